"""The mainloop of the skinny GEMM: a warp's k-tiles from its pipeline through the tensor cores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from qerl_kernels.nvfp4_matmul.skinny.pipeline import Pipeline
from qerl_kernels.ptx.values import F32, I32, Ptr

Sums = list[list[list[F32]]]  # [tile of 16][n8 tile], four values each


@dataclasses.dataclass
class Mainloop:
    """One thread's mainloop.

    Attributes:
      pipeline: its warp's stages.
      dequantize: (machine, four words, two words of scales) -> the A fragments of the four k16 steps.
      in_flight: stages in use, fewer than the config's where a warp has fewer k-tiles.
      count: k-tiles of this warp.
      next: source addresses of the first k-tile that is not in flight, None where there is none.
    """

    pipeline: Pipeline
    dequantize: Callable[..., list[list[I32]]]
    in_flight: int = 0
    count: I32 | None = None
    next: list[Ptr] | None = None

    def start(self) -> None:
        """Fills the pipeline; the last group also holds the copies of B."""
        pipeline, layout = self.pipeline, self.pipeline.layout
        config, thread, machine = pipeline.config, pipeline.thread, pipeline.machine
        first, self.count = self._k_tiles()
        at = pipeline.begin(first)
        max_k_tiles = math.ceil(math.ceil(pipeline.problem.k_tiles / config.cluster) / config.warps)
        self.in_flight = min(config.stages, max_k_tiles)
        for stage in range(self.in_flight):
            pipeline.fetch(thread.memory + stage * layout.stage_bytes, at, stage < self.count)
            if config.computes_lora_x and stage == self.in_flight - 1:
                pipeline.lora.fetch_b()  # in the last group: the first k-tile is waited for first
            machine.commit_group()
            at = pipeline.advance(at)
        self.next = at if max_k_tiles > self.in_flight else None

    def run(self) -> tuple[Sums, Sums]:
        """(sums of this warp's k-tiles, its share of `x A`), both fp32. No copy is in flight afterwards."""
        pipeline, machine = self.pipeline, self.pipeline.machine
        config, layout, memory = pipeline.config, pipeline.layout, pipeline.thread.memory
        zero, at = machine.f32(0.0), self.next or []
        carried = 4 * (config.m16_tiles + layout.rank_tiles) * config.n8_tiles
        last = memory + (self.in_flight - 1) * layout.stage_bytes

        def k_tile(i: I32, carry: list) -> list:
            stage, at_, flat = carry[0], carry[1 : 1 + len(at)], carry[1 + len(at) :]
            machine.wait_group(self.in_flight - 1)
            machine.warp_sync()
            sums = self._by_tile(flat)
            x = pipeline.x_fragments(stage)
            sums, lora_x = sums[: config.m16_tiles], sums[config.m16_tiles :]
            lora_x = [
                self._add(tile_sums, pipeline.lora_a_fragments(stage, tile), x) for tile, tile_sums in enumerate(lora_x)
            ]
            sums = [self._add_weight(tile_sums, x, stage, tile) for tile, tile_sums in enumerate(sums)]
            if at:
                machine.warp_sync()
                pipeline.fetch(stage, at_, i + self.in_flight < self.count)
                at_ = pipeline.advance(at_)
            machine.commit_group()
            next_stage = machine.select(stage < last, stage + layout.stage_bytes, memory)
            return [next_stage, *at_, *(value for tile_sums in sums + lora_x for four in tile_sums for value in four)]

        by_tile = self._by_tile(machine.fori(self.count, [memory, *at, *[zero] * carried], k_tile)[-carried:])
        machine.wait_group(0)
        machine.warp_sync()
        return by_tile[: config.m16_tiles], by_tile[config.m16_tiles :]

    def _k_tiles(self) -> tuple[I32, I32]:
        """(first k-tile, number of k-tiles) of this warp: an even share of its CTA's, an even share of all."""
        config, thread, machine = self.pipeline.config, self.pipeline.thread, self.pipeline.machine
        each, more = divmod(self.pipeline.problem.k_tiles, config.cluster)
        begin = thread.rank * each + machine.minimum(thread.rank, more)
        of_cta = each + (thread.rank < more)
        each, more = of_cta // config.warps, of_cta % config.warps
        first = begin + (thread.warp * each + machine.minimum(thread.warp, more))
        return first, each + (thread.warp < more)

    def _by_tile(self, flat: list[F32]) -> Sums:
        fours = [flat[i : i + 4] for i in range(0, len(flat), 4)]
        n8_tiles = self.pipeline.config.n8_tiles
        return [fours[i : i + n8_tiles] for i in range(0, len(fours), n8_tiles)]

    def _add_weight(self, sums: list[list[F32]], x: list[list[I32]], stage: I32, tile: int) -> list[list[F32]]:
        """The sums of an m16 tile plus those of a k-tile."""
        return self._add(sums, self.dequantize(self.pipeline.machine, *self.pipeline.weight(stage, tile)), x)

    def _add(self, sums: list[list[F32]], a_fragments: Iterable[list[I32]], x: list[list[I32]]) -> list[list[F32]]:
        """sums + Σ over k16 steps of A fragment · xᵀ."""
        machine = self.pipeline.machine
        for k16_step, a in enumerate(a_fragments):
            sums = [machine.mma(four, a, x[n8][2 * k16_step : 2 * k16_step + 2]) for n8, four in enumerate(sums)]
        return sums
