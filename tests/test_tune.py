"""`python -m qerl_jax.tune` with a clock that knows the fastest config of each GEMM."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from command_lines import assert_says, error_of
from qerl_kernels.gpu import H200, gpu_of
from qerl_kernels.kernel_times import Kernel, kernel_medians
from qerl_kernels.nvfp4_matmul import packing, tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.tuner.candidates import skinny_configs, trials
from qerl_kernels.nvfp4_matmul.tuner.search import halved, keep
from qerl_kernels.nvfp4_matmul.tuner.trials import MANY, RANK, Gemm, Prologue, Timer, Trial, adapters, gemm_of
from qerl_kernels.ops import fp32_matmul

import qerl_jax
from qerl_jax.models.config import ModelConfig
from qerl_jax.tune import ROWS, gemms_of, main, tune

TINY = Path(qerl_jax.__file__).parent / "assets" / "tiny-qwen2"
MODEL = ModelConfig(1000, 1024, 2816, 2, 16, 4, 64, 1e4, 1e-6, True, 512, (1,), 0)
ADA = gpu_of("NVIDIA GeForce RTX 4090", 89, 128)


class Clock:
    """A config takes longer the more its stages and warps differ from three and eight. The present one and, as where
    the compiler refuses, every config of `without` are not timed. Counted prologues: 2 us but where a GEMM computes
    `x A` itself."""

    def __init__(self, group, without=frozenset()):
        self.group, self.without, self.rounds = group, without, []

    def times(self, several, calls):
        self.rounds.append((len(several), calls))
        able = [trial for trial in several if trial.config not in self.without]
        return {trial: 5 + self.distance(trial.config) for trial in able}

    def distance(self, config):
        return 100 if isinstance(config, GemmConfig) else abs(config.stages - 3) + abs(config.warps - 8) / 4

    def prologue_us(self, trial):
        return None if self.distance(trial.config) == 100 else 0.0 if trial.config.computes_lora_x else 2.0


def test_the_table_has_the_fastest_config_of_every_gemm_and_dispatch_reads_it(tmp_path):
    path, said, clocks = tmp_path / "tuning" / "4090.json", [], []

    def clock_of(group):
        clocks.append(Clock(group))
        return clocks[-1]

    tune(MODEL, ADA, path, 1000, said.append, clock_of)
    stored = json.loads(path.read_text())
    assert stored["meta"]["gpu"] == ADA.name and len(stored["rows"]) == len(said) == len(clocks) == 4 * 3
    gpu = dataclasses.replace(ADA, own_table=str(path))
    assert tuning.fault_of(str(path), gpu) is None
    for clock in clocks:
        first = clock.group[0]
        every = {trial.config for trial in clock.group}
        assert len(every) == len(clock.group) > 10 and all(config.cluster == 1 for config in every)
        best = min(clock.distance(c) + (0 if c.computes_lora_x else 2) for c in every)
        found = tuning.config_for(first.m, first.gemm.n, first.gemm.k, adapters=first.gemm.adapters, gpu=gpu)
        assert clock.distance(found) + (0 if found.computes_lora_x else 2) == best
        [row] = [row for row in stored["rows"] if (row["n"], row["k"], row["m"]) == (*first.gemm[1:3], first.m)]
        assert row["us"] + row["prologue_us"] == 5 + best
        sizes = [size for size, _ in clock.rounds]
        assert sizes[0] == len(every) and sizes[1] == -(-sizes[0] // 2) and sizes[-1] == 2  # halved; then side by side
    assert "qkv_proj 1536 x 1024, 8 sequences: " in said[0] and "us before)" in said[0]


def test_the_config_before_stays_where_it_is_faster_side_by_side(tmp_path):
    """In the first measurement it was the slowest."""

    class Changed(Clock):
        def times(self, several, calls):
            before = {self.group[0]: 1.0} if self.rounds and self.group[0] in several else {}
            return super().times(several, calls) | before

    path, groups = tmp_path / "table.json", []
    tune(MODEL, ADA, path, 8, str, lambda group: groups.append(group) or Changed(group))
    assert [row["us"] for row in json.loads(path.read_text())["rows"]] == [1.0] * len(groups)
    gpu = dataclasses.replace(ADA, own_table=str(path))
    for first, *_ in groups:
        found = tuning.config_for(first.m, first.gemm.n, first.gemm.k, adapters=first.gemm.adapters, gpu=gpu)
        assert found == first.config


def test_another_model_adds_its_shapes_and_a_damaged_table_is_replaced(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{")
    tune(MODEL, ADA, path, 4, str, Clock)
    wider = dataclasses.replace(MODEL, intermediate_size=5632)
    tune(wider, ADA, path, 4, str, Clock)  # qkv and o have the same shapes, gate_up and down others
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 6 * len(ROWS["warp"])


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_timed(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"the directory of the tuning table .*/file cannot be written"):
        tune(MODEL, ADA, tmp_path / "file" / "table.json", 4, str, lambda group: pytest.fail("timed"))


def test_configs_that_do_not_run_are_left_out(tmp_path):
    """Where none does, the table gets no row, and decode keeps the tier's."""
    path, said = tmp_path / "table.json", []
    present = {
        tuning.config_for(m, g.n, g.k, adapters=g.adapters, gpu=ADA) for g in gemms_of(MODEL) for m in ROWS["warp"]
    }
    tune(MODEL, ADA, path, 1, said.append, lambda group: Clock(group, present))
    assert not path.exists() and all("none of 1 configs runs" in line for line in said) and len(said) == 12


def test_hopper_gpus_also_try_the_other_kernel(tmp_path):
    groups = []
    with pytest.raises(StopIteration):
        tune(
            MODEL,
            dataclasses.replace(H200, sms=114),
            tmp_path / "t.json",
            10**6,
            str,
            lambda group: groups.append(group) or next(iter([])),
        )
    kinds = {type(trial.config).__name__ for trial in groups[0]}
    assert kinds == {"GemmConfig", "SkinnyConfig"} and any(trial.config.cluster > 1 for trial in groups[0])


@pytest.mark.parametrize(
    ("gpu", "prologue", "is_tried"),
    [(H200, "norm", True), (ADA, "norm", False), (ADA, "silu", True), (ADA, "plain", True)],
)
def test_x_a_within_the_gemm_is_tried_unless_xla_would_compute_it_beside_a_norm(gpu, prologue, is_tried):
    found = trials(Gemm("one", 1024, 1024, (1024,), prologue), 8, "forward", 10**6, gpu)
    skinny = [trial.config for trial in found if isinstance(trial.config, SkinnyConfig)]
    assert any(config.computes_lora_x for config in skinny) == is_tried
    assert not all(config.computes_lora_x for config in skinny)
    assert not any(isinstance(t.config, SkinnyConfig) for t in trials(found[0].gemm, 8, "dx", 10**6, H200))


def test_the_skinny_kernel_is_tried_in_the_fewest_blocks_of_rows():
    """Of 64 rows at most, each as small as it may be; in no more than four."""
    for m, tile_m, blocks in ((30, 32, 1), (64, 64, 1), (65, 40, 2), (129, 48, 3), (256, 64, 4)):
        found = skinny_configs(m, 1024, 1024, H200)
        assert {(config.tile_m, config.blocks(m)) for config in found} == {(tile_m, blocks)}
    assert not skinny_configs(257, 1024, 1024, H200)


def test_a_config_with_wrong_results_is_not_timed():
    """XLA stands in for the kernels: as it is, with one row of another, and refused by the compiler."""
    gemm = Gemm("qkv", 256, 512, (128, 64, 64), "norm")
    good, wrong, refused = (Trial(gemm, MANY, "forward", GemmConfig(tile_m)) for tile_m in (64, 72, 80))

    def product(x, lora_x, layer):
        weight, a, bs = layer
        each = [fp32_matmul(x, a[:, RANK * i : RANK * (i + 1)]).astype(x.dtype) for i in range(len(bs))]
        lora = jnp.concatenate([fp32_matmul(one, b) for one, b in zip(each, bs, strict=True)], axis=1)
        matrix, row = packing.packed_parts(weight)
        return (fp32_matmul(x, matrix.T.astype(x.dtype)) * row + lora).astype(x.dtype)

    programs = {good: product, wrong: lambda *args: product(*args).at[7].multiply(1.5), refused: "no registers"}
    timer = Timer(list(programs), programs.__getitem__)
    assert set(timer.refused) == {wrong, refused} and timer.refused[refused] == "no registers"
    assert "relative error" in timer.refused[wrong] and timer.prologue_us(good) is None


@pytest.mark.parametrize(
    ("kind", "prologue"),
    [("norm", ["f32[8,512]", "bf16[8,512]", "f32[512]"]), ("silu", ["bf16[8,1024]"]), ("plain", ["bf16[8,512]"])],
)
def test_the_inputs_are_those_of_decode_and_others_for_each_call(kind, prologue):
    gemm = Gemm("qkv", 256, 512, (128, 64, 64), kind)
    a, bs = f"bf16[512,{3 * RANK}]", [f"bf16[{RANK},{width}]" for width in gemm.parts]

    def several(seed):
        return Prologue(gemm, 8, "whole").inputs(seed), Prologue(gemm, 8, "a").inputs(seed), adapters(gemm, seed)

    one, other = map(jax.tree.leaves, (several(1), several(2)))
    assert [array.aval.str_short(short_dtypes=True) for array in one] == [*prologue, a, *prologue, a, *bs]
    is_same = [jnp.array_equal(x, y) for x, y in zip(one, other, strict=True)]
    assert [array.ndim == 1 for array in one] == is_same  # the norm's weight alone


def test_successive_halving():
    """Ten: 3 calls each, then five 6, three 12, two 24."""
    asked = []

    def time(some, calls):
        asked.append((len(some), calls))
        return {one: abs(one - 7) for one in some}

    assert next(iter(halved(range(10), time, 24))) == 7 and asked == [(10, 3), (5, 6), (3, 12), (2, 24)]


def test_a_row_takes_the_place_of_the_same_gemm_alone():
    first = {"direction": "forward", "n": 64, "k": 128, "m": 8, "us": 3.0}
    others = [first | {name: value} for name, value in (("direction", "dx"), ("n", 128), ("k", 64), ("m", 16))]
    stored = {"rows": [first, *others]}
    keep(stored, first | {"us": 2.0})
    assert stored["rows"] == [*others, first | {"us": 2.0}]


def test_medians_are_of_the_counted_calls():
    """Of two functions, of which the first two calls and the first one are not counted; others' kernels lie between."""
    times = [900, 900, 1, 3, 2, 900, 40, 60]
    found = [Kernel(2 * i, 1000 * time, "ours") for i, time in enumerate(times)]
    found += [Kernel(2 * i + 1, 5.0, "another") for i in range(8)]
    ours = "ours".__eq__
    assert kernel_medians(sorted(found), ours, [(2, 3), (1, 2)]) == [2.0, 50.0]
    with pytest.raises(ValueError, match="saw 8 of 9 kernels"):
        kernel_medians(sorted(found), ours, [(2, 3), (1, 3)])


def test_the_gemms_of_a_model_are_those_that_are_benchmarked():
    shape = ModelConfig(152064, 3584, 18944, 28, 28, 4, 128, 1e6, 1e-6, False, 32768, (1,), 0)
    wanted = [gemm_of(f"{name}_7b") for name in ("qkv", "o", "gate_up", "down")]
    assert [gemm[1:] for gemm in gemms_of(shape)] == [gemm[1:] for gemm in wanted]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([str(TINY), "--most", "0"], "--most 0 is below 1"),
        ([str(TINY)], "tuning needs …"),
        (["MODEL"], "model directory MODEL does not exist…"),
    ],
)
def test_bad_input_is_one_line(arguments, expected, tmp_path, capfd):
    assert_says(error_of(main, arguments, tmp_path, capfd), expected)
