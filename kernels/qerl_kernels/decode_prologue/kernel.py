"""Fused prologue of a decode projection: residual add + RMSNorm, or SiLU · up, or nothing; LoRA's `x A`.

    norm    s = x + delta;  r = sqrt(mean(s²) + eps);  y = w ⊙ s / r;  lora_x = (w ⊙ s) A / r
    silu    y = silu(gate) · up;                                       lora_x = y A
    plain   y = x;                                                     lora_x = y A

Work split. At decode batch sizes the kernel is bound by latency, so it waits for memory once: every load is issued at
the start, straight into the registers of the `mma` operands, and nothing is staged in shared memory. A cluster takes
`token_tiles` n8 tiles of tokens. Its CTAs share out the K features in k-tiles of 32, one k-tile a warp at a time (in
several, where there are more k-tiles than warps). More clusters may work on the same tokens in one of two ways:
- `column_splits`: they share out the columns of A. Each computes all of y and stores a part of it.
- `k_splits`, where y needs no sum over the features and the GEMM takes split-K partials: they share out the features.
  Each reads its part of x and of A and leaves an fp32 partial.
Sums over a cluster cross its CTAs through distributed shared memory (`rms_norm`, `lora`). A norm's two exchanges do not
wait for each other: the `mma` operand is w ⊙ s, rounded to bf16 as y is, and 1 / r scales the sums. A cluster of one
CTA has no exchange and runs on any GPU from sm_80 on; a norm, whose rows outgrow the registers of one SM, takes more.

Determinism. The order of every sum depends on K, the cluster size and the number of warps alone. So a token's bits
depend neither on the other tokens nor on their number (split-K partials: on their number).

Barriers, and why none can hang. Each exchange has one mbarrier in every CTA, used once: one for the squares, one for
the sums of lora_x. A CTA waits for exactly the bytes that are sent to it, and every CTA sends all it has before it
waits. None leaves before the bytes sent to it have come. (A barrier of the whole cluster would also wait until every
store to global memory is visible, which takes longer than the exchange.) Every thread sends and waits, whatever its
k-tile or token.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from qerl_kernels.decode_prologue.config import PrologueConfig, PrologueSpec, shared_bytes
from qerl_kernels.decode_prologue.lora import LoraProjection
from qerl_kernels.decode_prologue.rms_norm import RmsNorm
from qerl_kernels.decode_prologue.thread import Thread, Words
from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK
from qerl_kernels.ptx import arithmetic
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.launch import Position, launch
from qerl_kernels.ptx.values import I32, Ptr

FEW_COLUMNS = 48  # columns of A of a cluster (tools/results/notes/decode-prologue.md)


def outputs(spec: PrologueSpec, config: PrologueConfig) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the outputs of `fused_prologue`."""
    tokens, features, columns = spec.tokens, spec.features, spec.columns
    out = [jax.ShapeDtypeStruct((tokens, features), jnp.float32)] if spec.residual else []
    if spec.kind != "plain":
        out.append(jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16))
    if columns and spec.partials:
        out.append(jax.ShapeDtypeStruct((config.k_splits, tokens, columns), jnp.float32))
    elif columns:
        out.append(jax.ShapeDtypeStruct((tokens, MAX_RANK * len(spec.ranks)), jnp.bfloat16))
    return out


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@functools.partial(jax.jit, static_argnames=("spec", "config", "gpu"))
def fused_prologue(
    spec: PrologueSpec,
    config: PrologueConfig,
    inputs: Sequence[jax.Array],
    a: jax.Array | None,
    gpu: Gpu = H200,
) -> tuple[jax.Array, ...]:
    """The equations of the module's docstring.

    Args:
      spec: the problem.
      config: the kernel configuration.
      inputs: norm: x f32 [M, K], (delta bf16 [M, K],) w f32 [K]. silu: gate and up, bf16 [M, 2 K]. plain: x bf16
        [M, K].
      a: bf16 [K, C]; None without adapters.
      gpu: the GPU.

    Returns:
      norm: (s f32 if `spec.residual`,) y; silu: y; then, with adapters, lora_x [M, MAX_RANK · adapters]; all bf16 but
      s. With `spec.partials` lora_x is f32 [config.k_splits, M, C].
    """
    return run(launch, spec, config, inputs, a, gpu)


def run(
    launch: Callable,
    spec: PrologueSpec,
    config: PrologueConfig,
    inputs: Sequence[jax.Array],
    a: jax.Array | None,
    gpu: Gpu = H200,
) -> tuple[jax.Array, ...]:
    """`fused_prologue` with `ptx.launch.launch` or with that of another machine."""
    return launch(
        functools.partial(emit, spec=spec, config=config, gpu=gpu),
        [*inputs, *([] if a is None else [a])],
        tuple(outputs(spec, config)),
        name=f"decode_prologue_{spec.kind}" + ("_lora" if spec.columns else ""),
        clusters=config.clusters(spec.tokens),
        ctas=config.cluster,
        warps=config.warps,
        shared_bytes=shared_bytes(spec, config),
        gpu=gpu,
    )


def emit(
    machine: PtxMachine,
    position: Position,
    pointers: list[Ptr],
    shared: dict[str, I32],
    *,
    spec: PrologueSpec,
    config: PrologueConfig,
    gpu: Gpu,
) -> None:
    """The instructions of one thread. `pointers`: the inputs, A and the outputs of `fused_prologue`."""
    thread = Thread(machine, spec, config, position, pointers, shared)
    norm = RmsNorm(thread) if spec.kind == "norm" else None
    lora = LoraProjection(thread) if spec.columns else None
    exchanges = [(thread.squares_barrier, norm), (thread.lora_barrier, lora)]
    is_cluster = config.cluster > 1
    if is_cluster:
        machine.init_mbarriers([(barrier, part.exchanged_bytes) for barrier, part in exchanges if part], thread.index)

    rows = [norm.load_rows(k_tile) for k_tile in range(thread.k_tiles_of_warp)] if norm else []
    a = [lora.load_a(k_tile) for k_tile in range(config.prefetch)] if lora else []
    # Last, because arithmetic begins with these; but a norm's weights are read twice.
    load = norm.load_weights if norm else thread.load_x
    fetched = [load(k_tile) for k_tile in range(thread.k_tiles_of_warp if norm else config.prefetch)]
    if lora and not spec.partials:
        lora.zero_padding()
    if is_cluster:
        machine.cluster_wait()

    # A norm adds up its squares before A has come, where A is small. (A value loaded before a branch and used behind it
    # is waited for together with all others; without the branch the assembler waits for x before it issues the other
    # loads.) And where clusters share SMs, registers are worth more than early loads.
    is_small = norm and (config.token_tiles == 1 or thread.columns <= FEW_COLUMNS)
    is_crowded = config.clusters(spec.tokens) > gpu.resident_clusters(config.cluster)
    with contextlib.nullcontext() if is_small or is_crowded or not is_cluster else _opaque_branch(thread):
        if norm:
            _finish_norm(norm, lora, rows, fetched, a)
        else:
            _multiply(thread, None, lora, [], fetched, a)
            if lora:
                lora.send_sums()
        if lora:
            lora.finish(norm)


def _finish_norm(norm: RmsNorm, lora: LoraProjection | None, rows: list, weights: list[Words], a: list) -> None:
    """s, the exchange of the squares, `x A` up to its exchange, and y."""
    thread, config = norm.thread, norm.thread.config
    rows = [norm.add_delta(loaded) for loaded in rows]
    if thread.s is not None:
        for k_tile, row in enumerate(rows):
            thread.store(thread.s, k_tile, row, 4)
    norm.send_squares(rows)
    if lora:
        with _opaque_branch(thread):
            _multiply(thread, norm, lora, rows, weights, a)
        lora.send_sums()
    thread.machine.mbarrier_wait(thread.squares_barrier)
    inverse = [norm.inverse_rms(i, thread.g) for i in range(config.token_tiles)]
    for k_tile, (row, weight_words) in enumerate(zip(rows, weights, strict=True)):
        thread.store(thread.y, k_tile, norm.scale(row, weight_words, inverse), 2)


def _opaque_branch(thread: Thread) -> contextlib.AbstractContextManager[None]:
    """An always-true branch that ptxas cannot fold, a scheduling barrier: code within stays behind the code before it.

    Without it the assembler unpacks words of A, and so waits for them, before the squares are sent; or it works on the
    first words of x before it issues the last loads, to save a register.
    """
    machine = thread.machine
    return machine.when(machine.cluster_rank() < thread.config.cluster)


def _multiply(
    thread: Thread, norm: RmsNorm | None, lora: LoraProjection | None, rows: list, fetched: list, a: list
) -> None:
    """y of all k-tiles (for a norm without 1 / rms), stored but for a norm's; the warp's `y A`, left in shared memory.

    Args:
      rows: a norm's s of every k-tile.
      fetched: a norm's weights of every k-tile; else words of x of the first k-tiles.
      a: words of A of the first k-tiles.
    """
    machine, config, kind = thread.machine, thread.config, thread.spec.kind
    sums = lora.zeros() if lora else []
    for k_tile in range(thread.k_tiles_of_warp):
        y = words = fetched[k_tile]
        if norm:
            y = norm.scale(rows[k_tile], words, [None] * config.token_tiles)
        elif kind == "silu":
            silu_mul = functools.partial(arithmetic.silu_mul_bf16, machine)
            y = [list(map(silu_mul, row[:4], row[4:])) for row in words]
            thread.store(thread.y, k_tile, y, 2)
        if lora:
            lora.multiply(sums, y, a[k_tile])
        if k_tile + config.prefetch < thread.k_tiles_of_warp:
            fetched += [] if norm else [thread.load_x(k_tile + config.prefetch)]
            a += [lora.load_a(k_tile + config.prefetch)] if lora else []
    if lora:
        lora.store_sums(sums)
