"""Attention of packed sequences by cuDNN on a GPU, against plain attention in fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import dense, visible

from qerl_jax.models.attention import is_flash
from qerl_jax.rl.micro_batches import PackShape, assign, pack
from qerl_jax.rl.segment_attention import segment_attention, segment_attention_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_flash(jnp.dtype(jnp.bfloat16)), reason="needs a GPU, and JAX_PLATFORMS=cuda"),
]
LENGTHS = {
    "groups": ([300, 300, 300, 500, 500, 90], [120, 120, 120, 33, 33, 60], [0, 0, 0, 1, 1, 2]),
    "no common prompt": ([513, 64, 700, 257], [40, 1, 256, 255], [0, 1, 2, 3]),
    "one sequence": ([1280], [256], [0]),
    "prompts of a token": ([200, 300, 10, 1], [1, 1, 1, 1], [0, 0, 0, 0]),
    "empty completions": ([256, 256, 100], [256, 256, 100], [0, 0, 1]),
    "nothing": ([0, 0], [4, 4], [0, 1]),
}
HEADS = {"7b": (28, 4, 128), "0.5b": (14, 2, 64)}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "few"), [(1280, {}), (2560, {}), (2560, {"short": 320, "suffixes_beside_long": 2})])
@pytest.mark.parametrize("case", LENGTHS)
def test_it_is_that_of_each_sequence(case, tokens, few, heads):
    """The error of either is the rounding of its bf16 inputs: at most twice that of plain attention in bf16."""
    query_heads, kv_heads, width = HEADS[heads]
    lengths, prompt_lengths, prompts = map(np.array, LENGTHS[case])
    shape = PackShape(tokens, 5, 9, 1280, 256, 1024, **few)
    rng = np.random.default_rng(0)
    for some in assign(lengths, prompt_lengths, prompts, shape).micro_batches():
        packed = pack(some, jnp.asarray(lengths), jnp.asarray(prompt_lengths), shape.tokens, shape.prefixes)
        q, k, v, d_out = (
            jnp.asarray(rng.normal(size=(tokens, n, width)), jnp.bfloat16)
            for n in (query_heads, kv_heads, kv_heads, query_heads)
        )
        poisoned = [jnp.where(packed.real[:, None, None], x, jnp.nan) for x in (q, k, v)]
        kind = shape.holding(int(packed.lengths.max()))
        out, statistics = jax.jit(segment_attention, static_argnums=4)(*poisoned, packed, kind)
        gradients = jax.jit(segment_attention_backward, static_argnums=7)(
            *poisoned, out, statistics, d_out, packed, kind
        )
        mask = visible(some, packed)
        exact = dense(*(x.astype(jnp.float32) for x in (q, k, v, d_out)), mask)
        plain = dense(q, k, v, d_out, mask)
        for found, rounded, wanted in zip((out, *gradients), plain, exact, strict=True):
            bound = 2 * np.linalg.norm(rounded - wanted) + 1e-6
            assert np.isfinite(np.float32(found)).all()
            assert np.linalg.norm(np.float32(found) - wanted) <= bound
