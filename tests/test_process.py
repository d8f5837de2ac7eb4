"""How the process of a command line ends: one line and an exit code, whatever stops it."""

import contextlib
import io
import subprocess
import sys

import jax
import pytest

from qerl_jax import command


def raising(error: BaseException):
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("two\nlines"), "error: two lines"),
        (OSError("gone"), "error: gone"),
        (ValueError(), "error: ValueError()"),
        (MemoryError(), "error: out of memory"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 byte"),
            "error: out of memory: JaxRuntimeError: RESOURCE_EXHAUSTED: 1 byte",
        ),
    ],
)
def test_an_error_is_one_line(error, said, capsys):
    assert command.run(raising(error)) == command.FAILED
    assert capsys.readouterr().err == said + "\n"


def test_a_bug_is_no_message():
    for error in (KeyError("bug"), jax.errors.JaxRuntimeError("INTERNAL")):
        with pytest.raises(type(error)):
            command.run(raising(error))


def test_an_interrupt_says_what_is_left(capsys):
    code = command.run(raising(KeyboardInterrupt()), lambda: "interrupted; resume with\n  x")
    assert code == command.STOPPED and capsys.readouterr().err == "interrupted; resume with\n  x\n"
    code = command.run(raising(KeyboardInterrupt("in the evaluation")))
    assert code == command.STOPPED and capsys.readouterr().err == "in the evaluation\n"


SWALLOWED = """
import gc, signal, time
from qerl_jax import command

def callback(phase, info):
    gc.callbacks.remove(callback)
    signal.raise_signal(signal.SIGINT)

def body():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command ignores it
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(100)

command.end(lambda: command.run(body))
"""


def test_an_interrupt_that_a_callback_swallows_comes_again():
    """As JAX's, which runs at any garbage collection, and from which Python raises nothing."""
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, timeout=90)
    assert done.returncode == command.STOPPED and done.stderr == "interrupted\n"


PRINTS = """
from qerl_jax import command
command.end(lambda: command.run(lambda: print("result") or 0))
"""


def test_a_full_disk_behind_standard_output():
    """/dev/full refuses what is flushed: one line, and nothing else fails at the interpreter's end."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (command.FAILED, "error: [Errno 28] No space left on device\n")


CLOSED = """
import os, subprocess, sys
from qerl_jax import command
def main():
    print("to nowhere")
    print("nor here", file=sys.stderr)
    with open("file", "w") as file:
        names = [os.readlink("/proc/self/fd/%d" % number) for number in range(3)]
        print(file.fileno() > 2, names, subprocess.call(["sh", "-c", "echo nowhere"]), file=file, end="")
    return 0
command.end(lambda: command.run(main))
"""


def test_closed_standard_streams_get_into_no_file(tmp_path):
    """`<&- >&- 2>&-`: the first file that is opened would be standard output."""
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED]
    assert subprocess.run(shell, cwd=tmp_path).returncode == 0
    assert (tmp_path / "file").read_text() == f"True {['/dev/null'] * 3} 0"


ENDS = """
import atexit, logging.handlers, os, sys, types
import jax
atexit.register(lambda: print("as JAX's", end=" ", flush=True))
from qerl_jax import command
atexit.register(lambda: print("hook", end=" "))
file, log = open("file", "w"), logging.handlers.MemoryHandler(9, target=logging.FileHandler("log"))
atexit.register(lambda: file.write("held back") and log.handle(logging.makeLogRecord({"msg": "too", "levelno": 20})))
for code, run in ((0, None), (2, "a run"), (2, None), (130, "a run"), (1, "a run")):
    if not (child := os.fork()):
        sys.modules["wandb"] = types.SimpleNamespace(run=run)
        command.end(lambda: code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def test_only_wandbs_failed_run_and_success_end_with_the_hooks_behind_jaxs(tmp_path):
    """And with what files and loggers have held back."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ENDS], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("hook 0\nhook 2\n2\n130\n1\n", "")
    assert (tmp_path / "log").read_text() == "too\n" * 2 and "held back" in (tmp_path / "file").read_text()


def test_a_terminal_that_knows_ascii_alone():
    written = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(written):
        assert command.run(lambda: print("σ …") or 0) == 0
    assert written.buffer.getvalue() == b"\\u03c3 \\u2026\n"


# Ctrl-C while two threads are inside XLA's compiler, each with a program that takes it seconds.
COMPILING = """
import os, signal, threading, time
import jax, jax.numpy as jnp
from qerl_jax import command, programs
jax.config.update("jax_enable_compilation_cache", False)
signal.signal(signal.SIGINT, signal.default_int_handler)
lowered = []
def long(number):
    def f(x):
        for i in range(800):
            x = jnp.sin(x @ x + number * i)
        return x
    return programs.program(f)
programs.kernel_programs = lambda program: lowered.append(program) or {}
several = [long(n) for n in range(3)]
def body():
    def interrupt():
        while len(lowered) < 3:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    with programs.Ahead(2) as ahead:
        for compiling in ahead.begin(lambda x: [f(x) for f in several], jnp.ones((8, 8))):
            compiling.result()
    print("compiled")
command.end(lambda: command.run(body, lambda: "interrupted; as it was"))
"""


def test_an_interrupt_among_real_compilations_crashes_nothing():
    """Threads that are inside a compiler while the interpreter shuts down may end in SIGSEGV: it does not shut down."""
    done = subprocess.run([sys.executable, "-c", COMPILING], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (command.STOPPED, "", "interrupted; as it was\n")
