"""Data parallelism: replicas of the policy, a process with one device each, and what they exchange.

Every replica runs the same program and makes the same exchanges in the same order. Small host values travel through the
key-value store of `jax.distributed`, large ones and gradients between the devices (NCCL on GPUs, gloo on CPUs). An
exchange on the host precedes everything that waits for other devices, and a replica that fails announces its error in
place of its next one: so all end with that error, and none waits for a device that will not come.

Axes: D replicas, X elements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float32, UInt32

from qerl_jax.programs import program

T = TypeVar("T")
Values = Float32[Array, " X"] | jax.ShapeDtypeStruct
_AXIS = "replica"
_SMALL = 1 << 16  # bytes of a value that travels through the key-value store
_CHUNK = 1 << 20  # words of 4 bytes of a larger one that travel at once: one program whatever its size
_BUCKET = 1 << 26  # words of the arrays that are summed together
_POLL_MS = 1000  # between two looks for Ctrl-C while waiting for other replicas
_LEAVE_MS = 10_000  # time in which all take notice of an error, before the process with the key-value store may end


class ReplicaError(ValueError):
    """Another replica failed."""


@runtime_checkable
class Link(Protocol):
    """How the values of D replicas reach each other."""

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all replicas, by index."""

    def announce(self, message: bytes) -> None:
        """Leave a message in place of the next exchange, without waiting for the others."""

    def all_gather(self, words: UInt32[np.ndarray, " X"]) -> UInt32[np.ndarray, "D X"]:
        """The arrays of all replicas, of one size."""

    def all_reduce(self, values: Values) -> Values:
        """The sum over replicas, the same bits on each; shapes give shapes."""


@dataclasses.dataclass(frozen=True)
class Replicas:
    """This process among the data-parallel replicas of a run. `Replicas()` is one process alone, for which nothing is
    exchanged. As a context, it announces an error that leaves the block to the other replicas.

    Attributes:
      index: of this replica; 0 writes the output of the run.
      count: D, replicas.
      link: to the others; None: there are none.
    """

    index: int = 0
    count: int = 1
    link: Link | None = None

    @classmethod
    def join(
        cls,
        coordinator: str | None = None,
        index: int | None = None,
        count: int | None = None,
        device: int | None = None,
        heartbeat_seconds: int = 30,
    ) -> Replicas:
        """Meet the other processes, before JAX starts a device.

        Args:
          coordinator: HOST:PORT where process 0 listens; None: `jax.distributed` asks SLURM, MPI or Kubernetes for it,
            the index and the count.
          index: of this process.
          count: processes.
          device: its GPU, among those that it sees; None: the only one, or the cluster's choice.
          heartbeat_seconds: a process of which nothing was heard for so long counts as dead, and all others end.
        """
        from jax._src import distributed  # the key-value store has no public name

        jax.distributed.initialize(
            coordinator,
            count,
            index,
            None if device is None else [device],
            "deactivate" if coordinator else None,
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
        state = distributed.global_state
        if state.num_processes == 1:
            return cls()
        return cls(state.process_id, state.num_processes, Cluster(state.client, state.process_id, state.num_processes))

    def share(self, number: int) -> range:
        """Which of `number` things are this replica's: each count-th one from its index on."""
        return range(self.index, number, self.count)

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
        return self.gather(value if self.index == 0 else None)[0]

    def agree(self) -> None:
        """Wait for all replicas. Raises ReplicaError where one has failed."""
        self.gather(None)

    def check_equal(self, value: Any, name: str) -> None:
        """Raise ValueError, naming the values, unless all replicas have the same one. Raises as `gather`."""
        values = self.gather(value)
        if any(other != values[0] for other in values):
            raise ValueError(f"the replicas differ in {name}: {values}")

    def sum(self, tree: T) -> T:
        """The sum over replicas of a tree of fp32 arrays, the same bits on each; shapes give shapes.

        The device's work on the arrays ends before the replicas agree to go on, so that a lack of memory comes to light
        before another device waits. Raises as `gather`.
        """
        if self.link is None:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        if any(leaf.dtype != jnp.float32 for leaf in leaves):
            raise ValueError(f"sums over replicas are in fp32, not {sorted({leaf.dtype.name for leaf in leaves})}")
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            jax.block_until_ready(leaves)
            self.agree()
        summed: list[Array] = []
        for bucket in _buckets(leaves):
            shapes = tuple(leaf.shape for leaf in bucket)
            summed += _split(self.link.all_reduce(_joined(bucket)), shapes)
        return jax.tree.unflatten(structure, summed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.link is not None and error is not None:
            name = type(error).__name__
            said = str(error) if isinstance(error, ReplicaError) else f"replica {self.index} failed: {name}: {error}"
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


class Cluster:
    """The link between the processes of `jax.distributed`.

    Args:
      client: of its key-value store.
      index, count: as in `Replicas`.
    """

    def __init__(self, client: Any, index: int, count: int):
        self._client, self._index, self._count, self._number = client, index, count, 0

    def exchange(self, message: bytes) -> list[bytes]:
        """As in `Link`."""
        number, self._number = self._number, self._number + 1
        self._client.key_value_set_bytes(_key(number, self._index), message)
        messages = [message if i == self._index else self._get(_key(number, i)) for i in range(self._count)]
        if number:  # whoever is at this exchange has read the one before
            self._client.key_value_delete(_key(number - 1, self._index))
        return messages

    def announce(self, message: bytes) -> None:
        """As in `Link`. Waits a little for the others to take notice, as the store ends with process 0."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # one of them is dead
            self._client.key_value_set_bytes(_key(self._number, self._index), message)
            self._client.wait_at_barrier("failed", _LEAVE_MS)

    def all_gather(self, words: UInt32[np.ndarray, " X"]) -> UInt32[np.ndarray, "D X"]:
        """As in `Link`."""
        return np.asarray(_over_devices(_gathered, jax.device_put(words)))

    def all_reduce(self, values: Values) -> Values:
        """As in `Link`."""
        return _over_devices(_reduced, values)

    def _get(self, key: str) -> bytes:
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ReplicaError(f"the other replicas are out of reach: {error}") from error


def _key(number: int, index: int) -> str:
    return f"qerl_jax/{number}/{index}"


def replica_mesh() -> jax.sharding.Mesh:
    """The device of each process, by its index. Raises ValueError for a process with several."""
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    if len(devices) != jax.process_count():
        raise ValueError(f"{jax.process_count()} replicas have {len(devices)} devices, expected one each")
    return jax.sharding.Mesh(np.array(devices), (_AXIS,))


def _over_devices(collective: Callable, values: Any) -> Any:
    """The replicated result of a program over the arrays of all devices, end to end."""
    mesh = replica_mesh()
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    shape = (mesh.size * values.size,)
    if isinstance(values, jax.ShapeDtypeStruct):
        result = collective(mesh, jax.ShapeDtypeStruct(shape, values.dtype, sharding=sharding))
        return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=SingleDeviceSharding(jax.local_devices()[0]))
    everywhere = jax.make_array_from_single_device_arrays(shape, sharding, [values])
    return collective(mesh, everywhere).addressable_data(0)


def _on_each(mesh: jax.sharding.Mesh, function: Callable, values: Array) -> Array:
    own, same = PartitionSpec(_AXIS), PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=own, out_specs=same, check_vma=False)(values)


@program(static_argnums=0)
def _gathered(mesh: jax.sharding.Mesh, words: UInt32[Array, " DX"]) -> UInt32[Array, "D X"]:
    return _on_each(mesh, lambda own: jax.lax.all_gather(own, _AXIS), words)


@program(static_argnums=0)
def _reduced(mesh: jax.sharding.Mesh, values: Float32[Array, " DX"]) -> Float32[Array, " X"]:
    return _on_each(mesh, lambda own: jax.lax.psum(own, _AXIS), values)


def _buckets(leaves: Sequence[Array]) -> Iterator[list[Array]]:
    """The arrays, in order, in groups of at most `_BUCKET` words, or of one."""
    bucket: list[Array] = []
    for leaf in leaves:
        if bucket and sum(other.size for other in bucket) + leaf.size > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(leaf)
    if bucket:
        yield bucket


@program
def _joined(leaves: list[Array]) -> Float32[Array, " X"]:
    return jnp.concatenate([leaf.ravel() for leaf in leaves])


@program(static_argnums=1)
def _split(values: Float32[Array, " X"], shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(jnp.split(values, ends[:-1]), shapes, strict=True)]
