"""Programs in the sandbox of the reward `code` that try to leave it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attacks.harness import Case
from test_sandbox import ACTIONS, tried

from qerl_jax.rewards import sandbox

CALL = "import ctypes; assert ctypes.CDLL(None, use_errno=True).syscall({}) == -1"
MORE = [
    # by the number of the call, past every wrapper (x86-64)
    *((CALL.format(numbers), "done") for numbers in (
        "57", "58", "56, 17, 0, 0, 0, 0", "59, 0, 0, 0", "322, 0, 0, 0, 0, 0", "41, 2, 1, 0", "53, 1, 1, 0, 0",
        "425, 8, 0",
        "62, 1, 9", "200, 1, 9", "101, 16, 1, 0, 0", "310, 1, 0, 0, 0, 0, 0", "311, 1, 0, 0, 0, 0, 0", "319, b'x', 0",
        "434, 1, 0", "438, 0, 0, 0", "424, 0, 9, 0, 0", "272, 0x10000000", "308, 0, 0", "321, 0, 0, 0",
        "298, 0, 0, 0, 0, 0",
        "323, 0", "248, 0, 0, 0, 0, 0", "165, 0, 0, 0, 0, 0", "155, 0, 0", "161, b'/'", "169, 0, 0, 0", "175, 0, 0, 0",
        "246, 0, 0, 0, 0", "133, b'dev', 0o60600, 0", "76, b'OUTSIDE', 0", "90, b'OUTSIDE', 0o777",
        "92, b'OUTSIDE', 1, 1",
        "188, b'OUTSIDE', 0, 0, 0, 0", "253", "300, 0, 0", "304, 0, 0, 0", "29, 1, 4096, 0o1000", "64, 1, 1, 0o1000",
        "1000, 0", "0x40000000 + 39", "157, 22, 2, 0", "157, 1, 0", "302, 1, 7, 0, 0", "86, b'OUTSIDE', b'mine'",
        "88, b'OUTSIDE', b'mine'", "83, b'dir', 0o777", "82, b'OUTSIDE', b'mine'", "87, b'OUTSIDE'", "435, 0, 0",
    )),
    ("import os; os.open('/proc/1/environ', os.O_RDONLY)", "PermissionError"),
    ("open('/proc/self/environ').read()", "PermissionError"),
    ("open('/proc/self/mem', 'r+b')", "PermissionError"),
    ("import os; os.listdir('/proc/self/fd')", "PermissionError"),
    ("import os; os.listdir('/tmp')", "PermissionError"),
    ("import os; os.listdir('..')", "PermissionError"),
    ("import os; os.chdir('/'); open('etc/passwd')", "PermissionError"),
    ("import os; os.chroot('.')", "PermissionError"),
    ("import os; os.setuid(0); open('/etc/shadow')", "PermissionError"),
    ("import os; os.mkfifo('pipe')", "PermissionError"),
    ("import os; os.link('OUTSIDE', 'mine')", "PermissionError|OSError"),
    ("open('/dev/tty')", "PermissionError|OSError"),
    ("open('/dev/mem', 'rb')", "PermissionError|FileNotFoundError"),
    ("open('/dev/shm/x', 'w')", "PermissionError|FileNotFoundError"),
    ("import asyncio; asyncio.run(asyncio.sleep(0))", "PermissionError"),
    ("import concurrent.futures as f; f.ProcessPoolExecutor().submit(int).result()", "PermissionError|OSError"),
    ("import mmap; mmap.mmap(-1, 10**10)", "OSError|MemoryError"),
    ("x = [0] * 10**10", "MemoryError"),
    ("x = 'a' * 10**10", "MemoryError"),
    ("import sys; sys.setrecursionlimit(10**6); (f := lambda: f())()", "RecursionError|MemoryError"),
    ("import shutil; shutil.rmtree('OUTSIDE')", "PermissionError|NotADirectoryError|OSError"),
    ("for i in range(40): open(f'{i}', 'w').write('x')", "OSError|PermissionError"),
    ("import importlib; importlib.import_module('qerl_jax')", "ModuleNotFoundError|PermissionError"),
    ("import sqlite3; sqlite3.connect('OUTSIDE').execute('create table t(x)')", "OperationalError|PermissionError"),
    ("import ctypes; ctypes.CDLL('OUTSIDE')", "OSError|PermissionError"),
    ("import os; os.environ['LD_PRELOAD'] = 'OUTSIDE'; os.system('true')", "PermissionError|done"),
    ("import pty; pty.fork()", "PermissionError|OSError"),
    ("import signal; signal.raise_signal(0)", "done|OSError"),
    ("import os; os.nice(-20)", "PermissionError"),
    ("import os; os.sched_setaffinity(0, {0})", "PermissionError"),
    ("import time; time.clock_settime(0, 0)", "PermissionError"),
    ("import socket; socket.create_connection(('127.0.0.1', 22))", "PermissionError|OSError"),
    ("import fcntl; fcntl.ioctl(0, 0x5412, b'x')", "OSError"),
]  # fmt: skip
# Programs that end otherwise: (program, whether it may end well)
ENDLESS = {
    "a loop": "while True: pass",
    "a sleep": "import time; time.sleep(1000)",
    "a flood": "while True: print('x' * 10**6)",
    "a flood of files": "i = 0\nwhile True:\n    open(str(i), 'w').write('x' * 10**6)\n    i += 1",
    "a flood of threads": "import threading as t, time\nwhile 1: t.Thread(target=time.sleep, args=(99,)).start()",
    "ignored signals": (
        "import signal\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
        "while True: pass"
    ),
    "a regular expression": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "a power": "9 ** 9 ** 9",
    "a stop": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
}


def cases() -> Iterator[Case]:
    """Every case."""
    for action, outcome in (*ACTIONS, *MORE):
        yield Case(f"sandbox: {action}", _tries(action, outcome), code=0, limit=60,
                   prepare=lambda place: (place / "outside").write_text("kept"))  # fmt: skip
    for name, program in ENDLESS.items():
        yield Case(f"sandbox: {name} ends", _ends(program), code=0, limit=30)


def _tries(action: str, outcome: str):
    def run(place: Path) -> int:
        result = sandbox.run(tried(action.replace("OUTSIDE", str(place / "outside"))), "", 30.0)
        said = result.output.strip()
        print(said)
        return 0 if result.ok and said in outcome.split("|") else 3

    return run


def _ends(program: str):
    def run(place: Path) -> int:
        result = sandbox.run(program, "", 1.0)
        print("timed out" if result.timed_out else "ended early", len(result.output))
        return 0 if not result.ok and len(result.output) <= sandbox.FILE_BYTES else 3

    return run
