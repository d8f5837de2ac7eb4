"""Decode by the fused executor against decode by the plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from qerl_kernels import dispatch
from qerl_kernels.gpu import gpu_of
from qerl_kernels.nvfp4_matmul import cases, packing
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
from qerl_kernels.nvfp4_matmul.route import route

from qerl_jax.models import cache as kv
from qerl_jax.models import fused_decode
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.executor import PlainExecutor
from qerl_jax.models.formats import Dense
from qerl_jax.models.linear import linear
from qerl_jax.models.lora import Lora, fuse_lora_a
from qerl_jax.models.qwen2 import Qwen2
from qerl_jax.models.trees import layer_adapters, weight_trees

CONFIG = ModelConfig(64, 32, 48, 2, 4, 2, 8, 1e4, 1e-6, True, 64, (0,), 0)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model_of(targets=ALL, rank=8, dense=()):
    """Random packed weights, those of the projections `dense` dense, and adapters."""
    rng = np.random.default_rng(0)

    def tensor(spec, layer):
        if spec.kind == "projection" and spec.path[1] in dense:
            return Dense(jnp.asarray(rng.normal(size=spec.shape) / spec.columns**0.5, jnp.float32))
        if spec.kind == "projection":
            return packing.pack(cases.random_weight(jax.random.key(rng.integers(1 << 30)), *spec.shape))
        if spec.kind == "norm":
            return jnp.asarray(1 + 0.3 * rng.normal(size=spec.shape), jnp.float32)
        return jnp.asarray(rng.normal(size=spec.shape), jnp.float32)

    def adapter(part, k, n, offset):
        a, b = rng.normal(size=(k, rank)) / k**0.5, rng.normal(size=(rank, n)) / rank**0.5
        return Lora(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), 2.0, offset) if part in targets else None

    lora = fuse_lora_a({"layers": {i: layer_adapters(CONFIG, adapter) for i in range(CONFIG.num_layers)}})
    return Qwen2(CONFIG, *weight_trees(CONFIG, tensor), lora)


def empty_caches(batch):
    """Caches of one prompt, and of each row."""
    shape = (CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, jnp.float32)
    return kv.init_cache(1, 4, *shape), kv.init_cache(batch, 4, *shape)


def step_of(model, batch_invariant=False):
    """`decode` as a function of arrays; traced anew."""
    graph, weights = nnx.split(model)
    return functools.partial(lambda weights, *args: nnx.merge(graph, weights).decode(*args, batch_invariant), weights)


def decoded(model, batch, batch_invariant=False):
    """Hidden states and cache of two tokens a row, the second after the first."""
    prompts, own = empty_caches(batch)
    zeros, tokens = jnp.zeros(batch, jnp.int32), jnp.arange(batch) % CONFIG.vocab_size
    step = jax.jit(step_of(model, batch_invariant))
    for length in (1, 2):
        hidden, own, _ = step(tokens * length % 64, prompts, zeros, zeros, own, jnp.full(batch, length))
    return hidden, own


def traced(model, batch_invariant=False):
    """The program of a decode step of 5 rows, as text."""
    (prompts, own), rows = empty_caches(5), jnp.zeros(5, jnp.int32)
    return str(jax.make_jaxpr(step_of(model, batch_invariant))(rows, prompts, rows, rows, own, rows))


def all_near(found, wanted):
    for got, expected in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("targets", "dense"),
    [(ALL, ("o_proj", "down_proj")), (("k_proj", "up_proj", "down_proj"), ("gate_up_proj",)), ((), ())],
)
def test_fused_decode_equals_plain_decode(targets, dense):
    """With adapters on packed weights alone: below."""
    model = model_of(targets, dense=dense)
    assert fused_decode.can_fuse_decode(model.projections(), 5)
    all_near(decoded(model, 5), decoded(model, 5, True))


@pytest.fixture(scope="module")
def plain():
    return decoded(model_of(), 5, True)


@pytest.mark.parametrize("form", [LoraForm.A, LoraForm.PARTIALS, LoraForm.WHOLE])
def test_x_a_has_the_form_that_the_gemm_takes(monkeypatch, plain, form):
    """Of o and down; a prologue with a norm computes the whole x A. No prologue computes it for a GEMM that does."""
    model = model_of()
    assert fused_decode.can_fuse_decode(model.projections(), 5)

    def routed(m, weight, loras, dtype):
        own = form if weight.shape[0] == CONFIG.hidden_size else LoraForm.WHOLE
        return dataclasses.replace(route(m, weight, loras, dtype), lora_form=own)

    monkeypatch.setattr(fused_decode, "route", routed)
    all_near(decoded(model, 5), plain)
    # That of each adapter is cut out of a whole one: of q, k, v, gate and up, of o and down where theirs is whole.
    counts = [traced(model).count(operation) for operation in ("f32[1,5,8] =", "f32[5,8] = slice")]
    assert counts == {LoraForm.A: [0, 10], LoraForm.PARTIALS: [4, 10], LoraForm.WHOLE: [0, 14]}[form]


def test_batch_invariant_decode_is_plain():
    """Not every batch fits the fused kernels, whose sums have another order and whose `x A` has 64 columns for each of
    q, k and v."""
    assert ["f32[5,192]" in traced(model_of(), invariant) for invariant in (False, True)] == [True, False]


def test_batches_and_ranks_beyond_the_kernels_run_plain():
    """A GPU without clusters takes half as many rows, even where it has few: no sum crosses its CTAs."""
    model, fused, plain = model_of(), fused_decode.FusedDecodeExecutor, PlainExecutor
    for batch, batch_invariant, kind in ((256, False, fused), (257, False, plain), (8, True, plain)):
        assert type(model._decode_executor(batch, batch_invariant)) is kind
    with dispatch.lowering_for(gpu_of("RTX 4090", 89, 128)):
        kinds = [type(model._decode_executor(batch, False)) for batch in (128, 129)]
    assert kinds == [fused, plain]
    assert not fused_decode.can_fuse_decode(model_of(rank=72).projections(), 8)
    assert "f32[5,72]" in traced(model_of(rank=72))


def test_linear_refuses_lora_x_for_an_unpacked_weight():
    with pytest.raises(ValueError, match="packed weight, this is Dense"):
        linear(jnp.ones((2, 16)), Dense(jnp.ones((8, 16))), lora_x=jnp.ones((2, 64)))
