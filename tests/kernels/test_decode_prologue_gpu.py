"""The fused kernels on a Hopper GPU against their equations in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_prologue_oracle import EPS, check, inputs_of, wide
from gpu_oracle import needs_gpu, poison
from qerl_kernels.decode_prologue import cases
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraForm

pytestmark = needs_gpu
MOST = max(cases.TOKENS)


def run(kind, inputs, a, ranks):
    """(s or None, y or None, t), by the kernel."""
    if kind == "norm":
        return rms_norm_prologue(*inputs, EPS, a, ranks, dtype=jnp.bfloat16, implementation="mosaic_gpu")
    if kind == "silu":
        return None, *silu_mul_prologue(inputs[0], a, ranks, implementation="mosaic_gpu")
    return None, None, lora_prologue(inputs[0], a, ranks, implementation="mosaic_gpu")


run_jit = jax.jit(run, static_argnums=(0, 3))


@pytest.mark.parametrize("case", cases.SHAPES)
def test_every_number_of_tokens(case):
    """Right for every M, and a token's bits are the same whatever M is and whoever its neighbours are."""
    kind, features, adapters = cases.SHAPES[case]
    ranks = (32,) * adapters
    inputs, a = inputs_of(kind, MOST, features, sum(ranks))
    per_token = 2 if kind == "norm" else 1
    whole = run_jit(kind, inputs, a, ranks)
    check(kind, inputs, a, ranks, whole)
    for m in cases.TOKENS if case in cases.LAYER_7B else (3, 17, 65):
        some = [x[MOST - m :] for x in inputs[:per_token]] + inputs[per_token:]
        poison([(m, features), (m, features), (m, MAX_RANK * adapters)])
        got = run_jit(kind, some, a, ranks)
        for ours, all_ in zip(got, whole, strict=True):
            if ours is not None:
                np.testing.assert_array_equal(wide(ours), wide(all_)[MOST - m :])


@pytest.mark.parametrize("case", ["o_7b", "down_7b", "down_0.5b", "down_72b"])
@pytest.mark.parametrize("ranks", [(32,), (64, 8)])
def test_split_k_partials(case, ranks):
    """h has the bits that it has otherwise, and the parts add up to its product with A; forty runs agree."""
    kind, features, _ = cases.SHAPES[case]
    of = silu_mul_prologue if kind == "silu" else lora_prologue
    call = jax.jit(lambda x, a, form: of(x, a, ranks, lora_form=form, implementation="mosaic_gpu"), static_argnums=2)
    for tokens in (1, 8, 13, 16, 27, 32):
        [x], a = inputs_of(kind, tokens, features, sum(ranks), seed=tokens)
        poison([(6, tokens, 2 * sum(ranks)), (tokens, features)])
        got = call(x, a, LoraForm.PARTIALS)
        h, parts = got if kind == "silu" else (x, got)
        if kind == "silu":
            np.testing.assert_array_equal(wide(h), wide(call(x, a, LoraForm.WHOLE)[0]))
        exact = wide(h) @ wide(a)
        slack = np.linalg.norm(wide(h), axis=1)[:, None] * np.linalg.norm(wide(a), axis=0)[None]
        assert parts.shape[1:] == exact.shape and parts.dtype == jnp.float32
        assert np.all(np.abs(wide(parts).sum(0) - exact) <= 4 * np.sqrt(features) * 2.0**-24 * slack)
        for _ in range(40):
            np.testing.assert_array_equal(jax.tree.leaves(call(x, a, LoraForm.PARTIALS))[-1], parts)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("norm", (8,)), ("silu", (16, 16)), ("plain", (8, 8, 8)), ("norm", (32, 8, 64)), ("silu", (64,)),
        ("plain", (64, 64)), ("norm", (64, 64, 64)), ("silu", (64, 64, 64)), ("plain", (64, 64, 64)),
    ],
)  # fmt: skip
def test_ranks(kind, ranks):
    tokens, features = ((5, 896), (70, 4864), (20, 32))[sum(ranks) // 8 % 3]
    inputs, a = inputs_of(kind, tokens, features, sum(ranks), seed=len(ranks))
    check(kind, inputs, a, ranks, run_jit(kind, inputs, a, ranks))


def test_without_adapters_and_without_delta():
    [x, delta, weight], a = inputs_of("norm", 8, 3584, 32)
    s, y, t = rms_norm_prologue(x, delta, weight, EPS, dtype=jnp.bfloat16, implementation="mosaic_gpu")
    assert t is None
    check("norm", [x, delta, weight], None, (), (s, y, None))
    *_, t = rms_norm_prologue(x, delta, weight, EPS, a, (32,), dtype=jnp.bfloat16, implementation="mosaic_gpu")
    _, y0, t0 = rms_norm_prologue(s, None, weight, EPS, a, (32,), dtype=jnp.bfloat16, implementation="mosaic_gpu")
    np.testing.assert_array_equal(wide(y0), wide(y))
    np.testing.assert_array_equal(wide(t0), wide(t))
    gate_up = jnp.concatenate([x.astype(jnp.bfloat16), delta], axis=1)
    h, none = silu_mul_prologue(gate_up, implementation="mosaic_gpu")
    assert none is None
    check("silu", [gate_up], None, (), (None, h, None))


def test_extreme_values():
    """Rows of zeros, of tiny and of huge values; gates at which exp overflows."""
    features, ranks = 896, (32,)
    inputs, a = inputs_of("norm", 4, features, 32)
    x = inputs[0] * jnp.asarray([0.0, 2.0**-120, 2.0**50, 1.0])[:, None]
    norm = [x, jnp.zeros_like(inputs[1]), inputs[2]]
    check("norm", norm, a, ranks, run("norm", norm, a, ranks))
    gate = jnp.linspace(-80, 80, 2 * features, dtype=jnp.float32).reshape(2, features).astype(jnp.bfloat16)
    both = jnp.concatenate([gate, jnp.ones_like(gate)], axis=1)
    check("silu", [both], a, ranks, run("silu", [both], a, ranks))
    far = jnp.concatenate([jnp.full_like(gate, -3e38), jnp.ones_like(gate)], axis=1)
    assert not np.any(wide(silu_mul_prologue(far, a, ranks, implementation="mosaic_gpu")[0]))


@pytest.mark.parametrize("case", cases.LAYER_7B)
def test_a_thousand_repeats_are_bit_identical(case):
    kind, features, adapters = cases.SHAPES[case]
    ranks = (32,) * adapters
    inputs, a = inputs_of(kind, 24, features, sum(ranks))
    first = run_jit(kind, inputs, a, ranks)

    @jax.jit
    def differences(inputs, a, first):
        def one(count, _):
            x = jnp.where(count >= 0, inputs[0], 0)  # in the loop, for all the compiler knows
            got = run(kind, [x, *inputs[1:]], a, ranks)
            bits = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in jax.tree.leaves((got, first))]
            half = len(bits) // 2
            return count + sum(jnp.sum(x != y) for x, y in zip(bits[:half], bits[half:], strict=True)), None

        return jax.lax.scan(one, jnp.int32(0), None, length=1000)[0]

    assert int(differences(inputs, a, first)) == 0
