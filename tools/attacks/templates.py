"""Where the cases begin: a model, a dataset, an adapter, a finished run; and the command lines, called in a fork."""

from __future__ import annotations

import os
import shutil
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import small
import yaml
from command_lines import ROWS, RUN, SHORT, lines, replaced
from test_export_command import put_model_and_adapter

from qerl_jax import train
from qerl_jax.command_line import process
from qerl_jax.command_line.evaluate import main as evaluate_main
from qerl_jax.compare import main as compare_main
from qerl_jax.export import main as export_main
from qerl_jax.io.adapter import export_adapter
from qerl_jax.io.load import load_policy
from qerl_jax.models.lora import LoraConfig
from qerl_jax.quantize import main as quantize_main
from qerl_jax.run import prepare

Main = Callable[[list[str]], int]
CACHE = ["--compilation-cache-dir", str(Path(tempfile.gettempdir()) / "qerl-attack-cache")]
_EVALUATION = ["--dataset", "rows.jsonl", *SHORT, *CACHE]
RECORDS = ["--records", "records.jsonl", "--samples", "4", "--num-generations", "2", "--problems-at-once", "2"]
FLAGS = ["--model", "model", "--dataset", "rows.jsonl", "--output-dir", "run", *RUN, *CACHE]


def make(place: Path) -> None:
    """All templates. It initializes JAX, so it is called in a fork."""
    place.mkdir()
    (place / "rows.jsonl").write_text(lines(ROWS))
    small.nvfp4(place / "model")
    shutil.rmtree(place / "model-bf16")
    policy = load_policy(place / "model", lora=LoraConfig(rank=64))
    export_adapter(policy, place / "adapter", norms=True, base_model="model")
    (place / "pair").mkdir()
    put_model_and_adapter(place / "pair")


def make_run(place: Path) -> int:
    """A finished run of two steps in a copy of the template."""
    os.chdir(place)
    return train.main(list(FLAGS))


def make_records(place: Path) -> int:
    """Finished records of an evaluation in the template."""
    os.chdir(place)
    return evaluate_main(["model", *_EVALUATION, *RECORDS])


def exit_code(main: Main, flags: Sequence[str]) -> int:
    """Exit code as the process would have it."""
    if main in (train.main, evaluate_main, quantize_main, export_main, compare_main):
        process.end(lambda: main(list(flags)))
    return main(list(flags))


def trains(*more: str) -> Callable[[Path], int]:
    """A whole run."""
    return lambda place: exit_code(train.main, replaced(FLAGS, *more))


def reads(*more: str) -> Callable[[Path], int]:
    """A run up to where all its input has been read and accepted."""
    return lambda place: exit_code(_reading, replaced(FLAGS, *more))


def _reading(flags: list[str]) -> int:
    def read(*arguments: object) -> None:
        real(*arguments)
        raise SystemExit(0)

    real, train.prepare = train.prepare, read
    prepare.CompileAhead = lambda *_: types.SimpleNamespace(cancel=lambda: None)
    return train.main(flags)


def trains_by(argv: Sequence[str]) -> Callable[[Path], int]:
    """A training command line as it stands."""
    return lambda place: exit_code(train.main, argv)


def dry_runs(*more: str) -> Callable[[Path], int]:
    """A dry run."""
    return trains("--dry-run", *more)


def evaluates(*more: str) -> Callable[[Path], int]:
    """An evaluation."""
    flags = replaced(_EVALUATION, *more)
    return lambda place: exit_code(evaluate_main, ["model", *flags])


def quantizes(*argv: str) -> Callable[[Path], int]:
    """A quantization."""
    return lambda place: exit_code(quantize_main, argv)


def exports(*argv: str) -> Callable[[Path], int]:
    """An export of the adapter."""
    return lambda place: exit_code(export_main, [*argv, "--base", "model"])


def compares(*argv: str) -> Callable[[Path], int]:
    """A comparison with transformers."""
    return lambda place: exit_code(compare_main, argv)


def written(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Prepare: a file of that content."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda place: (place / name).write_bytes(data)


def configured(**changes: object) -> Callable[[Path], object]:
    """Prepare: `c.yaml`, a config of the template's run with other values."""
    values = {"model": "model", "dataset": "rows.jsonl", "output_dir": "run", "max_steps": 1, **changes}
    return written("c.yaml", yaml.safe_dump(values, allow_unicode=False))


def model_config(**changes: object) -> Callable[[Path], object]:
    """Prepare: other values in the model's config.json."""
    return lambda place: small.change_json(place / "model/config.json", **changes)


def both(*steps: Callable[[Path], object]) -> Callable[[Path], object]:
    """Prepare: one after the other."""

    def prepare(place: Path) -> None:
        for step in steps:
            step(place)

    return prepare
