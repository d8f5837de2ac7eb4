"""NVFP4 GEMM for decode batches: on Hopper, and with clusters of one CTA on any GPU from sm_80 on.

Fixed launch and prologue cost is comparable to the weight traffic there.

    y[m, n] = multiplier[n] · Σ_k x[m, k] · w[n, k]  (+ bias[n])  (+ scale · Σ_r lora_x[m, r] · b[r, n])

`lora_x = x A` is given, whole or as split-K partials, or with `SkinnyConfig.computes_lora_x` computed here: one launch
less where no other prologue is needed.

`gemm` streams the weight through a ring that a producer fills by TMA. Before its first `mma` it fetches tensor maps,
sets up barriers and hands a stage over; after the last it exchanges sums twice and stores through shared memory. Here
no warp waits for another before its last `mma`.

Split-K. A warp takes 16 · `m16_tiles` output features and a run of k-tiles of 64, which no other warp has: so it also
brings its own part of x, and there is no hand-over. The `warps` of a CTA and the `cluster` CTAs of a cluster have the
same features and consecutive runs. A warp copies its k-tiles to stages of its own (`pipeline`), dequantizes the weight
in registers (`dequant`), and multiplies with `mma.sync.m16n8k16` (`mainloop`).

Epilogue. Each warp writes its sums over its own stages as [row][feature], and the CTA meets. A thread then takes four
features of a row: it sums the warps, and in a cluster the CTAs of higher rank send the result to rank 0, which sums
those too (`reduce`), applies multiplier, bias and LoRA term, and stores eight bytes. The LoRA terms are made by rank 0
(`lora`) and lie behind the sums of its warps. Its loads (B, `lora_x`, multiplier, bias) are issued before the mainloop.

`x A` computed here. A warp multiplies Aᵀ [16 ranks, 16 of k] with the x that it has in registers anyway. So it has its
own share of `x A`, as it has its own share of every sum, and y is linear in both: it rounds its share to bf16 and adds
its product with B to its sums; nothing but these crosses the CTA and the cluster. (Summing `x A` first took two more
barriers and an exchange before the last `mma`.) B lies in shared memory, brought behind the first k-tiles by the whole
CTA, missing ranks and features as zeros. All clusters whose features have the same adapter compute the same `x A`:
sharing it would take a barrier of the whole GPU.

Why no copy tears and no wait hangs.
- A stage is written by copies of its warp and read by that warp alone. A lane waits for its own copies, `warp_sync`
  makes those of the others visible, and a second one stands between the last read and the copies that fill the stage
  anew. After the mainloop no copy is in flight: all non-empty groups have been waited for.
- One CTA barrier stands between the writes and the reads of the sums. Where the kernel computes `x A`, one more stands
  between the mainloop and the sums: every thread has then waited for its own copies of B.
- Between CTAs there is one mbarrier, in the shared memory of rank 0. It is set up before the mainloop and completed
  once, by the bytes of all other CTAs. Each of them sends the same number and waits for no CTA but for that set-up,
  which every CTA announces before it waits for anything.
- Every thread that reads the sums of other CTAs has waited for that mbarrier itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.nvfp4_matmul.dequant import weight_fragments
from qerl_kernels.nvfp4_matmul.lora_input import MMA_ROWS, can_fuse, describe, is_lora_x
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.skinny.config import SharedLayout, SkinnyConfig, SkinnyProblem
from qerl_kernels.nvfp4_matmul.skinny.lora import LoraTerm
from qerl_kernels.nvfp4_matmul.skinny.mainloop import Mainloop
from qerl_kernels.nvfp4_matmul.skinny.pipeline import Pipeline
from qerl_kernels.nvfp4_matmul.skinny.reduce import Reduction
from qerl_kernels.nvfp4_matmul.skinny.thread import Thread
from qerl_kernels.ptx.arithmetic import as_float, bf16_to_f32, fma, pack_bf16
from qerl_kernels.ptx.instructions import PtxMachine
from qerl_kernels.ptx.launch import Position, launch
from qerl_kernels.ptx.values import F32, I32, Ptr, tree_sum


# A jit of its own: a program lowers and compiles each shape once, not once for every layer.
@functools.partial(jax.jit, static_argnames=("config", "scale", "gpu"))
def skinny_matmul(x: jax.Array, weight: PackedNvfp4, config: SkinnyConfig, **epilogue) -> jax.Array:
    """`run` on the GPU. `epilogue`: the bias and the arguments of LoRA."""
    return run(launch, x, weight, config, **epilogue)


def run(
    launch: Callable,
    x: jax.Array,
    weight: PackedNvfp4,
    config: SkinnyConfig,
    *,
    bias: jax.Array | None = None,
    lora_x: jax.Array | None = None,
    lora_a: jax.Array | None = None,
    lora_b: Sequence[jax.Array] = (),
    scale: float = 1.0,
    gpu: Gpu = H200,
) -> jax.Array:
    """The equation of the module's docstring: x bf16 [m, k] -> bf16 [m, n], in blocks of `config.tile_m` rows.

    Args:
      launch: `ptx.launch.launch`, or another machine's.
      x: activations.
      weight: the packed weight.
      config: tuning config.
      bias: [n], any float dtype.
      lora_x: `x A` of the adapters side by side, bf16 [m, 64 · adapters], each padded to a rank of 64 with zeros; one
        adapter alone may keep its rank. Or split-K partials of it, f32 [partials, m, sum of ranks]. None where the
        config computes `x A`.
      lora_a: then A of the adapters side by side, bf16 [k, sum of ranks].
      lora_b: B of each adapter, bf16 [rank, features]; together they cover the n features in order.
      scale: LoRA scale alpha / R.
      gpu: the GPU.

    Raises:
      ValueError: the config fits neither the GPU nor these shapes, or an array has another shape or dtype than stated.
    """
    _check(x, weight, config, bias, lora_x, lora_a, lora_b, gpu)
    n, k = weight.shape
    padded = weight.multiplier.shape[0]
    x = jnp.pad(x, ((0, 0), (0, -k % TILE)))
    a_or_lora_x = jnp.pad(lora_a, ((0, -k % TILE), (0, 0))) if config.computes_lora_x else lora_x
    if bias is not None:
        bias = bias if bias.dtype in (jnp.bfloat16, jnp.float32) else bias.astype(jnp.float32)
        bias = jnp.pad(bias, (0, padded - n))
    problem = SkinnyProblem(
        m=x.shape[0], n=n, k_tiles=x.shape[1] // TILE, scale=scale,
        bias_bytes=None if bias is None else bias.dtype.itemsize,
        adapters=tuple(each.shape for each in lora_b), lora_columns=a_or_lora_x.shape[-1] if lora_b else 0,
        partials=len(a_or_lora_x) if lora_b and a_or_lora_x.ndim == 3 else 0,
    )  # fmt: skip
    inputs = [x, weight.words, weight.scales, weight.multiplier]
    inputs += ([] if bias is None else [bias]) + ([a_or_lora_x, *lora_b] if lora_b else [])
    y = launch(
        lambda *place: _Program(problem, config, gpu, *place).emit(),
        inputs,
        jax.ShapeDtypeStruct((x.shape[0], padded), jnp.bfloat16),
        name=f"nvfp4_skinny_m{config.tile_m}{'_lora_x' if config.computes_lora_x else ''}",
        clusters=config.clusters(n) * config.blocks(problem.m),
        ctas=config.cluster,
        warps=config.warps,
        shared_bytes=SharedLayout(config, problem.rank).arrays(),
        gpu=gpu,
    )
    return y[:, :n]


def _check(x, weight, config, bias, lora_x, a, b, gpu) -> None:
    """Refuses arrays that the kernel, which has addresses alone, would misread."""
    (n, k), m, shapes = weight.shape, x.shape[0], tuple(each.shape for each in b)
    ranks = [rank for rank, _ in shapes]
    if x.shape != (m, k) or x.dtype != jnp.bfloat16:
        raise ValueError(f"skinny_matmul: x is {describe(x)}, the weight {n} x {k}, {config}")
    if not config.fits(n, k, max(ranks, default=0), gpu):
        raise ValueError(f"skinny_matmul: {config} does not fit an SM or {n} x {k} features, adapters {shapes}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"skinny_matmul: the bias is {describe(bias)}, the weight {n} x {k}")
    if b and not can_fuse(n, shapes, config.tile_n if config.computes_lora_x else MMA_ROWS):
        raise ValueError(f"skinny_matmul: adapters of shapes {shapes} do not fit {n} features and {config}")
    if any(each.dtype != jnp.bfloat16 for each in b):
        raise ValueError(f"skinny_matmul: B are {list(map(describe, b))}, all must be bfloat16")
    if b and config.computes_lora_x:
        is_good = lora_x is None and a is not None and a.shape == (k, sum(ranks)) and a.dtype == jnp.bfloat16
    else:
        is_good = a is None and is_lora_x(lora_x, m, ranks)
    if not is_good:
        raise ValueError(
            f"skinny_matmul: x A is {describe(lora_x)}, A is {describe(a)}; x {describe(x)}, "
            f"adapters of shapes {shapes}, {config}"
        )


class _Program:
    """Emits the instructions of one thread."""

    def __init__(
        self,
        problem: SkinnyProblem,
        config: SkinnyConfig,
        gpu: Gpu,
        machine: PtxMachine,
        position: Position,
        pointers: list[Ptr],
        shared: dict[str, I32],
    ):
        """`pointers`: to the inputs and y; the rest as `ptx.launch` has it."""
        self.problem, self.config, self.machine, self.shared = problem, config, machine, shared
        self.layout = SharedLayout(config, problem.rank)
        x, words, scales, self.multiplier, *rest = pointers
        self.bias = None if problem.bias_bytes is None else rest.pop(0)
        self.y = rest.pop()
        warp = machine.warp_index()
        clusters, blocks, tile_m = config.clusters(problem.n), config.blocks(problem.m), config.tile_m
        block, rows, cluster = machine.i32(0), min(problem.m, tile_m), position.cluster
        if blocks > 1:
            block, cluster = cluster // clusters, cluster % clusters
        if problem.m > tile_m and problem.m % tile_m:
            rows = machine.minimum(block * -tile_m + problem.m, tile_m)
        first_tile = cluster * config.m16_tiles
        is_first = position.rank < 1 if config.cluster > 1 else machine.i32(1)
        lane = position.thread % 32
        g, q = lane // 4, lane % 4
        memory = shared["warps_s"] + warp * self.layout.warp_bytes
        self.thread = Thread(
            machine, position.rank, is_first, first_tile, block, rows, position.thread, warp, lane, g, q, memory
        )
        self.reduction = Reduction(config, self.layout, self.thread, shared)
        a_or_lora_x, *b = rest or [None]
        self.lora = LoraTerm(problem, config, self.layout, self.thread, shared, a_or_lora_x, b, gpu.sms)
        self.mainloop = Mainloop(Pipeline(self.lora, words, scales, x), weight_fragments)

    def emit(self) -> None:
        machine, config = self.machine, self.config
        if config.cluster > 1:  # first: its fence might wait for copies in flight
            size = (config.cluster - 1) * self.layout.vectors * 16
            machine.init_mbarriers([(self.shared["arrived_s"], size)], self.thread.index)
        self.mainloop.start()
        row_terms = self._load_row_terms()
        if config.computes_lora_x:
            multiplier = self._load_multiplier()
        else:
            jobs = self.lora.load_jobs()
        sums, lora_x = self.mainloop.run()
        if config.computes_lora_x:
            machine.cta_sync()
            sums = self.lora.add_to(sums, lora_x, multiplier, self.mainloop.pipeline.rank)
            self.reduction.store_warp(sums)
        else:
            self.reduction.store_warp(sums)
            self.lora.multiply_jobs(jobs)
        machine.cta_sync()
        if config.cluster > 1:
            machine.cluster_wait()
        self._epilogue(row_terms)

    def _feature(self) -> I32:
        """First of the four features that this thread finishes in every round."""
        return self.thread.first_tile * MMA_ROWS + self.reduction.row_and_vector(0)[1] * 4

    def _load_multiplier(self) -> list[list[F32]]:
        """The multiplier of features g and g + 8 of each m16 tile."""
        machine = self.machine
        at = self.multiplier + (self.thread.first_tile * MMA_ROWS + self.thread.g) * 4
        places = [[4 * (MMA_ROWS * tile + 8 * h) for h in range(2)] for tile in range(self.config.m16_tiles)]
        load = lambda byte: as_float(machine, machine.load_global(at, 1, machine.i32(1), byte)[0])  # noqa: E731
        return [list(map(load, pair)) for pair in places]

    def _load_row_terms(self) -> tuple[list[I32] | None, list[I32] | None]:
        """Words of the multiplier, where the sums do not include it, and of the bias for this thread's features."""
        feature, multiplier, load = self._feature(), None, self.machine.load_global
        if not self.config.computes_lora_x:
            multiplier = load(self.multiplier + feature * 4, 4, self.thread.is_first)
        if self.bias is None:
            return multiplier, None
        size = self.problem.bias_bytes
        return multiplier, load(self.bias + feature * size, size, self.thread.is_first)

    def _epilogue(self, row_terms: tuple) -> None:
        machine, sums = self.machine, self.reduction.sum_warps()
        is_cluster = self.config.cluster > 1
        if is_cluster:
            with machine.when(self.thread.rank > 0):
                self.reduction.send(sums)
            with machine.when(self.thread.is_first):
                machine.mbarrier_wait(self.shared["arrived_s"])
        with machine.when(self.thread.is_first) if is_cluster else contextlib.nullcontext():
            for start, values in self.reduction.sum_ctas(sums):
                self._store(start, values, *row_terms)

    def _store(self, start: int, values: list[F32], multiplier: list[I32] | None, bias: list[I32] | None) -> None:
        """Stores four features of a row: values · multiplier (+ bias) (+ LoRA term), as bf16."""
        machine, problem = self.machine, self.problem
        row, _ = self.reduction.row_and_vector(start)
        exists = self.thread.index + start < self.config.tile_m * self.reduction.row_vectors
        if multiplier is not None:
            values = [value * as_float(machine, word) for value, word in zip(values, multiplier, strict=True)]
        if bias is not None:
            if problem.bias_bytes == 4:
                wide = [as_float(machine, bias[i]) for i in range(4)]
            else:
                wide = [bf16_to_f32(machine, bias[i // 2], i % 2 == 1) for i in range(4)]
            values = [value + more for value, more in zip(values, wide, strict=True)]
        if problem.rank_tiles and not self.config.computes_lora_x:
            scale, vectors = machine.f32(problem.scale), self.lora.read_jobs(*self.reduction.row_and_vector(start))
            values = [fma(machine, scale, tree_sum(more), v) for v, *more in zip(values, *vectors, strict=True)]
        words = [pack_bf16(machine, values[0], values[1]), pack_bf16(machine, values[2], values[3])]
        columns = -(-problem.n // TILE) * TILE
        place = self.y + ((self.thread.block * self.config.tile_m + row) * columns + self._feature()) * 2
        machine.store_global(place, words, exists & (row < self.thread.rows))
