"""What a run left, changed before it is resumed: nothing is lost, whatever is said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from attacks.harness import Case, quoted
from attacks.templates import FLAGS, exit_code, reads, replaced, trains
from test_bad_runs import RUNS

from qerl_jax import train

LOCK = ("run/run.lock",)
RESUME = replaced(FLAGS, "--resume", "auto")


def resumes(place: Path) -> int:
    """The run, resumed."""
    return exit_code(train.main, RESUME)


def moved(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    """Prepare: the finished run in its place, damaged."""

    def prepare(place: Path) -> None:
        (place / "used").rename(place / "run")
        damage(place / "run")

    return prepare


def flipped(name: str, at: float) -> Callable[[Path], None]:
    """One bit of a file, so far into it."""

    def damage(run: Path) -> None:
        (path,) = list(run.glob(name))[:1]
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return damage


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in the place of a file."""

    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        make(run / name)

    return damage


def cases() -> Iterator[Case]:
    """Every case."""
    for name, (change, flags, message) in RUNS.items():
        said = tuple(
            quoted(part) for part in message.replace("OUT/", "…").replace("OUT", "…").split("…") if len(part) > 4
        )
        run = trains(*flags) if flags else trains()
        yield Case(f"run: {name}", run, said, prepare=moved(change), uses=("used",), writes=LOCK)
    state = "checkpoints/2/state"
    damages: dict[str, tuple[Callable[[Path], object], str]] = {}
    for at in (0.0, 0.3, 0.6, 1.0):
        damages[f"a bit of the newest manifest, at {at}"] = (flipped("checkpoints/2/manifest.json", at), "")
        damages[f"a bit of an array's file, at {at}"] = (flipped(f"{state}/**/d/*", at), "is not what was saved")
        damages[f"a bit of the arrays' table, at {at}"] = (flipped(f"{state}/_METADATA", at), "is not what was saved")
    for name in ("checkpoints/2/manifest.json", f"{state}/_METADATA", "metrics.jsonl", "evaluation.json"):
        table: dict[str, Callable[[Path], object]] = {
            "empty": lambda path: path.write_bytes(b""),
            "a pipe": os.mkfifo,
            "a directory": Path.mkdir,
            "not UTF-8": lambda path: path.write_bytes(b'{"\xff": 1}\n'),
            "a list": lambda path: path.write_text("[1]\n"),
            "nested too deep": lambda path: path.write_bytes(b"[" * 100_000 + b"\n"),
            "a number of 5000 digits": lambda path: path.write_bytes(b'{"step": ' + b"9" * 5000 + b"}\n"),
            "a device": lambda path: path.symlink_to("/dev/zero"),
        }
        for kind, make in table.items():
            damages[f"{name.rpartition('/')[2]} is {kind}"] = (instead(name, make), "")
    for name, (damage, says) in damages.items():
        yield Case(
            f"run: {name}",
            resumes,
            (says,) if says else (),
            prepare=moved(damage),
            uses=("used",),
            writes=LOCK,
            code=2,
            limit=30,
        )
    refused: dict[str, tuple[list[str], str]] = {
        "another rank": (["--resume", "auto", "--lora-rank", "32"], r"lora_rank: 64 -> 32"),
        "another seed": (["--resume", "auto", "--seed", "9"], r"seed: 0 -> 9"),
        "another model": (["--resume", "auto", "--weight-format", "nf4"], "weight_format"),
        "of a file": (["--resume", "rows.jsonl"], "resume 'rows.jsonl' would begin another"),
        "of the dataset's directory": (["--resume", "."], "resume '.' would begin another"),
        "with --overwrite": (["--resume", "auto", "--overwrite"], "overwrite deletes the run"),
        "of nothing": (["--resume", "nothing"], "resume 'nothing' would begin another"),
    }
    for name, (flags, says) in refused.items():
        yield Case(
            f"run: resumed {name}",
            trains(*flags),
            (says,),
            prepare=moved(lambda run: None),
            uses=("used",),
            writes=LOCK,
        )
    for name in ("config.yaml", "metrics.jsonl", "checkpoints", "completions", "report.md"):
        yield Case(
            f"run: begun over {name} alone",
            reads(),
            ("output_dir run holds",),
            uses=("used",),
            writes=LOCK,
            prepare=lambda place, name=name: (
                (place / "run").mkdir(),
                (place / "used" / name).rename(place / "run" / name),
            ),
        )
    yield Case(
        "run: --overwrite over a stranger's files",
        reads("--overwrite"),
        ("--overwrite deletes only",),
        uses=("used",),
        writes=LOCK,
        prepare=lambda place: (
            (place / "run").mkdir(),
            (place / "used/metrics.jsonl").rename(place / "run/metrics.jsonl"),
        ),
    )
