"""FP8 keys and values: the rollout against a forward pass with the same rounding, memory, and layers left out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from command_lines import ROWS, evaluation, lines, training
from helpers import fp32_policy, logprobs_of, plain_rollout, randomized
from oracles import torch_qwen2

from qerl_jax import train
from qerl_jax.evaluate import main as evaluate
from qerl_jax.models.attention import masked_attention, split_and_rotate
from qerl_jax.rollout import decode
from qerl_jax.rollout.engine import generate
from qerl_jax.rollout.shapes import cache_note, choose_shapes, kv_cache_dtypes, max_key_bias
from qerl_jax.types import Engine, FinishReason, Policy, Sampling, completion_ids

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 60], [40, 41]]
SAMPLING = Sampling(8, temperature=0.9, num_generations=2)
KEY = jax.random.key(11)
FP8 = Engine(slots=3, chunk=2, kv_cache_dtype="fp8_e4m3")
E4M3, F32 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float32)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    """Two layers, vocab 64, no EOS, fp32."""
    path = tmp_path_factory.mktemp("micro")
    torch_qwen2.make(path, seed=0, scale=0.3)
    policy = randomized(fp32_policy(path, rank=2), 1, 0.3)
    return policy.replace(config=dataclasses.replace(policy.config, eos_token_ids=(), pad_token_id=63))


def with_key_bias(policy: Policy, layer: int, value: float, head: int = 1, dim: int = 7) -> Policy:
    """One element of a layer's key bias set."""
    config = policy.config
    place = (config.num_heads + head) * config.head_dim + dim
    frozen = jax.tree.map(lambda leaf: leaf, policy.frozen)  # new dicts
    projection = frozen["layers"][layer]["self_attn"]["qkv_proj"]
    projection["bias"] = projection["bias"].at[place].set(value)
    return policy.replace(frozen=frozen)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x rounded to a cache dtype. e4m3 by exact arithmetic (three mantissa bits, the last worth 2^-9 or more), because
    XLA may remove a cast there and back, and on a GPU does so for the values.
    """
    if dtype != E4M3:
        return x
    power_of_two = lambda n: jax.lax.bitcast_convert_type((n + 127) << 23, jnp.float32)  # noqa: E731
    x = jnp.clip(x, -448, 448)
    exponent = ((jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF) - 127
    last = jnp.maximum(exponent, -6) - 3
    return jnp.round(x * power_of_two(-last)) * power_of_two(last)


def rounding_logits(dtypes):
    """Logits with rounded keys and values for completion tokens and exact ones for prompt tokens."""

    def logits(policy: Policy, tokens: jax.Array, prompt: int) -> jax.Array:
        order = jnp.arange(tokens.shape[1])
        mask = jnp.broadcast_to(order[:, None] >= order, (1, *order.shape, *order.shape))

        def attention(qkv, angles, like):
            q, k, v = split_and_rotate(policy.config, qkv, angles)
            exact = masked_attention(q, k, v, mask)
            cached = masked_attention(q, rounded(k, like.dtype), rounded(v, like.dtype), mask)
            return jnp.where((order < prompt)[None, :, None, None], exact, cached), None

        model = policy.model()
        caches = [jnp.zeros(0, dtype) for dtype in dtypes]
        return model.logits(model._run(tokens, order[None], attention, caches)[0])

    return logits


@pytest.mark.parametrize("kept", [None, 0, 1])
def test_a_rollout_is_the_plain_one_over_rounded_keys_and_values(policy, kept):
    """Three slots with refills; also with one fp32 layer. A key that differs in its last bit can round to another e4m3
    number; the tolerance is a tenth of the effect of rounding itself.
    """
    dtypes = [E4M3, E4M3]
    if kept is not None:
        policy, dtypes[kept] = with_key_bias(policy, kept, -9.0), F32
    assert kv_cache_dtypes(policy, "fp8_e4m3") == tuple(dtypes)
    rollout = generate(policy, PROMPTS, SAMPLING, KEY, FP8)
    exact = np.asarray(logprobs_of(policy, rollout.tokens, rollout.attention_mask, temperature=0.9))
    moved = []
    for row, (ids, logprobs, _) in enumerate(
        plain_rollout(policy, PROMPTS, SAMPLING, KEY, rounding_logits(tuple(dtypes)))
    ):
        start = int(rollout.prompt_lengths[row])
        assert completion_ids(rollout)[row] == ids
        np.testing.assert_allclose(rollout.logprobs[row, start : start + len(ids)], logprobs, atol=2e-3)
        moved.append(np.abs(exact[row, start - 1 : start - 1 + len(ids)] - logprobs))
    assert np.max(moved) > 2e-2 and np.max(np.asarray(moved)[:, 0]) < 1e-4, (
        "the first token depends on the exact prompt only"
    )


def test_keys_beyond_the_range_saturate(policy):
    """Norm weights that make keys of thousands: no row fails, as all would if a key became NaN."""
    large = jax.tree.map(lambda norm: norm * 1e4, policy.norms)
    rollout = generate(policy.replace(norms=large), PROMPTS, SAMPLING, KEY, FP8)
    assert (np.asarray(rollout.finish) == FinishReason.LENGTH).all() and np.isfinite(rollout.logprobs).all()


def test_cache_bytes_and_slots(policy):
    """2 (K, V) x 2 layers x 2 heads x 8: 256 bytes a token in fp32, 64 in e4m3, 160 with one layer of each; twice as
    many or more sequences fit.
    """
    shapes = {name: choose_shapes(policy, 4, 2, 5, 8, Engine(kv_cache_dtype=name)) for name in ("auto", "fp8_e4m3")}
    assert shapes["auto"].cache_bytes == 256 * (8 * 8 + 4 * 8) and shapes["fp8_e4m3"].cache_bytes == 64 * (
        8 * 8 + 4 * 8
    )
    mixed = choose_shapes(with_key_bias(policy, 1, 100.0), 4, 2, 5, 8, Engine(kv_cache_dtype="fp8_e4m3"))
    assert mixed.cache_bytes == 160 * (8 * 8 + 4 * 8)
    limit = 256 * (8 * 2 + 8 * 2) / 1e9
    assert choose_shapes(policy, 4, 2, 5, 8, Engine(memory_gb=limit)).slots == 2
    assert choose_shapes(policy, 4, 2, 5, 8, Engine(memory_gb=limit, kv_cache_dtype="fp8_e4m3")).slots == 8


def test_layers_with_a_large_key_bias_keep_their_dtype(policy):
    """Only beyond the limit; biases of values and queries do not count; `cache_note` names the layers."""
    assert max_key_bias(128) == pytest.approx(33.94, abs=0.01) and max_key_bias(8) == pytest.approx(8.485, abs=1e-3)
    at, beyond = (with_key_bias(policy, 1, value) for value in (-8.48, 8.49))
    assert kv_cache_dtypes(at, "fp8_e4m3") == (E4M3, E4M3) and kv_cache_dtypes(beyond, "fp8_e4m3") == (E4M3, F32)
    heads = policy.config.num_kv_heads
    for head in (-1, heads):  # the last query head, the first value head
        assert kv_cache_dtypes(with_key_bias(policy, 1, 500.0, head), "fp8_e4m3") == (E4M3, E4M3)
    assert kv_cache_dtypes(beyond, "auto") == (F32, F32)
    assert cache_note(beyond, "auto") is None and cache_note(at, "fp8_e4m3") is None
    assert cache_note(beyond, "fp8_e4m3") == (
        "kv_cache_dtype fp8_e4m3: of 2 layers these keep their keys and values in float32, because their key bias "
        "exceeds 8.5: 1"
    )


def test_the_command_lines_reach_the_engine(tmp_path, capfd, monkeypatch):
    """One layer keeps its dtype and is reported; training, its evaluations and `evaluate` all allocate such caches."""
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    small.bf16(tmp_path / "model", shards=1)
    small.change_tensors(tmp_path / "model", with_large_bias)
    allocate, seen = decode.allocate, []

    def watched(policy, shapes, sequences, key):
        seen.append(shapes.kv_dtypes)
        return allocate(policy, shapes, sequences, key)

    monkeypatch.setattr(decode, "allocate", watched)
    note = "keep their keys and values in float32, because their key bias exceeds 8.5: 1"
    flags = ["--kv-cache-dtype", "fp8_e4m3"]
    evaluated = ["--eval-dataset", str(tmp_path / "rows.jsonl"), "--eval-samples", "2", "--eval-num-generations", "1"]
    assert train.main(training(tmp_path, *flags, *evaluated, "--max-steps", "1")) == 0
    assert note in capfd.readouterr().out
    assert seen == [(E4M3, F32)] * 3, "before, one step, and after"
    assert evaluate([*evaluation(tmp_path), "--dtype", "float32", *flags]) == 0
    assert note in capfd.readouterr().out
    assert seen[3:] == [(E4M3, F32)]


def test_a_dry_run_reads_the_biases_as_the_loader_does(tmp_path, capfd):
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    small.bf16(tmp_path / "model", shards=1)
    small.change_tensors(tmp_path / "model", with_short_bias)
    flags = ["--kv-cache-dtype", "fp8_e4m3"]
    assert train.main(training(tmp_path, *flags, "--dry-run")) == 2
    told = capfd.readouterr().err
    assert "'model.layers.0.self_attn.q_proj.bias' has shape [4], the config asks for" in " ".join(told.split())


def with_short_bias(tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["model.layers.0.self_attn.q_proj.bias"][:4].copy()


def with_large_bias(tensors) -> None:
    tensors["model.layers.1.self_attn.k_proj.bias"][3] = -40


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype 'fp8_e5m2' is not one of \['auto', 'fp8_e4m3'\]"):
        Engine(kv_cache_dtype="fp8_e5m2")
