"""What comes in from others and goes out to them: adapters and their bases, `compare`, `export`, records, presets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import small
from attacks.harness import Case, quoted
from attacks.templates import RECORDS, both, compares, evaluates, exit_code, exports, reads, written
from test_bad_input import MODELS
from test_export_command import BAD

from qerl_jax.export import main as export_main

PRESETS = Path(__file__).resolve().parents[2] / "tests/data/presets"
OUT = ("out",)


def cases() -> Iterator[Case]:
    """Every case."""
    yield from pairs()
    yield from models()
    yield from comparisons()
    yield from runs()
    yield from records()
    yield from presets()


def paired(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    """Prepare: a base and an adapter of the tests in the place of the template's, one of them damaged."""

    def prepare(place: Path) -> None:
        shutil.rmtree(place / "model")
        for path in (place / "pair").iterdir():
            path.rename(place / path.name)
        (place / "pair").rmdir()
        damage(place)

    return prepare


def pairs() -> Iterator[Case]:
    """An adapter that is not the base's, and a base that is none, through every command line that takes both."""
    adapter = ("--adapter", "adapter")
    for name, (damage, message) in BAD.items():
        commands: dict[str, tuple[Callable[[Path], int], str]] = {
            "trained": (reads(*adapter, "--lora-rank", "4"), message),
            "evaluated": (evaluates(*adapter), message),
            "compared": (compares("model", *adapter), message),
            **{f"exported as {kind}": (exports("adapter", "out", "--as", kind), message) for kind in
               ("peft", "vllm", "merged", "merged-nvfp4")},
        }  # fmt: skip
        for kind, (run, words) in commands.items():
            words = words.replace("MODEL", "model").replace("ADAPTER", "adapter")
            said = tuple(part for part in map(quoted, words.split("…")) if part)
            yield Case(f"pair: {name}, {kind}", run, said, prepare=paired(damage), uses=("pair",))


def models() -> Iterator[Case]:
    """The models of the tests, compared and exported. Both go without a tokenizer."""
    for name, (layout, damage, _) in MODELS.items():

        def prepare(place: Path, layout=layout, damage=damage) -> None:
            shutil.rmtree(place / "model")
            damage(layout(place / "model"))

        code = 0 if name == "no tokenizer" else 2
        common = {"prepare": prepare, "code": code, "limit": 60}
        yield Case(f"model: {name}, compared", compares("model"), ("model",), **common)
        yield Case(f"model: {name}, exported", exports("adapter", "out", "--as", "merged"), ("model|out",),
                   uses=("adapter",), writes=OUT if code == 0 else (), **common)  # fmt: skip


def comparisons() -> Iterator[Case]:
    """Flags and prompts of `compare`."""
    prompts = compares("model", "--prompts", "p.txt")
    files: dict[str, tuple[Callable[[Path], object], str]] = {
        "that are missing": (lambda place: None, "p.txt"),
        "that are empty": (written("p.txt", b""), "p.txt holds no prompt"),
        "that are not UTF-8": (written("p.txt", b"ab\xff\xfe"), "p.txt is not UTF-8"),
        "that are a pipe": (lambda place: os.mkfifo(place / "p.txt"), "p.txt is a pipe"),
        "that are a device": (lambda place: (place / "p.txt").symlink_to("/dev/zero"), "p.txt is a device"),
        "that are a directory": (lambda place: (place / "p.txt").mkdir(), "p.txt"),
        "of one token": (written("p.txt", b"a"), "p.txt: 'a' has 1 tokens"),
        "of 60 MB": (written("p.txt", b"a b c d " * 7_500_000), "p.txt: 'a b c d.* 60000000 characters"),
        "of zero bytes": (written("p.txt", bytes(1000)), "p.txt"),
    }
    for name, (prepare, says) in files.items():
        yield Case(f"compare: prompts {name}", prompts, (says,), prepare=prepare, limit=60)
    flags: dict[str, tuple[Callable[[Path], int], str]] = {
        "no model": (compares(), "MODEL"),
        "two models": (compares("model", "model"), "unexpected argument 'model'"),
        "a model that is a file": (compares("rows.jsonl"), "rows.jsonl"),
        "a model with a zero byte": (compares("a\0b"), ""),
        "an adapter that is not there": (compares("model", "--adapter", "nothing"), "nothing/adapter_config.json"),
        "an adapter with markup": (compares("model", "--adapter", "a[/b]"), r"a\[/b\]/adapter_config.json"),
        "another dtype": (compares("model", "--dtype", "float16"), "dtype"),
        "a format of the base's own": (compares("model", "--weight-format", "nf4"), "model holds NVFP4 weights"),
        "prompts twice": (compares("model", "--prompts", "a", "--prompts", "b"), "--prompts is given twice"),
        "an unknown flag": (compares("model", "--tolerance", "1"), "unknown flag --tolerance"),
        "a dtype that config.json lacks": (compares("model", "--dtype", "stored"), "has dtype None"),
    }
    for name, (run, says) in flags.items():
        yield Case(f"compare: {name}", run, (says,) if says else ())


def runs() -> Iterator[Case]:
    """A run that is exported: what is left of it, damaged."""

    def run_out(place: Path) -> int:
        return exit_code(export_main, ["used", "out", "--as", "merged"])

    state = "used/checkpoints/2/state"
    damages: dict[str, tuple[Callable[[Path], object], str]] = {
        "without a config": (lambda place: (place / "used/config.yaml").unlink(), "neither a run with config.yaml"),
        "with a config that is a pipe": (piped("used/config.yaml"), "used/config.yaml is a pipe"),
        "with a config that is no YAML": (written("used/config.yaml", b"\xff"), "used/config.yaml"),
        "with a config of another version": (written("used/config.yaml", "sed: 1\n"), "unknown key 'sed'"),
        "with an adapter cut short": (
            lambda place: os.truncate(place / "used/adapter/adapter_model.safetensors", 300),
            "used/adapter/adapter_model.safetensors",
        ),
        "without adapter and checkpoints": (
            lambda place: [shutil.rmtree(place / "used" / name) for name in ("adapter", "checkpoints")],
            "nothing to export yet",
        ),
        "with checkpoints alone, one bit flipped": (
            lambda place: (shutil.rmtree(place / "used/adapter"), flip(place, f"{state}/**/d/*")),
            "",
        ),
        "with checkpoints alone, no manifest": (
            lambda place: (
                shutil.rmtree(place / "used/adapter"),
                [path.unlink() for path in (place / "used/checkpoints").glob("*/manifest.json")],
            ),
            "nothing to export yet",
        ),
        "whose evaluation is a list": (written("used/evaluation.json", b"[1]"), "evaluation.json"),
        "whose base is gone": (lambda place: shutil.rmtree(place / "model"), "model directory model does not exist"),
        "whose base is another": (
            lambda place: (shutil.rmtree(place / "model"), small.bf16(place / "model", 1, intermediate_size=64)),
            "the model asks for",
        ),
    }
    for name, (prepare, says) in damages.items():
        yield Case(f"export: a run {name}", run_out, (says,) if says else (), prepare=prepare, uses=("used",), limit=60)


def piped(name: str) -> Callable[[Path], object]:
    """Prepare: a pipe in the place of a file."""
    return lambda place: ((place / name).unlink(), os.mkfifo(place / name))


def flip(place: Path, pattern: str) -> None:
    """One bit in the middle of the first file of a pattern."""
    path = sorted(place.glob(pattern))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def records() -> Iterator[Case]:
    """Records of another evaluation, or damaged."""
    whole, seed = evaluates(*RECORDS), evaluates(*RECORDS, "--seed", "5")
    common: dict[str, Any] = {"uses": ("records.jsonl",), "limit": 60}
    yield Case("records: of another seed", seed, ("written with seed 0, this call has 5",), **common)

    def item(**changes: Any) -> Callable[[Path], object]:
        def prepare(place: Path) -> None:
            path = place / "records.jsonl"
            header, first, *others = path.read_text().splitlines()
            path.write_text("\n".join([header, json.dumps(json.loads(first) | changes), *others, ""]))

        return prepare

    for name, values in {
        "id": (1, None, True, "0"),
        "prompt": (None, 1),
        "completions": ([], ["a"], "ab", [1, 2], None),
        "answers": ([1, 2], 3, ["a"]),
        "verdicts": (["correct"], ["good", "bad"], "correct", [[], {}], None),
        "lengths": ([1], [1.5, 2], [-1, 2], [None, None], 10**401),
        "finish": (["eos"], ["never", "eos"], [1, 2]),
        "majority": (2, -1, "0", True, 0.5),
        "tied": (0, None, "no"),
        "another": (1,),
    }.items():
        for value in values:
            shown = repr(value) if len(repr(value)) < 30 else "of 401 digits"
            prepare = item(**{name: value})
            yield Case(f"records: {name} {shown}", whole, ("records.jsonl, line 2",), prepare=prepare, **common)
    for case in range(20):
        yield Case(
            f"damage: records {case}",
            whole,
            code=(0, 2),
            writes=("records.jsonl",),
            **common,
            prepare=lambda place, case=case: mutations.change_file(
                place / "records.jsonl", np.random.default_rng([16, case])
            ),
        )


def presets() -> Iterator[Case]:
    """Local copies of published datasets."""
    for preset in ("gsm8k", "math500", "aime24", "amc23"):
        run = evaluates("--dataset", f"{preset}:copy")
        for case in range(8):
            yield Case(
                f"damage: {preset} {case}",
                run,
                code=(0, 2),
                limit=60,
                prepare=lambda place, preset=preset, case=case: (
                    shutil.copytree(PRESETS / preset, place / "copy"),
                    mutations.change_directory(place / "copy", np.random.default_rng([17, case])),
                ),
            )
    golds = ("9", "\\text{}", "7")
    rows = [{"problem": f"What is {i}?", "answer": gold, "unique_id": "x"} for i, gold in enumerate(golds)]
    unreadable = "".join(json.dumps(row) + "\n" for row in rows)
    math = evaluates("--dataset", "math500:copy")
    make = lambda place: (place / "copy").mkdir()  # noqa: E731
    yield Case("golds: one of three that no grader parses", math, (r"their gold answers cannot be read \(ids 1\)",), 0,
               limit=60, prepare=both(make, written("copy/test.jsonl", unreadable)))  # fmt: skip
    alone = json.dumps(rows[1]) + "\n"
    yield Case("golds: none that a grader parses", math, ("none of 1 gold answers can be read",), limit=60,
               prepare=both(make, written("copy/test.jsonl", alone)))  # fmt: skip
