"""A Hopper GPU seen as another: it runs the instructions of sm_80, so that kernels of tier "warp" can be timed."""

from __future__ import annotations

import argparse

from qerl_kernels import dispatch
from qerl_kernels.gpu import Gpu, gpu_of


def add_as_arch(parser: argparse.ArgumentParser) -> None:
    """Adds `--as-arch`."""
    parser.add_argument("--as-arch", type=int, choices=(80, 86, 89), help="run the kernels of this compute capability")


def seen_as(gpu: Gpu, arch: int) -> Gpu:
    """The facts of a GPU with the tier and the shared memory of another compute capability."""
    return gpu_of(f"{gpu.name} as sm_{arch}", arch, gpu.sms)


def assume(arch: int | None) -> dict[str, int]:
    """Has dispatch take the default device for one of another compute capability, None: for what it is. Returns what
    tells the rows of a result file apart."""
    if arch is None:
        return {}
    gpu = seen_as(dispatch.this_gpu(), arch)
    dispatch.this_gpu = lambda: gpu
    return {"as_arch": arch}
