"""The sandbox of untrusted programs, layer by layer."""

from __future__ import annotations

import errno
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from processes import is_running, missing_confinement

from qerl_jax.rewards import confine, sandbox
from qerl_jax.rewards.code import code
from qerl_jax.rewards.functions import load_reward
from qerl_jax.rewards.outcomes import Crashed, RewardError

confined = pytest.mark.skipif(bool(missing_confinement()), reason=missing_confinement())


def tried(action: str) -> str:
    """A program that prints the outcome of an action."""
    return (
        f"try:\n    {action}\nexcept BaseException as error:\n    print(type(error).__name__)\nelse:\n    print('done')"
    )


# what a program tries: (statement, its outcome by `tried`); OUTSIDE stands for a file of ours
ACTIONS = [
    ("import os; os.fork()", "PermissionError"),
    ("import subprocess; subprocess.run(['true'])", "PermissionError"),
    ("import os; os.execv('/bin/true', ['true'])", "PermissionError"),
    ("import multiprocessing as m; m.get_context('spawn').Process().start()", "PermissionError"),
    ("import socket; socket.socket()", "PermissionError"),
    ("import socket; socket.socket(socket.AF_UNIX)", "PermissionError"),
    ("import urllib.request as u; u.urlopen('http://127.0.0.1:1')", "URLError"),
    ("bytearray(10 * 10**9)", "MemoryError"),
    ("open('/etc/passwd').read()", "PermissionError"),
    ("import os; os.listdir('/')", "PermissionError"),
    ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    ("import os; os.kill(-1, 9)", "PermissionError"),
    ("import os; os.truncate('OUTSIDE', 0)", "PermissionError"),
    ("import os; os.chmod('OUTSIDE', 0o777)", "PermissionError"),
    ("import os; os.remove('OUTSIDE')", "PermissionError"),
    ("import os; os.rename('OUTSIDE', 'mine')", "PermissionError|OSError"),
    ("import os; os.symlink('OUTSIDE', 'mine')", "PermissionError"),
    ("open('OUTSIDE', 'a').write('x')", "PermissionError"),
    ("open('OUTSIDE').read()", "PermissionError"),
    ("import resource as r; r.prlimit(1, r.RLIMIT_CPU)", "PermissionError"),
    ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError"),
    ("import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, 1)", "PermissionError"),
    ("import os; os.mkdir('directory')", "PermissionError"),
    ("import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == -1", "done"),
    ("import ctypes; assert ctypes.CDLL(None).prctl(15, b'name', 0, 0, 0) == 0", "done"),
    ("import ctypes; assert ctypes.CDLL(None).inotify_init1(0) == -1", "done"),
    ("import ctypes; assert ctypes.CDLL(None).fanotify_init(0, 0) == -1", "done"),
    ("import os; os.set_inheritable(os.pipe()[0], True)", "done"),
    ("import tempfile; tempfile.TemporaryFile().write(b'x')", "done"),
    ("open('big', 'wb').write(bytes(20_000_000))", "OSError"),
    ("open('mine', 'w').write('x'); assert open('mine').read() == 'x'", "done"),
    ("import threading as t; x = t.Thread(target=int); x.start(); x.join()", "done"),
    ("import numpy; assert numpy.arange(3).sum() == 3", "done"),
    ("import os; assert not {'SECRET', 'PYTHONPATH'} & set(os.environ)", "done"),
]  # fmt: skip


@confined
@pytest.mark.parametrize(("action", "outcome"), ACTIONS)
def test_what_a_program_can_do(action, outcome, tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    mode = outside.stat().st_mode
    monkeypatch.setenv("SECRET", "x")
    result = sandbox.run(tried(action.replace("OUTSIDE", str(outside))), "", 20.0)
    assert result.ok and result.output.removesuffix("\n") in outcome.split("|")
    assert outside.read_text() == "kept" and outside.stat().st_mode == mode


@confined
def test_a_fork_bomb_is_one_process():
    """Every fork is refused, also as root: the fork bomb counts its successes."""
    bomb = """
import os
born = 0
for _ in range(1000):
    try:
        born += os.fork() == 0 or 1
    except PermissionError:
        pass
print(born)
"""
    assert sandbox.run(bomb, "", 20.0).output == "0\n"


@confined
@pytest.mark.parametrize(
    "program", ["while True: pass", "import time; time.sleep(1000)", "input()\nwhile True: print('x' * 10**6)"]
)
def test_what_does_not_end_is_ended(program):
    started = time.monotonic()
    result = sandbox.run(program, "go", 0.5)
    assert not result.ok and time.monotonic() - started < 15
    assert len(result.output) <= sandbox.FILE_BYTES
    assert result.timed_out or result.output  # the printing one is stopped by the size of a file


@confined
def test_many_files_end_a_program_early():
    """Not at its time limit, and not counted as one that met it."""
    started = time.monotonic()
    result = sandbox.run("import time\nfor i in range(40): open(str(i), 'w')\ntime.sleep(1000)", "", 60.0)
    assert not result.ok and not result.timed_out and time.monotonic() - started < 30


HOLD = """
import os
files = []
for i in range(20):
    files.append(open(f"{i}", "wb"))
    os.remove(f"{i}")
    files[-1].write(bytes(10**7))
    files[-1].flush()
import time
time.sleep(1000)
"""


@confined
@pytest.mark.parametrize("has_quota", [True, False])
def test_deleted_files_that_are_held_open_count(has_quota, monkeypatch):
    """200 MB of them: refused by the directory's own quota, or seen by the parent where no such directory is had."""
    if not has_quota:
        monkeypatch.setattr(confine, "__file__", without_namespaces())
    started = time.monotonic()
    result = sandbox.run(HOLD, "", 60.0)
    assert not result.ok and not result.timed_out and time.monotonic() - started < 30


def without_namespaces() -> str:
    """A copy of `confine` on a system that refuses user namespaces."""
    path = Path(tempfile.mkdtemp()) / "confine.py"
    text = Path(confine.__file__).read_text()
    assert "if libc.unshare(_NEW_USER | _NEW_MOUNTS):" in text
    path.write_text(text.replace("if libc.unshare(_NEW_USER | _NEW_MOUNTS):", "if True:"))
    return str(path)


@confined
def test_many_threads_end_a_program_early():
    program = "import threading, time\nthreading.stack_size(65536)\nfor _ in range(500):\n"
    program += "    threading.Thread(target=time.sleep, args=(1000,)).start()\n"
    started = time.monotonic()
    result = sandbox.run(program, "", 60.0)
    assert not result.ok and not result.timed_out and time.monotonic() - started < 30


def test_a_full_disk_is_no_score(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sandbox, "run", full)
    info = {"test_cases": [{"input": "1", "output": "1"}]}
    (value,) = code(completions=["```python\nprint(1)\n```"], verification_info=[info], reward_timeout=[5.0])
    assert isinstance(value, Crashed) and math.isnan(value)


GRADER = """
from qerl_jax.rewards import sandbox
sandbox.run("while True: pass", "", 1000.0)
"""


@confined
def test_a_program_dies_with_the_process_that_started_it(tmp_path):
    """A grading process that is killed cannot clean up: the kernel does it."""
    litter = os.environ | {"TMPDIR": str(tmp_path)}  # the directory that nobody is left to remove
    with subprocess.Popen([sys.executable, "-c", GRADER], env=litter) as grader:
        children = Path(f"/proc/{grader.pid}/task/{grader.pid}/children")
        deadline = time.monotonic() + 60
        while not (pids := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.01)
        (pid,) = map(int, pids)
        while Path(f"/proc/{pid}/status").read_text().count("Seccomp:\t2") == 0 and time.monotonic() < deadline:
            time.sleep(0.01)  # until it is confined
        grader.kill()
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def test_numbers_of_system_calls_are_the_headers():
    """The filter's tables against Linux's own, where the headers are installed."""
    headers = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]
    tables = [
        {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text())}
        if file.exists()
        else {}
        for file in headers
    ]
    if not any(tables):
        pytest.skip("no kernel headers here")
    for name, numbers in (confine._REFUSED | confine._DECIDED).items():
        for number, table in zip(numbers, tables, strict=True):
            assert table.get(name, number) == number, name
            assert number is None or number <= confine._LAST_KNOWN


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_as_it_says(machine):
    """The BPF program, interpreted here, for every call number, and the calls whose arguments count."""
    column, audit = confine._AUDIT[machine]
    lines = [
        (int.from_bytes(line[:2], "little"), line[2], line[3], int.from_bytes(line[4:], "little"))
        for line in (lambda code: [code[i : i + 8] for i in range(0, len(code), 8)])(
            confine.filter_program(machine, 77)
        )
    ]

    def decide(number: int, first: int = 0, second: int = 0, machine_number: int = audit) -> int:
        data = {0: number, 4: machine_number, 16: first, 24: second}
        at, loaded = 0, 0
        while True:
            operation, if_true, if_false, value = lines[at]
            at += 1
            if operation == 0x20:
                loaded = data[value]
            elif operation == 0x06:
                return value
            else:
                holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[operation]
                at += if_true if holds else if_false

    refused = {numbers[column] for numbers in confine._REFUSED.values()} - {None}
    special = {name: numbers[column] for name, numbers in confine._DECIDED.items()}
    allow, eperm, enosys = confine._ALLOW, confine._EPERM, confine._ENOSYS
    for number in range(confine._LAST_KNOWN + 1):
        if number not in special.values():
            assert decide(number) == (eperm if number in refused else allow), number
    assert decide(confine._LAST_KNOWN + 1) == decide(0x40000000) == enosys
    assert decide(0, machine_number=1) == confine._KILL
    assert decide(special["clone3"]) == enosys
    assert decide(special["clone"], first=0x11) == eperm and decide(special["clone"], first=0x10F00) == allow
    assert decide(special["prlimit64"], first=0) == allow and decide(special["prlimit64"], first=1) == eperm
    assert decide(special["tgkill"], first=77) == allow and decide(special["tgkill"], first=78) == eperm
    assert decide(special["fcntl"], second=1) == allow and decide(special["fcntl"], second=8) == eperm
    set_name, death_signal, no_new_privileges = 15, 1, 38
    assert decide(special["prctl"], first=set_name) == allow
    assert decide(special["prctl"], first=death_signal) == decide(special["prctl"], first=no_new_privileges) == eperm
    get_terminal, set_flags, push_back = 0x5401, 0x40086602, 0x5412
    assert decide(special["ioctl"], second=get_terminal) == allow
    assert decide(special["ioctl"], second=set_flags) == decide(special["ioctl"], second=push_back) == 0x50000 + 25


def test_no_machine_without_a_table_and_no_system_but_linux(monkeypatch):
    with pytest.raises(OSError, match="'riscv64'"):
        confine.filter_program("riscv64", 1)
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(RewardError, match="on Linux only, this is darwin"):
        load_reward("code")


def test_a_program_that_cannot_be_confined_does_not_run(monkeypatch, tmp_path):
    """The error names a missing layer; here Landlock, requested by a call number that no kernel has."""
    script = tmp_path / "confine.py"
    source = Path(confine.__file__).read_text()
    script.write_text(
        source.replace('"Landlock", libc.syscall(_LANDLOCK_CREATE, None', '"Landlock", libc.syscall(9999, None')
    )
    assert script.read_text() != source
    monkeypatch.setattr(sandbox.confine, "__file__", str(script))
    with pytest.raises(RewardError, match=r"cannot confine programs on this machine: .*Landlock"):
        load_reward("code")
