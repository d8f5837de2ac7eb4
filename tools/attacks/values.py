"""Values of every config field, and flags."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from attacks.harness import Case
from attacks.templates import (
    configured,
    dry_runs,
    evaluates,
    exports,
    quantizes,
    trains_by,
    written,
)

from qerl_jax.config import Config

HUGE = 10**401
NO_NUMBERS = ("x", True, [1], {"a": 1}, math.nan, math.inf, HUGE, "", "1e400", "0x10", "１x")
# Values of the right type that are no values of the field; those of numbers are below every lower bound.
WRONG: dict[type, tuple[Any, ...]] = {
    int: (*NO_NUMBERS, 1.5, 2**31, 2**63, -(2**31)),
    float: (*NO_NUMBERS, -1e30),
    bool: ("yes please", 1, 0, "true", [True], None),
    str: (1, True, 1.5, ["a", "b"], {"a": 1}),
}
FREE = {  # legal after all: 1e400 and -1e30 are numbers, where no bound says otherwise
    ("rollout_memory_gb", "x"),
}


def cases() -> Iterator[Case]:
    """Every case."""
    for name, hint in typing.get_type_hints(Config).items():
        for value in wrong_values(hint):
            if (name, value if isinstance(value, str | int | float) else None) in FREE:
                continue
            shown = repr(value) if len(repr(value)) < 40 else f"{type(value).__name__} of {len(repr(value))} characters"
            yield Case(
                f"value: {name} {shown}",
                trains_by(["--config", "c.yaml"]),
                (name,),
                prepare=configured(**{name: value}),
            )
    yield from flags()
    yield from files()


def wrong_values(hint: Any) -> tuple[Any, ...]:
    """Values that a type's reader must refuse."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return tuple(v for v in wrong_values(next(a for a in arguments if a is not type(None))) if v is not None)
    if origin is Literal:
        return ("nonsense", "", 1, True, ["a", "b"], {"a": 1})
    if origin is tuple:
        inner = [value for value in wrong_values(arguments[0])[:4] if not isinstance(value, list)]
        return (1, True, {"a": 1}, *([value] for value in inner))
    return WRONG[hint]


def flags() -> Iterator[Case]:
    """Command lines."""
    for field in dataclasses.fields(Config):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            yield Case(f"flags: {flag} and its opposite", dry_runs_twice(flag, flag.replace("--", "--no-", 1)), (flag,))
        else:
            yield Case(f"flags: {flag} twice", dry_runs_twice(flag, "1", flag, "2"), (f"{flag} is given twice",))
    no_path = os.fsdecode(b"\xff")
    table = {
        "--seed 2^63": (dry_runs("--seed", str(2**63)), "seed must be at most 2147483647"),
        "--seed of 401 digits": (dry_runs("--seed", str(HUGE)), "seed must be a number"),
        "evaluate --seed 2^64": (evaluates("--seed", str(2**64)), "seed must be at most"),
        "evaluate --seed twice": (evaluates("--seed=1", "--seed", "2"), "--seed is given twice"),
        "evaluate --samples 0": (evaluates("--samples", "0"), "samples must be at least 1"),
        "evaluate --batch-size 0": (evaluates("--batch-size", "0"), "batch_size must be at least 1"),
        "evaluate --output of a directory": (evaluates("--output", "model"), "output model is a directory"),
        "evaluate --records of a directory": (evaluates("--records", "model"), "records model is a directory"),
        "evaluate --records of a device": (evaluates("--records", "/dev/null"), "is a device, not a regular file"),
        "evaluate --records of another file": (evaluates("--records", "rows.jsonl"), "something else than records"),
        "evaluate --few-shot of nobody": (evaluates("--few-shot", "smith"), "is neither one of"),
        "evaluate --output below a file": (evaluates("--output", "rows.jsonl/x"), "rows.jsonl is not a directory"),
        "evaluate --split of none": (evaluates("--dataset", "gsm8k", "--split", "x"), "no split 'x'"),
        "evaluate --adapter of none": (evaluates("--adapter", "none"), "none/adapter_config.json does not exist"),
        "evaluate --adapter with markup": (evaluates("--adapter", "a[/b]"), r"a\[/b\]/adapter_config.json"),
        "--watchdog-seconds 1e10": (dry_runs("--watchdog-seconds", "1e10"), "watchdog_seconds must be at most"),
        "--reward-timeout 3e6": (dry_runs("--reward-timeout", "3e6"), "reward_timeout must be at most"),
        "--max-refill-rounds": (dry_runs("--max-refill-rounds", str(2**31 - 1)), "max_refill_rounds must be at most"),
        "--reward-workers 1e6": (dry_runs("--reward-workers", "1000000"), "reward_workers must be at most"),
        "--config twice": (trains_by(["--config", "tiny", "--config", "tiny"]), "--config is given twice"),
        "--config without a value": (trains_by(["--config"]), "--config needs a file"),
        "--config of none": (trains_by(["--config", "nothing"]), "config file nothing does not exist"),
        "--config of a directory": (trains_by(["--config", "model"]), "config file model does not exist"),
        "a flag of TRL's": (trains_by(["--per-device-train-batch-size", "1"]), "per-device-train-batch-size"),
        "an unknown flag": (trains_by(["--no-such-flag", "1"]), "unknown flag --no-such-flag"),
        "a misspelt flag": (trains_by(["--learnin-rate", "1"]), "did you mean --learning-rate"),
        "a flag of 100,000 letters": (trains_by(["--" + "a" * 100_000]), "unknown flag --aaa"),
        "a flag without a value": (trains_by(["--learning-rate"]), "Missing value .*--learning-rate"),
        "a flag with another type": (trains_by(["--learning-rate", "[/b]"]), r"--learning-rate: .*'\[/b\]'"),
        "a flag that is not UTF-8": (trains_by(["--" + os.fsdecode(b"\xff")]), "unknown flag"),
        "a positional argument": (trains_by(["model"]), "unexpected argument 'model'"),
        "an output_dir that is not UTF-8": (dry_runs("--output-dir", no_path), "output_dir must be valid UTF-8"),
        "a dataset that is not UTF-8": (dry_runs("--dataset", no_path), "dataset must be valid UTF-8"),
        "a model that is not UTF-8": (dry_runs("--model", no_path), "model must be valid UTF-8"),
        "a reward that is not UTF-8": (dry_runs("--reward-funcs", no_path), "reward_funcs must be valid UTF-8"),
        "a zero byte in a path": (dry_runs("--output-dir", "a\0b"), "output_dir .* cannot be written"),
        "a dataset with a zero byte": (dry_runs("--dataset", "a\0b"), "dataset"),
        "a path of 5000 characters": (dry_runs("--output-dir", "a" * 5000), "output_dir .*cannot be written"),
        "an output_dir below a device": (dry_runs("--output-dir", "/dev/null/run"), "/dev/null is not a directory"),
        "a dataset with markup": (dry_runs("--dataset", "d[/b].jsonl"), r"'d\[/b\].jsonl' does not exist"),
        "a reward with markup": (dry_runs("--reward-funcs", "r[/b].py:f"), r"file r\[/b\].py does not exist"),
        "a dataset twice": (dry_runs("--dataset", "rows.jsonl", "rows.jsonl"), "names 'rows.jsonl' twice"),
        "a projection twice": (dry_runs("--lora-target-modules", "q_proj", "q_proj"), "q_proj"),
        "a sink twice": (dry_runs("--report-to", "tensorboard", "tensorboard"), "report_to"),
        "a column for rewards twice": (dry_runs("--reward-columns", "n", "n"), "reward_columns"),
        "quantize without arguments": (quantizes(), "SRC .*DST"),
        "quantize of nothing": (quantizes("nothing", "out"), "model directory nothing does not exist"),
        "quantize of NVFP4": (quantizes("model", "out"), "quantized already"),
        "quantize onto itself": (quantizes("model", "model"), "model already exists"),
        "quantize over the dataset": (quantizes("model", "rows.jsonl", "--overwrite"), "rows.jsonl is no model"),
        "quantize below a file": (quantizes("model", "rows.jsonl/x"), "rows.jsonl is not a directory"),
        "quantize --overwrite twice": (quantizes("model", "out", "--overwrite", "--overwrite"), "--overwrite is given"),
        "quantize of a zero byte": (quantizes("a\0b", "out"), ""),
        "export of nothing": (exports("nothing", "out"), "nothing is no directory"),
        "export of a model": (exports("model", "out"), "model is neither a run with config.yaml nor an adapter"),
        "export as another kind": (exports("adapter", "out", "--as", "gguf"), ""),
        "export in another format": (exports("adapter", "out", "--weight-format", "nf4"), "weight_format 'nf4'"),
        "export onto the base": (exports("adapter", "model"), "model already exists"),
        "export over the base": (exports("adapter", "model", "--overwrite"), "is or holds the source"),
        "export over the dataset": (exports("adapter", "rows.jsonl", "--overwrite"), "rows.jsonl is no model"),
    }
    for name, (run, says) in table.items():
        yield Case(f"flags: {name}", run, (says,), uses=("adapter",))


def dry_runs_twice(*argv: str):
    """A dry run with these flags as they stand."""
    return trains_by(["--dry-run", *argv])


def files() -> Iterator[Case]:
    """Config files."""
    table: dict[str, tuple[bytes | str, str]] = {
        "not UTF-8": (b"model: \xff\xfe", "c.yaml is not YAML"),
        "a list": ("- 1\n", "c.yaml holds a list"),
        "a number": ("1", "c.yaml holds a int"),
        "a tab": ("model:\n\t- x", "c.yaml, line 2 is not YAML"),
        "a key twice": ("seed: 1\nseed: 2\n", "'seed' is given twice, in lines 1 and 2"),
        "a key twice by another name": ("batch-size: 8\nbatch_size: 16\n", "batch_size is given twice"),
        "an unknown key": ("sed: 1\n", "unknown key 'sed'; did you mean 'seed'"),
        "a key that is a list": ("? [1, 2]\n: 1\n", "c.yaml"),
        "an object of Python": ("model: !!python/object/apply:os.system ['touch owned']\n", "c.yaml, line 1"),
        "an anchor of itself": ("model: &a [*a]\n", "model"),
        "a billion laughs": (
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{b}: &{b} [{','.join(f'*{a}' for _ in range(9))}]\n"
                for a, b in zip("abcdefgh", "bcdefghi", strict=True)
            )
            + "model: *i\n",
            "unknown key 'a'",
        ),
        "nested too deep": ("[" * 10_000, "c.yaml is not YAML"),
        "a number of 5000 digits": ("seed: " + "9" * 5000, "c.yaml is not YAML"),
        "a date that is none": ("model: 2001-99-99\n", "c.yaml"),
        "a surrogate": ('output_dir: "\\uD800"\n', "c.yaml"),
        "a zero byte": ("model: a\0b\n", "c.yaml"),
        "a sexagesimal": ("seed: 1:99\n", "seed"),
        "two documents": ("model: a\n---\nmodel: b\n", "c.yaml"),
    }
    for name, (content, says) in table.items():
        yield Case(
            f"config file: {name}", trains_by(["--config", "c.yaml"]), (says,), prepare=written("c.yaml", content)
        )
