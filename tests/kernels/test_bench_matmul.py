"""The benchmark of the GEMM without a GPU: timing, arguments of the programs, stored rows, the summary."""

import contextlib
import importlib
import json
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels import dispatch
from qerl_kernels.nvfp4_matmul import cases

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
SMALL = {"qkv_7b": (384, 256), "o_7b": (256, 256), "gate_up_7b": (1024, 256), "down_7b": (256, 512)}
PARTS = {"qkv_7b": (256, 64, 64), "gate_up_7b": (512, 512)}


@pytest.fixture
def tools(tool):
    return tool("bench_matmul"), tool("matmul_report")


@pytest.fixture
def bench(tools, monkeypatch):
    """Small projections of 7B, GEMMs by XLA, programs jitted where they are called, nothing repeated."""
    module, _ = tools
    for case, shape in SMALL.items():
        monkeypatch.setitem(cases.SHAPES, case, shape)
    monkeypatch.setattr(cases, "PARTS", PARTS)
    monkeypatch.setattr(module.bursts, "ROTATE_BYTES", 2e5)
    monkeypatch.setattr(module.bursts, "ROUND_US", 40.0)
    monkeypatch.setattr(module.bursts, "TIMED_US", 80.0)
    monkeypatch.setattr(dispatch, "choose", lambda *_: "xla")
    leaves = lambda programs: [float(len(jax.tree.leaves(args[1]))) for *_, args, _ in programs]  # noqa: E731
    monkeypatch.setattr(module, "microseconds", leaves)

    def compile_all(build, programs, jobs, options):
        return [(program, build(*program)) for program in programs]

    def load(built, *args):
        program, shapes = built
        asked = jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), args) == asked
        assert jax.tree.structure(args) == jax.tree.structure(shapes)
        return jax.jit(program)

    monkeypatch.setattr(module.ahead, "compile_all", compile_all)
    monkeypatch.setattr(module.ahead, "load", load)
    return module


def run(module, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_matmul.py", *arguments])
    module.main()


def test_a_run_goes_on_where_it_was_cut_short(bench, tool, monkeypatch, tmp_path, capsys):
    anchors, out = tmp_path / "rivals.json", tmp_path / "matmul.json"
    rival = {"case": "o_7b", "m": 8, "n": 256, "k": 256, "direction": "forward", "lora_rank": 0}
    about = {"gpu": "NVIDIA H200", "date": "2026-11-22", "commit": "123"}
    anchors.write_text(json.dumps({"meta": about, "rows": [{**rival, "impl": "marlin", "us": 36.0}]}))
    monkeypatch.setattr(tool("record"), "commit_of", lambda given: (given, "--commit"))
    common = ["--anchors", str(anchors), "--out", str(out), "--rank", "8", "--layers", "1", "--cases", "o_7b"]
    real = bench.Gemm.call

    def wrong(what, x, weight):
        return real(what, x, weight) * (1.01 if what.direction == "dx" else 1)

    monkeypatch.setattr(bench.Gemm, "call", wrong)
    with pytest.raises(SystemExit, match=r"1 of 7 failed:\nGemm.*'dx'.*: relative error .* is above 2.5e-03"):
        run(bench, monkeypatch, *common, "--commit", "abc", "--tokens", "8", "4096")
    first = json.loads(out.read_text())["rows"]
    assert len(first) == 6 + 1 and all(row["commit"] == "abc" for row in first[:6])
    assert first[6] == {
        **rival,
        "impl": "marlin",
        "us": 36.0,
        "source": "rivals.json",
        "date": "2026-11-22",
        "commit": "123",
    }
    assert "1.50 x marlin" in capsys.readouterr().out  # six weights of four arrays take 24 in this test

    monkeypatch.setattr(bench.Gemm, "call", real)
    run(bench, monkeypatch, *common, "--commit", "abc", "--tokens", "8", "4096", "--batch-invariant", "--layers", "0")
    said, stored = capsys.readouterr().out, json.loads(out.read_text())
    assert stored["rows"][:6] == first[:6] and len(stored["rows"]) == 6 + 3 + 1  # dx, and two that are batch invariant
    assert "dx" in said and said.count("us  ") == 3 and stored["meta"]["command"].count("bench_matmul.py") == 2
    assert "batch invariant m 8: 1.00 times" in said  # from all rows, also those measured before
    assert "step m   8: projections" in said

    run(bench, monkeypatch, *common, "--commit", "another", "--tokens", "8", "--rank", "0", "--layers", "0")
    assert [row["commit"] for row in json.loads(out.read_text())["rows"]] == ["another", "123"]


def test_the_sum_of_a_loop_is_that_of_its_calls(tool):
    programs = tool("matmul_programs")
    x, weights = jnp.arange(6.0).reshape(2, 3), [jnp.ones((3, 2)), 2 * jnp.ones((3, 2))]
    assert float(jax.jit(programs.looped(jnp.matmul, 5))([x], weights)) == 5 * (3 + 6)
    assert float(jax.jit(programs.looped(jnp.matmul, 5))([x, x + 1], weights)) == 5 * (3 + 6 + 6 + 12)
    assert float(jax.jit(programs.looped(jnp.matmul, 2))([[x, x + 1], [x + 2, x]], weights)) == 2 * (3 + 12 + 9 + 6)


@pytest.mark.parametrize("rank", [0, 8])
def test_no_two_calls_of_a_round_are_the_same(bench, monkeypatch, rank):
    """XLA would compute them once: neither the same x and weight nor, with adapters, the same x at all."""
    monkeypatch.setattr(bench.bursts, "ROUND_US", 100.0)
    what = bench.Gemm("qkv_7b", 8, lora_rank=rank)
    xs, weights = what.arguments(jax.random.normal(jax.random.key(0), (8, 256)))
    assert len(xs) == what.burst().turns == 5 and len(weights) == 4
    every = [one for x in xs for one in (x if rank else [x])]
    assert len({np.asarray(x).tobytes() for x in every}) == len(every) == (20 if rank else 5)
    words = [(weight[0] if rank else weight).words for weight in weights]
    assert len({np.asarray(one).tobytes() for one in words}) == 4


class Clock:
    """Stands for `time`; what is slept is counted apart."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock(tools, monkeypatch):
    clock = Clock()
    for module in (tools[0], tools[0].bursts):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_fixed_cost_of_a_call_is_not_counted(tools, clock):
    """A call of r rounds of 20 GEMMs of 50 us takes 3 ms + r ms; two calls in fifteen take far longer."""
    module, _ = tools
    calls = []

    def program(rounds):
        def compiled(x, weights):
            late = 0.5 if len(calls) in (8, 23) else 0.0  # one of the short, one of the long
            clock.now += 3e-3 + rounds * 1e-3 + late
            calls.append((clock.now, rounds))

        return compiled

    one = program(2), program(5), (None, None), 3 * 20
    assert module.microseconds([one]) == [pytest.approx(50.0)]
    assert [rounds for _, rounds in calls] == [2, 5] * (2 + 15)
    assert clock.slept == pytest.approx([15e-3, 24e-3] * 15)  # three times 5 and 8 ms, one before each that counts


def test_steps_of_as_many_tokens_take_turns(tools, clock):
    """Each program slows down by 1 ms from one turn to the next; the median of five is that of the third."""
    module, _ = tools
    calls = []

    def program(name, ms):
        def compiled(x, weights):
            calls.append(name)
            clock.now += (ms + (len(calls) - 1) // 4) * 1e-3

        return compiled

    both = [
        (program(f"{name} short", 100), program(f"{name} long", 100 + ms), (None, None), 2)
        for name, ms in (("a", 3), ("b", 5))
    ]
    assert module.microseconds(both) == [pytest.approx(1500.0), pytest.approx(2500.0)]
    assert calls == ["a short", "a long", "b short", "b long"] * (2 + 5)
    steps = [module.DecodeStep(m, rank, 28, True) for m in (8, 16) for rank in (0, 32)]
    gemms = [module.Gemm("o_7b", m) for m in (8, 16)]
    assert module.turns([*steps, *gemms]) == [steps[:2], steps[2:], gemms[:1], gemms[1:]]


def test_a_step_is_timed_at_several_places(bench, monkeypatch, tmp_path, capsys):
    """Everywhere the same values, with adapters and without the very same weights; the mean counts."""
    seen = []

    def microseconds(programs):
        seen.append([args for *_, args, _ in programs])
        return [100.0 * len(seen) + i for i, _ in enumerate(programs)]

    monkeypatch.setattr(bench, "microseconds", microseconds)
    out = tmp_path / "matmul.json"
    run(bench, monkeypatch, "--out", str(out), "--rank", "8", "--layers", "1", "--cases", "--tokens", "8")
    for row, first in zip(json.loads(out.read_text())["rows"], (100.0, 101.0, 102.0), strict=True):
        assert row["us_at_places"] == [first, first + 100, first + 200] and row["us"] == first + 100
    assert "at 3 places +100.0%, +100.0%, +100.0%" in capsys.readouterr().out
    words = [[layer[0][0].words for _, [[layer]] in args[1:]] for args in seen]
    assert all(plain is adapted for plain, adapted in words)
    assert len({id(plain) for plain, _ in words}) == len({plain.unsafe_buffer_pointer() for plain, _ in words}) == 3
    for args in seen[1:]:
        assert jax.tree.all(jax.tree.map(np.array_equal, args, seen[0]))


@pytest.mark.parametrize(
    ("seconds", "repeats", "pause"), [(1e-3, 15, 5e-3), (0.03, 15, 0.09), (0.05, 9, 0.15), (2.0, 5, 6.0)]
)
def test_long_bursts_are_repeated_less_often(tools, clock, seconds, repeats, pause):
    calls = []

    def burst():
        clock.now += seconds
        calls.append(None)
        return float(len(calls))

    # two warm-up calls; the result of a call is its number
    assert tools[0].bursts.medians([burst]) == [2 + (repeats + 1) / 2]
    assert clock.slept == pytest.approx([pause] * repeats)


def test_rotating_weights_outgrow_the_l2(tools):
    """50 MB on an H200; where it is not 512 MiB of weights, none is used twice in a round."""
    bursts = tools[0].bursts
    for n, k in map(cases.SHAPES.get, cases.TIMED):
        for m in cases.TOKENS:
            for weight_bytes in (n * k * 0.5625, n * k * 2):
                weights, turns, _ = bursts.burst_of(m, n, k, weight_bytes)
                assert weights * weight_bytes + 2 * m * (n + k) > 90e6
                assert weights * weight_bytes >= 512 * 2**20 or turns == 1


@pytest.mark.parametrize(
    ("case", "m", "weight_bytes", "us"),
    [
        ("qkv_7b", 8, 0.5625, 6.0),
        ("qkv_7b", 8, 0.5625, 10.9),  # Marlin's
        ("qkv_7b", 256, 2, 14.8),  # cuBLAS's
        ("gate_up_7b", 16, 0.5625, 26.7),
        ("gate_up_7b", 1024, 0.5625, 388.0),
    ],
)
def test_rounds_take_about_a_millisecond(tools, case, m, weight_bytes, us):
    """With times of an H200: a round is well above the 9 us between rounds, the timed rounds take some milliseconds."""
    n, k = cases.SHAPES[case]
    weights, turns, rounds = tools[0].bursts.burst_of(m, n, k, n * k * weight_bytes)
    assert 600 < weights * turns * us < 1500 and 1200 < weights * turns * rounds * us < 3000


def test_bursts_by_hand(tools):
    bursts = tools[0].bursts
    # 76.4 MB: 8 of them are 512 MiB; 1.5 · 76.4 MB / 4.3 TB/s + 5 us = 31.6 us; 4 · 8 of these are 1013 us
    assert bursts.burst_of(16, 37888, 3584, 37888 * 3584 * 0.5625) == (8, 4, 2)
    # 1.5 · 2 · 16384 · 37888 · 3584 / 788e12 + 5 us = 8475 us
    assert bursts.burst_of(16384, 37888, 3584, 37888 * 3584 * 2) == (1, 1, 1)
    assert bursts.burst_of_step(28) == (1, 1, 25)  # 1.26 ms each


def test_rivals_are_timed_without_the_launch_of_the_first_replay(tools, clock, monkeypatch):
    """A GPU that takes 30 us a call and begins 40 us after an idle stream's launch; the host needs 10 us a launch."""
    torch = pytest.importorskip("torch")
    rivals = importlib.import_module("time_rivals")
    gpu = types.SimpleNamespace(free=0.0, captured=None, replays=0)

    def call():
        if gpu.captured is not None:
            gpu.captured += 1

    class Graph:
        def replay(self):
            clock.now += 10e-6
            gpu.free = max(gpu.free, clock.now + 40e-6) + self.calls * 30e-6
            gpu.replays += 1

    @contextlib.contextmanager
    def capture(graph):
        gpu.captured = 0
        yield
        graph.calls, gpu.captured = gpu.captured, None

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(gpu.free, clock.now)

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    def synchronize():
        clock.now = max(clock.now, gpu.free)

    for name, value in {"CUDAGraph": Graph, "graph": capture, "Event": Event, "synchronize": synchronize}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert rivals.microseconds([call] * 7, turns=5, rounds=3) == pytest.approx(7 * 30.0)
    assert gpu.replays == (2 + 15) * (1 + 3)
    assert clock.slept == pytest.approx([3 * (50e-6 + 4 * 5 * 7 * 30e-6)] * 15)


def test_adapters_are_checked_as_the_gemm_adds_them(tools, tool):
    module, programs = tools[0], tool("matmul_programs")
    a, expand = programs.adapters("qkv_7b", 16, 0)
    x = jax.random.normal(jax.random.key(1), (2, cases.SHAPES["qkv_7b"][1]), jnp.bfloat16)
    found = module.lora_term(x, (None, a, expand))
    for i, (b, first) in enumerate(zip(expand, (0, 3584, 4096), strict=True)):
        t = np.asarray(x, np.float64) @ np.asarray(a[:, 16 * i : 16 * i + 16], np.float64)
        np.testing.assert_allclose(found[:, first : first + b.shape[1]], t @ np.asarray(b, np.float64), atol=0.05)


def measured(case: str, m: int, us: float, direction: str = "forward", impl: str = "qerl", lora_rank: int = 0, **more):
    n, k = {"qkv_32b": (7168, 5120), "o_32b": (5120, 5120)}.get(case) or cases.SHAPES[case]
    return {"case": case, "m": m, "n": n, "k": k, "direction": direction, "impl": impl, "us": us,
            "lora_rank": lora_rank, **more}  # fmt: skip


def test_the_summary_by_hand(tools):
    _, report = tools
    rows = [
        measured("qkv_7b", 8, 5.0),
        measured("qkv_7b", 8, 10.0, impl="marlin", source="here"),
        measured("qkv_7b", 8, 20.0, impl="cublas_bf16", source="here"),
        measured("o_14b", 8, 10.0),
        measured("o_14b", 8, 9.0, impl="marlin"),
        measured("o_32b", 8, 12.0, impl="marlin"),  # the same GEMM as that of 14B, measured again
        measured("gate_up_7b", 8, 20.0),
        measured("qkv_7b", 8, 6.0, lora_rank=32),
        measured("qkv_7b", 8, 7.5, batch_invariant=True),
        measured("qkv_7b", 4096, 200.0, "dx"),
        measured("qkv_7b", 4096, 170.0, impl="cublas_bf16"),
    ]
    step = {"case": "layers_7b", "m": 8, "n": 0, "k": 0, "direction": "forward", "impl": "qerl", "layers": 28}
    times = ((0, False, [400.0, 400.0]), (0, True, [1700.0, 1700.0]), (32, True, [1800.0, 2000.0]))
    for rank, products, at_places in times:
        how = {"lora_rank": rank, "products": products}
        rows.append({**step, **how, "us": sum(at_places) / 2, "us_at_places": at_places})
    rows.append({**step, "case": "layer_set_7b", "impl": "marlin", "us": 2334.0})
    said = report.summary(rows).splitlines()
    assert said[:2] == ["rivals: 2 rows, here", "rivals: 4 rows, no source named"]
    # (2 · 0.9 · 1.2)^(1/3) = 1.29
    assert "forward  m       1, 8, 16, 32   1.29 (least 0.90, 3 GEMMs) x marlin: asked 1.35, each 1.0: MISSED" in said
    assert (
        "forward  m           1, 8, 16   2.00 (least 2.00, 1 GEMMs) x marlin of qkv_7b, o_7b: asked 1.5: holds" in said
    )
    assert "dx       m        4096, 16384   0.85 (least 0.85, 1 GEMMs) x cublas_bf16: asked 0.88: MISSED" in said
    assert "m 8:  3.82 (least 3.82, 1 GEMMs) TB/s" in said
    assert "all of these  3.82 (least 3.82, 1 GEMMs) TB/s: asked 2.8: holds" in said
    assert "gate_up_7b m 8: 3.82 TB/s" in said  # 37888 · 3584 · 0.5625 bytes in 20 µs
    assert "with adapters m 8: 1.20 times a plain GEMM (most 1.20, 1 GEMMs)" in said
    assert "batch invariant m 8: 1.50 times a plain GEMM (most 1.50, 1 GEMMs)" in said
    assert (
        "step m   8: projections 1.300 ms, with adapters of rank 32 1.500 ms (+15.4%: asked 10%: MISSED), "
        "at 2 places +7.7%, +23.1%, asked 1.7 ms: holds; Marlin without adapters 2.334 ms"
    ) in said
    line = report.describe(rows[0], report.rivals_of(rows))
    assert "1.86 TB/s ( 43%)" in line and "52.8 TFLOP/s (  7%)" in line  # 9.29 MB and 264 MFLOP in 5 µs
    assert line.endswith("4.00 x cublas_bf16   2.00 x marlin")
    assert report.describe(rows[9], report.rivals_of(rows)).endswith("0.85 x cublas_bf16")
