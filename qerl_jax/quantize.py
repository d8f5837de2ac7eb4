"""`python -m qerl_jax.quantize IN OUT`: the command line of `qerl_jax.checkpoint.quantize`."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from qerl_jax import command
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.layouts import WRITTEN
from qerl_jax.checkpoint.quantize import quantize_checkpoint
from qerl_jax.config import flags
from qerl_jax.models.config import PROJECTIONS


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Quantize a bf16 checkpoint by round-to-nearest to NVFP4 or MXFP4 (compressed-tensors layout) or NF4 (bitsandbytes
    layout), byte for byte as the usual tools.
    """

    src: str
    """Hugging Face directory to read, or ORGANIZATION/NAME on the hub."""
    dst: str
    """Directory to write, in one atomic step."""
    format: Literal[*WRITTEN] = "nvfp4"
    """nvfp4 (as llm-compressor), mxfp4 (as compressed-tensors, mxfp4-pack-quantized) or nf4 (as transformers with
    bitsandbytes, without double quantization)."""
    ignore: tuple[Literal[*PROJECTIONS], ...] = ()
    """Projections to copy unquantized, such as `q_proj k_proj v_proj`; those of the same inputs together."""
    overwrite: bool = False
    """Replace dst if it exists."""


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 and a one-line error message for bad input."""
    return command.run(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "interrupted; nothing was written")


def _run(argv: Sequence[str]) -> int:
    arguments = flags.parse(_Arguments, argv, "python -m qerl_jax.quantize", inspect.getdoc(_Arguments))
    from qerl_jax.reporting.progress import tensor_bar

    src = model_path(arguments.src)  # a download has a progress bar of its own
    with tensor_bar() as bar:
        task = bar.add_task("writing tensors", visible=False)  # bad input leaves none behind

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        quantize_checkpoint(src, arguments.dst, arguments.format, arguments.overwrite, progress, arguments.ignore)
    size = sum(file.stat().st_size for file in Path(arguments.dst).glob("*.safetensors"))
    left = f" without {', '.join(arguments.ignore)}" if arguments.ignore else ""
    print(f"wrote {arguments.dst}: {arguments.format}{left}, {size / 1e9:.3g} GB; train it with")
    print(f"  python -m qerl_jax.train --model {shlex.quote(arguments.dst)} --dataset gsm8k --output-dir runs/NAME")
    return 0


if __name__ == "__main__":
    command.end(main)
