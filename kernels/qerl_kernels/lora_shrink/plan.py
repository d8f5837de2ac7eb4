"""What a fused kernel computes and how it is cut."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax

from qerl_kernels.dispatch import MULTIPROCESSORS
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK

CHUNK = 32  # features that a warp takes at a time
OCTET = 8  # tokens that `mma.sync` takes at a time
BLOCKS = 16  # of a cluster: twice what is portable; faster than 8 up to 32 tokens (tools/results/LOG.md)
AT_ONCE = 7  # clusters of that size that an H200 holds at one time, as its driver says
MOST_GROUPS = 4
LEAST_CHUNKS = 4  # of a block, where clusters share out the features: fewer gain nothing, one warp takes one chunk
LEAST_COLUMNS = 16  # of a cluster: what a row of A has for it is a whole sector of 32 bytes
# What `cost` is made of, in us, fitted to 316 plans on an H200 (tools/results/LOG.md): to begin; for each wave of
# clusters whose blocks have more than 8 warps, of which a multiprocessor holds one; for the sums of 8 tokens, 32
# columns and 8 warps; for 8 tokens of one cluster more that makes the same y; for 1e6 of a cluster's elements of x; for
# 1e6 bytes of its A.
START, WAVE, PRODUCTS, AGAIN = 1.83, 0.31, 0.133, 0.071
READ_X = {"norm": 15.4, "silu": 8.12, "plain": 0.29}
READ_A = 1.32


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

    def clusters(self, tokens: int) -> int:
        """Of the whole grid."""
        return -(-tokens // (OCTET * self.groups)) * self.shares * self.parts


def plan_for(task: Task) -> Plan:
    """The plan that `cost` puts first, of equal ones that with fewest tokens a cluster. Only `groups`, `ahead` and
    `shares` may depend on the number of tokens: they change no sum. `parts` does, and depends on it."""
    return min(plans(task), key=lambda plan: (round(cost(task, plan), 3), plan.groups))


def plans(task: Task) -> list[Plan]:
    """Every way to cut the work for which a thread has registers."""
    most_parts = -(-task.features // CHUNK // (BLOCKS * LEAST_CHUNKS)) if task.in_parts else 1
    shares = [1]
    if task.columns and not task.in_parts:
        shares += [n for n in range(2, AT_ONCE + 1) if task.columns % (LEAST_COLUMNS * n) == 0]
    cuts = itertools.product(range(1, MOST_GROUPS + 1), shares, range(1, min(AT_ONCE, most_parts) + 1))
    found = [_plan(task, *cut) for cut in cuts if cut[0] == 1 or OCTET * (cut[0] - 1) < task.tokens]
    return list(filter(None, found))


def _plan(task: Task, groups: int, shares: int, parts: int) -> Plan | None:
    """As many warps as there are chunks, but not more than leave each the registers it needs, and as many chunks of A
    under way as these allow."""
    most = 16 if task.columns <= 96 else 8
    chunks = -(-task.features // CHUNK // (BLOCKS * parts))
    steps = -(-chunks // most)
    warps = -(-chunks // steps // 4) * 4
    columns = task.columns // shares
    fetched = 2 * -(-columns // 16) * 4 + {"norm": 0, "silu": 8 * groups, "plain": 4 * groups}[task.kind]
    held = 2 * -(-columns // 8) * groups + 40
    held += 8 * (groups + 1) * steps if task.kind == "norm" else 0
    free = min(255, 65536 // (warps * 32)) - held
    ahead = min(steps, free // max(1, fetched))
    return Plan(BLOCKS, warps, groups, max(1, ahead), shares, parts) if ahead >= 1 or groups == 1 else None


def cost(task: Task, plan: Plan) -> float:
    """Microseconds by a rough model (a tenth off): clusters beyond those that begin at once wait for all that did."""
    columns = task.columns / plan.shares
    x = 1e-6 * task.features / plan.parts * min(task.tokens, OCTET * plan.groups)
    a = 1e-6 * task.features / plan.parts * 2 * columns
    of_cluster = READ_X[task.kind] * x + READ_A * a
    of_cluster += plan.groups * (PRODUCTS * columns / 32 * plan.warps / 8 + AGAIN * (plan.shares - 1))
    of_cluster += WAVE if plan.warps > 8 else 0
    return START + -(-plan.clusters(task.tokens) // AT_ONCE) * of_cluster


def missing(features: int, ranks: Sequence[int]) -> str | None:
    """What keeps the kernels from these shapes and this chip; None where they run."""
    cores = getattr(jax.devices()[0], "core_count", None)
    if cores is not None and cores < MULTIPROCESSORS:
        return (
            f"clusters of {BLOCKS} blocks, seen to launch on {MULTIPROCESSORS} multiprocessors (this GPU has {cores})"
        )
    if features % CHUNK:
        return f"a multiple of {CHUNK} input features (these are {features})"
    if any(rank % 8 or not 0 < rank <= MAX_RANK for rank in ranks):
        return f"adapter ranks that are multiples of 8 up to {MAX_RANK} (these are {list(ranks)})"
    return None
