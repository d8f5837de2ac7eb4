"""The command lines called in this process on a tiny model, and what they must say of bad input."""

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]
SHORT = ["--max-prompt-length", "120", "--max-completion-length", "6"]
RUN = [
    *("--lora-rank", "64", "--max-steps", "2", "--batch-size", "4", "--num-generations", "2", "--num-iterations", "1"),
    *("--save-steps", "1", "--num-stages", "3", "--learning-rate", "1e-3", "--dtype", "float32", *SHORT),
]


def lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def error_of(main: Callable[[list[str]], int], arguments: list[str], place: Path, capfd) -> str:
    """The one line that a command line ends with, with exit code 2."""
    capfd.readouterr()
    code = main(arguments)
    captured = capfd.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.out + captured.err, captured.out + captured.err
    text = captured.err.strip()
    for short, path in {"OUT": "run", "MODEL": "model", "DATA": "rows.jsonl"}.items():
        text = text.replace(str(place / path), short)
    return text


def assert_says(said: str, expected: str) -> None:
    """The whole message; `…` stands for what the words of another library may be."""
    pattern = ".*".join(re.escape(part) for part in f"error: {expected}".split("…"))
    assert re.fullmatch(pattern, said), f"said: {said}"


def training(place: Path, *more: str) -> list[str]:
    paths = {"--model": "model", "--dataset": "rows.jsonl", "--output-dir": "run"}
    return replaced([*(part for flag, name in paths.items() for part in (flag, str(place / name))), *RUN], *more)


def replaced(flags: list[str], *more: str) -> list[str]:
    """A command line with further flags, in the place of its own of the same names."""
    found: dict[str, list[str]] = {}
    for line in (flags, more):
        starts = [i for i, part in enumerate(line) if part.startswith("--")]
        found |= {line[i]: list(line[i:j]) for i, j in zip(starts, [*starts[1:], len(line)], strict=False)}
    return [part for group in found.values() for part in group]


def evaluation(place: Path) -> list[str]:
    return [str(place / "model"), "--dataset", str(place / "rows.jsonl"), *SHORT]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """A hang becomes an error."""

    def late(*_: object) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
