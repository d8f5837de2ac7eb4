"""The facts of a GPU that decide which kernels run on it, and with which configs."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

KIB = 1024
# Shared memory that a CTA may have, by compute capability (CUDA C++ Programming Guide, "Technical Specifications").
SMEM_BYTES = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
# Clusters, by their number of CTAs, that an H200 holds at a time with one CTA an SM, as its driver says
# (cuOccupancyMaxActiveClusters). A cluster lies within one GPC, so that clusters of three, four or sixteen CTAs leave
# some SMs idle.
H200_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 8: 15, 16: 7}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as the kernels see it.

    Attributes:
      name: the driver's name of it.
      arch: compute capability times ten.
      sms: number of its SMs.
      smem_bytes: shared memory that a CTA may have.
      own_table: path of a tuning table of its GEMMs that were timed on this GPU; None: there is none.
    """

    name: str
    arch: int
    sms: int
    smem_bytes: int
    own_table: str | None = None

    @property
    def tier(self) -> str:
        """Which kernels run. "wgmma": all, as they are tuned for Hopper. "warp": those of `mma.sync` and `cp.async`, in
        clusters of one CTA; larger GEMMs by dequantization and XLA's library."""
        return "wgmma" if self.arch == 90 else "warp"

    @property
    def has_tcgen05(self) -> bool:
        """Whether `tcgen05.mma` multiplies many rows, in tier "warp"."""
        return self.arch in (100, 103)

    @property
    def table(self) -> str:
        """The tuning table for GEMMs that its own does not have: a file of `nvfp4_matmul/`."""
        return "tuning_h200.json" if self.tier == "wgmma" else "tuning_warp.json"

    def resident_clusters(self, ctas: int) -> int:
        """Clusters of so many CTAs, one CTA an SM, that the GPU holds at a time; 0 where it is not known to hold any.

        Hopper GPUs with other numbers of SMs have other GPCs: in proportion, and no clusters of more than 8 CTAs, which
        the driver may refuse.
        """
        if self.tier == "warp":
            return self.sms if ctas == 1 else 0
        if self.sms >= 132:
            return H200_CLUSTERS[ctas]
        return H200_CLUSTERS[ctas] * self.sms // 132 if ctas <= 8 else 0


def slug(name: str) -> str:
    """A GPU's name as part of a file's name."""
    return re.sub("[^A-Za-z0-9]+", "-", name).strip("-").lower()


def user_table(name: str) -> Path:
    """Where `python -m qerl_jax.tune` keeps the tuning table of a GPU of this name."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "qerl-jax" / "tuning" / f"{slug(name)}.json"


def gpu_of(name: str, arch: int, sms: int, smem_bytes: int | None = None) -> Gpu:
    """The facts of a GPU without a table of its own; `smem_bytes` None: those of its compute capability."""
    return Gpu(name, arch, sms, SMEM_BYTES.get(arch, 99) * KIB if smem_bytes is None else smem_bytes)


H200 = gpu_of("NVIDIA H200", 90, 132)
