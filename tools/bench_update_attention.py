"""Times causal attention on packed sequences, forward and forward + backward, for the candidates of the update.

    python tools/bench_update_attention.py [--models 7b 0.5b 32b] [--tokens 4096 8192] [--out FILE.json]

Each case is a micro-batch of T tokens in which sequences lie end to end: lengths as GSM8K has them (log-normal, about
450 tokens), 1280 each, or one of 4608 (T is raised to it where that does not fit). Every result is checked against
dense attention in fp32 first; `error` is the largest |difference| over the largest |value| of the output, dq, dk and
dv. A time is the wall clock of one jitted call over four inputs, divided by four, the smallest of five.

Needs only jax and numpy. A candidate that raises is printed with the last line of its error.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

MODELS = {"7b": (28, 4, 128), "0.5b": (14, 2, 64), "32b": (40, 8, 128)}
INPUTS, REPEATS = 4, 5
MASKED = -1e30


def gsm8k_lengths(tokens: int, rng: np.random.Generator) -> list[int]:
    """Lengths of prompt and completion, log-normal around 450 tokens, that fit into `tokens`."""
    lengths = []
    while True:
        length = int(np.clip(rng.lognormal(math.log(420), 0.4), 64, 4608))
        if sum(lengths) + length > tokens:
            return lengths
        lengths.append(length)


class Layout:
    """Sequences end to end from column 0; `segments` slots, `tokens` tokens."""

    def __init__(self, lengths: list[int], tokens: int, segments: int):
        self.lengths, self.tokens, self.segments = lengths, tokens, segments
        starts = np.concatenate([[0], np.cumsum(lengths)])
        order = np.arange(tokens)
        self.segment = np.searchsorted(starts[1:], order, side="right").astype(np.int32)
        self.real = order < starts[-1]
        padding = segments - len(lengths)
        if padding < 0:
            raise ValueError(f"{len(lengths)} sequences, {segments} slots")
        self.seqlens = np.array([*lengths, *[-1] * padding], np.int32)[None]
        self.offsets = np.array([*starts, *[-1] * padding], np.int32)[None]
        self.width = max(lengths)

    def rows(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(token of each place of rows [segments, width], place of each token, lengths of the rows)."""
        count = len(self.lengths)
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        lengths = np.array([*self.lengths, *[1] * (self.segments - count)], np.int32)
        begin = np.array([*starts[:-1], *[0] * (self.segments - count)])
        to_rows = begin[:, None] + np.minimum(np.arange(width), lengths[:, None] - 1)
        inside = np.minimum(self.segment, count - 1)
        to_one = inside * width + np.minimum(np.arange(self.tokens) - starts[inside], width - 1)
        return to_rows.astype(np.int32), to_one.astype(np.int32), lengths


def oracle(q, k, v, layout: Layout):
    """Dense attention in fp32, one key/value head at a time."""
    order = jnp.arange(layout.tokens)
    segment, real = jnp.asarray(layout.segment), jnp.asarray(layout.real)
    mask = (order[:, None] >= order) & (segment[:, None] == segment) & real
    groups = q.shape[1] // k.shape[1]

    @jax.checkpoint
    def head(inputs):
        q, k, v = inputs
        scores = jnp.einsum("tgh,sh->gts", q, k, precision="highest") * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1)
        return jnp.einsum("gts,sh->tgh", weights, v, precision="highest")

    grouped = q.astype(jnp.float32).reshape(q.shape[0], k.shape[1], groups, -1).swapaxes(0, 1)
    out = jax.lax.map(head, (grouped, *(x.astype(jnp.float32).swapaxes(0, 1) for x in (k, v))))
    return jnp.where(real[:, None, None], out.swapaxes(0, 1).reshape(q.shape), 0)


def dense(q, k, v, layout: Layout):
    """Scores in fp32, weights in bf16, by XLA: today's `attend`."""
    order = jnp.arange(layout.tokens)
    segment, real = jnp.asarray(layout.segment), jnp.asarray(layout.real)
    mask = (order[:, None] >= order) & (segment[:, None] == segment)
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("tkgh,skh->kgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("kgts,skh->tkgh", weights, v, preferred_element_type=jnp.float32)
    return jnp.where(real[:, None, None], out.reshape(q.shape).astype(q.dtype), 0)


def cudnn(q, k, v, **arguments):
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    return dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5, mask_type=MaskType.PADDING_CAUSAL, qkv_layout="BTNH", **arguments
    )


def cudnn_packed(q, k, v, layout: Layout):
    """cuDNN's packed layout through JAX's function."""
    seqlens, offsets = jnp.asarray(layout.seqlens), jnp.asarray(layout.offsets)
    out = cudnn(q[None], k[None], v[None], q_seqlen=seqlens, kv_seqlen=seqlens, q_offsets=offsets, kv_offsets=offsets)[
        0
    ]
    return jnp.where(jnp.asarray(layout.real)[:, None, None], out, 0)


def cudnn_view(q, k, v, layout: Layout, view: int):
    """`cudnn_packed` through the primitives, with offsets as cuDNN takes them.

    `view` rows of T / view tokens: cuDNN launches for the longest sequence that the shape allows. A sequence may cross
    from one row into the next, since offsets count from the first row.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fa

    if layout.width > layout.tokens // view:
        raise ValueError(f"a sequence of {layout.width} in rows of {layout.tokens // view}")
    width, per_row = layout.tokens // view, layout.segments // view
    seqlens = jnp.maximum(jnp.asarray(layout.seqlens), 0).reshape(view, per_row)
    starts = np.where(layout.offsets >= 0, layout.offsets, layout.tokens)[0]
    starts = np.concatenate([starts, np.full(view - 1, layout.tokens)]).astype(np.int32).reshape(view, per_row + 1)
    static = {
        "scale": q.shape[-1] ** -0.5, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": fa.MaskType.PADDING_CAUSAL, "layout": fa.AttentionLayout.BTNH.value, "sliding_window_length": None,
    }  # fmt: skip
    empty = jnp.zeros(0, q.dtype)
    page = (jnp.zeros(0, q.dtype),) * 2

    def rows(x):
        return x.reshape(view, width, *x.shape[1:])

    def offsets(x):
        return jnp.asarray(starts) * (x.shape[1] * x.shape[2])

    def arguments(q, k, v):
        return (rows(q), rows(k), rows(v), empty, seqlens, seqlens, offsets(q), offsets(k), *page)

    @jax.custom_vjp
    def call(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        out, stats = fa._dot_product_attention_fwd_p.bind(*arguments(q, k, v), is_training=True, **static)
        return out.reshape(q.shape), (q, k, v, out, stats)

    def backward(kept, dout):
        q, k, v, out, stats = kept
        grads = fa._dot_product_attention_bwd_p.bind(*arguments(q, k, v), stats, out, rows(dout), **static)
        return tuple(x.reshape(like.shape) for x, like in zip(grads[:3], (q, k, v), strict=True))

    call.defvjp(forward, backward)
    return jnp.where(jnp.asarray(layout.real)[:, None, None], call(q, k, v), 0)


def cudnn_rows(q, k, v, layout: Layout, multiple: int = 128):
    """A row of the width of the longest for each sequence, gathered and scattered back."""
    width = -(-layout.width // multiple) * multiple
    to_rows, to_one, lengths = layout.rows(width)
    lengths = jnp.asarray(lengths)
    out = cudnn(*(x[to_rows] for x in (q, k, v)), q_seqlen=lengths, kv_seqlen=lengths)
    out = out.reshape(-1, *out.shape[2:])[to_one]
    return jnp.where(jnp.asarray(layout.real)[:, None, None], out, 0)


def cudnn_one(q, k, v, layout: Layout):
    """All tokens as one causal sequence: not the same function; the time of cuDNN's kernel without segments."""
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True, implementation="cudnn")[0]


def mosaic_rows(q, k, v, layout: Layout, block_kv: int = 128):
    """JAX's Mosaic GPU attention on rows: fp16, causal forward only."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as mgpu

    width = -(-layout.width // 128) * 128
    to_rows, to_one, _ = layout.rows(width)
    config = mgpu.TuningConfig(block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=True)
    q = (q * q.shape[-1] ** -0.5).astype(q.dtype)
    out = mgpu.attention(*(x[to_rows].astype(jnp.float16) for x in (q, k, v)), config).astype(q.dtype)
    return jnp.where(jnp.asarray(layout.real)[:, None, None], out.reshape(-1, *out.shape[2:])[to_one], 0)


def triton_segments(q, k, v, layout: Layout):
    """JAX's Pallas Triton attention with segment ids (deprecated backend; no GQA, so keys are repeated)."""
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    sizes = BlockSizes(block_q=128, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
    segment = jnp.asarray(layout.segment)[None]
    out = mha(q[None], k[None], v[None], segment, q.shape[-1] ** -0.5, True, sizes)[0]
    return jnp.where(jnp.asarray(layout.real)[:, None, None], out, 0)


CANDIDATES: dict[str, Callable] = {
    "xla dense": dense,
    "cudnn packed": cudnn_packed,
    "cudnn packed, view 1": functools.partial(cudnn_view, view=1),
    "cudnn packed, view 2": functools.partial(cudnn_view, view=2),
    "cudnn packed, view 4": functools.partial(cudnn_view, view=4),
    "cudnn rows": cudnn_rows,
    "cudnn one sequence": cudnn_one,
    "mosaic gpu rows": mosaic_rows,
    "triton segments": triton_segments,
}
NOT_THE_SAME = {"cudnn one sequence"}


def relative_error(found, wanted) -> float:
    """Largest |difference| over the largest |value|."""
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def seconds(function, inputs) -> float:
    """Seconds for one input: the smallest of a few runs over all of them."""
    jax.block_until_ready(function(inputs))
    best = math.inf
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(4):
            result = function(inputs)
        jax.block_until_ready(result)
        best = min(best, time.perf_counter() - start)
    return best / (4 * len(inputs))


def measure(name: str, layout: Layout, inputs: list, expected: tuple | None) -> dict:
    """Errors and times of a candidate."""
    attention = functools.partial(CANDIDATES[name], layout=layout)

    def both(q, k, v, dout):
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(dout)

    row = {}
    try:
        forward = jax.jit(lambda inputs: [attention(q, k, v) for q, k, v, _ in inputs])
        row["forward_us"] = seconds(forward, inputs) * 1e6
        row["error_forward"] = relative_error(forward(inputs)[0], expected[0])
        step = jax.jit(lambda inputs: [both(*some) for some in inputs])
        row["both_us"] = seconds(step, inputs) * 1e6
        row["error"] = max(relative_error(x, y) for x, y in zip(step(inputs)[0], expected, strict=True))
        analysis = jax.jit(both).lower(*inputs[0]).compile().memory_analysis()
        row["temporary_mb"] = analysis.temp_size_in_bytes / 1e6
    except Exception as failure:  # a candidate that cannot run is a result
        row["failed"] = ((str(failure).strip().splitlines() or [""])[-1] or type(failure).__name__)[:160]
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--segments", type=int, default=32, help="slots of the packed layout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for model in args.models:
        heads, kv_heads, head_dim = MODELS[model]
        for tokens in args.tokens:
            rng = np.random.default_rng(0)
            draws = {
                "gsm8k": gsm8k_lengths(tokens, rng), "1280": [1280] * (tokens // 1280), "4608": [4608],
            }  # fmt: skip
            for lengths_name, lengths in draws.items():
                total = max(tokens, -(-max(lengths) // 512) * 512)
                if total > tokens and tokens != args.tokens[0]:
                    continue
                layout = Layout(lengths, total, args.segments)
                flops = sum(4 * heads * head_dim * length * (length + 1) / 2 for length in lengths)
                shapes = [(total, heads, head_dim)] + 2 * [(total, kv_heads, head_dim)] + [(total, heads, head_dim)]
                inputs = [
                    [jax.random.normal(key, shape, jnp.bfloat16)
                     for key, shape in zip(jax.random.split(jax.random.key(i), 4), shapes, strict=True)]
                    for i in range(INPUTS)
                ]  # fmt: skip
                for some in inputs:  # nothing flows into or out of the tail
                    some[3] = jnp.where(jnp.asarray(layout.real)[:, None, None], some[3], 0)

                def exact(q, k, v, dout, layout=layout):
                    out, pullback = jax.vjp(functools.partial(oracle, layout=layout), q, k, v)
                    return out, *pullback(dout.astype(jnp.float32))

                expected = jax.block_until_ready(jax.jit(exact)(*inputs[0]))
                print(f"\n{model}, {total} tokens, {lengths_name}: {len(lengths)} sequences of {sum(lengths)} tokens")
                print(
                    f"{'':24}{'forward us':>12}{'TFLOP/s':>9}{'both us':>10}{'TFLOP/s':>9}{'error':>10}{'temp MB':>9}"
                )
                for name in args.candidates:
                    row = {
                        "model": model, "tokens": total, "lengths": lengths_name, "impl": name,
                        "sequences": len(lengths),
                    } | measure(name, layout, inputs, expected)  # fmt: skip
                    rows.append(row)
                    text = f"{name:24}"
                    if "forward_us" in row:
                        text += f"{row['forward_us']:12.1f}{flops / row['forward_us'] / 1e6:9.0f}"
                    if "both_us" in row:
                        text += f"{row['both_us']:10.1f}{3.5 * flops / row['both_us'] / 1e6:9.0f}"
                        text += f"{row['error']:10.1e}{row.get('temporary_mb', 0):9.0f}"
                        text += "  (another function)" if name in NOT_THE_SAME else ""
                    print(text + ("  " + row["failed"] if "failed" in row else ""), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
