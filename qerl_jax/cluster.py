"""The link between replicas that are processes of `jax.distributed`.

Small messages travel through its key-value store, large arrays and sums between the devices. In each process a thread
watches the others: where one fails or dies, `ReplicaError` is raised in the main thread, whatever that does.

Axes: D replicas, X elements.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float32, UInt32

from qerl_jax import partition
from qerl_jax.parallel import ReplicaError, Replicas, Vector
from qerl_jax.programs import program

LOST = signal.SIGUSR2
"""Tells a process that another one of its run is dead."""

_AXIS = "replica"
_KEPT = 64  # exchanges whose messages are deleted at once
_WATCH_SECONDS = 1.0
_POLL_MS = 1000  # between two looks for signals while waiting for other replicas
_HANG_SECONDS = 15  # time in which the main thread must take notice of a dead replica
_SAVE_SECONDS = 10  # then, for what is called before the end; with a heartbeat less than launch's patience
_LEAVE_SECONDS = 30, 5  # that the process with the key-value store waits for the others; where one of them failed


def join(
    coordinator: str | None = None,
    index: int | None = None,
    count: int | None = None,
    devices: Sequence[int] | None = None,
    heartbeat_seconds: int = 20,
    hang_seconds: float = _HANG_SECONDS,
) -> Replicas:
    """Meet the other processes, before JAX starts a device; from the main thread. `Link.leave` is the end.

    Args:
      coordinator: HOST:PORT where process 0 listens; None: `jax.distributed` asks SLURM, MPI or Kubernetes for it, the
        index and the count.
      index: of this process.
      count: processes.
      devices: its GPUs, among those that it sees; None: the only one, or the cluster's choice.
      heartbeat_seconds: a process of which nothing was heard for so long counts as dead.
      hang_seconds: where the main thread takes no notice of that for so long, the process is ended.

    Raises ValueError for another form of coordinator, and OSError where process 0 cannot listen there.
    """
    from jax._src import distributed  # the key-value store has no public name

    if coordinator is not None:
        place = re.fullmatch(r"(\[[\da-f:.]+\]|[^\s:/]+):(\d{1,5})", coordinator, re.ASCII | re.IGNORECASE)
        if not place or not 0 < int(place[2]) < 1 << 16:
            raise ValueError(f"coordinator must be HOST:PORT, with a port from 1 to 65535, got {coordinator!r}")
        if index == 0:
            try:
                socket.create_server(("", int(place[2]))).close()  # JAX may crash where it cannot listen
            except OSError as error:
                raise OSError(f"process 0 cannot listen at coordinator {coordinator}: {error.strerror}") from error
    jax.config.update("jax_enable_recoverability", True)  # else the death of one aborts all others at once
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away
    os.environ.setdefault("grpc_proxy", "")  # none: http_proxy is not meant for the other processes
    jax.config.update("jax_check_proxy_envs", False)  # so it need not warn of one
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        None if devices is None else list(devices),
        "deactivate" if coordinator else None,
        heartbeat_timeout_seconds=heartbeat_seconds,
    )
    state = distributed.global_state
    if state.num_processes == 1:
        return Replicas()
    link = Cluster(state.client, state.process_id, state.num_processes, hang_seconds)
    return Replicas(state.process_id, state.num_processes, link)


class Cluster:
    """The link between the processes of `jax.distributed`.

    Args:
      client: of its key-value store.
      index, count: as in `Replicas`.
      hang_seconds: as in `join`.
    """

    def __init__(self, client: Any, index: int, count: int, hang_seconds: float):
        self._client, self._index, self._count, self._number = client, index, count, 0
        self._hang_seconds, self._before_end = hang_seconds, lambda: None
        self._failure = "another process of the run is dead"
        self._is_over, self._is_told = threading.Event(), threading.Event()
        if index == 0:
            client.key_value_set_bytes(_key("machine"), socket.gethostname().encode())
        self.is_beside_first = self._get(_key("machine")) == socket.gethostname().encode()
        signal.signal(LOST, self._raise)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def exchange(self, message: bytes) -> list[bytes]:
        """As in `Link`."""
        number, self._number = self._number, self._number + 1
        self._client.key_value_set_bytes(_message_key(self._index, number), message)
        messages = [message if i == self._index else self._get(_message_key(i, number), i) for i in range(self._count)]
        if number and number % _KEPT == 0:  # whoever is at this exchange has read those before
            self._client.key_value_delete(_key(self._index, number // _KEPT - 1))
        return messages

    def announce(self, message: bytes) -> None:
        """As in `Link`."""
        self._is_over.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first failure stays
            self._client.key_value_set_bytes(_key("failed"), message)

    def before_end(self, action: Callable[[], None]) -> None:
        """As in `Link`."""
        self._before_end = action

    def tell(self, word: str) -> None:
        """As in `Link`."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set_bytes(_key("told", word), b"")

    def hears(self, word: str, seconds: float) -> bool:
        """As in `Link`."""
        end = time.monotonic() + seconds
        with contextlib.suppress(ReplicaError):  # out of reach
            while not self._is_over.is_set() and (left := end - time.monotonic()) > 0:
                if self._wait_for(_key("told", word), min(_POLL_MS, max(1, int(1000 * left)))) is not None:
                    return True
        return False

    def all_gather(self, words: UInt32[np.ndarray, " X"]) -> UInt32[np.ndarray, "D X"]:
        """As in `Link`."""
        return np.asarray(_over_devices(_gathered, words))

    def all_reduce(self, vector: Vector) -> Vector:
        """As in `Link`."""
        return _over_devices(_reduced, vector)

    def leave(
        self,
        patience: tuple[float, float] = _LEAVE_SECONDS,
        shutdown: Callable[[], None] = jax.distributed.shutdown,
    ) -> None:
        """As in `Link`. Process 0, with which the key-value store ends, waits a while for the others.

        Args:
          patience: seconds of that; those where another process has failed.
          shutdown: ends this process's connection.
        """
        self._is_over.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set_bytes(_key("left", self._index), b"")
        if self._index == 0:  # those that are connected when the store ends are aborted
            waiting = threading.Thread(target=self._wait_for_others, daemon=True)
            waiting.start()
            waiting.join(patience[self._is_told.is_set()])
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            shutdown()
        self._watcher.join(_WATCH_SECONDS)

    def _wait_for_others(self) -> None:
        """Until they have disconnected, or count as dead."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while len(self._client.get_live_nodes(list(range(self._count)))) > 1:
                time.sleep(0.1)

    def _get(self, key: str, index: int = 0) -> bytes:
        """What replica `index` stores under a key. Raises ReplicaError once it has left without."""
        while True:
            if self._is_told.is_set():  # and a function of the user's caught that error
                raise ReplicaError(self._failure)
            if (value := self._wait_for(key, _POLL_MS)) is not None:
                return value
            if self._look(_key("left", index)) is not None and self._look(key) is None:
                said = f"replica {index} left the run before this exchange; its own output may say why"
                raise ReplicaError(self._failure_of_others(range(self._count)) or said)

    def _wait_for(self, key: str, milliseconds: int) -> bytes | None:
        """What a process left under a key; None where none did within that time."""
        try:
            return self._client.blocking_key_value_get_bytes(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise ReplicaError(f"the other replicas are out of reach: {error}") from error

    def _watch(self) -> None:
        """Raise in the main thread what ended another process. One that waits for the dead one's device forever, as
        NCCL does (gloo raises), ends here: its host still runs, and copies from a device pass by a stuck collective.
        """
        while not self._is_over.wait(_WATCH_SECONDS):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # this process leaves
                # It returns when all others have called it or are dead.
                alive = self._client.get_live_nodes(list(range(self._count)))
                said = self._failure_of_others(alive)
                if said and not self._is_over.is_set():
                    self._failure = said
                    signal.pthread_kill(threading.main_thread().ident, LOST)
                    if not self._is_told.wait(self._hang_seconds):
                        print(f"error: {said}", file=sys.stderr, flush=True)
                        last = threading.Thread(target=self._before_end, daemon=True)
                        last.start()
                        last.join(_SAVE_SECONDS)
                        os._exit(2)

    def _failure_of_others(self, alive: Any) -> str | None:
        if (message := self._look(_key("failed"))) is not None:
            return pickle.loads(message)
        for index in range(self._count):
            if index not in alive and self._look(_key("left", index)) is None:
                return f"replica {index} is dead"
        return None

    def _look(self, key: str) -> bytes | None:
        try:
            return self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError:
            return None

    def _raise(self, *_: object) -> None:
        self._is_told.set()
        if not self._is_over.is_set():
            self._is_over.set()
            raise ReplicaError(self._failure)


def _key(*parts: object) -> str:
    return "/".join(map(str, ("qerl_jax", *parts)))


def _message_key(index: int, number: int) -> str:
    return _key(index, number // _KEPT, number)


@functools.cache  # each exchange would compare other ones, value by value
def _shardings() -> tuple[NamedSharding, jax.sharding.Sharding]:
    """Of one vector for each process, on a mesh that has a row of its devices for each, by its index; of what this
    process has whole on each of its devices. Raises ValueError where some have more devices than others.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(devices) != jax.process_count() * jax.local_device_count():
        raise ValueError(
            f"{jax.process_count()} replicas have {len(devices)} devices together, this one {jax.local_device_count()}"
        )
    mesh = jax.sharding.Mesh(np.array(devices).reshape(jax.process_count(), -1), (_AXIS, partition.AXIS))
    if (count := jax.local_device_count()) == 1:
        own = SingleDeviceSharding(jax.local_devices()[0])
    else:
        own = NamedSharding(partition.mesh_of(count), PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(_AXIS)), own


def _over_devices(collective: Callable, vector: Any) -> Any:
    """The replicated result of a program over the vectors of all replicas, end to end. Several devices of a replica
    hold the same vector, and do the same.
    """
    sharding, own = _shardings()
    shape = (jax.process_count() * vector.size,)
    if isinstance(vector, jax.ShapeDtypeStruct):
        result = collective(sharding.mesh, jax.ShapeDtypeStruct(shape, vector.dtype, sharding=sharding))
        return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=own)

    def parts(array: Array) -> list[Array]:
        return [shard.data for shard in array.addressable_shards]

    everywhere = jax.make_array_from_single_device_arrays(shape, sharding, parts(jax.device_put(vector, own)))
    result = collective(sharding.mesh, everywhere)
    if jax.local_device_count() == 1:
        return result.addressable_data(0)
    return jax.make_array_from_single_device_arrays(result.shape, own, parts(result))


def _on_each(mesh: jax.sharding.Mesh, function: Callable, vector: Array) -> Array:
    own, same = PartitionSpec(_AXIS), PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=own, out_specs=same, check_vma=False)(vector)


@program(static_argnums=0)
def _gathered(mesh: jax.sharding.Mesh, words: UInt32[Array, " DX"]) -> UInt32[Array, "D X"]:
    return _on_each(mesh, lambda own: jax.lax.all_gather(own, _AXIS), words)


@program(static_argnums=0)
def _reduced(mesh: jax.sharding.Mesh, vector: Float32[Array, " DX"]) -> Float32[Array, " X"]:
    return _on_each(mesh, lambda own: jax.lax.psum(own, _AXIS), vector)
