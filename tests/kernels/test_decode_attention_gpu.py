"""The Mosaic GPU attention on a Hopper GPU, against the definition in fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_oracle import assert_repeats, bits, needs_gpu
from qerl_kernels.decode_attention import cases
from qerl_kernels.decode_attention.api import decode_attention
from test_decode_attention import exact, inputs

pytestmark = needs_gpu

kernel = jax.jit(functools.partial(decode_attention, implementation="mosaic_gpu"), static_argnames="scale")
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000]


def check(args, **kwargs):
    """Each weight and the result are rounded to bf16 once, by at most 2^-8 each; the rest is fp32."""
    y = np.asarray(kernel(*args.values(), **kwargs), np.float64)
    expected = exact(**args, **kwargs)
    magnitudes = {name: np.abs(np.asarray(args[name], np.float64)) for name in ("prompt_v", "v")}
    of_magnitudes = exact(**{**args, **magnitudes}, **kwargs)
    assert np.all(np.abs(y - expected) <= 2.0**-8 * np.abs(expected) + (2.0**-8 + 2.0**-12) * of_magnitudes)
    if expected.size > 2000:
        assert np.linalg.norm(y - expected) <= 2.5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("model", cases.MODELS)
def test_every_model_at_every_edge(model):
    """Own lengths at every edge, prompts of other lengths, NaN and infinity in the slots past both."""
    heads, kv_heads, width = cases.MODELS[model]
    prompts = [0, 1, 64, 65, 200]
    for seed in range(2):
        check(
            inputs(
                len(EDGES), 5, 200, 1000, heads, kv_heads, width, jnp.bfloat16, seed, lengths=EDGES,
                prompt_lengths=np.roll(prompts, seed),
            )
        )  # fmt: skip


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (7, 1), (9, 3), (16, 2), (8, 8)])
@pytest.mark.parametrize("width", [64, 128])
def test_every_group(heads, kv_heads, width):
    """Groups of 1 to 8 queries; fewer than eight queries in all."""
    check(inputs(1, 1, 8, 8, heads, kv_heads, width, jnp.bfloat16))
    check(inputs(3, 2, 72, 136, heads, kv_heads, width, jnp.bfloat16, seed=1))


def test_long_caches():
    lengths, of_prompts = [4096, 4097, 4104, 3000], [512, 300]
    check(inputs(4, 2, 512, 4104, 28, 4, 128, jnp.bfloat16, lengths=lengths, prompt_lengths=of_prompts))


def test_idle_rows_give_zero_and_lengths_of_the_prompt_alone():
    args = inputs(4, 2, 64, 64, 28, 4, 128, jnp.bfloat16, lengths=[0, 0, 5, 0], prompt_lengths=[0, 40])
    args["prompt_index"] = jnp.asarray([0, 1, 0, 0], jnp.int32)
    args["prompt_lengths"] = jnp.asarray([0, 40, 0, 0], jnp.int32)
    y = np.asarray(kernel(*args.values()), np.float64)
    assert not y[[0, 3]].any()
    check(args)


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_scale_and_sharp_softmax(spread):
    args = inputs(6, 2, 64, 256, 28, 4, 128, jnp.bfloat16)
    check({**args, "q": args["q"] * spread}, scale=0.05)


@pytest.mark.parametrize("model", ["7b", "0.5b"])
def test_a_row_does_not_depend_on_the_others(model):
    """Alone, in another order, among other rows, with more slots: the same bits."""
    args = inputs(24, 4, 256, 512, *cases.MODELS[model], jnp.bfloat16)
    whole = bits(kernel(*args.values()))

    def rows(index, more=0):
        index = np.asarray(index)
        part = {name: args[name] if name.startswith("prompt_") and args[name].ndim == 4 else args[name][index]
                for name in args}  # fmt: skip
        pad = lambda cache: jnp.pad(cache, ((0, 0), (0, 0), (0, more), (0, 0)), constant_values=jnp.nan)  # noqa: E731
        return bits(kernel(*[pad(a) if more and a.ndim == 4 else a for a in part.values()]))

    for i in range(0, 24, 5):
        np.testing.assert_array_equal(rows([i])[0], whole[i])
    order = np.random.default_rng(0).permutation(24)
    np.testing.assert_array_equal(rows(order), whole[order])
    np.testing.assert_array_equal(rows(np.tile(order, 8)), whole[np.tile(order, 8)])
    np.testing.assert_array_equal(rows(order, more=64), whole[order])


@pytest.mark.parametrize(("model", "rows"), [("7b", 3), ("7b", 20), ("7b", 40), ("7b", 160), ("0.5b", 160)])
def test_a_thousand_runs_give_the_same_bits(model, rows):
    """Found a slot of the ring that was filled anew while it was still being read."""
    args = inputs(rows, 4, 256, 512, *cases.MODELS[model], jnp.bfloat16)

    q, *rest = args.values()
    assert_repeats(lambda q: kernel(q, *rest), q)


def test_within_a_decode_loop():
    """A scan that writes each step's token into donated caches before it attends, against XLA."""
    args = inputs(5, 2, 64, 64, 14, 2, 64, jnp.bfloat16, lengths=[0, 3, 10, 0, 30])
    steps = jax.random.normal(jax.random.key(1), (20, 5, 14, 64), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnames="implementation", donate_argnames=("k", "v"))
    def loop(prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths, implementation):
        def step(carry, q):
            k, v, lengths = carry
            rows = jnp.arange(5)
            new = q.astype(k.dtype)
            k, v = k.at[rows, :, lengths].set(new[:, ::7]), v.at[rows, :, lengths].set(new[:, 1::7])
            y = decode_attention(
                q, prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths + 1, implementation=implementation
            )
            return (k, v, lengths + 1), y

        (k, v, _), y = jax.lax.scan(step, (k, v, lengths), steps)
        return y, k, v

    _, *rest = args.values()
    ours, theirs = (
        np.asarray(loop(*[a.copy() for a in rest], implementation=name)[0], np.float64)
        for name in ("mosaic_gpu", "xla")
    )
    # each is within 2^-7 of the largest value of the exact result
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2.0**-6 * np.abs(theirs).max())


def test_every_configuration_gives_the_same_bits():
    """And a wrong barrier would hang or tear."""
    from qerl_kernels.decode_attention.config import AttentionConfig
    from qerl_kernels.decode_attention.kernel import decode_attention as by_kernel

    args = inputs(11, 3, 256, 512, 14, 2, 64, jnp.bfloat16, lengths=[0, 1, 64, 65, 130, 200, 256, 300, 400, 511, 512],
                  prompt_lengths=[0, 64, 256])  # fmt: skip
    check(args)
    first = bits(kernel(*args.values()))
    for ctas in (1, 2, 4):
        for stages in (1, 2, 3, 7):
            y = by_kernel(*args.values(), 64**-0.5, config=AttentionConfig(ctas, stages))
            np.testing.assert_array_equal(bits(y), first)
