"""The route of a GEMM and of its LoRA input: which kernel is called, and which computes `x A` (the GEMM, the decode
prologue or XLA). The kernels are replaced by the equations that they stand for."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels import dispatch
from qerl_kernels.decode_prologue import kernel as prologue_kernel
from qerl_kernels.decode_prologue import reference
from qerl_kernels.gpu import H200, gpu_of
from qerl_kernels.nvfp4_matmul import cases, lora_input, packing, tuning
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul
from qerl_kernels.nvfp4_matmul.dequantize import kernel as dequantize_kernel
from qerl_kernels.nvfp4_matmul.gemm import kernel, transposed
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
from qerl_kernels.nvfp4_matmul.route import Problem, problem_of, route_problem
from qerl_kernels.nvfp4_matmul.skinny import kernel as skinny_kernel
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.tcgen05.config import Tcgen05Config
from test_tuning import timed

N, K = 512, 640
SKINNY = SkinnyConfig(8, m16_tiles=2, warps=4, cluster=2, stages=1, computes_lora_x=True)
CONFIG = GemmConfig(tile_m=64, warpgroups_n=1, k_tiles=1, stages=4)
FEW, MANY = tuning.Row("forward", N, K, 8, SKINNY, 1.0), tuning.Row("forward", N, K, 64, CONFIG, None)


@pytest.fixture
def here(request, tmp_path):
    """The GPU for which programs are traced, on which these GEMMs were timed; an H200 unless a test says another."""
    gpu, *rows = getattr(request, "param", (H200, FEW, MANY, dataclasses.replace(MANY, direction="dx")))
    with dispatch.lowering_for(timed(tmp_path / "table.json", *rows, gpu=gpu)):
        yield


@pytest.fixture
def calls(monkeypatch, here):
    """(kernel, rows of x, what it was given: "a", "parts", "whole" or None) of each call; ("shrink", rows, ranks),
    ("tcgen05", rows, compute capability), ("dequantize", compute capability)."""
    made = []

    def whole(x, weight, shrunk, a, expand, scale, bias):
        matrix, row = packing.packed_parts(weight)
        y = x.astype(jnp.float32) @ matrix.astype(jnp.float32).T * row
        ranks = [b.shape[0] for b in expand]
        if a is not None:
            t = jnp.split((x.astype(jnp.float32) @ a.astype(jnp.float32)).astype(x.dtype), np.cumsum(ranks)[:-1], 1)
        elif shrunk is not None and shrunk.ndim == 3:
            t = jnp.split(shrunk.sum(0).astype(x.dtype), np.cumsum(ranks)[:-1], 1)
        else:
            t = [shrunk[:, 64 * i :][:, :rank] for i, rank in enumerate(ranks)]
        added = [p.astype(jnp.float32) @ b.astype(jnp.float32) for p, b in zip(t, expand, strict=True)]
        y = y + scale * jnp.concatenate(added, axis=1) if expand else y
        return (y if bias is None else y + bias).astype(x.dtype)

    def given(shrunk):
        return None if shrunk is None else "parts" if shrunk.ndim == 3 else "whole"

    def few(x, weight, config, *, bias=None, lora_x=None, lora_a=None, lora_b=(), scale=1.0, gpu):
        assert gpu == dispatch.this_gpu()
        assert config.computes_lora_x == (lora_a is not None)
        assert lora_x is None or lora_a is None
        made.append(("few", x.shape[0], "a" if lora_a is not None else given(lora_x)))
        return whole(x, weight, lora_x, lora_a, lora_b, scale, bias)

    def many(x, weight, config, *, bias=None, lora_x=None, lora_b=(), scale=1.0, gpu):
        assert gpu == dispatch.this_gpu()
        made.append(("many", x.shape[0], given(lora_x)))
        assert lora_x is None or lora_x.ndim == 2 or config.takes_partials(x.shape[0], [b.shape for b in lora_b])
        return whole(x, weight, lora_x, None, lora_b, scale, bias)

    def many_dx(dy, weight, config, *, gpu):
        assert gpu == dispatch.this_gpu()
        made.append(("many", dy.shape[0], None))
        matrix, row = packing.packed_parts(weight)  # the kernel has one multiplier for all output features
        return (row[0] * (dy.astype(jnp.float32) @ matrix.astype(jnp.float32))).astype(dy.dtype)

    def shrink(spec, config, inputs, a, gpu):
        [x] = inputs
        assert (config.cluster > 1) == (gpu.tier == "wgmma") and gpu == dispatch.this_gpu()
        assert (spec.kind, spec.partials) == ("plain", False) and x.dtype == a.dtype == jnp.bfloat16
        assert x.shape == (spec.tokens, spec.features) and a.shape == (spec.features, sum(spec.ranks))
        made.append(("shrink", spec.tokens, spec.ranks))
        return [reference.lora_x(x, a, spec.ranks)]

    def dequantize(weight, *, gpu):
        made.append(("dequantize", gpu.arch / 10))
        return packing.packed_parts(weight)[0]

    def by_tcgen05(x, weight, *, bias, gpu):
        made.append(("tcgen05", len(x), gpu.arch / 10))
        return whole(x, weight, None, None, (), 1.0, bias)

    stand_ins = [
        (skinny_kernel, "skinny_matmul", few), (kernel, "gemm", many), (transposed, "gemm_dx", many_dx),
        (prologue_kernel, "fused_prologue", shrink), (dequantize_kernel, "dequantize", dequantize),
    ]  # fmt: skip
    if jax.__version_info__ >= (0, 11):
        from qerl_kernels.nvfp4_matmul.tcgen05 import kernel as tcgen05

        stand_ins.append((tcgen05, "gemm", by_tcgen05))
    for kernel_and_function in stand_ins:
        monkeypatch.setattr(*kernel_and_function)
    return made


def matmul(x, weight, bias, loras, *, implementation="mosaic_gpu", batch_invariant=False, lora_x=None):
    """`nvfp4_matmul` where the kernels run, or by XLA."""
    chosen = route(math.prod(x.shape[:-1]), weight, loras, batch_invariant, implementation)
    more = {"batch_invariant": batch_invariant, "lora_x": lora_x}
    return nvfp4_matmul(x, weight, bias, loras, route=chosen, **more)


def route(m, weight, loras, batch_invariant=False, implementation="mosaic_gpu"):
    """The route for m rows where the kernels run, or by XLA."""
    return route_problem(problem_of(m, weight, loras, implementation, batch_invariant))


@functools.cache
def packed_weight(k=K):
    return packing.pack(cases.random_weight(jax.random.key(0), N, k))


def draw(rows, widths, ranks, scale=0.5, beside=True):
    rng = np.random.default_rng(len(ranks))
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    a = [jnp.asarray(normal(K, rank) / K**0.5, jnp.bfloat16) for rank in ranks]
    together, loras = jnp.concatenate(a, axis=1), []
    for i, (rank, width) in enumerate(zip(ranks, widths, strict=True)):
        b = jnp.asarray(normal(rank, width), jnp.bfloat16)
        where = {"a": together, "column": sum(ranks[:i])} if beside else {"a": a[i], "column": None}
        loras.append(types.SimpleNamespace(b=b, scale=scale, offset=sum(widths[:i]), **where))
    return jnp.asarray(normal(rows, K), jnp.bfloat16), packed_weight(), loras


def compiled(function, *arguments):
    """A result by one program, for which kernels are called anew: each operation by itself compiles for 40 ms."""
    return jax.jit(lambda *arguments: function(*arguments))(*arguments)


def opaque(weight):
    """A constant of a program that XLA does not compute with while it compiles."""
    return jax.lax.optimization_barrier(weight)


def near(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(got, expected, rtol=2.0**-7, atol=2.0**-7 * np.abs(expected).max())


@pytest.mark.parametrize(("widths", "ranks", "beside"), [((512,), (32,), False), ((256, 64, 192), (8, 64, 16), True)])
def test_without_gradients_the_gemm_computes_lora_x(calls, widths, ranks, beside):
    x, weight, loras = draw(5, widths, ranks, beside=beside)
    assert route(5, weight, loras).lora_form is LoraForm.A
    y = jax.jit(lambda x: matmul(x, weight, jnp.ones(N), loras))(x)
    assert calls == [("few", 5, "a")]
    near(y, matmul(x, weight, jnp.ones(N), loras, implementation="xla"))


def test_given_lora_x_is_taken(calls):
    x, weight, loras = draw(8, (512,), (32,))
    t = (x.astype(jnp.float32) @ loras[0].a.astype(jnp.float32)).astype(jnp.bfloat16)
    slots = jnp.pad(2 * t, ((0, 0), (0, 32)))
    y = matmul(x, weight, None, loras, lora_x=slots)
    assert calls == [("few", 8, "whole")]
    near(y, matmul(x, weight, None, loras, lora_x=slots, implementation="xla"))


PLAIN = dataclasses.replace(SKINNY, computes_lora_x=False)


@pytest.mark.parametrize("here", [(H200, dataclasses.replace(FEW, config=PLAIN), MANY)], indirect=True)
@pytest.mark.parametrize(("widths", "ranks"), [((512,), (32,)), ((256, 64, 192), (8, 64, 16))])
def test_partials_are_reduced(calls, widths, ranks):
    """In the skinny kernel; in the other one for one adapter, before it for several; by XLA; and where `vmap` makes
    many rows of few."""
    x, weight, loras = draw(8, widths, ranks)
    form = lambda m: route(m, weight, loras).lora_form  # noqa: E731
    assert form(8) is LoraForm.PARTIALS
    assert form(9) is form(64) is (LoraForm.PARTIALS if len(ranks) == 1 else LoraForm.WHOLE)
    assert form(65) is LoraForm.WHOLE
    of_gemm = "parts" if len(ranks) == 1 else "whole"
    halves = [x[:, part].astype(jnp.float32) @ loras[0].a[part].astype(jnp.float32) for part in np.s_[:200, 200:]]
    parts = jnp.stack(halves)
    expected = compiled(lambda x: matmul(x, opaque(weight), None, loras, implementation="xla"), x)

    def product(x, parts, **more):
        return matmul(x, opaque(weight), None, loras, lora_x=parts, **more)

    near(compiled(product, x, parts), expected)
    near(compiled(functools.partial(product, implementation="xla"), x, parts), expected)
    near(compiled(product, jnp.tile(x, (2, 1)), jnp.tile(parts, (1, 2, 1)))[8:], expected)
    several = compiled(jax.vmap(product), x.reshape(2, 4, K), jnp.moveaxis(parts.reshape(2, 2, 4, -1), 1, 0))
    near(several.reshape(8, N), expected)
    near(compiled(jax.vmap(product), jnp.stack([-x, x, -x]), jnp.stack([-parts, parts, -parts]))[1], expected)
    near(compiled(product, jnp.tile(x, (9, 1)), jnp.tile(parts, (1, 9, 1)))[64:], expected)
    kinds = [call for call in calls if call[1] in (8, 16, 24, 72)]
    assert {("few", 8, "parts"), ("many", 16, of_gemm), ("many", 24, of_gemm), ("many", 72, "whole")} == set(kinds)
    near(compiled(functools.partial(product, batch_invariant=True), x, parts), expected)
    assert calls[-1] == ("many", 8, "whole")
    over_x = compiled(jax.vmap(product, in_axes=(0, None)), jnp.stack([x, x]), parts)  # as many as there are parts
    over_parts = compiled(jax.vmap(product, in_axes=(None, 0)), x, jnp.stack([parts, parts[::-1]]))
    for several in (*over_x, *over_parts):
        near(several, expected)
    with pytest.raises(ValueError, match=r"lora_x is float32\[2, 8, \d+\], .* need float32\[2, 8, \d+\]"):
        product(x, parts[:, :, 8:])


@pytest.mark.parametrize("here", [(H200, dataclasses.replace(FEW, m=64, config=PLAIN))], indirect=True)
def test_rows_beyond_a_tile_are_blocks_of_one_launch(calls):
    x, weight, loras = draw(20, (512,), (32,))
    halves = [x[:, part].astype(jnp.float32) @ loras[0].a[part].astype(jnp.float32) for part in np.s_[:200, 200:]]
    product = lambda x, t, **more: matmul(x, opaque(weight), None, loras, lora_x=t, **more)  # noqa: E731
    parts = jnp.stack(halves)
    near(compiled(product, x, parts), compiled(functools.partial(product, implementation="xla"), x, parts))
    assert calls == [("few", 20, "parts")]


def test_a_batch_of_few_rows_may_be_many(calls):
    """`vmap` makes one GEMM of all rows; where that is not the skinny kernel, `x A` is computed for it."""
    x, weight, loras = draw(8, (256, 256), (32, 8))
    one = lambda x, **more: matmul(x, opaque(weight), None, loras, **more)  # noqa: E731
    expected = compiled(functools.partial(one, implementation="xla"), x)
    near(compiled(jax.vmap(one), x.reshape(2, 4, K)).reshape(8, N), expected)
    near(compiled(jax.vmap(one), jnp.stack([x, x, x]))[1], expected)
    made = [call for call in calls if call[1] in (8, 24)]
    assert made[-3:] == [("few", 8, "a"), ("shrink", 24, (32, 8)), ("many", 24, "whole")]


def test_which_gemm_computes_lora_x(calls):
    """Too many rows, no adapters, adapters that share a block of 32 features or that do not fit at all, XLA."""
    x, weight, loras = draw(8, (512,), (32,))
    form = lambda m, loras, **more: route(m, weight, loras, **more).lora_form  # noqa: E731
    assert form(8, loras) is LoraForm.A
    assert form(9, loras) is LoraForm.PARTIALS
    assert form(9, loras, batch_invariant=True) is LoraForm.WHOLE
    assert form(8, []) is LoraForm.NONE
    assert form(8, loras, implementation="xla") is LoraForm.WHOLE
    assert form(8, loras, batch_invariant=True) is LoraForm.WHOLE
    for widths, ranks, scale in (((240, 272), (16, 16), 0.5), ((512,), (72,), 0.5), ((512,), (32,), 0.0)):
        x, weight, loras = draw(8, widths, ranks, scale)
        assert route(8, weight, loras).lora_form is LoraForm.WHOLE
        calls.clear()
        near(matmul(x, weight, None, loras), matmul(x, weight, None, loras, implementation="xla"))
        assert calls == [("shrink", 8, ranks)] * (max(ranks) <= 64) + [("few", 8, None)]


def draw_for_gradients(rows, widths, ranks, k=K):
    """A product as a function of x and its adapters' A and B, and these; `k`: as many of the input features."""
    x, _, loras = draw(rows, widths, ranks, beside=False)
    weight = packed_weight(k)

    def product(x, pairs, **more):
        parts = [
            types.SimpleNamespace(a=a, b=b, scale=lora.scale, offset=lora.offset)
            for lora, (a, b) in zip(loras, pairs, strict=True)
        ]
        return matmul(x, opaque(weight), None, parts, **more)

    return product, (x[:, :k], [(lora.a[:k], lora.b) for lora in loras])


def compiled_gradients(product, arguments, **more):
    """`value_and_gradients` by one program."""
    return compiled(lambda *arguments: value_and_gradients(product, arguments, **more), *arguments)


def value_and_gradients(product, arguments, **more):
    """y, and the gradients of its squares' sum in x and all A and B."""

    def loss(*arguments):
        y = product(*arguments, **more)
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    gradients, y = jax.grad(loss, (0, 1), has_aux=True)(*arguments)
    return [y, *jax.tree.leaves(gradients)]


def all_near(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) <= 4e-3 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    ("rows", "widths", "ranks"),
    [
        (8, (512,), (32,)),
        (256, (256, 64, 192), (8, 64, 16)),
        (257, (256, 64, 192), (8, 64, 16)),
        (64, (240, 272), (16, 16)),
    ],
)
def test_up_to_256_rows_the_prologue_kernel_computes_lora_x(calls, rows, widths, ranks):
    product, arguments = draw_for_gradients(rows, widths, ranks)
    got = compiled_gradients(product, arguments)
    assert [call for call in calls if call[0] == "shrink"] == [("shrink", rows, ranks)] * (rows <= 256)
    assert rows > 8 or calls[1:] == [("few", rows, "whole"), ("many", rows, None)]
    calls.clear()
    expected = compiled_gradients(product, arguments, implementation="xla")
    assert not calls
    all_near(got, expected)


@pytest.mark.parametrize(
    ("ranks", "k", "more"),
    [
        ((12,), K, {}), ((72,), K, {}), ((32,), K - 16, {}), ((32,), K, {"batch_invariant": True}),
    ],
)  # fmt: skip
def test_shapes_that_the_prologue_kernel_refuses_go_to_xla(calls, ranks, k, more):
    product, arguments = draw_for_gradients(8, (512,), ranks, k)
    got = compiled_gradients(product, arguments, **more)
    assert "shrink" not in [call[0] for call in calls]
    all_near(got, compiled_gradients(product, arguments, implementation="xla"))


ALONE = [tuning.Row("forward", N, K, m, SkinnyConfig(m, 2, 4, 1, 2), None) for m in (8, 32)]


@pytest.mark.parametrize("here", [(gpu_of("RTX 4090", 89, 128), *ALONE)], indirect=True)
@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        (5, [("shrink", 5, (32, 8)), ("few", 5, "whole"), ("dequantize", 8.9)]),
        (70, [("shrink", 70, (32, 8)), ("few", 70, "whole"), ("dequantize", 8.9)]),
        (129, [("dequantize", 8.9)] * 2),
    ],
)
def test_a_gpu_without_wgmma(calls, rows, kernels):
    """Up to 128 rows the skinny kernel, in CTAs of no cluster; more rows, and the gradient in x, by a
    weight that a kernel dequantizes. Nothing calls the other GEMM. A batch of few rows may be many."""
    product, arguments = draw_for_gradients(rows, (448, 64), (32, 8))
    got = compiled_gradients(product, arguments)
    assert calls == kernels
    all_near(got, compiled_gradients(product, arguments, implementation="xla"))
    x, pairs = arguments
    all_near(compiled(jax.vmap(product, (0, None)), jnp.stack([x] * 30), pairs), [got[0]] * 30)
    assert calls[-1][0] == "dequantize"
    near(compiled(functools.partial(product, batch_invariant=True), x, pairs), got[0])
    assert calls[-1][0] == "dequantize"


@pytest.mark.parametrize("here", [(gpu_of("NVIDIA B200", 100, 148), ALONE[0])], indirect=True)
def test_many_rows_on_data_center_blackwell(calls):
    """By `tcgen05`, whose result the adapters are added to; so are those of a batch of few rows, which the skinny
    kernel would fuse. Not the gradient in x, batch invariance, or a matrix that is no projection of a model."""
    pytest.importorskip("jax", "0.11")
    product, arguments = draw_for_gradients(129, (448, 64), (32, 8))
    got = compiled_gradients(product, arguments)
    assert calls == [("tcgen05", 129, 10.0), ("dequantize", 10.0)]
    all_near(got, compiled_gradients(product, arguments, implementation="xla"))
    few, pairs = arguments[0][:5], arguments[1]
    batch = compiled(jax.vmap(product, (0, None)), jnp.stack([few] * 30), pairs)
    assert calls[-1] == ("tcgen05", 150, 10.0)
    all_near(batch, [compiled(functools.partial(product, implementation="xla"), few, pairs)] * 30)


def test_where_many_rows_are_multiplied_by_tcgen05():
    chosen = [
        tuning.config_for(256, n, k, gpu=gpu_of("GPU A", arch, 148), **more)
        for arch, n, k, more in [
            *[(103, 512, 512, {}), (100, 512, 448, {}), (100, 448, 512, {}), (120, 512, 512, {})],
            *[(100, 512, 512, more) for more in ({"batch_invariant": True}, {"adapters": [(32, 512)]})],
        ]
    ]
    assert chosen == [Tcgen05Config()] + [None] * 5


@pytest.mark.parametrize(("how", "batch"), [("vmap", 3), ("scan", 3), ("remat", 3), ("inner", 22)])
def test_transformations_of_a_gemm_whose_lora_x_a_kernel_computes(calls, how, batch):
    """`vmap`, within a gradient or around it, makes one call of the kernel with more rows (36), none where they are too
    many (264)."""
    product, (x, pairs) = draw_for_gradients(12 * batch, (256, 256), (32, 8))
    several = x.reshape(batch, 12, K)
    of_one = lambda x, **more: value_and_gradients(product, (x, pairs), **more)  # noqa: E731
    by_xla = jax.jit(functools.partial(of_one, implementation="xla"))
    expected = [jnp.stack(leaves) for leaves in zip(*map(by_xla, several), strict=True)]
    calls.clear()
    if how == "scan":
        got = jax.lax.scan(lambda carry, x: (carry, of_one(x)), 0, several)[1]
    elif how == "inner":  # the gradients of A and B are sums over the batch
        mapped = lambda x, pairs, **more: jax.vmap(lambda x: product(x, pairs, **more))(x)  # noqa: E731
        got = compiled_gradients(mapped, (several, pairs))
        expected = expected[:2] + [leaf.astype(jnp.float32).sum(0).astype(leaf.dtype) for leaf in expected[2:]]
    elif how == "remat":
        got = compiled(jax.vmap(lambda x: value_and_gradients(jax.checkpoint(product), (x, pairs))), several)
    else:
        got = compiled(jax.vmap(of_one), several)
    all_near(got, expected)
    rows = {call[1] for call in calls if call[0] == "shrink"}
    last = [call for call in calls if call[0] == "many" and call[2]][-1]
    if how == "scan":
        assert rows == {12} and last[1] == 12
    else:
        assert rows <= {12, 12 * batch} and (12 * batch in rows) == (batch == 3) and last[1] == 12 * batch


def test_a_batch_of_adapters_outside_the_gemm(calls):
    """Adapters that the product cannot add itself may have a batch axis: their `x A` is XLA's."""
    product, (x, pairs) = draw_for_gradients(8, (240, 272), (16, 16))
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), pairs)
    by_xla = jax.jit(functools.partial(product, implementation="xla"))
    expected = [by_xla(x, jax.tree.map(lambda leaf, i=i: leaf[i], several)) for i in range(3)]
    near(compiled(jax.vmap(product, (None, 0)), x, several), jnp.stack(expected))
    near(compiled(jax.vmap(product, (0, 0)), jnp.stack([x] * 3), several), jnp.stack(expected))


@pytest.mark.parametrize(
    ("adapters", "is_fused"),
    [
        (((32, 3584, 0, 2.0), (32, 512, 3584, 2.0), (32, 512, 4096, 2.0)), True),
        (((32, 3584, 0, 2.0), (32, 512, 4096, 2.0)), False),  # a gap
        (((32, 3584, 0, 2.0), (32, 512, 4096, 2.0), (32, 512, 3584, 2.0)), False),  # another order
        (((32, 3584, 0, 2.0), (32, 512, 3584, 1.0), (32, 512, 4096, 2.0)), False),
        (((32, 3584, 0, 0.0), (32, 512, 3584, 0.0), (32, 512, 4096, 0.0)), False),  # it divides by the scale
    ],
)
def test_which_adapters_the_gemm_adds(adapters, is_fused):
    """Those that lie end to end from feature 0 on and share a scale; XLA adds any other."""
    found = route_problem(Problem(4096, *cases.SHAPES["qkv_7b"], adapters, False, "mosaic_gpu", False, H200))
    assert (found.kernel, found.is_fused) == ("gemm", is_fused)


@pytest.mark.parametrize(
    ("n", "adapters", "features", "fuses"),
    [
        (4608, [(32, 3584), (8, 512), (64, 512)], 16, True),
        (4608, [(32, 3584), (32, 512)], 16, False),  # the last features have none
        (4608, [(32, 3584), (32, 512), (32, 528)], 16, False),  # nor do features beyond the last
        (4608, [(32, 3580), (32, 1028)], 16, False),  # one begins within a tile
        (4608, [(32, 3584), (32, 1024)], 128, True),
        (4608, [(32, 3600), (32, 1008)], 128, False),
        (40, [(8, 40)], 16, False),
        *((64, [(rank, 64)], 16, rank in (8, 64)) for rank in (0, 8, 12, 64, 72)),
        (64, [], 16, False),
    ],
)
def test_which_adapters_a_kernel_can_add(n, adapters, features, fuses):
    assert lora_input.can_fuse(n, adapters, features) == fuses


def test_which_configs_take_partials():
    """One adapter, rows of one tile and at most 64, and room for 64 columns of each row: 25.5 KiB are free beside
    the config of 7B's down for 64 tokens, which needs 8; 2.5 beside another."""
    for model, m, expected in (
        ("7b", 32, True), ("7b", 33, True), ("7b", 64, True), ("7b", 65, False), ("14b", 64, True),
        ("32b", 64, True), ("15b", 64, True), ("7b", 4096, False),
    ):  # fmt: skip
        n, k = cases.SHAPES[f"down_{model}"]
        config = tuning.config_for(m, n, k, adapters=[(32, n)])
        assert isinstance(config, GemmConfig) and config.takes_partials(m, [(32, n)]) == expected, (model, m)
        assert not config.takes_partials(m, [(32, n // 2)] * 2)
    assert not GemmConfig(64, 1, 2, 4, 1, 9, lookahead=True).takes_partials(64, [(32, 1536)])
    assert config.smem_bytes(True, has_partials=True) - config.smem_bytes(True) == config.tile_m * 128
    two = dataclasses.replace(CONFIG, stages=9, ctas_per_sm=2)
    one = dataclasses.replace(two, ctas_per_sm=1)
    assert [config.takes_partials(64, [(32, N)]) for config in (one, two)] == [True, False]
    assert CONFIG.takes_partials(64, [(32, N)])
    assert not dataclasses.replace(CONFIG, tile_m=56).takes_partials(64, [(32, N)])


@pytest.mark.parametrize(
    ("shape", "dtype", "adapters"),
    [
        ((2, 64, 32), jnp.bfloat16, 1),  # partials are fp32
        ((2, 64, 24), jnp.float32, 1),  # another rank
        ((2, 63, 32), jnp.float32, 1),
        ((0, 64, 32), jnp.float32, 1),  # no partials
        ((2, 64, 64), jnp.float32, 2),  # two adapters
        ((2, 65, 32), jnp.float32, 1),  # more rows than a tile has
        ((64, 32), jnp.float32, 1),
        ((64, 32), jnp.bfloat16, 2),
        (None, None, 1),
        ((64, 32), jnp.bfloat16, 0),
    ],
)
def test_the_gemm_refuses_what_it_would_misread(shape, dtype, adapters):
    weight = packing.pack(cases.random_weight(jax.random.key(0), N, K))
    lora_x = None if shape is None else jnp.zeros(shape, dtype)
    x = jnp.zeros((65 if shape == (2, 65, 32) else 64, K), jnp.bfloat16)
    lora_b = [jnp.zeros((32, N // max(1, adapters)), jnp.bfloat16)] * adapters
    with pytest.raises(ValueError, match=r"gemm: x A is .* rows, adapters of ranks \[.*GemmConfig"):
        kernel.gemm(x, weight, CONFIG, lora_x=lora_x, lora_b=lora_b)


@pytest.mark.parametrize(
    ("change", "gpu", "message"),
    [
        ({"lookahead": True, "stages": 1}, H200, "lookahead takes wgmma and two stages"),
        ({"stages": 32}, H200, r"needs \d+ bytes of shared memory, a CTA has 232448"),
        ({}, gpu_of("NVIDIA GeForce RTX 4090", 89, 128), "wgmma takes compute capability 9.0, this is .*4090, 8.9"),
    ],
)
def test_the_gemm_refuses_what_its_gpu_cannot_run(change, gpu, message):
    weight = packing.pack(cases.random_weight(jax.random.key(0), N, K))
    with pytest.raises(ValueError, match=message):
        kernel.gemm(jnp.zeros((64, K), jnp.bfloat16), weight, dataclasses.replace(CONFIG, **change), gpu=gpu)


def test_a_route_is_that_of_its_gemm(calls):
    """The route that the prologue was given goes to the GEMM as it is; that of another GEMM is refused."""
    x, weight, loras = draw(8, (512,), (32,))
    chosen = route(8, weight, loras)
    nvfp4_matmul(x, weight, None, loras, route=chosen)
    assert calls == [("few", 8, "a")]
    assert route(64, weight, loras).for_rows(8) == chosen != route(64, weight, loras)
    for other in (route(7, weight, loras), route(8, weight, []), route(8, weight, loras, True)):
        with pytest.raises(ValueError, match="the route is that of"):
            nvfp4_matmul(x, weight, None, loras, route=other)
    with pytest.raises(ValueError, match="the route is that of"):
        nvfp4_matmul(x, weight, None, loras, route=chosen, implementation="xla")
