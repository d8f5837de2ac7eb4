"""`python -m qerl_jax.export RUN OUT --as KIND`: the command line of `qerl_jax.run.export`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from qerl_jax import command
from qerl_jax.config import flags
from qerl_jax.io.export import Kind
from qerl_jax.io.tokenizer import leave_out_torch
from qerl_jax.run.export import export

_STAGES = {
    "scan": "scanning layers",
    "write": "writing tensors",
    "policy": "logits of the policy",
    "export": "logits of the export",
    "rounding": "logits under rounding",
    "base": "logits of the base",
    "merged": "logits before quantizing",
}


@dataclasses.dataclass(frozen=True)
class _OwnArguments:
    """Export a trained policy: as a PEFT adapter, for vLLM, or merged into one model. Nothing is written if its logits
    are not the policy's.
    """

    run: str
    """Directory of a run, or of an adapter."""
    out: str
    """Directory to write, in one atomic step."""
    base: str | None = None
    """Model that an adapter belongs to: Hugging Face directory, ORGANIZATION/NAME on the hub, or "tiny". None: the
    run's; for a run that was moved away from its model, the model's new place."""
    weight_format: Literal["bf16", "nvfp4", "mxfp4", "nf4"] | None = None
    """Format into which an unquantized base was quantized while loading. None: the run's; for an adapter, none."""
    overwrite: bool = False
    """Replace out if it is an earlier export."""


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 and a one-line error message for bad input."""
    return command.run(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "interrupted; nothing was written")


def _arguments() -> Any:
    """The flags. `as` cannot be a name in Python."""
    import tyro

    text = (
        "peft: adapter; vllm: LoRA, and where it differs from the original the base it belongs to; merged: one bf16 "
        "model; merged-nvfp4: that model in NVFP4."
    )
    kind = Annotated[Kind, tyro.conf.arg(name="as", help=text)]
    field = ("kind", kind, dataclasses.field(default="peft"))
    return dataclasses.make_dataclass("Arguments", [field], bases=(_OwnArguments,), frozen=True)


def _run(argv: Sequence[str]) -> int:
    arguments = flags.parse(_arguments(), argv, "python -m qerl_jax.export", inspect.getdoc(_OwnArguments))
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    leave_out_torch()
    with Progress("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(_STAGES[stage])
            bar.update(tasks[stage], completed=done, total=total)

        use = export(
            Path(arguments.run),
            Path(arguments.out),
            arguments.kind,
            arguments.base,
            arguments.weight_format,
            arguments.overwrite,
            lambda line: bar.console.print(line, soft_wrap=True, markup=False, highlight=False),
            progress,
        )
    print("\n".join([f"wrote {arguments.out}; use it with", *(f"  {command}" for command in use)]))
    return 0


def program() -> NoReturn:
    """The process of the command line."""
    command.end(main)


if __name__ == "__main__":
    program()
