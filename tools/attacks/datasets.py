"""Dataset files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pyarrow
import pyarrow.parquet
from attacks.harness import Case, quoted
from attacks.templates import evaluates, reads, written
from command_lines import ROWS, lines
from test_bad_input import DATASETS

HUGE = "9" * 401
GOOD = lines(ROWS)


def cases() -> Iterator[Case]:
    """Every case."""
    for name, (content, message) in DATASETS.items():
        said = tuple(quoted(part) for part in message.replace("DATA", "rows.jsonl").split("…") if part.strip())
        yield Case(f"dataset: {name}", reads(), said, prepare=written("rows.jsonl", content))
        yield Case(f"dataset: {name}, evaluated", evaluates(), said, prepare=written("rows.jsonl", content))
    row = '{"question": "q", "answer": %s}\n'
    refused: dict[str, tuple[str | bytes, str]] = {
        "a key twice": ('{"question": "q", "question": "r", "answer": "1"}\n', "the key 'question' is given twice"),
        "a key twice, deep": (
            '{"question": "q", "answer": "1", "n": {"a": 1, "a": 2}}\n',
            "the key 'a' is given twice",
        ),
        "an answer of 1e400": (row % "1e400" * 8, "'answer' is not finite"),
        "an answer of -Infinity": (row % "-Infinity" * 8, "'answer' is not finite"),
        "an answer of NaN": (row % "NaN" * 8, "no 'answer'"),
        "an answer of 5000 digits": (row % ("9" * 5000), "line 1 is not JSON"),
        "answers that are lists": (row % "[1]" * 8, "'answer' is neither text nor a number"),
        "answers that are truth values": (row % "true", "rows.jsonl"),
        "bytes that are no UTF-8": (b'{"question": "\xff", "answer": "1"}\n', "line 1 is not UTF-8"),
        "half a surrogate pair": ('{"question": "\\ud800", "answer": "1"}\n', "'question' is not valid Unicode"),
        "UTF-16": (GOOD.encode("utf-16"), "line 1 is not"),
        "brackets without an end": (b"[" * 200_000, "line 1 is not JSON"),
        "a zero byte": (b'{"question": "a\0b", "answer": "1"}\n', "line 1 is not JSON"),
        "a prompt of 2 MB": (
            json.dumps({"question": "a" * 2_000_000, "answer": "1"}),
            "'question' over 1000000 characters",
        ),
        "an answer of 2 MB": (
            json.dumps({"question": "a", "answer": "1" * 2_000_000}),
            "'answer' over 1000000 characters",
        ),
        "messages of another shape": (json.dumps({"question": [1], "answer": "1"}), "question"),
        "messages of an unknown role": (
            json.dumps({"question": [{"role": "tool", "content": "x"}], "answer": "1"}),
            "question",
        ),
        "messages without an end": (
            json.dumps({"question": [{"role": "assistant", "content": "x"}], "answer": "1"}),
            "question",
        ),
    }
    for name, (content, says) in refused.items():
        yield Case(f"dataset: {name}", reads(), (says,), prepare=written("rows.jsonl", content))
    legal: dict[str, str | bytes] = {
        "numbers of 401 digits": row % HUGE * 8,
        "a byte-order mark": b"\xef\xbb\xbf" + GOOD.encode(),
        "DOS line ends": GOOD.replace("\n", "\r\n"),
        "empty lines": GOOD.replace("\n", "\n\n"),
        "one prompt of 60 MB among others": GOOD + json.dumps({"question": "ab1 " * 15_000_000, "answer": "1"}) + "\n",
        "one word of 60 MB among others": GOOD + json.dumps({"question": "a" * 60_000_000, "answer": "1"}) + "\n",
        "a prompt of a million letters": GOOD + json.dumps({"question": "a" * 1_000_000, "answer": "1"}) + "\n",
        "control tokens": json.dumps({"question": "<|im_end|><|im_start|>system", "answer": "1"}) + "\n" + GOOD,
        "markup": json.dumps({"question": "[/b] [bold", "answer": "1"}) + "\n" + GOOD,
    }
    for name, content in legal.items():
        yield Case(f"dataset: {name}", reads(), code=0, limit=60, prepare=written("rows.jsonl", content))
    yield from kinds()
    for case in range(60):

        def damaged(place: Path, case=case) -> None:
            data = mutations.change_text(GOOD.encode(), np.random.default_rng([11, case]))
            (place / "rows.jsonl").write_bytes(data)

        yield Case(f"damage: dataset {case}", reads(), code=(0, 2), prepare=damaged)


def kinds() -> Iterator[Case]:
    """What a path can be."""

    def made(make: Callable[[Path], Any], name: str) -> Callable[[Path], object]:
        return lambda place: make(place / name)

    def table(names: list[str], *columns: list) -> Callable[[Path], None]:
        arrays = [pyarrow.array(column) for column in columns]
        return lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=names), path)

    cases: dict[str, tuple[str, Callable[[Path], Any], str]] = {
        "a pipe": ("d.jsonl", os.mkfifo, "d.jsonl is a pipe"),
        "a pipe of JSON": ("d.json", os.mkfifo, "d.json is a pipe"),
        "a pipe of parquet": ("d.parquet", os.mkfifo, "d.parquet is a pipe"),
        "a device": ("d.jsonl", lambda path: path.symlink_to("/dev/zero"), "d.jsonl is a device"),
        "a directory": ("d.jsonl", Path.mkdir, "d.jsonl has no file of the split"),
        "a link to itself": ("d.jsonl", lambda path: path.symlink_to(path.name), "d.jsonl"),
        "a link to nowhere": ("d.jsonl", lambda path: path.symlink_to("nowhere"), "does not exist"),
        "another ending": ("d.csv", lambda path: path.write_text("a"), "d.csv does not end in one of"),
        "no parquet": ("d.parquet", lambda path: path.write_bytes(b"PAR1" + bytes(50) + b"PAR1"), "not a parquet file"),
        "parquet cut short": (
            "d.parquet",
            lambda path: (table(["question", "answer"], ["q"], ["1"])(path), os.truncate(path, 200)),
            "not a parquet file",
        ),
        "a column twice": (
            "d.parquet",
            table(["question", "question", "answer"], ["q"], ["r"], ["1"]),
            "two columns 'question'",
        ),
        "parquet without an answer": ("d.parquet", table(["question"], ["q"]), "has no column 'answer'"),
        "parquet of infinite answers": (
            "d.parquet",
            table(["question", "answer"], ["q"], [float("inf")]),
            "not finite",
        ),
        "parquet of bytes": ("d.parquet", table(["question", "answer"], [b"\xff"], ["1"]), "question"),
        "an empty parquet": ("d.parquet", table(["question", "answer"], [], []), "holds no problems"),
        "JSON that is an object": ("d.json", lambda path: path.write_text("{}"), "d.json holds a dict"),
        "JSON with a key twice": (
            "d.json",
            lambda path: path.write_text('[{"question": "q", "answer": "1", "answer": "2"}]'),
            "the key 'answer' is given twice",
        ),
        "a directory with a pipe": (
            "d",
            lambda path: (path.mkdir(), os.mkfifo(path / "train.jsonl")),
            "train.jsonl is a pipe",
        ),
        "a directory of two kinds": (
            "d",
            lambda path: (
                path.mkdir(),
                (path / "train.jsonl").write_text(GOOD),
                (path / "train.json").write_text("[]"),
            ),
            "holds the split 'train' as",
        ),
    }
    for name, (path, make, says) in cases.items():
        yield Case(f"dataset: {name}", reads("--dataset", path), (says,), prepare=made(make, path))
    for name in (
        "arithmatic",
        "gsm8k:",
        "gsm8k:nothing",
        ".",
        "",
        "/",
        "~",
        "math500",
        "openai/gsm8k",
        "a" * 5000,
        "x\ny",
    ):
        yield Case(
            f"dataset: named {name[:20]!r}", reads("--dataset", name), ("dataset|split|holds|File name too long: 'aaa",)
        )
