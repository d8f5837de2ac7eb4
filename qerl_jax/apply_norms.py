"""`python -m qerl_jax.apply_norms BASE ADAPTER OUT`: the command line of `qerl_jax.io.apply_norms`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import NoReturn

from qerl_jax.command_line import flags, process
from qerl_jax.io.apply_norms import apply_norms
from qerl_jax.io.assets import model_path


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Write a base checkpoint with an adapter's trained layer norms, for vLLM, which refuses them in an adapter."""

    base: str
    """Hugging Face directory of the model that was trained, ORGANIZATION/NAME on the hub, or "tiny"."""
    adapter: str
    """Adapter directory of a run with train_norms, such as runs/NAME/adapter."""
    out: str
    """Directory to write, in one atomic step."""
    overwrite: bool = False
    """Replace out if it exists."""


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 and a one-line error message for bad input."""
    return process.run(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "interrupted; nothing was written")


def _run(argv: Sequence[str]) -> int:
    arguments = flags.parse(_Arguments, argv, "python -m qerl_jax.apply_norms", inspect.getdoc(_Arguments))
    apply_norms(model_path(arguments.base), arguments.adapter, arguments.out, arguments.overwrite)
    print(f"wrote {arguments.out}")
    return 0


def command() -> NoReturn:
    """The program."""
    process.end(main)


if __name__ == "__main__":
    command()
