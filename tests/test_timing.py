"""`tools/timing.py`: gaps of a profile by hand."""

from __future__ import annotations

import pytest


def test_gaps_are_the_times_without_a_kernel(tool):
    """Kernels overlap, one lies within another, a copy to the host runs alone; one on the device counts."""
    timing = tool("timing")
    names = {
        "a": (10, 5),
        "long": (12, 20),
        "inside": (14, 2),
        "MemcpyD2H": (33, 4),
        "b": (40, 10),
        "MemcpyD2D": (50, 1),
    }
    kernels = [timing.Kernel(1e6 * start, 1e6 * duration, name) for name, (start, duration) in names.items()]
    [gap] = timing.gaps(kernels)
    assert gap.seconds == pytest.approx(8e-3) and (gap.before, gap.after) == ("long", "b")
    assert timing.gaps([]) == [] and timing.gaps(kernels[:1]) == []
