"""`python -m qerl_jax.quantize IN OUT`: the command line of `qerl_jax.io.quantize`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import NoReturn

from qerl_jax.command_line import flags, process
from qerl_jax.io.assets import model_path
from qerl_jax.io.quantize import quantize_checkpoint


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Quantize a bf16 Qwen2.5 checkpoint to NVFP4 (compressed-tensors layout)."""

    src: str
    """Hugging Face directory to read, or ORGANIZATION/NAME on the hub."""
    dst: str
    """Directory to write, in one atomic step."""
    overwrite: bool = False
    """Replace dst if it exists."""


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 and a one-line error message for bad input."""
    return process.run(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "interrupted; nothing was written")


def _run(argv: Sequence[str]) -> int:
    arguments = flags.parse(_Arguments, argv, "python -m qerl_jax.quantize", inspect.getdoc(_Arguments))
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    src = model_path(arguments.src)  # a download has a progress bar of its own
    with Progress("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        tasks = {
            "scan": bar.add_task("scanning layers", total=None),
            "quantize": bar.add_task("writing tensors", total=None),
        }
        quantize_checkpoint(
            src,
            arguments.dst,
            overwrite=arguments.overwrite,
            progress=lambda stage, done, total: bar.update(tasks[stage], completed=done, total=total),
        )
    print(f"wrote {arguments.dst}")
    return 0


def command() -> NoReturn:
    """The program."""
    process.end(main)


if __name__ == "__main__":
    command()
