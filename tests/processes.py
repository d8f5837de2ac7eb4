"""What tests ask the system about processes."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def missing_confinement() -> str:
    """Why the kernel, asked directly, cannot confine programs; "" where it can, and then the sandbox must work."""
    if not sys.platform.startswith("linux"):
        return "programs are confined on Linux only"
    libc = ctypes.CDLL(None)
    if libc.syscall(444, None, ctypes.c_size_t(0), 1) < 1:  # landlock_create_ruleset asked for its version
        return "this kernel has no Landlock, or hides it"
    return "" if libc.prctl(21, 0, 0, 0, 0) >= 0 else "this kernel has no seccomp"
