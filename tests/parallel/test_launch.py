"""`--devices`: the processes of a command, how they end together, and a run of two against the run of one."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import runs
import small
from jax._src import clusters
from qerl_kernels.gpu import H200, Gpu
from replicas import Store, ThreadLink

from qerl_jax import driver, launch, train
from qerl_jax.checkpoint.orbax import latest_step
from qerl_jax.command import FAILED, STOPPED
from qerl_jax.config import ConfigError, dump
from qerl_jax.parallel import Replicas
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.run.devices import usable_bytes, use_device_memory

pytestmark = pytest.mark.usefixtures("nothing_drawn")
STEPS = 4
REWARD = """
import time

def length(*, completions, **_):
    time.sleep(0.2)
    return [len(text) / 20 for text in completions]
"""


@pytest.mark.parametrize(("devices", "gpus", "count"), [("all", 8, 4), ("all", 3, 1), ("all", 0, 1), ("3", 0, 3)])
def test_processes_with_two_devices_each(devices, gpus, count, monkeypatch):
    assert launch.count_of(devices, gpus, 2) == count
    monkeypatch.setattr(driver, "gpus", lambda: [None] * gpus)
    assert launch.count(launch.Devices(devices=devices, tensor_parallel_size=2)) == count


@pytest.mark.parametrize(
    ("given", "gpus", "fitting", "size"),
    [
        ({}, 8, {1, 2, 4, 8}, 1),
        ({}, 8, {4, 8}, 4),
        ({}, 6, {4}, 4),
        ({"devices": "6"}, 8, {4}, 1),  # no multiple of 4
        ({"devices": "6"}, 8, {2, 4}, 2),
        ({"devices": "4"}, 8, {4}, 4),
        ({"devices": "2"}, 8, {4}, 1),
        ({}, 1, {2}, 1),
        ({}, 0, {2}, 1),
        ({"devices": "1"}, 8, {2}, 1),
        ({}, 8, set(), 1),  # the run is refused
        ({"tensor_parallel_size": 2}, 8, {4}, 2),
        ({"coordinator": "a:1", "process_id": 0, "num_processes": 8}, 8, {2}, 1),
    ],
)
def test_layers_are_divided_where_one_gpu_does_not_suffice(given, gpus, fitting, size, capsys):
    """Over the fewest with which the estimate fits JAX's share of the smallest GPU; what is started is told."""
    asked = []

    def fits(memory: float, replicas: int, size: int, gpu: Gpu) -> bool:
        asked.append((memory, replicas * size <= gpus, gpu))
        return size in fitting

    usable = usable_bytes(80 * 10**9)
    machine = [driver.Described(H200, (80 + number) * 10**9) for number in range(gpus)]
    given = launch.Devices(**given)
    found, program = launch.sized(given, ["-m", "program"], fits, machine)
    assert launch._size(found) == size and set(asked) <= {(usable, True, H200)}
    is_chosen = given.tensor_parallel_size is None and size > 1
    assert program == ["-m", "program", *(["--tensor-parallel-size", str(size)] if is_chosen else [])]
    said = f"fit one GPU of {usable / 1e9:.1f} GB: --tensor-parallel-size {size} is chosen\n"
    assert capsys.readouterr().out == (f"the memory estimate does not {said}" if is_chosen else "")


def test_a_dry_run_divides_what_does_not_fit(tmp_path, capsys):
    """The bundled policy with adapters of rank 256, on two GPUs of which JAX takes 61 MB: an update takes 75 and 52."""
    use_device_memory()  # as the command does, unless a test before this one did
    machine = [driver.Described(H200, round(61e6 / usable_bytes(1)))] * 2
    flags = ["--dry-run", "--output-dir", str(tmp_path / "run"), "--rollout-memory-gb", "0.001"]
    flags += ["--lora-rank", "256", "--batch-size", "8", "--max-completion-length", "8"]
    assert train.main(flags, machine) == 0
    first, output = capsys.readouterr().out.split("\n", 1)
    assert first.endswith("--tensor-parallel-size 2 is chosen") and "on each of 2 devices" in output


@pytest.mark.parametrize(("index", "own"), [(0, range(2)), (1, range(2, 4)), (2, range(2)), (5, range(2, 4))])
def test_a_process_takes_neighbouring_gpus(index, own):
    """Of five, whose last is left over; the third process and the sixth are on other hosts."""
    given = launch.Devices(coordinator="a:1", process_id=index, num_processes=6, tensor_parallel_size=2)
    assert launch._own_gpus(given, None, 5) == own


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tensor-parallel-size", "3"], "tensor_parallel_size 3 does not divide num_key_value_heads 2"),
        (
            ["--tensor-parallel-size", "4", "--batch-invariant"],
            "batch_invariant needs tensor_parallel_size 1 or 2, got 4",
        ),
    ],
)
def test_runs_that_cannot_be_divided(flags, said, tmp_path, capsys):
    assert train.main(["--dry-run", "--output-dir", str(tmp_path / "run"), *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "size", "gpus", "said"),
    [
        ("8", 2, 2, "--devices 8: this machine has 2 GPUs for JAX"),
        ("0", 2, 8, "devices must be \"all\" or a number from 1, got '0'"),
        ("two", 2, 8, "devices must be \"all\" or a number from 1, got 'two'"),
        ("3", 2, 8, "--devices 3 is no multiple of --tensor-parallel-size 2"),
        ("all", 4, 2, "--tensor-parallel-size 4: this machine has 2 GPUs for JAX"),
        ("all", 0, 2, "tensor_parallel_size must be at least 1, got 0"),
    ],
)
def test_devices_that_are_not_there(devices, size, gpus, said):
    with pytest.raises(ConfigError) as error:
        launch.start_of(launch.Devices(devices=devices, tensor_parallel_size=size), gpus)
    assert str(error.value) == said


def test_every_process_of_a_host_has_a_gpu_of_its_own():
    """By hand 8 processes on two hosts of 4 GPUs; by a cluster the local number, where it knows one."""
    by_hand = [launch.Devices(coordinator="a:1", process_id=index, num_processes=8) for index in range(8)]
    one = [range(n, n + 1) for n in range(4)]
    assert [launch._own_gpus(given, None, 4) for given in by_hand] == one * 2
    for local, gpus, own in ((2, 4, one[2]), (5, 4, one[1]), (0, 1, one[0]), (None, 4, None), (3, 0, None)):
        cluster = types.SimpleNamespace(get_local_process_id=lambda local=local: local)
        assert launch._own_gpus(launch.Devices(), cluster, gpus) == own


SHARED = "they share prompts and micro-batches"
ALONE, FIRST = launch.Start(), {"jax_cuda_visible_devices": "0"}


@pytest.mark.parametrize(
    ("given", "gpus", "start"),
    [
        ({}, 8, launch.Start(8, said=f"8 of 8 GPUs (--devices all), a process each: {SHARED}")),
        ({"devices": "3"}, 8, launch.Start(3, said=f"3 of 8 GPUs (--devices 3), a process each: {SHARED}")),
        (
            {"devices": "6", "tensor_parallel_size": 2}, 8,
            launch.Start(
                3, None, 2, {},
                f"6 of 8 GPUs (--devices 6 --tensor-parallel-size 2), 3 processes with 2 each: {SHARED}",
            ),
        ),
        (
            {"devices": "4", "tensor_parallel_size": 4}, 8,
            launch.Start(
                1, None, 4, {"jax_cuda_visible_devices": "0,1,2,3"},
                "4 of 8 GPUs (--devices 4 --tensor-parallel-size 4), which share the layers",
            ),
        ),
        ({"devices": "1"}, 8, launch.Start(settings=FIRST, said="1 of 8 GPUs (--devices 1)")),
        ({}, 1, ALONE),
        ({}, 0, ALONE),
        (
            {"devices": "3"}, 0,
            launch.Start(3, said=f"3 processes on the CPU (--devices 3), a process each: {SHARED}"),
        ),
        ({"tensor_parallel_size": 2}, 0, launch.Start(1, None, 2, {"jax_num_cpu_devices": 2})),
        (
            {"coordinator": "a:1", "process_id": 1, "num_processes": 2, "tensor_parallel_size": 2}, 4,
            launch.Start(1, ("a:1", 1, 2, range(2, 4)), 2),
        ),
        (
            {"coordinator": "a:1", "process_id": 1, "num_processes": 2, "tensor_parallel_size": 3}, 0,
            launch.Start(1, ("a:1", 1, 2, None), 3, {"jax_num_cpu_devices": 3}),
        ),
    ],
)  # fmt: skip
def test_a_command_says_which_gpus_it_takes_and_takes_them(given, gpus, start):
    """A number of processes, the first GPUs in this one, or those of its place among others."""
    assert launch.start_of(launch.Devices(**given), gpus) == start


def test_the_cluster_that_started_a_process_gives_its_place():
    cluster = types.SimpleNamespace(get_local_process_id=lambda: 2)
    start = launch.start_of(launch.Devices(devices="3"), 4, cluster)
    assert start == launch.Start(place=(None, None, None, range(2, 3)))


def test_a_pod_is_one_of_several_in_an_indexed_job_alone(monkeypatch):
    class K8sCluster:
        opt_in_only_method, is_env_present, get_process_count = False, lambda: True, lambda: 2

    monkeypatch.setattr(clusters.ClusterEnv, "_cluster_types", [K8sCluster])
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    assert launch._cluster() is None
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert launch._cluster() is K8sCluster


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (ConfigError("no"), FAILED), (OSError("no"), FAILED), (MemoryError(), FAILED),
     (KeyboardInterrupt(), STOPPED), (KeyError("a bug"), None)],
)  # fmt: skip
def test_the_first_of_several_processes_speaks_for_all(error, code, capsys):
    """What it prints, and errors of the input. The others end with its exit code; all of them leave."""

    def body(replicas: Replicas) -> int:
        print("from", replicas.index)
        if error is not None:
            raise error
        return 0

    for index in (0, 1):
        link = ThreadLink(Store(), index, 2)
        if error is not None and (index == 0 or code is None):
            with pytest.raises(type(error)):
                launch.as_replica(Replicas(index, 2, link), body)
        else:
            assert launch.as_replica(Replicas(index, 2, link), body) == code
        assert link.has_left
        told = [pickle.loads(message).partition(type(error).__name__)[0] for message in link.store.messages.values()]
        assert told == ([] if error is None else [f"replica {index} failed: "])
    assert capsys.readouterr().out == "from 0\n"
    assert launch.as_replica(Replicas(0, 1, ThreadLink(Store(), 0, 1)), lambda replicas: 7) == 7


def test_a_command_for_one_device_takes_the_first_of_all():
    one = launch.Devices().of_one()
    assert launch.start_of(one, 8) == launch.Start(settings=FIRST, said="1 of 8 GPUs (--devices 1)")
    assert launch.start_of(one, 0) == ALONE and launch.Devices(devices="2").of_one().devices == "2"


@pytest.mark.parametrize("index", [-1, 2])
def test_a_place_beyond_the_last(index):
    assert launch.count(launch.Devices(coordinator="a:1", process_id=1, num_processes=2)) == 2
    given = launch.Devices(coordinator="a:1", process_id=index, num_processes=2)
    with pytest.raises(ConfigError, match=f"process_id must be from 0 to num_processes - 1, got {index}"):
        launch.count(given)


@pytest.mark.parametrize("flags", [["--process-id", "0"], ["--num-processes", "2"], ["--coordinator", "a:1"]])
def test_a_place_that_is_incomplete(flags, capsys):
    assert train.main(flags) == 2
    assert "--coordinator, --process-id and --num-processes belong together" in capsys.readouterr().err


CHILD = """
import os, pathlib, signal, sys, time
index, here = int(sys.argv[-1]), pathlib.Path(__file__).parent
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7))
print("ready", index, flush=True)
(here / f"ready{index}").touch()
while len(list(here.glob("ready*"))) < 3:
    time.sleep(0.01)
"""
DIES = "os.kill(os.getpid(), 9) if index == 1 else time.sleep(60)"


@pytest.mark.parametrize(
    ("body", "grace", "code", "said"),
    [
        ("", 30, 0, ""),
        ("sys.exit(3 if index == 1 else 0)", 30, 3, ""),  # the others end by themselves
        (DIES, 30, 137, "process 1 of 3 was ended by SIGKILL\n"),
        (
            f"signal.signal(signal.SIGUSR2, signal.SIG_IGN)\ntime.sleep(0.5)\n{DIES}",
            0,
            137,
            "process 1 of 3 was ended by SIGKILL\nprocess 0 of 3 did not end within 0 s and is killed\n"
            "process 2 of 3 did not end within 0 s and is killed\n",
        ),
        ("os.kill(os.getppid(), signal.SIGTERM) if index == 0 else None\ntime.sleep(60)", 30, 130, ""),
        ("os.kill(os.getppid(), signal.SIGHUP) if index == 0 else None\ntime.sleep(9)", 30, 129, ""),
    ],
)
def test_processes_end_together(body, grace, code, said, tmp_path, capfd):
    (tmp_path / "child.py").write_text(CHILD + body)
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        assert launch.launch([str(tmp_path / "child.py")], 3, grace) == code
    finally:
        signal.signal(signal.SIGHUP, before)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("ready 0\n", said)  # the others' standard output is dropped


def test_a_signal_while_processes_are_started_reaches_all():
    sleeping = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    assert launch._wait(sleeping, [signal.SIGTERM], 30) == 128 + signal.SIGTERM


ORPHAN = """
import os, pathlib, signal, sys, threading, time
from qerl_jax import launch
if sys.argv[1:]:
    got = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    launch._end_with_launcher()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1)
    pathlib.Path(__file__).with_name("got").write_text(str(len(got)))
else:
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    launch.launch([__file__], 1)
"""


def test_a_dead_launcher_ends_its_processes_by_one_signal(tmp_path):
    """A second one would end a process at once, without its checkpoint."""
    (tmp_path / "both.py").write_text(ORPHAN)
    assert subprocess.run([sys.executable, tmp_path / "both.py"]).returncode == -signal.SIGKILL
    got = tmp_path / "got"
    for _ in range(300):
        if got.exists() and got.read_text():
            break
        time.sleep(0.1)
    assert got.read_text() == "1"


def test_processes_have_sessions_of_their_own():
    """So that Ctrl-C reaches them once, through their launcher."""
    assert launch.launch(["-c", "import os, sys; sys.exit(os.getsid(0) != os.getpid())"], 1) == 0


def processes_of(launcher: int) -> dict[int, int]:
    """Process id of each replica that a launcher has started (Linux)."""
    found = {}
    for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if "--process-id" in words:
            found[int(words[words.index("--process-id") + 1])] = child
    return found


def write_configs(root: Path, **shape: int) -> None:
    """`one.yaml` and `two.yaml`: the same run into `one` and `two`, without a checkpoint before its end."""
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(16)]
    (root / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD)
    model = small.bf16(root / "model", num_hidden_layers=1, **shape)
    for name in ("one", "two"):
        config = runs.config(
            root / name, model=str(model), weight_format=None, dataset=str(root / "problems.jsonl"), max_steps=STEPS,
            reward_funcs=(f"{root / 'reward.py'}:length",), reward_weights=(1.0,), reward_workers=0, num_iterations=1,
            save_steps=1000, dynamic_sampling=False, train_norms=False, beta=0.0, max_prompt_length=120,
        )  # fmt: skip
        (root / f"{name}.yaml").write_text(dump(config))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("launch")
    write_configs(root)
    return root


@pytest.fixture(scope="module")
def killed(place):
    """(exit code, output, seconds from the kill to the end) of the run of two, whose second process is killed after
    some steps. The run of one is run meanwhile: this end is seconds of waiting.
    """
    proxy = "http://127.0.0.1:9"  # which nobody answers, and is not meant for the other process
    with (
        runs.start(place / "two.yaml", "--devices", "2", http_proxy=proxy, no_proxy="") as process,
        ThreadPoolExecutor(1) as pool,
    ):
        runs.wait_for_step(place / "two", 2, process)
        began, replicas = time.monotonic(), processes_of(process.pid)
        assert sorted(replicas) == [0, 1]
        os.kill(replicas[1], signal.SIGKILL)
        end = pool.submit(lambda: (process.communicate(timeout=100)[0], time.monotonic() - began))
        assert train.main(["--config", str(place / "one.yaml")]) == 0
        output, seconds = end.result()
    return process.returncode, output, seconds


def assert_same_records(one: Path, other: Path, steps: int) -> None:
    """Tokens and rewards are equal; advantages and metrics are to rounding, as the processes compile by themselves."""
    for step in range(1, steps + 1):
        tables = [pyarrow.parquet.read_table(run / "completions" / f"step_{step:06d}.parquet") for run in (one, other)]
        assert tables[0].drop_columns("advantage") == tables[1].drop_columns("advantage")
        np.testing.assert_allclose(*(table["advantage"].to_numpy() for table in tables), rtol=1e-6)
    rows = [read_metrics(run)[:steps] for run in (one, other)]
    for first, second in zip(*rows, strict=True):
        assert first.keys() == second.keys() - {"time/gather"}
        for name in first.keys() - {name for name in first if name.startswith(runs.TIMES)}:
            np.testing.assert_allclose(second[name], first[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_killed_process_ends_the_run_and_loses_no_step(place, killed):
    code, output, seconds = killed
    assert code == 128 + signal.SIGKILL and seconds < 60
    done = len(read_metrics(place / "two"))
    assert 2 <= done < STEPS
    lines = output.splitlines()
    assert "2 processes on the CPU (--devices 2), a process each: they share prompts and micro-batches" in lines
    assert "process 1 of 2 was ended by SIGKILL" in lines and "proxy" not in output
    assert sum(line.startswith("compiled programs are kept in") for line in lines) == 1
    saved = latest_step(place / "two")
    assert done - saved in (0, 1)
    assert f"step {saved + 1} did not end; the state after step {saved} is saved, resume from it with" in lines
    assert_same_records(place / "one", place / "two", done)


def assert_close_arrays(one: Path, other: Path) -> None:
    """Gradients are sums in another order, so that adapters agree to rounding."""
    arrays = [runs.final_arrays(run) for run in (one, other)]
    assert arrays[0].keys() == arrays[1].keys()
    for name, wanted in arrays[0].items():
        np.testing.assert_allclose(arrays[1][name], wanted, rtol=1e-3, atol=1e-5, err_msg=name)


def test_one_process_resumes_the_run_of_two(place, killed):
    assert train.main(["--config", str(place / "two.yaml"), "--resume", "auto"]) == 0
    assert_same_records(place / "one", place / "two", STEPS)
    assert_close_arrays(place / "one", place / "two")


def train_both(root: Path, steps: int, one: tuple, two: tuple, **environment: str) -> list[str]:
    """What the runs `one` and `two` print with these flags; they are the same run."""
    printed = []
    for name, flags in (("one", one), ("two", two)):
        with runs.start(root / f"{name}.yaml", *flags, "--max-steps", str(steps), **environment) as process:
            printed.append(runs.finish(process))
    assert_same_records(root / "one", root / "two", steps)
    assert_close_arrays(root / "one", root / "two")
    return printed


@pytest.mark.nightly
def test_two_processes_of_two_devices_train_as_one_device(tmp_path):
    write_configs(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    train_both(tmp_path, 2, (), ("--devices", "2", "--tensor-parallel-size", "2"))


@pytest.mark.gpu
def test_two_gpus_train_as_one(tmp_path):
    if len(driver.gpus()) < 2:
        pytest.skip(f"needs two GPUs, this machine has {len(driver.gpus())}")
    write_configs(tmp_path)
    beside = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # what this process has taken
    one, two = (("--devices", count, "--batch-invariant") for count in ("1", "2"))
    assert ["2 of" in printed for printed in train_both(tmp_path, 3, one, two, **beside)] == [False, True]


def test_a_free_port_is_none_that_a_connection_gets_or_another_holds():
    """Else one that is opened before the processes have started may take it."""
    taken = launch.free_port()
    with socket.socket() as some:
        some.bind(("localhost", taken))
        assert launch.free_port([*[taken] * 20, 10_000]) != taken < 32768
