"""What a fused kernel computes and how it is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from qerl_kernels.dispatch import MULTIPROCESSORS
from qerl_kernels.nvfp4_matmul.api import SLOT

CHUNK = 32  # features that a warp takes at a time
OCTET = 8  # tokens that `mma.sync` takes at a time
BLOCKS = 16  # of a cluster: twice what is portable; faster than 8 up to 32 tokens (tools/results/LOG.md)
CLUSTERS = 6  # of that size to begin at one time: eight took twice as long as one (LOG.md), six are a guess
LEAST_CHUNKS = 4  # of a block, where clusters share out the features: fewer gain nothing, one warp takes one chunk
LEAST_COLUMNS = 16  # of a cluster: what a row of A has for it is a whole sector of 32 bytes


@dataclasses.dataclass(frozen=True)
class Task:
    """What is computed.

    Attributes:
      kind: "norm", "silu" or "plain".
      tokens: M.
      features: K.
      ranks: of the adapters, side by side in A; empty: no `x A`.
      eps: of the norm.
      residual: True where the norm adds delta to x first.
      in_parts: True where t is left as fp32 sums over parts of the features; not for a norm.
    """

    kind: str
    tokens: int
    features: int
    ranks: tuple[int, ...] = ()
    eps: float = 0.0
    residual: bool = False
    in_parts: bool = False

    @property
    def columns(self) -> int:
        """C, columns of A."""
        return sum(self.ranks)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How it is cut.

    Attributes:
      blocks: of a cluster.
      warps: of a block, a multiple of 4.
      groups: octets of tokens of a cluster.
      ahead: chunks of A that a warp loads before it multiplies the first.
      shares: clusters that share out the columns of A for the same tokens. All of them make the same y.
      parts: clusters that share out the features for the same tokens; each leaves sums of its own.
    """

    blocks: int
    warps: int
    groups: int
    ahead: int
    shares: int = 1
    parts: int = 1


def plan_for(task: Task, blocks: int = BLOCKS) -> Plan:
    """As many warps as there are chunks, but not more than leave each the registers it needs. Few tokens spread over
    many clusters; more of them share what is read of A where registers allow. A cluster lies in one part of the chip,
    whose path to the L2 seems to bound it (0.5 TB/s): with few tokens, several read a part of A each, or of x and A
    where somebody else adds up (`in_parts`). `groups`, `ahead` and `shares` may depend on the number of tokens, because
    they change no sum. `parts` depends on it too and does: so do the bits of sums in parts.
    """
    groups = 2 if task.tokens > (OCTET if task.in_parts else 32) and task.columns <= 32 else 1
    most = 16 if task.columns <= 96 else 8
    at_once = CLUSTERS // -(-task.tokens // (OCTET * groups))
    worth = -(-task.features // CHUNK // (blocks * LEAST_CHUNKS))
    parts = max(1, min(at_once, worth)) if task.in_parts else 1
    chunks = -(-task.features // CHUNK // (blocks * parts))
    steps = -(-chunks // most)
    warps = -(-chunks // steps // 4) * 4
    whole = [n for n in range(2, at_once + 1) if task.columns % (LEAST_COLUMNS * n) == 0]
    shares = max([1, *whole]) if task.columns and not task.in_parts else 1
    columns = task.columns // shares
    fetched = 2 * -(-columns // 16) * 4 + {"norm": 8, "silu": 8 * groups, "plain": 4 * groups}[task.kind]
    held = 2 * -(-columns // 8) * groups + 40
    held += 8 * groups * steps if task.kind == "norm" else 0
    free = 65536 // (warps * 32) - held
    return Plan(blocks, warps, groups, max(1, min(steps, free // fetched)), shares, parts)


def missing(features: int, ranks: Sequence[int]) -> str | None:
    """What keeps the kernels from these shapes and this chip; None where they run."""
    cores = getattr(jax.devices()[0], "core_count", None)
    if cores is not None and cores < MULTIPROCESSORS:
        return (
            f"clusters of {BLOCKS} blocks, seen to launch on {MULTIPROCESSORS} multiprocessors (this GPU has {cores})"
        )
    if features % CHUNK:
        return f"a multiple of {CHUNK} input features (these are {features})"
    if any(rank % 8 or not 0 < rank <= SLOT for rank in ranks):
        return f"adapter ranks that are multiples of 8 up to {SLOT} (these are {list(ranks)})"
    return None
