"""The oracle of `activations.peak_bytes`: a micro-batch moment by moment, with every array that is on the device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from qerl_jax.rl.activations import Keeps


class Programs(NamedTuple):
    """Bytes that programs need besides arguments and results: of a layer by what it keeps, and of the head."""

    forward: Callable[[Keeps], int]
    backward: Callable[[Keeps], int]
    head: int


def peak(layers: Sequence[Keeps], sizes: dict[str, int], programs: Programs) -> int:
    """Most bytes at a time. The input of the next micro-batch is there as soon as the forward pass has ended.

    Args:
      sizes: bytes of an "input", of "gate_up" and of the "rest" that a layer keeps.
      programs: what is needed besides.
    """
    count, live, most = len(layers), {("input", 0)}, 0

    def see(working: int) -> None:
        nonlocal most
        most = max(most, sum(sizes[name] for name, _ in live) + working)

    for i, keeps in enumerate(layers):
        live.add(("input", i + 1))
        if keeps is not Keeps.INPUT:
            live |= {("rest", i), ("gate_up", i)}
        see(programs.forward(keeps))
        if keeps is Keeps.ALL_BUT_GATE_UP:
            live.remove(("gate_up", i))
    live.add(("input", count + 1))
    see(programs.head)
    live.remove(("input", count))
    for i in reversed(range(count)):
        see(programs.backward(layers[i]))
        live -= {("input", i), ("rest", i), ("gate_up", i)}
    assert live == {("input", count + 1)}
    return most
