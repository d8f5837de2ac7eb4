"""The problem that a decode prologue solves, and its kernel configuration: how the work is spread over the GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from qerl_kernels.gpu import H200, KIB, Gpu
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK

K_TILE = 32  # features that a warp takes at a time
TOKEN_TILE = 8  # tokens of one `mma.m16n8k16`
# CTAs of a cluster: twice the portable size; faster than 8 up to 32 tokens (tools/results/notes/decode-prologue.md).
# Clusters of 8 are faster up to these features, for nearly any number of tokens.
CLUSTER = 16
HALF_CLUSTER_FEATURES = {"norm": 1536, "plain": 1536, "silu": 8960}
MAX_K_SPLITS = 16  # of clusters of one CTA: the GEMM reads every partial
MAX_TOKEN_TILES = 4
MIN_K_TILES = 4  # a CTA under split-K: fewer gain nothing, one warp takes one k-tile
MIN_COLUMNS = 16  # columns of A a cluster: its part of a row is a whole 32-byte sector
# Terms of `predicted_us` in microseconds, fitted to 316 configurations on an H200
# (tools/results/notes/decode-prologue.md): launch; a wave of clusters whose CTAs have more than 8 warps, of which an SM
# holds one; the reduction of `x A` for 8 tokens, 32 columns and 8 warps; 8 tokens of one more cluster that computes the
# same y; 1e6 elements of a cluster's x; 1e6 bytes of its A.
LAUNCH_US, WAVE_US, REDUCE_US, REPEAT_Y_US = 1.83, 0.31, 0.133, 0.071
READ_X_US = {"norm": 15.4, "silu": 8.12, "plain": 0.29}
READ_A_US = 1.32
# What one more partial costs the GEMM: a guess, which keeps their number down where a cluster has one CTA.
PARTIAL_US = 0.03


@dataclasses.dataclass(frozen=True)
class PrologueSpec:
    """The problem.

    Attributes:
      kind: "norm" (residual add and RMSNorm), "silu" (SiLU · up) or "plain" (x as it is).
      tokens: M.
      features: K.
      ranks: LoRA ranks of the adapters, side by side in A; empty: no `x A`.
      eps: epsilon of the norm.
      residual: True where the norm adds delta to x first.
      partials: True where `x A` is left as fp32 split-K partials; not for a norm.
    """

    kind: str
    tokens: int
    features: int
    ranks: tuple[int, ...] = ()
    eps: float = 0.0
    residual: bool = False
    partials: bool = False

    @property
    def columns(self) -> int:
        """C, columns of A."""
        return sum(self.ranks)


@dataclasses.dataclass(frozen=True)
class PrologueConfig:
    """The kernel configuration.

    Attributes:
      cluster: CTAs of a cluster.
      warps: warps of a CTA, a multiple of 4.
      token_tiles: n8 tiles of tokens of a cluster.
      prefetch: k-tiles of A that a warp loads before its first `mma`.
      column_splits: clusters that share out the columns of A for the same tokens. All of them compute the same y.
      k_splits: clusters that share out the features for the same tokens. Each leaves its own split-K partial.
    """

    cluster: int
    warps: int
    token_tiles: int
    prefetch: int
    column_splits: int = 1
    k_splits: int = 1

    def clusters(self, tokens: int) -> int:
        """Clusters of the grid."""
        return -(-tokens // (TOKEN_TILE * self.token_tiles)) * self.column_splits * self.k_splits


def has_clusters(gpu: Gpu) -> bool:
    """Whether a cluster has several CTAs on this GPU. Otherwise no sum crosses CTAs: it takes no norm."""
    return gpu.resident_clusters(CLUSTER) > 0


def cluster_of(spec: PrologueSpec, gpu: Gpu) -> int:
    """CTAs of a cluster. The same for any number of tokens: it fixes the order of sums."""
    if not has_clusters(gpu):
        return 1
    return CLUSTER // 2 if spec.features <= HALF_CLUSTER_FEATURES[spec.kind] else CLUSTER


def best_config(spec: PrologueSpec, gpu: Gpu = H200) -> PrologueConfig:
    """The configuration with the least `predicted_us`; among equal ones, the fewest tokens a cluster.

    Of its fields only `token_tiles`, `prefetch` and `column_splits`, which change no sum, may depend on the number of
    tokens, and `k_splits`, which does: a row of split-K partials depends on the number of rows.
    """
    every = candidate_configs(spec, gpu)
    return min(every, key=lambda config: (round(predicted_us(spec, config, gpu), 3), config.token_tiles))


def candidate_configs(spec: PrologueSpec, gpu: Gpu = H200, cluster: int | None = None) -> list[PrologueConfig]:
    """All configurations for which a thread has enough registers and a CTA enough shared memory. `cluster`: CTAs of a
    cluster, None: `cluster_of`.
    """
    cluster = cluster or cluster_of(spec, gpu)
    most = gpu.resident_clusters(cluster) if cluster > 1 else MAX_K_SPLITS
    is_split = spec.partials or (cluster == 1 and spec.kind != "norm" and not spec.columns)  # no sum crosses CTAs
    max_k_splits = -(-spec.features // K_TILE // (cluster * MIN_K_TILES)) if is_split else 1
    column_splits = [1]
    if spec.columns and not spec.partials:
        column_splits += [n for n in range(2, most + 1) if spec.columns % (MIN_COLUMNS * n) == 0]
    k_splits = range(1, min(most, max_k_splits) + 1)
    choices = itertools.product(range(1, MAX_TOKEN_TILES + 1), column_splits, k_splits)
    useful = [choice for choice in choices if choice[0] == 1 or TOKEN_TILE * (choice[0] - 1) < spec.tokens]
    configs = [_config(spec, cluster, *choice) for choice in useful]
    has_room = lambda config: sum(shared_bytes(spec, config).values()) + 4 * KIB <= gpu.smem_bytes  # noqa: E731
    return [config for config in configs if config is not None and has_room(config)]


def _config(
    spec: PrologueSpec, cluster: int, token_tiles: int, column_splits: int, k_splits: int
) -> PrologueConfig | None:
    """As many warps as k-tiles, within the registers that each thread needs, and the deepest prefetch of A that these
    allow; None where not even one k-tile fits."""
    max_warps = 16 if spec.columns <= 96 else 8
    k_tiles = -(-spec.features // K_TILE // (cluster * k_splits))
    k_tiles_of_warp = -(-k_tiles // max_warps)
    warps = -(-k_tiles // k_tiles_of_warp // 4) * 4
    columns = spec.columns // column_splits
    fetched_registers = (
        2 * -(-columns // 16) * 4 + {"norm": 0, "silu": 8 * token_tiles, "plain": 4 * token_tiles}[spec.kind]
    )
    held_registers = 2 * -(-columns // 8) * token_tiles + 40
    held_registers += 8 * (token_tiles + 1) * k_tiles_of_warp if spec.kind == "norm" else 0
    free = min(255, 65536 // (warps * 32)) - held_registers
    prefetch = min(k_tiles_of_warp, free // max(1, fetched_registers))
    if prefetch < 1 and token_tiles > 1:
        return None
    return PrologueConfig(cluster, warps, token_tiles, max(1, prefetch), column_splits, k_splits)


def predicted_us(spec: PrologueSpec, config: PrologueConfig, gpu: Gpu = H200) -> float:
    """Microseconds by a rough model, within a tenth: clusters beyond those that the GPU holds wait for the wave before.

    Where a cluster has one CTA it reads as a sixteenth of those that the terms were fitted to: not measured.
    """
    columns = spec.columns / config.column_splits
    x = 1e-6 * spec.features / config.k_splits * min(spec.tokens, TOKEN_TILE * config.token_tiles)
    a = 1e-6 * spec.features / config.k_splits * 2 * columns
    wave = (READ_X_US[spec.kind] * x + READ_A_US * a) * (CLUSTER / config.cluster)
    wave += config.token_tiles * (
        REDUCE_US * columns / 32 * config.warps / 8 + REPEAT_Y_US * (config.column_splits - 1)
    )
    wave += WAVE_US if config.warps > 8 else 0
    partials = PARTIAL_US * config.k_splits if config.cluster == 1 else 0
    return LAUNCH_US + partials + -(-config.clusters(spec.tokens) // gpu.resident_clusters(config.cluster)) * wave


def shared_bytes(spec: PrologueSpec, config: PrologueConfig) -> dict[str, int]:
    """Bytes of each array in a CTA's shared memory."""
    tokens, columns = TOKEN_TILE * config.token_tiles, spec.columns // config.column_splits
    sizes = {"barriers_s": 16}  # two mbarriers
    if spec.kind == "norm":
        sizes |= {"squares_s": 4 * config.warps * tokens, "all_squares_s": 4 * tokens * config.cluster}
    if columns:
        sizes |= {"lora_sums_s": 4 * config.warps * tokens * columns, "lora_totals_s": 4 * tokens * columns}
    return sizes


def missing_for_kernel(features: int, ranks: Sequence[int]) -> str | None:
    """What the kernel needs and these shapes lack; None where it runs."""
    if features % K_TILE:
        return f"a multiple of {K_TILE} input features (these are {features})"
    if any(rank % 8 or not 0 < rank <= MAX_RANK for rank in ranks):
        return f"adapter ranks that are multiples of 8 up to {MAX_RANK} (these are {list(ranks)})"
    return None
