"""The sandbox of untrusted programs, limit by limit."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import is_running, missing_sandbox

from qerl_jax.rewards import sandbox

MISSING = missing_sandbox()
confined = pytest.mark.skipif(bool(MISSING), reason=MISSING)


# what a program tries: (statement, its outcome)
ACTIONS = [
    ("import urllib.request as u; u.urlopen('http://127.0.0.1:PORT')", "URLError"),
    ("import socket; socket.create_connection(('127.0.0.1', PORT))", "OSError|ConnectionRefusedError"),
    ("import socket; socket.create_connection(('1.1.1.1', 53), 3)", "OSError"),
    ("open('OUTSIDE').read()", "FileNotFoundError"),
    ("open('/etc/passwd').read()", "FileNotFoundError"),
    ("open('/proc/self/environ').read()", "FileNotFoundError"),
    ("import sys; open(sys.prefix + '/planted', 'w')", "OSError|PermissionError"),
    ("open('/planted', 'w')", "OSError|PermissionError"),
    ("import os; os.mkdir('/dev/shm')", "OSError|PermissionError"),
    ("import os; os.kill(TRAINER, 9)", "ProcessLookupError"),
    ("import os; os.setuid(0)", "PermissionError"),
    ("import os; assert os.getuid() != 0 or ROOTLESS", "done"),
    ("import ctypes; assert ctypes.CDLL(None).mount(None, b'/', None, 1 << 5, None) == -1", "done"),
    ("bytearray(10 * 10**9)", "MemoryError"),
    ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError"),
    ("open('mine', 'w').write('x'); assert open('mine').read() == 'x'", "done"),
    ("open('big', 'wb').write(bytes(20_000_000))", "OSError"),
    ("[open(str(i), 'wb').write(bytes(10**7)) for i in range(7)]", "OSError"),
    ("import threading as t; x = t.Thread(target=int); x.start(); x.join()", "done"),
    ("import subprocess as s, sys; s.run([sys.executable, '-c', ''], check=True)", "done"),
    ("import numpy; assert numpy.arange(3).sum() == 3", "done"),
    ("import os; assert 'PYTEST_CURRENT_TEST' not in os.environ", "done"),
]  # fmt: skip


@confined
def test_what_a_program_can_do(tmp_path):
    """One program tries all of it, and prints "done" or the name of an error for each."""
    outside = tmp_path / "outside"
    outside.write_text("kept")
    assert "PYTEST_CURRENT_TEST" in os.environ
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {
            "OUTSIDE": outside,
            "PORT": server.getsockname()[1],
            "TRAINER": os.getpid(),
            "ROOTLESS": os.getuid() == 0 and not sandbox._is_root(),
        }
        attempt = "try:\n    {}\n    print('done')\nexcept BaseException as error:\n    print(type(error).__name__)"
        program = "\n".join(attempt.format(action) for action, _ in ACTIONS)
        for name, value in values.items():
            program = program.replace(name, str(value))
        result = sandbox.run(program, "", 30.0)
    assert result.ok
    for found, (action, expected) in zip(result.output.split("\n"), [*ACTIONS, ("", "")], strict=True):
        assert found in expected.split("|"), action
    assert outside.read_text() == "kept" and not Path("/planted").exists()


def test_what_bubblewrap_is_asked_for():
    """Also where it is not installed: nothing of the machine can be written, no capability or namespace is shared."""
    flags = sandbox._files()
    assert not {"--bind", "--bind-try", "--dev", "--proc"} & set(flags) and flags.count("--remount-ro") == 1
    at = flags.index("--remount-ro")
    assert flags[at:] == ["--remount-ro", "/", "--chdir", "/tmp"] and flags[at - 2 : at] == ["--tmpfs", "/tmp"]
    bound = {flags[i + 1] for i, flag in enumerate(flags) if flag == "--dev-bind"}
    assert bound == {"/dev/null", "/dev/zero", "/dev/urandom"}
    for is_root in (False, True):
        own = sandbox._namespaces(is_root)
        assert {"--unshare-ipc", "--unshare-pid", "--unshare-net", "--die-with-parent"} <= set(own)
        assert ("--unshare-user" in own) == (not is_root)
        assert own[own.index("--cap-drop") + 1] == "ALL"
        added = {own[i + 1] for i, flag in enumerate(own) if flag == "--cap-add"}
        assert added == ({"CAP_SETUID", "CAP_SETGID"} if is_root else set())


# System V: a queue, a semaphore and shared memory of this process, which others may use.
IPC = {"msgget": (0o1666,), "semget": (1, 0o1666), "shmget": (4096, 0o1666)}


@confined
@pytest.mark.parametrize("name", IPC)
def test_queues_semaphores_and_shared_memory_of_others_are_not_there(name):
    libc, key, arguments = ctypes.CDLL(None, use_errno=True), 77_000_001, IPC[name]
    made = getattr(libc, name)(key, *arguments)
    assert made >= 0
    try:
        existing = (*arguments[:-1], 0)  # -1 where there is none
        program = f"import ctypes; print(ctypes.CDLL(None).{name}{(key, *existing)})"
        seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
        assert int(seen) == made  # as a process outside sees it
        assert sandbox.run(program, "", 30.0).output == "-1\n"
    finally:
        control = {"msgget": libc.msgctl, "semget": libc.semctl, "shmget": libc.shmctl}[name]
        control(made, *((0,) if name == "semget" else ()), 0, None)  # IPC_RMID


@confined
def test_posix_queues_of_others_are_not_there():
    libc, name = ctypes.CDLL(None, use_errno=True), f"/qerl{os.getpid()}".encode()
    made = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o666, None)
    if made < 0:
        pytest.skip("this kernel has no POSIX message queues")
    try:
        program = f"import ctypes; print(ctypes.CDLL(None).mq_open({name}, 2) >= 0)"
        seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
        assert seen == "True\n" and sandbox.run(program, "", 30.0).output == "False\n"
    finally:
        os.close(made)
        libc.mq_unlink(name)


@confined
def test_a_fork_bomb_is_a_few_processes():
    bomb = """
import os, time
born = 0
for _ in range(1000):
    try:
        if os.fork() == 0:
            time.sleep(1000)
        born += 1
    except OSError:
        break
print(born)
"""
    result = sandbox.run(bomb, "", 30.0)
    assert result.ok and result.output == f"{sandbox.MAX_PROCESSES - 1}\n"


@confined
@pytest.mark.parametrize(
    "program", ["while True: pass", "import time; time.sleep(1000)", "input()\nwhile True: print('x' * 10**6)"]
)
def test_what_does_not_end_is_ended(program):
    """And nothing of it stays open: a run has thousands of programs."""
    started, descriptors = time.monotonic(), sorted(os.listdir("/proc/self/fd"))
    result = sandbox.run(program, "go", 1.0)
    assert not result.ok and time.monotonic() - started < 15
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert len(result.output) <= sandbox.FILE_BYTES
    assert result.timed_out or result.output  # the printing one is stopped by the size of a file


def test_what_a_program_prints_is_its_output():
    if MISSING:
        pytest.skip(MISSING)
    result = sandbox.run("import sys\nprint(input() * 2, 'é')\nprint('no', file=sys.stderr)", "ab\ncd", 30.0)
    assert result == sandbox.Result(ok=True, output="abab é\n", timed_out=False)
    called = sandbox.run("def f(a, b):\n    print('noise')\n    return [a, b]", "", 30.0, ("f", [1, "x"]))
    assert called == sandbox.Result(ok=True, output='[1, "x"]', timed_out=False)
    assert not sandbox.run("print(1)\nraise SystemExit(3)", "", 30.0).ok


GRADER = """
from qerl_jax.rewards import sandbox
sandbox.run("while True: pass", "", 1000.0)
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@confined
def test_a_program_dies_with_the_process_that_started_it():
    """A grading process that is killed cannot clean up: the kernel does it."""
    with subprocess.Popen([sys.executable, "-c", GRADER]) as grader:
        deadline, family = time.monotonic() + 60, []
        while len(family) < 3 and time.monotonic() < deadline:  # bubblewrap, its process 1, the program
            family, new = [], children(grader.pid)
            while new:
                family.append(new.pop())
                new += children(family[-1])
            time.sleep(0.01)
        grader.kill()
    assert len(family) >= 3
    while any(map(is_running, family)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, family))


@confined
def test_threads_may_run_programs_at_once():
    outputs: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: outputs.append(sandbox.run(f"print({i})", "", 30.0).output))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == ["0\n", "1\n", "2\n"]
