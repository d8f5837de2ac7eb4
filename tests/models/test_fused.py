"""Decode through the fused operations against decode as the modules compute it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from qerl_kernels.nvfp4_matmul import cases, packing

from qerl_jax.models import cache as kv
from qerl_jax.models import fused
from qerl_jax.models.formats import Dense
from qerl_jax.models.linear import linear
from qerl_jax.models.lora import Lora, side_by_side
from qerl_jax.models.qwen2 import FUSED, ModelConfig, Qwen2

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=64,
    eos_token_ids=(0,),
    pad_token_id=0,
)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layer_of(rng, targets, rank):
    """Random packed weights and adapters of one layer."""
    shapes = CONFIG.projection_shapes()
    weights, adapters = {}, {}
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        parts = FUSED.get(name, (name,))
        rows, k = sum(shapes[part][0] for part in parts), shapes[parts[0]][1]
        weights[name] = packing.pack(cases.random_weight(jax.random.key(rng.integers(1 << 30)), rows, k))
        loras, offset = {}, 0
        for part in parts:
            n = shapes[part][0]
            if part in targets:
                a, b = rng.normal(size=(k, rank)) / k**0.5, rng.normal(size=(rank, n)) / rank**0.5
                loras[part] = Lora(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), 2.0, offset)
            offset += n
        adapters[name] = side_by_side(loras)
    weights["qkv_bias"] = jnp.asarray(rng.normal(size=64), jnp.float32)
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[name] = jnp.asarray(1 + 0.3 * rng.normal(size=CONFIG.hidden_size), jnp.float32)
    return weights, adapters


def model_of(targets=ALL, rank=8):
    rng = np.random.default_rng(0)
    layers, adapters = zip(*(layer_of(rng, targets, rank) for _ in range(CONFIG.num_layers)), strict=True)
    embed = jnp.asarray(rng.normal(size=(CONFIG.vocab_size, CONFIG.hidden_size)), jnp.float32)
    weights = {"embed_tokens": embed, "norm": jnp.ones(CONFIG.hidden_size), "layers": layers}
    return Qwen2(CONFIG, weights, list(adapters))


def decoded(model, batch):
    """Hidden states and cache of two tokens a row, the second after the first."""
    shape = (CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, jnp.float32)
    prompts, own = kv.init_cache(1, 4, *shape), kv.init_cache(batch, 4, *shape)
    zeros, tokens = jnp.zeros(batch, jnp.int32), jnp.arange(batch) % CONFIG.vocab_size
    for length in (1, 2):
        step = nnx.jit(lambda model, *args: model.decode(*args))  # a new function: what `fits` says is read again
        hidden, own = step(model, tokens * length % 64, prompts, zeros, zeros, own, jnp.full(batch, length))
    return hidden, own


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("k_proj", "up_proj", "down_proj"), ()])
def test_fused_decode_is_decode(targets, monkeypatch):
    model = model_of(targets)
    assert fused.fits(model.layers, 5)
    ours = decoded(model, 5)
    monkeypatch.setattr(fused, "fits", lambda layers, batch: False)
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(decoded(model, 5)), strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_no_x_a_is_made_for_a_product_that_computes_its_own(monkeypatch):
    """Of o and of down, say: nothing is launched before the one, and what precedes the other makes h alone."""
    model, asked, made = model_of(), [], []
    expected = decoded(model, 5)

    def takes(rows, weight, parts, dtype):
        asked.append((rows, dtype))
        return "a" if weight.shape[0] == CONFIG.hidden_size else "whole"

    def recorded(name):
        whole = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *args, **more: made.append((name, args)) or whole(*args, **more))

    monkeypatch.setattr(fused, "product_takes", takes)
    for name in ("rms_norm_prologue", "silu_mul_prologue", "lora_prologue"):
        recorded(name)
    for got, wanted in zip(jax.tree.leaves(decoded(model, 5)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert set(asked) == {(5, jnp.dtype(jnp.float32))} and len(asked) == 2 * 2 * 4  # tokens, layers, projections
    names = [name for name, _ in made]
    assert names.count("rms_norm_prologue") == names.count("silu_mul_prologue") * 2 == 8
    assert "lora_prologue" not in names
    assert all((args[-1] == ()) == (name == "silu_mul_prologue") for name, args in made)


def test_x_a_in_parts_goes_to_products_that_add_it_up(monkeypatch):
    """Before o and down; a norm makes the whole of it whatever follows."""
    model, made = model_of(), []
    expected = decoded(model, 5)
    monkeypatch.setattr(fused, "product_takes", lambda *args: "parts")
    for name in ("silu_mul_prologue", "lora_prologue"):
        whole = getattr(fused, name)
        recorded = lambda *args, whole=whole, **more: made.append(whole(*args, **more)) or made[-1]  # noqa: E731
        monkeypatch.setattr(fused, name, recorded)
    for got, wanted in zip(jax.tree.leaves(decoded(model, 5)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    t = [each[1] if isinstance(each, tuple) else each for each in made]
    assert [(each.shape, each.dtype) for each in t] == [((1, 5, 8), jnp.float32)] * 2 * 2 * CONFIG.num_layers


def test_what_the_kernels_do_not_hold_goes_the_plain_way():
    assert not fused.fits(model_of().layers, 129)
    assert not fused.fits(model_of(rank=72).layers, 8)
    assert decoded(model_of(rank=72), 3)[0].shape == (3, CONFIG.hidden_size)


def test_linear_refuses_a_given_x_a_where_nothing_uses_it():
    with pytest.raises(ValueError, match="packed weight, this is Dense"):
        linear(jnp.ones((2, 16)), Dense(jnp.ones((8, 16))), shrunk=jnp.ones((2, 64)))
