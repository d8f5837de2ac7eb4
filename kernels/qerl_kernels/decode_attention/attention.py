"""`decode_attention`: attention of one new token a row, as the rollout engine calls it.

Axes: B rows, P prompts, S slots of a prompt, T slots of a row's own cache, N query heads, K key/value heads, H head
dim.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from qerl_kernels import dispatch
from qerl_kernels.decode_attention import reference


def decode_attention(
    q: Float[Array, "B N H"],
    prompt_k: Float[Array, "P K S H"],
    prompt_v: Float[Array, "P K S H"],
    prompt_index: Int32[Array, " B"],
    prompt_lengths: Int32[Array, " B"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    lengths: Int32[Array, " B"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B N H"]:
    """`softmax(scale · q [prompt_k; k]ᵀ) [prompt_v; v]`: a row attends to its prompt's tokens, then to its own.

    Query head n reads key/value head `n // (N / K)`. Scores, softmax and sums are fp32, the result is rounded once to
    q's dtype. What the caches hold past the lengths does not matter. A row's bits depend on that row alone.

    Args:
      q: one query a row, rotary already applied; bf16 for the kernel, any float dtype for XLA.
      prompt_k: keys of the prompts, which the rows of a group share.
      prompt_v: values of the prompts.
      prompt_index: the prompt that each row continues.
      prompt_lengths: tokens of that prompt, at most S; may be 0.
      k: keys of the rows' own tokens, the current one among them.
      v: values of the rows' own tokens.
      lengths: own tokens, at most T; may be 0. A row with neither prompt nor own tokens gets 0.
      scale: of the scores; None for `H ** -0.5`.
      implementation: "mosaic_gpu" or "xla"; None picks (and logs once why where it is not Mosaic GPU).

    Raises:
      ValueError: the shapes do not belong together, or the implementation asked for cannot run here.
    """
    _check_shapes(q, prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dispatch.choose("decode_attention", implementation, "a kernel, of which there is none yet")
    return reference.decode_attention(q, prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths, scale)


def _check_shapes(q, prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths) -> None:
    rows, heads, width = q.shape
    kv_heads, own, prompt = k.shape[1], k.shape[2], prompt_k.shape[2]
    wanted = {
        "k": (k, (rows, kv_heads, own, width)),
        "v": (v, (rows, kv_heads, own, width)),
        "prompt_k": (prompt_k, (prompt_k.shape[0], kv_heads, prompt, width)),
        "prompt_v": (prompt_v, (prompt_k.shape[0], kv_heads, prompt, width)),
        "prompt_index": (prompt_index, (rows,)),
        "prompt_lengths": (prompt_lengths, (rows,)),
        "lengths": (lengths, (rows,)),
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"decode_attention: {name} is {array.shape}, not {shape}, which goes with q {q.shape}")
    if heads % kv_heads:
        raise ValueError(f"decode_attention: {heads} query heads are no multiple of {kv_heads} key/value heads")
