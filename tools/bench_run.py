"""A whole run of `qerl_jax.train`: where its seconds go, which share of the tokens it trains, what it compiles.

    python tools/bench_run.py --out DIR [--name NAME] FLAGS OF qerl_jax.train …
    python tools/bench_run.py --out DIR --random 7B --tokenizer DIR [--equal 0.5] --config gsm8k-7b-nvfp4 --dataset
        FILE.jsonl --eval-dataset none --max-steps 8

Each call adds a row to run.json and draws all rows of the file as bars, run.png: seconds of a step (medians over those
after the first) and of the run, from the start of the process. Medians hide steps with a checkpoint; the run has them.

`--random SIZE` takes random weights of the published shapes. They hardly ever draw an EOS, so completions end at limits
drawn here: twice the tokens of a GSM8K reference solution (log-normal, around 210), one in fifty at the config's own
limit, as completions that never stop have it. Rewards of random text are all equal and would leave nothing to update:
after grading they are replaced by 0 and 1 in turn, or by 1 alone in a share `--equal` of the groups.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import lzma
import shutil
import statistics
import tempfile
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from make_checkpoint import SIZES, hf_config
from random_policy import random_policy
from record import add_commit, write_rows
from rich.console import Console
from timing import peak_bytes, since_start

from qerl_jax import train
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.checkpoint.run_files import METRICS_FILE
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.config import Config
from qerl_jax.lowered import as_in_sources
from qerl_jax.rewards.functions import score
from qerl_jax.rollout.engine import generate
from qerl_jax.run import grading, prepare
from qerl_jax.run.devices import device_bytes, use_device_memory
from qerl_jax.run.memory import memory_report
from qerl_jax.types import Policy

PHASES = ("rollout", "grading", "update")
RUN_PHASES = ("start", "compile", "evaluation", *PHASES, "checkpoint", "rest")  # compile: what was waited for
MEDIAN_TOKENS, SPREAD = 210, 0.45  # log-normal, of twice the length of a GSM8K reference solution
NEVER_STOPS = 0.02


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", help="of the row; default: the model's")
    parser.add_argument("--random", choices=SIZES, help="random weights of this size")
    parser.add_argument("--tokenizer", type=Path, help="with --random: directory of a tokenizer")
    parser.add_argument("--equal", type=float, default=0.0, help="with --random: share of groups with equal rewards")
    add_commit(parser)
    args, flags = parser.parse_known_args(argv)
    if (args.random is None) != (args.tokenizer is None):
        parser.error("--random and --tokenizer go together")
    use_device_memory()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if "--output-dir" not in flags:
            flags += ["--output-dir", str(Path(folder) / "run")]
        if args.random:
            model = model_directory(Path(folder) / args.random, args.random, args.tokenizer)
            flags += ["--model", str(model)]
            stand_in(stack, args.random, model, args.equal)
        config = train.parse(flags)
        row = measured_run(config)
    about = {
        "name": args.name or args.random or Path(config.model).name,
        "weight_format": config.weight_format or "stored",
        "random": bool(args.random),
        **({"equal": args.equal} if args.random else {}),
        "batch": config.batch_size,
        "group": config.num_generations,
        "prompt_len": config.max_prompt_length,
        "completion_len": config.max_completion_length,
        "num_iterations": config.num_iterations,
        "gpu": jax.local_devices()[0].device_kind,
    }
    print(json.dumps(about | row, indent=1))
    write_rows(args.out / "run.json", [about | row], args.commit)
    draw(args.out)


def measured_run(config: Config) -> dict[str, Any]:
    """The measured fields of a run's row."""
    ends: list[float] = []
    found: dict[str, Any] = {}

    def begin(*loaded: Any, original: Any = train.begin_run) -> Any:
        found["start"] = since_start()
        return original(*loaded)

    def finish(run: prepare.Run, recorder: Any, state: Any, original: Any = train.finish_run) -> None:
        original(run, recorder, state)
        ahead = run.programs
        found.update(recorder.phases.totals, compiled=ahead.programs - ahead.cached, cached=ahead.cached)
        found.update(compile_s=ahead.seconds, compile=ahead.waited)

    patch = unittest.mock.patch.object
    # What is replaced here and in `stand_in` is in no program.
    with as_in_sources(), patch(train, "begin_run", begin), patch(train, "finish_run", finish):
        train.train(config, on_step=lambda metrics, state: ends.append(since_start()))
    seconds = since_start()
    lines = (Path(config.output_dir) / METRICS_FILE).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    later, step_times = rows[1:] or rows, np.diff(ends).tolist() or [rows[0]["step_time"]]
    median = {phase: statistics.median(row[f"time/{phase}"] for row in later) for phase in PHASES}
    run_s = {name: found.pop(name, 0.0) for name in RUN_PHASES}
    run_s["rest"] = seconds - sum(run_s.values())
    tokens = sum(row["tokens"] for row in rows)
    planned = memory_report(config, device_bytes()).memory
    return {
        "steps": len(rows),
        "step_seconds": statistics.median(step_times),
        **{f"{phase}_seconds": value for phase, value in median.items()},
        "first_step_seconds": ends[0],
        "seconds": seconds,
        "run_seconds": run_s,
        "tokens": statistics.median(row["completions/mean_length"] for row in later) * config.batch_size,
        "equal_groups": statistics.mean(row["frac_reward_zero_std"] for row in rows),
        "trained_share": sum(row["trained_tokens"] for row in rows) / tokens if tokens else 0.0,
        "compilations_last_step": rows[-1]["compilations"],
        **found,
        "peak_bytes": peak_bytes(),
        "predicted_bytes": max(planned.rollout_peak, planned.update_peak),
    }


def draw(out: Path) -> None:
    """run.png: the rows of run.json as stacked bars, a median step and the whole run. TRL's steps are in one piece."""
    rows = json.loads((out / "run.json").read_text())["rows"]
    steps = []
    for row in rows:
        parts = {phase: row[f"{phase}_seconds"] for phase in PHASES if f"{phase}_seconds" in row}
        steps.append(parts | {"rest" if parts else "step": row["step_seconds"] - sum(parts.values())})
    figure, axes = plt.subplots(2, 1, figsize=(9, 3 + 0.8 * len(rows)), layout="constrained")
    for axis, bars, title in ((axes[0], steps, "a step"), (axes[1], [row["run_seconds"] for row in rows], "the run")):
        left = np.zeros(len(rows))
        for phase in (*RUN_PHASES, "step"):
            widths = np.array([bar.get(phase, 0.0) for bar in bars])
            axis.barh(range(len(rows)), widths, left=left, label=phase)
            left += widths
        axis.set_yticks(range(len(rows)), [f"{row['name']} {row['weight_format']}" for row in rows])
        axis.invert_yaxis()
        axis.set_xlabel(f"seconds of {title}")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=9, fontsize="small")
    figure.savefig(out / "run.png", dpi=120)
    plt.close(figure)


def model_directory(path: Path, size: str, tokenizer: Path) -> Path:
    """A model directory without weights: config.json and the tokenizer's files, unpacked."""
    path.mkdir()
    for file in tokenizer.iterdir():
        if file.suffix == ".xz":
            (path / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
        elif file.suffix in (".json", ".jinja", ".txt") and file.name != "generation_config.json":
            shutil.copyfile(file, path / file.name)
    (path / "config.json").write_text(json.dumps(hf_config(size) | {"eos_token_id": []}))
    return path


def stand_in(stack: contextlib.ExitStack, size: str, model: Path, equal: float) -> None:
    """Random weights, drawn lengths and drawn rewards in place of a run's, until the stack ends."""
    rng = np.random.default_rng(1)

    def load(config: Config, console: Console, tensor_parallel: int, tokenizer: Any, problems: Any) -> Policy:
        del console, tensor_parallel, tokenizer, problems  # nothing is read, so there is no progress to show; one GPU
        stored, dtype = config.weight_format or "nvfp4", jnp.dtype(config.dtype)
        policy = random_policy(size, stored, config.lora, config.matmul_kernel, dtype=dtype)
        # The config of the directory, from which the programs are compiled ahead.
        read = {"config": model_config(model), "tokenizer": load_tokenizer(model), "source": str(model)}
        return dataclasses.replace(policy, **read)

    def limited(policy: Policy, prompts: Any, sampling: Any, key: jax.Array, engine: Any, **options: Any) -> Any:
        rows = prompts.lengths.shape[0] * sampling.num_generations
        lengths = rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, rows)
        lengths = np.where(rng.random(rows) < NEVER_STOPS, sampling.max_new_tokens, lengths)
        limits = np.clip(lengths, 8, sampling.max_new_tokens).astype(int).tolist()
        return generate(policy, prompts, sampling, key, engine, limits, **options)

    def drawn(rewards: Any, weights: Any, prompts: Sequence[str], *rest: Any, **columns: Any) -> tuple:
        _, parts = score(rewards, weights, prompts, *rest, **columns)
        index = np.asarray(columns["prompt_index"])
        groups = index.max() + 1
        values, is_equal = np.arange(len(index)) % 2.0, rng.permutation(groups) < round(equal * groups)
        return np.where(is_equal[index], 1.0, values).tolist(), parts

    for module, name, function in ((prepare, "load", load), (train, "generate", limited), (grading, "score", drawn)):
        stack.enter_context(unittest.mock.patch.object(module, name, function))


if __name__ == "__main__":
    main()
