"""The kernels compile for sm_90a without spills and with the tensor-core instruction they should use: each code path at
a few sizes, and under `-m nightly` every config of the tuning table and every model.

Needs no GPU, but jax 0.11 with its CUDA plugin and NVIDIA's compiler packages.
"""

import dataclasses
import json
import math
import pathlib
import re
import subprocess

import h200
import jax
import pytest

LOAD = "ld.relaxed.cta.global"  # as `PtxMachine.load_global` has it

nightly = pytest.mark.nightly
pytestmark = pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))


def compile_for_h200(cases: list[tuple]) -> subprocess.CompletedProcess:
    return h200.run(pathlib.Path(__file__).parent / "compile_for_h200.py", *map(repr, cases))


def compiled(cases: list[tuple]) -> list[tuple[str, str]]:
    """(PTX, what ptxas says of registers and spills) of each kernel."""
    found = h200.kernels(compile_for_h200(cases))
    assert len(found) == len(cases)
    return found


def table_cases() -> list[tuple]:
    from qerl_kernels.nvfp4_matmul import tuning
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig

    cases = {}
    for row in tuning.table():
        config, transposed = row.config, row.direction == "dx"
        is_skinny = isinstance(config, SkinnyConfig)
        assert config.fits(row.n, row.k, 32) if is_skinny else config.fits(), config
        is_own = is_skinny and config.computes_lora_x  # takes an adapter to compile
        cases.setdefault((config, transposed), (min(row.m, 512), row.n, row.k, config, transposed, int(is_own)))
    return list(cases.values())


def check(cases, kernels):
    for case, (kernel, report) in zip(cases, kernels, strict=True):
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, (case, report)
        by_warp = type(case[3]).__name__ == "SkinnyConfig"
        instruction = "mma.sync.aligned.m16n8k16" if by_warp else "wgmma.mma_async.sync.aligned.m64"
        assert instruction in kernel, case
        assert ("movmatrix" in kernel) == getattr(case[3], "computes_lora_x", False), case
        assert ("ldmatrix" in kernel) == (by_warp or case[4]), case
        assert "serialized" not in report, (case, report)


@nightly
def test_every_config_of_the_table():
    cases = table_cases()
    check(cases, compiled(cases))


def code_paths(case: tuple) -> set[tuple]:
    """What a config chooses between in the kernel's code; all else are numbers. Mainloop, sums and registers are chosen
    apart."""
    *_, config, transposed, is_own = case
    if not hasattr(config, "lookahead"):
        return {("skinny", is_own, config.cluster > 1)}
    chosen = (
        ("mainloop", config.lookahead, config.unroll),
        ("sums", config.warpgroups_k > 1, config.cluster > 1),
        ("registers", config.ctas_per_sm > 1),
    )
    return {(transposed, *each) for each in chosen}


def test_every_code_path_of_the_table():
    """By few configs, those with the most sums first; and, of many rows, with two adapters."""
    rows = sorted(table_cases(), key=lambda case: -case[3].tile_m)
    left, cases = set().union(*map(code_paths, rows)), []
    while left:
        cases.append(max(rows, key=lambda case: len(code_paths(case) & left)))
        left -= code_paths(cases[-1])
    cases += with_adapters([4096])
    check(cases, compiled(cases))


def test_a_stage_is_freed_after_its_wgmma():
    """In the PTX of the plain mainloop: all `wgmma` are waited for before the arrival that frees their stage."""
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig

    found = [(128, 1024, 4096, GemmConfig(128, 2, 1, 1, k_tiles, 2), False, 0) for k_tiles in (1, 2)]
    kernels = compiled(found)
    check(found, kernels)
    for (*_, config, _, _), (kernel, _) in zip(found, kernels, strict=True):
        order = re.findall(r"wgmma\.mma_async|wgmma\.wait_group\.sync\.aligned 0|mbarrier\.arrive\.release", kernel)
        products = ["wgmma.mma_async"] * 4 * config.k_tiles  # k-steps of 16
        assert order[: len(products)] == products
        assert order[len(products) :][:2] == ["wgmma.wait_group.sync.aligned 0", "mbarrier.arrive.release"]


@nightly
def test_configs_with_lookahead():
    """One `wgmma` follows another without the assembler waiting in between; two k-tiles share a stage or do not."""
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig

    few, shared, wide = (
        GemmConfig(8, 1, 2, 2, 4, 3, 2, lookahead=True),
        GemmConfig(64, 4, 1, 1, 1, 6, lookahead=True),
        GemmConfig(256, 2, 1, 1, 1, 4, lookahead=True),
    )
    assert few.fits() and shared.fits(has_lora=True) and wide.fits()
    cases = [
        (8, 4608, 3584, few, False, 0), (64, 4096, 3584, shared, False, 2), (256, 4608, 3584, wide, False, 0),
        (256, 4608, 3584, wide, True, 0),
    ]  # fmt: skip
    check(cases, compiled(cases))


def test_skinny():
    """Also: a warp asks for all it will have under way, and for what it adds at the end, before it waits; 16 warps with
    up to 64 rows of sums find registers on an SM, any other 8, as do those which hold x A in many parts;
    one block alone waits for no other."""
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig

    cases = [
        (3, 3584, 3584, SkinnyConfig(8, 4, 8, 2, 4), False, 1),
        (8, 4608, 3584, SkinnyConfig(8, 1, 8, 1, 7), False, 3),
        (8, 5120, 27648, SkinnyConfig(8, 8, 16, 3, 2), False, 1),
        (5, 3584, 3584, SkinnyConfig(8, 2, 24, 1, 2), False, 1),
        (13, 37888, 3584, SkinnyConfig(16, 4, 4, 1, 3), False, 2),
        (24, 4608, 3584, SkinnyConfig(24, 8, 4, 2, 2), False, 3),
        (16, 3584, 18944, SkinnyConfig(16, 4, 8, 2, 2), False, 1, 32, 7),
        (32, 3584, 18944, SkinnyConfig(32, 4, 4, 2, 3), False, 1, 32, 3),
    ]
    assert all(split.fits(n, k) for _, n, k, split, *_ in cases)
    kernels = compiled(cases)
    check(cases, kernels)
    for (m, n, _, split, _, adapters, *parts), (kernel, report) in zip(cases, kernels, strict=True):
        held = split.clusters(n) * split.cluster <= 132 and split.warps <= 8 and parts[1:] == [7]
        begun = kernel[: kernel.index("cp.async.wait_group")]
        assert begun.count("cp.async.cg") == split.stages * (split.m16_tiles + 1 + math.ceil(m / 4)), split
        assert begun.count(LOAD) == kernel.count(LOAD) >= 1 + bool(adapters), split
        registers = int(re.search(r"Used (\d+) registers", report)[1])
        assert registers <= (128 if split.m16_tiles * split.tile_m <= 64 and not held else 248), (split, registers)
        assert ("mapa.shared::cluster" in kernel) == (split.cluster > 1), (n, split)


def test_skinny_that_computes_x_a():
    """As above; of a unit's A each lane copies 32 bytes for eight ranks, of B the block 16 bytes for eight features of
    a rank. One barrier of the block before B is read, one before sums are."""
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig

    cases = [
        (8, 3584, 3584, SkinnyConfig(8, 4, 4, 4, 4, True), False, 1),
        (3, 3584, 3584, SkinnyConfig(8, 1, 4, 1, 3, True), False, 1, 8),
        (16, 4608, 3584, SkinnyConfig(16, 8, 8, 4, 2, True), False, 3),
        (13, 3584, 18944, SkinnyConfig(16, 4, 8, 4, 2, True), False, 1, 64),
        (8, 5120, 27648, SkinnyConfig(8, 8, 12, 3, 1, True), False, 1, 48),
        (32, 3584, 3584, SkinnyConfig(32, 4, 4, 4, 3, True), False, 1),
    ]
    ranks = [case[6] if len(case) > 6 else 32 for case in cases]
    assert all(split.fits(n, k, rank) for (_, n, k, split, *_), rank in zip(cases, ranks, strict=True))
    kernels = compiled(cases)
    check(cases, kernels)
    for (m, n, k, split, *_), rank, (kernel, report) in zip(cases, ranks, kernels, strict=True):
        begun = kernel[: kernel.index("cp.async.wait_group")]
        of_a, steps = 2 * {8: 2, 32: 4, 48: 8, 64: 8}[rank], math.ceil(rank / 16)
        of_b = math.ceil(steps * split.m16_tiles / split.warps)
        ahead = min(split.stages, math.ceil(math.ceil(k / 64) / split.cluster / split.warps))
        assert begun.count("cp.async.cg") == ahead * (split.m16_tiles + 1 + math.ceil(m / 4) + of_a) + of_b, split
        assert begun.count(LOAD) == kernel.count(LOAD) >= 2, split
        assert kernel.count("ldmatrix.sync.aligned.m8n8.x4.trans") == (4 + split.m16_tiles) * steps, split
        assert kernel[kernel.rindex("cp.async.wait_group") :].count("bar.sync") == 2, split
        registers = int(re.search(r"Used (\d+) registers", report)[1])
        assert registers <= min(248, 65536 // (32 * split.warps)), (split, registers)
        assert ("mapa.shared::cluster" in kernel) == (split.cluster > 1), (n, split)


def test_adapters_cost_no_config_more_than_a_stage():
    """At decode every projection has them: a config into which they do not fit would be another than the one timed."""
    from qerl_kernels.nvfp4_matmul import cases, tuning

    for case, (n, k) in cases.SHAPES.items():
        for m in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096):
            plain = tuning.config_for(m, n, k)
            adapted = tuning.config_for(m, n, k, adapters=[(32, width) for width in cases.parts(case)])
            if hasattr(adapted, "computes_lora_x"):
                adapted = dataclasses.replace(adapted, computes_lora_x=False)
            allowed = (
                (plain, dataclasses.replace(plain, stages=plain.stages - 1)) if hasattr(plain, "stages") else (plain,)
            )
            assert adapted in allowed, (case, m, plain, adapted)


def with_adapters(rows: list[int]) -> list[tuple]:
    from qerl_kernels.nvfp4_matmul import tuning

    cases = []
    for m in rows:
        config = tuning.config_for(m, 37888, 3584, adapters=[(32, 18944), (32, 18944)])
        assert config is not None, m
        cases.append((m, 37888, 3584, config, False, 2))
    return cases


@nightly
def test_few_rows_with_adapters():
    cases = with_adapters([16, 64])
    check(cases, compiled(cases))


@pytest.mark.parametrize("chosen", [slice(0, 2), pytest.param(slice(2, None), marks=nightly)])
def test_lora_partials(chosen):
    """Also: warps that reduce them meet no other, have the registers for it, and ask for all partials before they wait;
    the mainloop has the instructions that it has where `x A` comes whole."""
    from qerl_kernels.nvfp4_matmul import tuning
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig

    down_7b = tuning.config_for(32, 3584, 18944, adapters=[(32, 3584)])
    assert down_7b.takes_partials(32, [(32, 3584)])
    cases = [
        (m, 3584, 18944, config, False, 1, rank, partials)
        for m, rank, partials, config in (
            (32, 32, 7, down_7b),
            (63, 64, 3, GemmConfig(64, 1, 2, 2, 2, 4)),
            (40, 32, 9, GemmConfig(64, 4, 1, 1, 2, 4, lookahead=True)),
            (64, 8, 1, GemmConfig(64, 2, 1, 2, 1, 6, lookahead=True)),
            (8, 32, 7, GemmConfig(8, 7, 1, 1, 1, 4)),
            (30, 64, 7, GemmConfig(32, 1, 2, 1, 1, 3, 2)),
        )[chosen]
    ]
    assert all(config.fits(has_lora=True) for _, _, _, config, *_ in cases)
    every = cases + [(*case[:-1], 0) for case in cases]
    kernels = compiled(every)
    check(every, kernels)
    whole = kernels[len(cases) :]
    for (*_, partials), (kernel, _), (given_whole, _) in zip(cases, kernels[: len(cases)], whole, strict=True):
        adds = kernel[kernel.index(LOAD) :]
        adds = adds[: adds.index("fence.proxy.async")]
        assert adds.count(LOAD) == kernel.count(LOAD)
        assert adds.split("add.rn.f32")[0].count(LOAD) >= min(partials, 8)
        assert not re.search(r"\bbar\.|barrier|sync|elect", adds)
        assert loop(kernel) == loop(given_whole) and len(loop(kernel)) > 20


def loop(kernel: str) -> list[str]:
    """The instructions, without their operands, from the label before the first of the tensor cores to the branch
    behind it."""
    first = re.search(r"wgmma\.mma_async|mma\.sync\.aligned", kernel).start()
    begin = list(re.finditer(r"^\$L\S+:", kernel[:first], flags=re.M))[-1].end()
    body = kernel[begin : re.compile(r"\bbra\b").search(kernel, first).start()]
    return re.findall(r"^\s+(?:@\S+\s+)?([a-z][\w.:]*)", body, flags=re.M)


@pytest.mark.parametrize(
    "rows",
    [{"0.5b": (2,), "7b": (2, 32, 128)},
     pytest.param(dict.fromkeys(["0.5b", "1.5b", "3b", "14b", "72b"], (2, 32, 128)), marks=nightly)],
)  # fmt: skip
def test_attention(rows):
    """Also: two CTAs fit an SM, as the size of the ring assumes. The rows take clusters of 4, 2 and 1."""
    from qerl_kernels.decode_attention import cases

    found = [("attention", count, *cases.MODELS[model], 256, 1024) for model in rows for count in rows[model]]
    for case, (kernel, report) in zip(found, compiled(found), strict=True):
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, (case, report)
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in kernel, case
        assert int(re.search(r"Used (\d+) registers", report)[1]) <= 128, (case, report)
        set_up = kernel[: kernel.rindex("mbarrier.init.shared::cta")]  # the barriers lie behind all arrays
        barriers = max(int(offset) for offset in re.findall(r"add.s32\s+%r\d+, %r\d+, (\d+);", set_up))
        assert barriers + 1024 <= 113 * 1024, (case, barriers)


def test_a_decode_step_is_one_command_buffer(tmp_path):
    """The GEMMs of three layers with LoRA: one captured graph, nothing in it but the GEMMs and, for each but o, which
    computes its own, the kernel of its `x A`, none of XLA's."""
    layers = 3
    run = compile_for_h200([("step", layers, str(tmp_path))])
    [thunks] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    graph, *lines = filter(str.strip, thunks.read_text().splitlines())
    assert "kCommandBuffer" in graph and all(line.startswith("    ") for line in lines)
    kinds = [line.split()[1] for line in lines]
    assert kinds == ["kCustomCall"] * layers * (4 + 3)
    kernels = re.findall(r"\.entry (decode_prologue\w*?)_mosaic", run.stdout + run.stderr)
    assert kernels == ["decode_prologue_plain_lora"] * 3  # each shape once


@pytest.mark.parametrize("is_nightly", [False, pytest.param(True, marks=nightly)])
def test_decode_prologues(is_nightly):
    """Also: every load of a warp's first chunks is issued before the block waits for its cluster."""
    from qerl_kernels.decode_prologue import cases

    found = [
        ("prologue", "norm", 256, 8192, 64, 64),
        ("prologue", "norm", 8, 896),
        ("prologue", "silu", 128, 29568, 64),
    ]
    found += [("prologue", "silu partials", 32, 29568, 64), ("prologue", "plain partials", 8, 3584, 32)]
    found += [
        ("prologue", kind, tokens, features, *[rank] * adapters)
        for kind, features, adapters in (
            cases.SHAPES[name] for name in (cases.SHAPES if is_nightly else cases.LAYER_7B)
        )
        for tokens, rank in ((8, 32), (128, 32), (256, 32), (8, 16))[: 4 if is_nightly else 1]
    ]
    for case, (kernel, report) in zip(found, compiled(found), strict=True):
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, (case, report)
        assert ("mma.sync.aligned.m16n8k16" in kernel) == (len(case) > 4), case
        started = kernel.rindex("barrier.cluster.wait")
        assert kernel.index(LOAD) > kernel.index("barrier.cluster.arrive"), case
        assert kernel.count(LOAD, 0, started) >= (8 if len(case) > 4 else 3), case


def test_rope_and_cache():
    """Also: it loads all it needs before it waits for any of it, writes caches in place, and takes few registers."""
    from qerl_kernels.decode_attention import cases

    found = [("rope", 8, *cases.MODELS["0.5b"]), ("rope", 128, *cases.MODELS["7b"])]
    for case, (kernel, report) in zip(found, compiled(found), strict=True):
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, (case, report)
        assert int(re.search(r"Used (\d+) registers", report)[1]) <= 64, (case, report)
        assert kernel.count(LOAD) == 5, case
        assert kernel.rindex(LOAD) < kernel.index("mul.rn.f32"), case


def test_the_gradients_of_gate_and_up_are_one_array_made_in_one_pass():
    compile_for_h200([("swiglu gradient", 4352, 3584, 18944)])


def test_kernels_compiled_separately_are_found_by_their_programs():
    """Three kernels of two programs, one of which both have, and a third program, whose kernel is still to compile. The
    oracle is Mosaic GPU's own event for each kernel that it compiles. In jax 0.11 a kernel of two programs is two,
    because what is hashed has its number among all that were lowered.
    """
    ran = h200.run(pathlib.Path(__file__).parent / "separate_kernels.py")
    count = 4 if jax.__version__.startswith("0.11.") else 3
    assert json.loads(ran.stdout) == {"separate": count, "compiled": [count, 0, 0, 1]}
