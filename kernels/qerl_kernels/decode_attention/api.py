"""`decode_attention`: attention of one new token a sequence, over a shared prompt cache and the sequence's own cache.

Axes: B sequences, P prompts, S slots of a prompt's cache, T slots of a sequence's own cache, N query heads,
K key/value heads, H head dim.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from qerl_kernels import dispatch
from qerl_kernels.batch_invariant import in_blocks
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
    batch_invariant: bool = False,
) -> Float[Array, "B N H"]:
    """`softmax(scale · q [prompt_k; k]ᵀ) [prompt_v; v]`: a sequence attends to its prompt's tokens, then to its own.

    Prefix sharing: the sequences of a group read one cache of their prompt.

    Query head n reads key/value head `n // (N / K)`. Scores, softmax and sums are fp32, the result is rounded once to
    q's dtype. The content of the caches past the lengths does not matter. By the kernel the bits of a sequence depend
    on that sequence alone; XLA sums over all S + T slots, in an order that depends on their number and on B.

    Args:
      q: one query a sequence, rotary already applied; bf16 for the kernel, any float dtype for XLA.
      prompt_k: keys of the prompts. All four caches are of q's dtype. The kernel wants S and T to be multiples of 8.
      prompt_v: values of the prompts.
      prompt_index: the prompt that each sequence continues.
      prompt_lengths: tokens of that prompt, at most S; may be 0.
      k: keys of the sequences' own tokens, the current one among them.
      v: values of the sequences' own tokens.
      lengths: own tokens, at most T; may be 0. A sequence without any token gets 0.
      scale: scale of the scores; None for `H ** -0.5`.
      implementation: "mosaic_gpu" or "xla"; None picks (on a GPU it logs once why where it is not Mosaic GPU).
      batch_invariant: XLA, too, computes each sequence by itself, so that its bits do not depend on B; slower.

    Raises:
      ValueError: the shapes or dtypes do not belong together, or the implementation asked for cannot run here.
    """
    _check(q, prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    arrays = q, prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths
    missing = dispatch.missing_for_mosaic_gpu(q.dtype) or _missing(q, prompt_k, k)
    if dispatch.choose("decode_attention", implementation, missing) == "xla":
        if not batch_invariant:
            return reference.decode_attention(*arrays, scale)

        def one(q: Array, *row: Array) -> Array:
            return reference.decode_attention(q, prompt_k, prompt_v, *row, scale)

        return in_blocks(one, q, prompt_index, prompt_lengths, k, v, lengths, size=1)
    from qerl_kernels.decode_attention import kernel  # jax ≥ 0.11: imported where it runs

    return kernel.decode_attention(*arrays, scale, gpu=dispatch.this_gpu())


def _missing(q: Array, prompt_k: Array, k: Array) -> str | None:
    """What the kernel needs and these arrays lack; None where it takes them."""
    if q.shape[2] not in (64, 128):
        return f"a head dim of 64 or 128 (this is {q.shape[2]})"
    if q.shape[1] > 8 * k.shape[1]:
        return f"at most 8 query heads a key/value head (these are {q.shape[1]} and {k.shape[1]})"
    if prompt_k.shape[2] % 8 or k.shape[2] % 8 or not prompt_k.size or not k.size:
        return f"caches whose slots are a multiple of 8 (these are {prompt_k.shape[2]} and {k.shape[2]})"
    return None


def _check(q, prompt_k, prompt_v, prompt_index, prompt_lengths, k, v, lengths) -> None:
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
    for name, cache in (("k", k), ("v", v), ("prompt_k", prompt_k), ("prompt_v", prompt_v)):
        if cache.dtype != q.dtype:
            raise ValueError(f"decode_attention: {name} is {cache.dtype} and q {q.dtype}: caches are of q's dtype")
    if heads % kv_heads:
        raise ValueError(f"decode_attention: {heads} query heads are no multiple of {kv_heads} key/value heads")
