"""What the fused decode operations have to return, in fp64, and how far a kernel may be off."""

import jax.numpy as jnp
import numpy as np
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK

EPS = 1e-6
U = 2.0**-8  # one rounding to bf16


def inputs_of(kind, tokens, features, columns, seed=0):
    """x (and delta and w; or gate and up), and A."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0, dtype=jnp.bfloat16):
        return jnp.asarray((scale * rng.standard_normal(shape, np.float32)).astype(dtype))

    a = normal(features, columns, scale=features**-0.5)
    if kind == "norm":
        weight = 1 + normal(features, scale=0.3, dtype=np.float32)
        return [normal(tokens, features, scale=3, dtype=np.float32), normal(tokens, features), weight], a
    return [normal(tokens, features * (1 + (kind == "silu")), scale=2)], a


def wide(x):
    return np.asarray(x).astype(np.float64)


def check(kind, inputs, a, ranks, got):
    s, y, t = got
    if kind == "norm":
        x, delta, weight = map(wide, inputs)
        exact_s = wide(s)
        np.testing.assert_array_equal(exact_s, (x + delta).astype(np.float32))  # one rounding: no tolerance
        expected = exact_s / np.sqrt(np.mean(exact_s**2, axis=1, keepdims=True) + EPS) * weight
    elif kind == "silu":
        gate, up = np.split(wide(inputs[0]), 2, axis=1)
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        expected = None
    if expected is None:
        rows = wide(inputs[0])
    else:
        rows = wide(y)
        # bf16's rounding, and the fp32 error before it (exp of 80 has 80 · 2^-24)
        assert np.all(np.abs(rows - expected) <= (U + 2.0**-16) * np.abs(expected) + 2e-36)
    if t is None:
        return
    a = wide(a)
    exact = rows @ a
    slack = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(a, axis=0)[None]
    bound = U * np.abs(exact) + 4 * np.sqrt(len(a)) * 2.0**-24 * slack
    if kind == "norm":  # what is multiplied is w s, rounded: as good as y, but rounded elsewhere, within U / 2 each
        exact = expected @ a
        bound += 4 * U / 2 * np.sqrt(expected**2 @ a**2)  # 9 standard deviations of their sum
    padded, start = wide(t), 0
    assert padded.shape == (len(rows), MAX_RANK * len(ranks))
    for i, rank in enumerate(ranks):
        slot = padded[:, i * MAX_RANK : (i + 1) * MAX_RANK]
        columns = slice(start, start + rank)
        assert np.all(np.abs(slot[:, :rank] - exact[:, columns]) <= bound[:, columns])
        assert np.all(slot[:, rank:] == 0)
        start += rank
