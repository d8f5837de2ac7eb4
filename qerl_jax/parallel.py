"""Data parallelism: replicas of the policy, a process each, and what they exchange.

Every replica runs the same program and makes the same exchanges in the same order; `cluster.join` makes a process one
of them. An exchange on the host precedes everything that waits for other devices, and a replica that fails announces
its error: so all end with that error, and none waits for a device that will not come.

Axes: D replicas, X elements.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float32, UInt32

T = TypeVar("T")
Vector = Float32[Array, " _"] | jax.ShapeDtypeStruct
_SMALL = 1 << 16  # bytes of a value that travels through the key-value store
_PATIENCE_SECONDS = 10.0, 120.0  # of a replica for a promise of the first one, and for what was promised
_CHUNK = 1 << 20  # words of 4 bytes of a larger one that travel at once: one program whatever its size


class ReplicaError(ValueError):
    """Another replica failed."""


@runtime_checkable
class Link(Protocol):
    """How the values of D replicas reach each other.

    Attributes:
      is_beside_first: whether this process is on the machine of replica 0.
    """

    is_beside_first: bool

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all replicas, by index."""

    def announce(self, message: bytes) -> None:
        """Leave a message in place of the next exchange, which all others raise; without waiting for them."""

    def before_end(self, action: Callable[[], None]) -> None:
        """Call `action`, in another thread, before a process that waits for a dead one's device forever is ended."""

    def leave(self) -> None:
        """Disconnect, after the last exchange or a failure."""

    def tell(self, word: str) -> None:
        """Leave a word that others can wait for; from any thread."""

    def hears(self, word: str, seconds: float) -> bool:
        """Wait for a word of replica 0, from any thread: whether it came within so many seconds."""

    def all_gather(self, words: UInt32[np.ndarray, " X"]) -> UInt32[np.ndarray, "D X"]:
        """The arrays of all replicas, of one size."""

    def all_reduce(self, vector: Vector) -> Vector:
        """The sum over replicas, the same bits on each; a shape gives a shape."""


@dataclasses.dataclass(frozen=True)
class Replicas:
    """This process among the data-parallel replicas of a run. `Replicas()` is one process alone, for which nothing is
    exchanged. As a context, it announces an error that leaves the block to the other replicas.

    Attributes:
      index: of this replica.
      count: D, replicas.
      link: to the others; None: there are none, or this describes a process elsewhere, whose programs are recorded.
      tensor_parallel: devices of each replica, over which its layers are divided (`partition`).
    """

    index: int = 0
    count: int = 1
    link: Link | None = None
    tensor_parallel: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this replica writes the run's output."""
        return self.index == 0

    def share(self, number: int) -> range:
        """Which of `number` things are this replica's: each count-th one from its index on."""
        return range(self.index, number, self.count)

    def largest_share(self, number: int) -> int:
        """How many of `number` things the first replica has, and no other more: of these are the programs of all, so
        that they are the same ones.
        """
        return len(range(0, number, self.count))

    def gather(self, value: T) -> list[T]:
        """The values of all replicas, by index: anything that can be pickled, arrays as NumPy's.

        Raises ReplicaError where another replica failed before it came here.
        """
        if self.link is None:
            return [value]
        data = pickle.dumps(value)
        is_small = len(data) <= _SMALL
        told = self._exchange((len(data), data if is_small else b""))
        if all(len(data) == size for size, data in told):
            return [pickle.loads(data) for _, data in told]
        return [pickle.loads(data) for data in self._all_gather(data, [size for size, _ in told])]

    def broadcast(self, value: T) -> T:
        """The value of replica 0. Raises as `gather`."""
        return self.gather(value if self.is_first else None)[0]

    def agree(self) -> None:
        """Wait for all replicas. Raises ReplicaError where one has failed."""
        self.gather(None)

    def check_equal(self, value: Any, name: str) -> None:
        """Raise ValueError, naming the values, unless all replicas have the same one. Raises as `gather`."""
        values = self.gather(value)
        if any(other != values[0] for other in values):
            raise ValueError(f"the replicas differ in {name}: {values}")

    def promise(self, name: str) -> None:
        """Let the others know, where this is replica 0, that it will call `after_first` with a name."""
        if self.link is not None and self.is_first:
            self.link.tell(f"{name} promised")

    def after_first(self, name: str, action: Callable[[], T], patience: tuple[float, float] = _PATIENCE_SECONDS) -> T:
        """`action()`, after that of replica 0, whose result it then finds in a cache. From any thread. What replica 0
        does not promise within the first time of `patience`, or end within the second, is not waited for.
        """
        if self.link is None:
            return action()
        if not self.is_first:
            if self.link.hears(f"{name} promised", patience[0]):
                self.link.hears(f"{name} done", patience[1])
            return action()
        try:
            return action()
        finally:
            self.link.tell(f"{name} done")

    def sum(self, vector: Vector) -> Vector:
        """The sum over replicas of a vector, the same bits on each. A shape gives a shape.

        The replicas agree to go on while their devices still work on the vectors. A GPU's memory is allocated at
        dispatch, so that a lack of it is raised before another device waits. Raises as `gather`.
        """
        if self.link is None:
            return vector
        if not isinstance(vector, jax.ShapeDtypeStruct):
            self.agree()
        return self.link.all_reduce(vector)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.link is not None and error is not None:
            said = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
            said = str(error) if isinstance(error, ReplicaError) else f"replica {self.index} failed: {said}"
            self.link.announce(pickle.dumps(said))

    def _exchange(self, message: T) -> list[T]:
        told = [pickle.loads(one) for one in self.link.exchange(pickle.dumps(message))]
        for said in told:
            if isinstance(said, str):
                raise ReplicaError(said)
        return told

    def _all_gather(self, data: bytes, sizes: list[int]) -> list[bytes]:
        words = np.zeros(-(-max(sizes) // (4 * _CHUNK)) * _CHUNK, np.uint32)
        words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        parts = [self.link.all_gather(part) for part in words.reshape(-1, _CHUNK)]
        rows = np.concatenate(parts, axis=1)
        return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]


ALONE = Replicas()


def in_order(shares: Sequence[Sequence[T]]) -> list[T]:
    """All things, from those of each replica, as `Replicas.share` deals them."""
    return [one for row in itertools.zip_longest(*shares, fillvalue=_NONE) for one in row if one is not _NONE]


_NONE: Any = object()
