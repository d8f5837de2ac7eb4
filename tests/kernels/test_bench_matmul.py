"""The benchmark of the product without a GPU: what is called with which arguments, what is kept, what is said."""

import importlib
import json
import pathlib
import sys

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
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    for name in ("ahead", "bench_matmul", "matmul_report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("bench_matmul"), importlib.import_module("matmul_report")


@pytest.fixture
def bench(tools, monkeypatch):
    """Small projections of 7B, products by XLA, programs jitted where they are called, nothing repeated."""
    module, _ = tools
    for case, shape in SMALL.items():
        monkeypatch.setitem(cases.SHAPES, case, shape)
    monkeypatch.setattr(cases, "PARTS", PARTS)
    monkeypatch.setattr(module, "ROTATE_BYTES", 2e5)
    monkeypatch.setattr(module, "LOOP_US", 20.0)
    monkeypatch.setattr(dispatch, "choose", lambda *_: "xla")
    monkeypatch.setattr(
        module, "microseconds", lambda compiled, x, weights, count: float(len(jax.tree.leaves(weights)))
    )

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


def test_a_run_goes_on_where_it_was_cut_short(bench, monkeypatch, tmp_path, capsys):
    anchors, out = tmp_path / "rivals.json", tmp_path / "matmul.json"
    rival = {"case": "o_7b", "m": 8, "n": 256, "k": 256, "direction": "forward", "lora_rank": 0}
    anchors.write_text(json.dumps({"rows": [{**rival, "impl": "marlin", "us": 36.0}]}))
    common = ["--anchors", str(anchors), "--out", str(out), "--rank", "8", "--layers", "1", "--cases", "o_7b"]
    real = bench.Product.call

    def wrong(what, x, weight):
        return real(what, x, weight) * (1.01 if what.direction == "dx" else 1)

    monkeypatch.setattr(bench.Product, "call", wrong)
    with pytest.raises(SystemExit, match=r"1 of 7 failed:\nProduct.*'dx'.*: relative error .* is above 2.5e-03"):
        run(bench, monkeypatch, *common, "--commit", "abc", "--tokens", "8", "4096")
    first = json.loads(out.read_text())["rows"]
    assert len(first) == 6 + 1 and all(row["commit"] == "abc" for row in first[:6])
    assert first[6] == {**rival, "impl": "marlin", "us": 36.0, "source": "rivals.json"}
    assert "1.50 x marlin" in capsys.readouterr().out  # six weights of four arrays take 24 in this test

    monkeypatch.setattr(bench.Product, "call", real)
    run(bench, monkeypatch, *common, "--commit", "abc", "--tokens", "8", "4096", "--batch-invariant", "--layers", "0")
    said, stored = capsys.readouterr().out, json.loads(out.read_text())
    assert stored["rows"][:6] == first[:6] and len(stored["rows"]) == 6 + 3 + 1  # dx, and two that are batch invariant
    assert "dx" in said and said.count("us  ") == 3 and stored["meta"]["command"].count("bench_matmul.py") == 2
    assert "batch invariant m 8: 1.00 times" in said  # of all rows, also those measured before
    assert "step m   8: projections" in said

    run(bench, monkeypatch, *common, "--commit", "another", "--tokens", "8", "--rank", "0", "--layers", "0")
    assert [row.get("commit") for row in json.loads(out.read_text())["rows"]] == ["another", None]


def test_the_sum_of_a_loop_is_that_of_its_products(tools):
    module, _ = tools
    x, weights = jnp.arange(6.0).reshape(2, 3), [jnp.ones((3, 2)), 2 * jnp.ones((3, 2))]
    assert float(jax.jit(module.looped(jnp.matmul, 5))(x, weights)) == 5 * (3 + 6)
    assert float(jax.jit(module.looped(jnp.matmul, 2))([x, x + 1], weights)) == 2 * (3 + 12)


def test_adapters_are_checked_as_the_product_adds_them(tools):
    module, _ = tools
    a, expand = module.adapters("qkv_7b", 16, 0)
    x = jax.random.normal(jax.random.key(1), (2, cases.SHAPES["qkv_7b"][1]), jnp.bfloat16)
    found = module.adapters_of(x, (None, a, expand))
    for i, (b, first) in enumerate(zip(expand, (0, 3584, 4096), strict=True)):
        t = np.asarray(x, np.float64) @ np.asarray(a[:, 16 * i : 16 * i + 16], np.float64)
        np.testing.assert_allclose(found[:, first : first + b.shape[1]], t @ np.asarray(b, np.float64), atol=0.05)


def product(case: str, m: int, us: float, direction: str = "forward", impl: str = "qerl", lora_rank: int = 0, **more):
    n, k = {"qkv_32b": (7168, 5120), "o_32b": (5120, 5120)}.get(case) or cases.SHAPES[case]
    return {"case": case, "m": m, "n": n, "k": k, "direction": direction, "impl": impl, "us": us,
            "lora_rank": lora_rank, **more}  # fmt: skip


def test_the_summary_by_hand(tools):
    _, report = tools
    rows = [
        product("qkv_7b", 8, 5.0),
        product("qkv_7b", 8, 10.0, impl="marlin"),
        product("qkv_7b", 8, 20.0, impl="cublas_bf16"),
        product("o_14b", 8, 10.0),
        product("o_14b", 8, 9.0, impl="marlin"),
        product("o_32b", 8, 12.0, impl="marlin"),  # the same product as 14B's, measured again
        product("gate_up_7b", 8, 20.0),
        product("qkv_7b", 8, 6.0, lora_rank=32),
        product("qkv_7b", 8, 7.5, batch_invariant=True),
        product("qkv_7b", 4096, 200.0, "dx"),
        product("qkv_7b", 4096, 170.0, impl="cublas_bf16"),
    ]
    step = {"case": "layers_7b", "m": 8, "n": 0, "k": 0, "direction": "forward", "impl": "qerl", "layers": 28}
    for rank, products, us in ((0, False, 400.0), (0, True, 1700.0), (32, True, 1900.0)):
        rows.append({**step, "lora_rank": rank, "products": products, "us": us})
    rows.append({**step, "case": "layer_set_7b", "impl": "marlin", "us": 2334.0})
    said = report.summary(rows).splitlines()
    # (2 · 0.9 · 1.2)^(1/3) = 1.29
    assert (
        "forward  m       1, 8, 16, 32   1.29 (least 0.90, 3 products) x marlin: asked 1.35, each 1.0: MISSED" in said
    )
    assert (
        "forward  m           1, 8, 16   2.00 (least 2.00, 1 products) x marlin of qkv_7b, o_7b: asked 1.5: holds"
        in said
    )
    assert "dx       m        4096, 16384   0.85 (least 0.85, 1 products) x cublas_bf16: asked 0.88: MISSED" in said
    assert "m 8:  3.82 (least 3.82, 1 products) TB/s" in said
    assert "all of these  3.82 (least 3.82, 1 products) TB/s: asked 2.8: holds" in said
    assert "gate_up_7b m 8: 3.82 TB/s" in said  # 37888 · 3584 · 0.5625 bytes in 20 µs
    assert "with adapters m 8: 1.20 times a plain product (most 1.20, 1 products)" in said
    assert "batch invariant m 8: 1.50 times a plain product (most 1.50, 1 products)" in said
    assert (
        "step m   8: projections 1.300 ms, with adapters of rank 32 1.500 ms (+15.4%: asked 10%: MISSED), "
        "asked 1.7 ms: holds; Marlin without adapters 2.334 ms"
    ) in said
    line = report.describe(rows[0], report.rivals_of(rows))
    assert "1.86 TB/s ( 43%)" in line and "52.8 TFLOP/s (  7%)" in line  # 9.29 MB and 264 MFLOP in 5 µs
    assert line.endswith("4.00 x cublas_bf16   2.00 x marlin")
    assert report.describe(rows[9], report.rivals_of(rows)).endswith("0.85 x cublas_bf16")
