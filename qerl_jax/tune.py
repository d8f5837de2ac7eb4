"""`python -m qerl_jax.tune MODEL`: a tuning table for this GPU: configs of a model's decode GEMMs, timed on it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
from qerl_kernels import dispatch
from qerl_kernels.gpu import Gpu, slug, user_table
from qerl_kernels.nvfp4_matmul import tuning
from qerl_kernels.nvfp4_matmul.packing import TILE
from qerl_kernels.nvfp4_matmul.tuner.candidates import trials
from qerl_kernels.nvfp4_matmul.tuner.search import Clock, fastest, in_lines, keep, row_of, total_us
from qerl_kernels.nvfp4_matmul.tuner.trials import Gemm, Timer, Trial, build, prologues

from qerl_jax import command
from qerl_jax.atomic import check_file_writable, write_text
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.config import ConfigError, flags
from qerl_jax.messages import one_line
from qerl_jax.models.config import ModelConfig
from qerl_jax.run.devices import use_device_memory

ROWS = {"warp": (8, 16, 32), "wgmma": (8, 16, 32, 64, 96, 128)}
"""Sequences decoded at a time for which each tier's GEMMs are timed: above, it has no config to choose, or one by a
rule that holds for all GPUs of the tier (`tuning.balance_waves`)."""

_BEFORE = {"qkv_proj": "norm", "o_proj": "plain", "gate_up_proj": "norm", "down_proj": "silu"}


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Time configs of the 4-bit decode kernels on this GPU, for the shapes of one model, and keep the fastest in the
    cache folder, where every later run finds them. Takes minutes; Ctrl-C keeps what was found. Another model adds its
    shapes.
    """

    model: str
    """Hugging Face directory, or ORGANIZATION/NAME on the hub; only its shapes count."""
    most: int = 24
    """Configs tried for each GEMM and number of sequences."""


def gemms_of(config: ModelConfig) -> list[Gemm]:
    """The GEMMs of a decoder layer. Raises ConfigError where the features are no multiples of 64."""
    found = []
    for spec in config.projections():
        name, (n, k) = spec.path[1], spec.shape
        if n % TILE or k % TILE:
            raise ConfigError(f"{name} is {n} x {k}: features that are no multiples of {TILE} are not timed")
        found.append(Gemm(name, n, k, tuple(spec.part_rows().values()), _BEFORE[name]))
    return found


def compiled_timer(group: Sequence[Trial]) -> Timer:
    """The trials of one GEMM, compiled for the default device and checked there."""

    def compiled(program: Trial) -> Callable | str:
        function, arguments = build(program)
        try:
            return jax.jit(function).lower(*arguments).compile()
        except Exception as error:  # any refusal of the compiler is an answer
            return one_line(error)

    programs = [*group, *prologues(group)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        executables = dict(zip(programs, pool.map(compiled, programs), strict=True))
    return Timer(group, executables.__getitem__)


def tune(
    model: ModelConfig,
    gpu: Gpu,
    path: Path,
    most: int,
    say: Callable[[str], None],
    clock_of: Callable[[Sequence[Trial]], Clock] = compiled_timer,
) -> None:
    """Add the fastest configs of a model's decode GEMMs to a tuning table, a row as soon as it is found.

    Args:
      model: shape of the model.
      gpu: the default device.
      path: the table; one that is not this GPU's is replaced.
      most: configs tried for each GEMM.
      say: called with a line for each GEMM.
      clock_of: gives what times the trials of one GEMM.

    Raises:
      ConfigError: features that are no multiples of 64.
      OSError: the table cannot be written.
    """
    check_file_writable(path, "the tuning table")
    is_sound = path.exists() and tuning.fault_of(str(path), gpu) is None
    stored = json.loads(path.read_text()) if is_sound else {"rows": []}
    about = {"gpu": gpu.name, "jax": jax.__version__, "date": str(date.today())}
    stored["meta"] = {**about, "command": f"python -m qerl_jax.tune, {most} configs a GEMM"}
    for gemm in gemms_of(model):
        for m in ROWS[gpu.tier]:
            group = trials(gemm, m, "forward", most, gpu)
            clock = clock_of(group)
            times = fastest(group, clock)
            place = f"{gemm.name} {gemm.n} x {gemm.k}, {m} sequences: "
            if not times:
                say(f"{place}none of {len(group)} configs runs")
                continue
            best = next(iter(times))
            last = total_us([best, group[0]], clock)  # once more, side by side
            best = min(last, key=last.__getitem__)
            keep(stored, row_of(best, last[best], clock))
            write_text(path, in_lines(stored))
            before = f"{last[group[0]]:.1f} us before" if group[0] in last else "the config before does not run"
            say(f"{place}{last[best]:.1f} us ({before})")


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 and a one-line error message for bad input or a device without the kernels."""
    return command.run(lambda: _run(sys.argv[1:] if argv is None else argv), lambda: "interrupted; rows found are kept")


def _run(argv: Sequence[str]) -> int:
    arguments = flags.parse(_Arguments, argv, "python -m qerl_jax.tune", inspect.getdoc(_Arguments))
    if arguments.most < 1:
        raise ConfigError(f"--most {arguments.most} is below 1")
    model = model_config(model_path(arguments.model))
    gemms_of(model)
    use_device_memory()
    if missing := dispatch.missing_for_mosaic_gpu(jnp.bfloat16):
        raise ConfigError(f"tuning needs {missing}")
    gpu = dispatch.this_gpu()
    path = user_table(gpu.name)
    tune(model, gpu, path, arguments.most, lambda line: print(line, flush=True))
    print(
        f"kept in {path}, which runs on this GPU read; the kernels can bring it along for others as "
        f"kernels/qerl_kernels/nvfp4_matmul/tuning_{slug(gpu.name)}.json"
    )
    return 0


if __name__ == "__main__":
    command.end(main)
