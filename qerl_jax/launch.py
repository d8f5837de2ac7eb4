"""From a command line to its replicas: the processes started here, one a GPU or for several of them, or this one's
place among those of a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
from qerl_kernels.gpu import Gpu

from qerl_jax import driver
from qerl_jax.cluster import LOST, join
from qerl_jax.command import FAILED, STOPPED
from qerl_jax.config import ConfigError
from qerl_jax.parallel import Replicas
from qerl_jax.run.devices import usable_bytes

_LAUNCHER = "QERL_JAX_LAUNCHER"  # in the environment of the processes that a launcher starts: a pipe that ends with it
_PORTS = range(10_000, 32_768)  # below those that Linux gives to connections that are opened meanwhile
ALL = "all"
Fits = Callable[[float, int, int, Gpu], bool]
"""Whether memory of so many bytes suffices on each GPU of so many processes with so many each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """Flags of a command that can use several devices."""

    devices: str = ALL
    """GPUs of this machine to use, a process for each `tensor_parallel_size`, or all of them. A number on a machine
    without GPUs is that of processes on the CPU."""
    tensor_parallel_size: int | None = None
    """GPUs of one process, over which the layers of a model that does not fit one are divided: a number that divides
    its key/value heads. A checkpoint is resumed with any other. None: 1, or on one machine the smallest power of two
    with which the memory estimate fits."""
    coordinator: str | None = None
    """HOST:PORT where process 0 listens, to start each process of several hosts by hand: this one is then `process_id`
    of `num_processes`. Not needed under SLURM, Open MPI before 5 and Kubernetes (JobSet)."""
    process_id: int | None = None
    """Number of this process, from 0. Of the GPUs that it sees it uses number `process_id` modulo their count, or with
    a `tensor_parallel_size` as many from a multiple on."""
    num_processes: int | None = None
    """Processes of all hosts."""

    def of_one(self) -> Self:
        """The flags of a command that can use one device: in place of all the first."""
        return dataclasses.replace(self, devices="1") if self.devices == ALL else self


@dataclasses.dataclass(frozen=True)
class Start:
    """How a command starts.

    Attributes:
      processes: that it starts on this machine; 1: this process is the command, or one of those that others started.
      place: of this process among those, as `cluster.join` takes it (coordinator, index, count, GPUs); None: there are
        no others.
      size: devices of a process, over which the layers are divided.
      settings: of JAX, before it starts a device.
      said: a line for people.
    """

    processes: int = 1
    place: tuple[str | None, int | None, int | None, range | None] | None = None
    size: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    said: str = ""


def start_of(given: Devices, gpus: int, cluster: Any = None) -> Start:
    """How a command with these flags starts, on a machine with so many GPUs; `cluster` as JAX knows it. Raises
    ConfigError for devices that are not there.
    """
    place, size = _place(given), _size(given)
    if size < 1:
        raise ConfigError(f"tensor_parallel_size must be at least 1, got {size}")
    if gpus and size > gpus:
        raise ConfigError(f"--tensor-parallel-size {size}: this machine has {_gpus(gpus)} for JAX")
    settings = {"jax_num_cpu_devices": size} if size > 1 and not gpus else {}
    if given.coordinator is not None or cluster is not None:
        return Start(1, (*place, _own_gpus(given, cluster, gpus)), size, settings)
    number = count_of(given.devices, gpus, size)
    flags = f"(--devices {given.devices}{f' --tensor-parallel-size {size}' if size > 1 else ''})"
    if number > 1:
        where = f"{number * size} of {gpus} GPUs" if gpus else f"{number} processes on the CPU"
        each = f"{number} processes with {size} each" if size > 1 else "a process each"
        said = f"{where} {flags}, {each}: they share prompts and micro-batches"
        return Start(number, None, size, settings, said)
    if gpus > 1:
        said = f"{size} of {gpus} GPUs {flags}{', which share the layers' if size > 1 else ''}"
        return Start(1, None, size, {"jax_cuda_visible_devices": ",".join(map(str, range(size)))}, said)
    return Start(1, None, size, settings)


def run(given: Devices, program: Sequence[str], body: Callable[[Replicas], int]) -> int:
    """Exit code of a command: that of `body(replicas)` in this process where it is the only one or one of a cluster's,
    else of the processes that it starts.

    Args:
      given: flags.
      program: the command, behind `python`.
      body: all of it. Output and errors of the input are those of the first replica.

    Raises ConfigError for devices that are not there.
    """
    start = start_of(given, len(driver.gpus()), None if given.coordinator else _cluster())
    for name, value in start.settings.items():
        jax.config.update(name, value)
    if start.said:
        print(start.said, flush=True)
    if start.processes > 1:
        return launch(program, start.processes)
    if start.place is None:
        return body(Replicas(tensor_parallel=start.size))
    _end_with_launcher()
    return as_replica(dataclasses.replace(join(*start.place), tensor_parallel=start.size), body)


def as_replica(replicas: Replicas, body: Callable[[Replicas], int]) -> int:
    """Exit code of `body(replicas)` in one of several processes, which leaves the others at the end. What it prints is
    that of the first, and so are its errors of the input, unless another one alone has them: then they reach the first.
    """
    try:
        with (
            replicas,
            open(os.devnull, "w") as nothing,
            contextlib.redirect_stdout(sys.stdout if replicas.is_first else nothing),
        ):
            return body(replicas)
    except (ValueError, OSError, MemoryError):
        if replicas.is_first:
            raise
        return FAILED  # the first replica says why
    except KeyboardInterrupt:
        if replicas.is_first:
            raise
        return STOPPED
    finally:
        if replicas.link is not None:
            replicas.link.leave()


def count(given: Devices) -> int:
    """Processes that a command with these flags has. Raises ConfigError."""
    if _place(given)[0] is not None:
        return given.num_processes
    if cluster := _cluster():
        return cluster.get_process_count()
    return count_of(given.devices, len(driver.gpus()), _size(given))


def _size(given: Devices) -> int:
    return 1 if given.tensor_parallel_size is None else given.tensor_parallel_size


def sized(
    given: Devices,
    program: Sequence[str],
    fits: Fits,
    gpus: Sequence[driver.Described] | None = None,
) -> tuple[Devices, list[str]]:
    """The flags and the program of a command with a `tensor_parallel_size`: where none is given, and one GPU of those
    that are used does not hold what each process would, the smallest power of two with which they do, in a line for
    people. Processes that a cluster or other hands start have their GPUs already: 1, as where no number will do.

    Args:
      given, program: as of `run`.
      fits: what `run.memory` estimates.
      gpus: of this machine; None: as the driver says.

    Raises ConfigError for devices that are not there.
    """
    if given.tensor_parallel_size is not None or _place(given)[0] is not None or _cluster() is not None:
        return given, list(program)
    gpus = driver.gpus() if gpus is None else gpus
    used = count_of(given.devices, len(gpus)) if gpus else 1
    sizes = [1 << k for k in range(used.bit_length()) if given.devices == ALL or used % (1 << k) == 0]
    memory = usable_bytes(min((gpu.bytes for gpu in gpus), default=0))
    size = next((size for size in sizes if used > 1 and fits(memory, used // size, size, gpus[0].gpu)), 1)
    if size == 1:
        return given, list(program)
    print(
        f"the memory estimate does not fit one GPU of {memory / 1e9:.1f} GB: --tensor-parallel-size {size} is chosen",
        flush=True,
    )
    return dataclasses.replace(given, tensor_parallel_size=size), [*program, "--tensor-parallel-size", str(size)]


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def count_of(devices: str, gpus: int, size: int = 1) -> int:
    """Processes for `--devices`, on a machine with so many GPUs, of which each process has `size`. Raises
    ConfigError.
    """
    if devices == ALL:
        return max(gpus // size, 1)
    if not devices.isdecimal() or int(devices) < 1:
        raise ConfigError(f'devices must be "{ALL}" or a number from 1, got {devices!r}')
    if gpus and int(devices) > gpus:
        raise ConfigError(f"--devices {devices}: this machine has {_gpus(gpus)} for JAX")
    if int(devices) % size and gpus:
        raise ConfigError(f"--devices {devices} is no multiple of --tensor-parallel-size {size}")
    return int(devices) // size if gpus else int(devices)


def free_port(ports: Sequence[int] = _PORTS) -> int:
    """A port of this machine that is free, one of these, for a process that is yet to start."""
    while True:
        with socket.socket() as some, contextlib.suppress(OSError):
            some.bind(("localhost", secrets.choice(ports)))
            return some.getsockname()[1]


def launch(program: Sequence[str], count: int, grace_seconds: int = 50) -> int:
    """Start `python PROGRAM` as `count` processes of this machine, pass signals on to them, and wait. Returns
    0, or the exit code of the first that failed, 128 + its number for a signal; the others then have `grace_seconds` to
    save the run's state and end.
    """
    command = [sys.executable, *program, "--coordinator", f"localhost:{free_port()}", "--num-processes", str(count)]
    alive, held = os.pipe()
    environment = os.environ | {_LAUNCHER: str(alive)}
    if environment.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # JAX's default
        environment["TF_CPP_MIN_LOG_LEVEL"] = "2"  # else XLA warns that it is new to let processes outlive others
    children: list[subprocess.Popen] = []
    received: list[int] = []  # signals to pass on once all have been started
    stopping = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in stopping}
    try:
        for index in range(count):
            children.append(
                subprocess.Popen(
                    [*command, "--process-id", str(index)],
                    stdout=subprocess.DEVNULL if index else None,
                    env=environment,
                    pass_fds=[alive],
                    start_new_session=True,  # Ctrl-C reaches them through this process, once
                )
            )
        return _wait(children, received, grace_seconds)
    finally:
        for child in children:
            child.kill()
            child.wait()
        os.close(alive)
        os.close(held)
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen], received: list[int], grace_seconds: int) -> int:
    """Exit code of processes that are to end together and get each signal that is `received`."""
    failed, end = None, float("inf")
    while any([child.poll() is None for child in children]) and time.monotonic() < end:
        time.sleep(0.1)
        while received:
            number = received.pop(0)
            for child in children:
                child.send_signal(number)
        bad = [index for index, child in enumerate(children) if child.poll()]
        if bad and failed is None:
            failed, end = bad[0], time.monotonic() + grace_seconds
            if (code := children[failed].returncode) < 0:
                print(f"process {failed} of {len(children)} was ended by {_name(-code)}", file=sys.stderr, flush=True)
                for child in children:
                    child.send_signal(LOST)
    for index, child in enumerate(children):
        if child.poll() is None:
            said = f"process {index} of {len(children)} did not end within {grace_seconds} s and is killed"
            print(said, file=sys.stderr, flush=True)
    code = 0 if failed is None else children[failed].returncode
    return code if code >= 0 else 128 - code


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _end_with_launcher() -> None:
    """One SIGTERM for this process when the launcher that started it dies. (Linux's own signal for that comes once for
    each of its threads.)
    """

    def wait(pipe: int) -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    if (launcher := os.environ.pop(_LAUNCHER, None)) is not None:
        threading.Thread(target=wait, args=(int(launcher),), daemon=True).start()


def _place(given: Devices) -> tuple[str | None, int | None, int | None]:
    """The flags that say which process this is. Raises ConfigError unless they are complete or left to the cluster."""
    place = given.coordinator, given.process_id, given.num_processes
    if 0 < place.count(None) < 3:
        raise ConfigError("--coordinator, --process-id and --num-processes belong together")
    if given.coordinator is not None and not 0 <= given.process_id < given.num_processes:
        raise ConfigError(f"process_id must be from 0 to num_processes - 1, got {given.process_id}")
    return place


def _own_gpus(given: Devices, cluster: Any, gpus: int) -> range | None:
    """Which GPUs are this process's, of those that it sees; None: no matter."""
    local, size = given.process_id, _size(given)
    local = local if given.coordinator is not None else cluster.get_local_process_id()
    if local is None or gpus == 0:
        return None
    first = local % (gpus // size) * size
    return range(first, first + size)


def _cluster() -> Any:
    """What JAX knows of the cluster that started this process as one of several; None elsewhere."""
    from jax._src import clusters  # public only as a part of jax.distributed.initialize

    alone = {  # though JAX takes them for clusters: a pod of no indexed job, and a shell or step of one task
        "K8sCluster": "JOB_COMPLETION_INDEX" not in os.environ,
        "SlurmCluster": os.environ.get("SLURM_STEP_NUM_TASKS") == "1",
    }
    kinds = [kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
    found = next((kind for kind in kinds if not alone.get(kind.__name__) and kind.is_env_present()), None)
    return found if found is not None and found.get_process_count() > 1 else None
