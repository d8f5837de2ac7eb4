"""Faults of the machine: no room, no reader, signals, what others delete."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import small
from attacks.harness import STOPPED, Case
from attacks.templates import (
    dry_runs,
    evaluates,
    exports,
    model_config,
    quantizes,
    trains,
    trains_by,
    written,
)

from qerl_jax.io.checkpoint import latest_step
from qerl_jax.reporting.metrics import read_metrics

RUN = ("run",)
LONG = ["--max-steps", "400", "--save-steps", "1000"]
FULL = "standard output cannot be written: No space left on device"
REWARD = "def f(completions, **columns):\n    return [float(len(text)) for text in completions]\n"


def limited(kind: int, value: int, run: Callable[[Path], int]) -> Callable[[Path], int]:
    """A command line under a limit of the system's."""

    def call(place: Path) -> int:
        resource.setrlimit(kind, (value, value))
        return run(place)

    return call


def environment(run: Callable[[Path], int], **values: str) -> Callable[[Path], int]:
    """A command line with other environment variables; "" removes one."""

    def call(place: Path) -> int:
        for name, value in values.items():
            os.environ.pop(name, None) if not value else os.environ.update({name: value})
        return run(place)

    return call


def closed(number: int, run: Callable[[Path], int]) -> Callable[[Path], int]:
    """A command line without one of the three standard descriptors."""

    def call(place: Path) -> int:
        os.close(number)
        return run(place)

    return call


def at_step(step: int, act: Callable[[Path, int], object]) -> Callable[[Path, int], None]:
    """During a run: act when a step is recorded, or after a minute."""

    def during(place: Path, pid: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            rows = read_metrics(place / "run")
            if rows and rows[-1]["step"] >= step:
                return act(place, pid)
            time.sleep(0.01)

    return during


def after(seconds: float, number: int) -> Callable[[Path, int], None]:
    """During a command: a signal, so long after its start."""

    def during(place: Path, pid: int) -> None:
        time.sleep(seconds)
        os.kill(pid, number)

    return during


def saved(place: Path) -> str:
    """Check: the last recorded step has its checkpoint."""
    rows, step = read_metrics(place / "run"), latest_step(place / "run")
    return "" if rows and rows[-1]["step"] == step else f"loss: {len(rows)} steps, checkpoint of {step}"


def rescued(place: Path) -> str:
    """Check: the state of a run without a directory lies beside it."""
    (found,) = [*place.glob("run-rescued-*"), None][:1]
    return "" if found and latest_step(found) else "loss: nothing was rescued"


def cases() -> Iterator[Case]:
    """Every case."""
    whole: dict[str, tuple[Callable[[Path], int], tuple[str, ...]]] = {
        "dry run": (dry_runs(), ()),
        "evaluation": (evaluates(), ()),
        "quantization": (quantizes("plain", "out"), ("out",)),
        "export": (exports("adapter", "out", "--as", "merged"), ("out",)),
        "help": (trains_by(["--help"]), ()),
        "quantize's help": (quantizes("--help"), ()),
    }
    plain = lambda place: small.bf16(place / "plain", 1)  # noqa: E731
    for name, (run, writes) in whole.items():
        common = {"prepare": plain, "writes": writes, "uses": ("adapter",), "limit": 60}
        if "help" not in name:
            yield Case(f"fault: {name}, full output", run, (FULL,), stdout="/dev/full", **common)
            yield Case(f"fault: {name}, no reader", run, code=(0, 1, 2), stdout="|", **common)
        yield Case(f"fault: {name}, ASCII", run, code=0, encoding="ascii", **common)
        yield Case(f"fault: {name}, no input", closed(0, run), code=0, **common)
        yield Case(f"fault: {name}, no home", environment(run, HOME="", XDG_CACHE_HOME=""), code=0, **common)
    long = {"writes": RUN, "limit": 120}
    yield Case("fault: a run, full output", trains(*LONG), (FULL,), STOPPED, stdout="/dev/full", check=saved, **long)
    yield Case("fault: a run, no reader", trains(*LONG), (), STOPPED, stdout="|", check=saved, **long)
    yield Case("fault: a run, ASCII", trains("--max-steps", "1"), (), 0, encoding="ascii", **long)
    yield Case(
        "fault: a run, brackets everywhere",
        trains("--model", "m[/b]", "--dataset", "d[/b].jsonl", "--output-dir", "r[/b]", "--reward-funcs", "f[/b].py:f"),
        (),
        0,
        writes=("r[",),
        limit=120,
        prepare=lambda place: (
            [(place / f"{name}[").mkdir() for name in "mdf"],
            (place / "model").rename(place / "m[/b]"),
            (place / "rows.jsonl").rename(place / "d[/b].jsonl"),
            (place / "f[/b].py").write_text(REWARD),
        ),
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield Case(
            f"fault: {number.name} in a step",
            trains(*LONG),
            (f"stopped by {number.name} after step",),
            STOPPED,
            during=at_step(2, lambda place, pid, number=number: os.kill(pid, number)),
            check=saved,
            **long,
        )
    yield Case(
        "fault: two SIGINTs in a step",
        trains(*LONG),
        ("interrupted|stopped",),
        STOPPED,
        **long,
        during=at_step(2, lambda place, pid: [os.kill(pid, signal.SIGINT), time.sleep(0.1), _again(pid)]),
    )
    for seconds in (0.1, 0.5, 1, 2, 4):
        flags = ["--compilation-cache-dir", "none"]
        yield Case(
            f"fault: SIGINT {seconds} s after the start",
            trains(*LONG, *flags),
            ("interrupted",),
            STOPPED,
            limit=30,
            writes=RUN,
            during=after(seconds, signal.SIGINT),
        )
        yield Case(
            f"fault: SIGINT {seconds} s into an evaluation",
            evaluates(*flags),
            ("interrupted",),
            STOPPED,
            limit=30,
            during=after(seconds, signal.SIGINT),
        )
        yield Case(
            f"fault: SIGTERM {seconds} s after the start",
            trains(*LONG, *flags),
            (),
            -signal.SIGTERM,
            limit=30,
            writes=RUN,
            during=after(seconds, signal.SIGTERM),
        )
    yield Case(
        "fault: SIGINT in a quantization",
        quantizes("plain", "out"),
        (),
        (0, STOPPED),
        prepare=plain,
        writes=("out",),
        during=after(0.2, signal.SIGINT),
        limit=30,
    )
    yield Case(
        "fault: the directory is deleted",
        trains(*LONG),
        ("was deleted during the run; the state after step",),
        2,
        during=at_step(2, lambda place, pid: shutil.rmtree(place / "run", ignore_errors=True)),
        limit=120,
        check=rescued,
        writes=RUN,
    )
    yield Case(
        "fault: the dataset is deleted",
        trains("--max-steps", "6"),
        (),
        0,
        writes=("run", "rows.jsonl"),
        limit=120,
        during=at_step(1, lambda place, pid: (place / "rows.jsonl").unlink()),
    )
    for size, says in (
        (1_000, "cannot be written"),
        (20_000, "cannot be written"),
    ):
        yield Case(
            f"fault: no file above {size} bytes", limited(resource.RLIMIT_FSIZE, size, trains()), (says,), **long
        )
    yield Case(
        "fault: a quantization without room",
        limited(resource.RLIMIT_FSIZE, 5_000, quantizes("plain", "out")),
        ("File too large|cannot be written",),
        prepare=plain,
    )
    yield Case(
        "fault: 14 open files",
        limited(resource.RLIMIT_NOFILE, 14, trains()),
        ("Too many open files|open files",),
        **long,
    )
    yield Case(
        "fault: a cache that is a file",
        trains("--compilation-cache-dir", "rows.jsonl", "--max-steps", "1"),
        ("is not writable",),
        0,
        **long,
    )
    yield Case("fault: no directory for temporary files", environment(evaluates(), TMPDIR="/nothing"), (), 0, limit=60)
    yield Case(
        "fault: a batch beyond all memory",
        trains("--batch-size", str(2**30), "--num-generations", str(2**29)),
        ("batch_size must be at most",),
    )
    yield Case(
        "fault: completions beyond all memory",
        trains("--max-completion-length", str(2**30)),
        ("exceed max_position",),
        prepare=model_config(max_position_embeddings=1000),
    )
    yield Case("fault: an update beyond its memory", trains("--update-memory-gb", "1e-9"), (), (0, 2), **long)
    for body, says in {
        "raise KeyError('[/b]')": r"raised KeyError\('\[/b\]'\)",
        "import os; os._exit(1)": "the process died",
        "while True: pass": "were stopped after reward_timeout",
        "import sys; sys.exit(3)": "raised SystemExit",
        "return [float('nan')] * len(completions)": "returned nan",
        "return 10**401": "returned a int|not iterable",
        "return [10**401] * len(completions)": "expected a finite number",
        "import ctypes; ctypes.string_at(0)": "the process died",
        "raise KeyboardInterrupt": r"raised KeyboardInterrupt\(\)",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM); return [0.0] * len(completions)": "",
    }.items():
        code = (0, 2, STOPPED, -signal.SIGTERM) if "SIGTERM" in body else 2
        yield Case(
            f"fault: a reward that does {body[:40]}",
            trains("--reward-funcs", "r.py:f", "--reward-timeout", "1", "--reward-workers", "1"),
            (says,),
            code,
            prepare=written("r.py", f"def f(completions, **columns):\n    {body}\n"),
            **long,
        )


def _again(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)
