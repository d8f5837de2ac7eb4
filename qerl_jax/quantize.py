"""`python -m qerl_jax.quantize IN OUT`: the command line of `qerl_jax.io.quantize` and `qerl_jax.run.calibrate`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from qerl_jax import command
from qerl_jax.config import ConfigError, flags
from qerl_jax.io.assets import model_path
from qerl_jax.io.quantize import FORMATS, quantize_checkpoint
from qerl_jax.reporting.calibration import Calibration
from qerl_jax.run.calibrate import SEQUENCES, TOKENS, calibrate_checkpoint
from qerl_jax.untrusted import shown


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Quantize a bf16 checkpoint to NVFP4 or MXFP4 (compressed-tensors layout) or NF4 (bitsandbytes layout): by
    round-to-nearest, byte for byte as the usual tools, or NVFP4 with --calibration by AWQ and a search of scales, which
    loses less.
    """

    src: str
    """Hugging Face directory to read, or ORGANIZATION/NAME on the hub."""
    dst: str
    """Directory to write, in one atomic step."""
    format: str = "nvfp4"
    """nvfp4 (as llm-compressor), mxfp4 (as compressed-tensors, mxfp4-pack-quantized) or nf4 (as transformers with
    bitsandbytes, without double quantization)."""
    calibration: str | None = None
    """File of texts (.jsonl, .json, .parquet; columns text, messages, or prompt and completion) on which scales are
    chosen. Every fourth text is held out for the errors in the table and in DST/calibration.json."""
    calibration_sequences: int = SEQUENCES
    """Most texts that are read."""
    calibration_tokens: int = TOKENS
    """Tokens after which a text is cut."""
    overwrite: bool = False
    """Replace dst if it exists."""


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 and a one-line error message for bad input."""
    return command.run(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "interrupted; nothing was written")


def _run(argv: Sequence[str]) -> int:
    arguments = flags.parse(_Arguments, argv, "python -m qerl_jax.quantize", inspect.getdoc(_Arguments))
    if arguments.format not in FORMATS:
        raise ConfigError(f"--format {shown(arguments.format)} is not one of {list(FORMATS)}")
    if arguments.calibration is not None and arguments.format != "nvfp4":
        raise ConfigError(f"--calibration {arguments.calibration} is for --format nvfp4, not {arguments.format}")
    if arguments.calibration is None:
        for field in ("calibration_sequences", "calibration_tokens"):
            if getattr(arguments, field) != getattr(_Arguments, field):
                flag = f"--{field.replace('_', '-')}"
                raise ConfigError(f"{flag} {getattr(arguments, field)} goes with --calibration, which is not given")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    src = model_path(arguments.src)  # a download has a progress bar of its own
    first = ("scan", "scanning layers") if arguments.calibration is None else ("calibrate", "calibrating layers")
    with Progress("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        tasks = {stage: bar.add_task(text, total=None) for stage, text in (first, ("quantize", "writing tensors"))}

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(tasks[stage], completed=done, total=total)

        report = _quantize(arguments, src, progress)
    if report is not None:
        Console().print(report.table())
        print(report.sentence())
    print(f"wrote {arguments.dst}")
    return 0


def _quantize(arguments: _Arguments, src: Path, progress: Callable[[str, int, int], None]) -> Calibration | None:
    dst, overwrite = arguments.dst, arguments.overwrite
    if arguments.calibration is None:
        quantize_checkpoint(src, dst, arguments.format, overwrite, progress)
        return None
    return calibrate_checkpoint(
        src,
        dst,
        arguments.calibration,
        arguments.calibration_sequences,
        arguments.calibration_tokens,
        overwrite,
        progress,
    )


def program() -> NoReturn:
    """The process of the command line."""
    command.end(main)


if __name__ == "__main__":
    program()
