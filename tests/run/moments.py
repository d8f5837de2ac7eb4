"""The oracle of `activations.peak_bytes`: a micro-batch moment by moment, with every array that is on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from qerl_jax.rl.activations import Keeps
from qerl_jax.rl.offload import AHEAD, BEHIND, MOST_LEAVING


class Programs(NamedTuple):
    """Bytes that programs need besides arguments and results: of a layer by what it keeps, and of the head."""

    forward: Callable[[Keeps], int]
    backward: Callable[[Keeps], int]
    head: int


def peak(layers: Sequence[Keeps], sizes: dict[str, int], programs: Programs) -> int:
    """Most bytes at a time.

    Copies end as late as they may: one to the host when the next but `MOST_LEAVING` waits for it; the host asks for one
    to the device as soon as `step` lets it, when the backward pass `AHEAD + BEHIND` layers before has ended. The input
    of the next micro-batch is there as soon as the forward pass has ended.

    Args:
      sizes: bytes of an "input", of "gate_up" and of the "rest" that a layer keeps.
      programs: what is needed besides.
    """
    count, live, leaving, most = len(layers), {("input", 0)}, [], 0

    def see(working: int) -> None:
        nonlocal most
        most = max(most, sum(sizes[name] for name, _ in live) + working)

    def arrive(running: int) -> None:
        """The copies that the host may have asked for while the backward pass `running` runs (`count`: the head)."""
        for i, keeps in enumerate(layers):
            before = i + AHEAD + BEHIND
            if keeps is Keeps.GATE_UP_ON_HOST and i <= running and (before > running or before >= count):
                live.add(("gate_up", i))

    for i, keeps in enumerate(layers):
        while keeps is Keeps.GATE_UP_ON_HOST and len(leaving) >= MOST_LEAVING:
            live.remove(("gate_up", leaving.pop(0)))
        live.add(("input", i + 1))
        if keeps is not Keeps.INPUT:
            live |= {("rest", i), ("gate_up", i)}
        see(programs.forward(keeps))
        if keeps is Keeps.ALL_BUT_GATE_UP:
            live.remove(("gate_up", i))
        if keeps is Keeps.GATE_UP_ON_HOST:
            leaving.append(i)
    live.add(("input", count + 1))
    see(programs.head)
    live -= {("gate_up", i) for i in leaving}
    arrive(count)
    see(programs.head)
    live.remove(("input", count))
    for i in reversed(range(count)):
        arrive(i)
        see(programs.backward(layers[i]))
        live -= {("input", i), ("rest", i), ("gate_up", i)}
    assert live == {("input", count + 1)}
    return most
