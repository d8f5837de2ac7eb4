"""`decode_attention` on the CPU: the XLA path against plain numpy in fp64, row by row, and what it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.decode_attention.api import decode_attention
from qerl_kernels.decode_attention.config import best_config, ctas_for
from qerl_kernels.gpu import gpu_of

NAMES = ("q", "prompt_k", "prompt_v", "prompt_index", "prompt_lengths", "k", "v", "lengths")


def inputs(rows, prompts, slots, own, heads, kv_heads, width, dtype, seed=0, lengths=None, prompt_lengths=None):
    """Random queries and caches; past the lengths the keys hold NaN and the values infinity."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    lengths = rng.integers(0, own + 1, rows) if lengths is None else np.asarray(lengths)
    of_prompt = rng.integers(0, slots + 1, prompts) if prompt_lengths is None else np.asarray(prompt_lengths)
    index = rng.integers(0, prompts, rows)
    caches = [draw(prompts, kv_heads, slots, width) for _ in "kv"] + [draw(rows, kv_heads, own, width) for _ in "kv"]
    for cache, filled, bad in zip(caches, (of_prompt, of_prompt, lengths, lengths), (np.nan, np.inf) * 2, strict=True):
        for row, tokens in enumerate(filled):
            cache[row, :, tokens:] = bad
    prompt_k, prompt_v, k, v = (jnp.asarray(cache, dtype) for cache in caches)
    q = jnp.asarray(draw(rows, heads, width), dtype)
    integers = [jnp.asarray(a, jnp.int32) for a in (index, of_prompt[index], lengths)]
    return dict(zip(NAMES, (q, prompt_k, prompt_v, *integers[:2], k, v, integers[2]), strict=True))


def exact(q, prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths, scale=None):
    """The definition, one row and key/value head at a time, in fp64."""
    q, prompt_k, prompt_v, k, v = (np.asarray(a, np.float64) for a in (q, prompt_k, prompt_v, k, v))
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for b, h in np.ndindex(k.shape[:2]):
        p, from_prompt, heads = int(prompt_index[b]), int(prompt_lengths[b]), slice(h * group, (h + 1) * group)
        keys = np.concatenate([prompt_k[p, h, :from_prompt], k[b, h, : int(lengths[b])]])
        values = np.concatenate([prompt_v[p, h, :from_prompt], v[b, h, : int(lengths[b])]])
        if len(keys):
            scores = q[b, heads] @ keys.T * (q.shape[-1] ** -0.5 if scale is None else scale)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[b, heads] = weights @ values / weights.sum(axis=1, keepdims=True)
    return out


@pytest.mark.parametrize("heads, kv_heads, width, seed", [(4, 2, 32, 0), (5, 1, 64, 1), (7, 7, 16, 2), (16, 2, 8, 3)])
def test_agrees_with_fp64(heads, kv_heads, width, seed):
    args = inputs(9, 3, 21, 13, heads, kv_heads, width, jnp.float32, seed)
    y = jax.jit(lambda args: decode_attention(**args, implementation="xla"))(args)
    np.testing.assert_allclose(y, exact(**args), atol=2e-6)


def test_bf16_rounds_weights_and_result_only():
    args = inputs(12, 2, 40, 30, 14, 2, 64, jnp.bfloat16)
    y = decode_attention(**args, implementation="xla")
    assert y.dtype == jnp.bfloat16
    # at most 2^-8 of every weight, hence of the largest value, and as much of the result
    values = np.concatenate([np.ravel(np.asarray(args[name], np.float64)) for name in ("prompt_v", "v")])
    error = np.abs(np.asarray(y, np.float64) - exact(**args))
    assert error.max() <= 2.0**-7 * np.abs(values[np.isfinite(values)]).max()
    assert np.linalg.norm(error) <= 2.5e-3 * np.linalg.norm(exact(**args))


def test_empty_prompts_empty_rows_and_idle_rows():
    args = inputs(4, 2, 8, 6, 4, 2, 16, jnp.float32, lengths=[0, 3, 0, 6], prompt_lengths=[0, 5])
    args["prompt_index"] = jnp.asarray([0, 0, 1, 1], jnp.int32)
    args["prompt_lengths"] = jnp.asarray([0, 0, 5, 5], jnp.int32)
    y = decode_attention(**args, implementation="xla")
    assert not np.any(y[0])
    np.testing.assert_allclose(y, exact(**args), atol=2e-6)


def test_one_key_gives_its_value_whatever_the_score():
    args = inputs(3, 1, 4, 4, 2, 2, 8, jnp.float32, lengths=[1, 1, 1], prompt_lengths=[0])
    args["q"] = args["q"] * 1e4  # exp would overflow without the maximum
    np.testing.assert_allclose(decode_attention(**args, implementation="xla"), args["v"][:, :, 0], rtol=1e-6)


def test_scale():
    args = inputs(3, 1, 9, 9, 2, 1, 8, jnp.float32)
    for batch_invariant in (False, True):
        found = decode_attention(**args, scale=0.7, implementation="xla", batch_invariant=batch_invariant)
        np.testing.assert_allclose(found, exact(**args, scale=0.7), atol=2e-6)


def test_what_does_not_belong_together_is_refused():
    args = inputs(3, 1, 9, 9, 6, 2, 8, jnp.float32)
    for name in NAMES[1:]:
        array = args[name]
        longer = jnp.concatenate([array, array[..., -1:]], -1)
        with pytest.raises(ValueError, match=re.escape(f": {name} is {longer.shape}, not {array.shape}")):
            decode_attention(**{**args, name: longer})
        if array.ndim > 1:
            with pytest.raises(ValueError, match=f": {name} is bfloat16 and q float32: caches are of q's dtype"):
                decode_attention(**{**args, name: array.astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"prompt_v is \(1, 2, 8, 8\), not \(1, 2, 9, 8\)"):
        decode_attention(**{**args, "prompt_v": args["prompt_v"][:, :, :8]})
    with pytest.raises(ValueError, match="5 query heads are no multiple of 2"):
        decode_attention(**{**args, "q": args["q"][:, :5]})
    with pytest.raises(ValueError, match="'mosaic_gpu' needs"):
        decode_attention(**args, implementation="mosaic_gpu")
    suited = inputs(2, 1, 8, 8, 4, 2, 64, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"'mosaic_gpu' needs an NVIDIA GPU|'mosaic_gpu' needs jax 0\.11"):
        decode_attention(**suited, implementation="mosaic_gpu")


def test_ctas_share_a_pair_while_that_keeps_idle_sms_busy():
    """132 SMs."""
    pairs = {1: 4, 33: 4, 34: 2, 132: 2, 133: 1}
    assert {count: ctas_for(count, 132) for count in pairs} == pairs


@pytest.mark.parametrize(("arch", "stages"), [(80, (8, 4)), (89, (8, 4)), (100, (8, 4)), (90, (10, 4))])
def test_stages_that_fit(arch, stages):
    """Of 64 tokens in bf16, for head dims of 64 and 128: 8 and 16 KiB. Tier "warp" may have 99 KiB or half of an SM's
    with 6 for little things, 8 or 16 for the warps' sums and 4 or 6 for its running partial: 10 or 11 of 64, at most 8,
    and 4 or 5 of 128, an even number. Hopper with two CTAs a pair keeps three partials.
    """
    gpu = gpu_of("GPU", arch, 132)
    assert tuple(best_config(100, width, gpu).stages for width in (64, 128)) == stages
