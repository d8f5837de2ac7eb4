"""Steps of a bundled recipe by `qerl_jax.train` itself, on random weights of its size: seconds, tokens and memory.

    python tools/bench_recipe.py gsm8k-7b-nvfp4 --tokenizer DIR [--problems FILE.jsonl] [--steps 3] [--out DIR]
        [--KEY VALUE ...]

Everything but the weights is the recipe's: prompts through the real tokenizer, rollout, grading, updates, checkpoints;
without evaluations. Random weights never draw an EOS, so completions end at limits drawn here: twice the tokens of a
GSM8K reference solution (log-normal, around 210 tokens), and for one completion in fifty the recipe's own limit, as
completions that never stop have it. `--problems` gives prompts and solutions (`question`, `answer`); without it prompts
are generated sentences of GSM8K's length. `--KEY VALUE` overrides a key of the recipe, for example
`--tokens-per-micro-batch 2304`.

Medians over the steps after the first go into recipe.json in `--out`, with the compilations of the last step; the first
step's seconds are printed beside, so that compile time is seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import shutil
import statistics
import tempfile
import time
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from make_checkpoint import SIZES, hf_config
from random_policy import random_policy
from record import add_commit, write_rows
from rich.console import Console
from timing import peak_bytes

from qerl_jax import train
from qerl_jax.checkpoint.run_files import METRICS_FILE
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.config import Config
from qerl_jax.rollout.engine import generate
from qerl_jax.run import prepare
from qerl_jax.run.devices import device_bytes, use_device_memory
from qerl_jax.run.memory import memory_report
from qerl_jax.train import parse
from qerl_jax.types import Policy

PHASES = ("rollout", "grading", "update")
MEDIAN_TOKENS, SPREAD = 210, 0.45  # log-normal, of twice the length of a GSM8K reference solution
NEVER_STOPS = 0.02


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name of a bundled config, as gsm8k-7b-nvfp4")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of a Qwen2.5 tokenizer")
    parser.add_argument("--problems", type=Path, help="jsonl with question and answer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    add_commit(parser)
    args, overrides = parser.parse_known_args()
    use_device_memory()
    size = next(size for size in SIZES if f"-{size.lower()}-" in args.recipe)
    with tempfile.TemporaryDirectory() as folder:
        model = model_directory(Path(folder) / size, size, args.tokenizer)
        problems = args.problems or write_problems(Path(folder) / "problems.jsonl")
        flags = {
            "model": model,
            "dataset": problems,
            "output_dir": Path(folder) / "run",
            "eval_dataset": None,
        }
        own = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        config = parse(["--config", args.recipe, *own, *overrides])
        config = dataclasses.replace(config, max_steps=args.steps * config.num_iterations)
        lengths = reference_lengths(args.problems, load_tokenizer(model)) if args.problems else None
        started = time.perf_counter()
        rows = run(config, size, model, lengths)
        report(args, config, rows, time.perf_counter() - started)


def model_directory(path: Path, size: str, tokenizer: Path) -> Path:
    """A model directory without weights: config.json and the tokenizer's files, unpacked."""
    path.mkdir()
    for file in tokenizer.iterdir():
        if file.suffix == ".xz":
            (path / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
        elif file.suffix in (".json", ".jinja", ".txt"):
            shutil.copyfile(file, path / file.name)
    (path / "config.json").write_text(json.dumps(hf_config(size)))
    return path


def write_problems(path: Path, count: int = 512) -> Path:
    """Problems whose questions have as many words as those of GSM8K (log-normal, around 43)."""
    rng = np.random.default_rng(0)
    words = [
        "a",
        "the",
        "of",
        "sells",
        "apples",
        "hours",
        "each",
        "day",
        "how",
        "many",
        "cost",
        "left",
        "then",
        "twice",
    ]
    lines = []
    for _ in range(count):
        length = int(np.clip(rng.lognormal(math.log(43), 0.4), 12, 180))
        answer = int(rng.integers(1, 500))
        lines.append(
            {"question": " ".join(rng.choice(words, length)) + "?", "answer": f"It is {answer}.\n#### {answer}"}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def reference_lengths(problems: Path, tokenizer: Any) -> np.ndarray:
    """Twice the tokens of each reference solution."""
    answers = [json.loads(line)["answer"] for line in problems.read_text().splitlines()[:2000]]
    return np.array([2 * len(tokenizer(answer)["input_ids"]) for answer in answers])


def run(config: Config, size: str, model: Path, lengths: np.ndarray | None) -> list[dict]:
    """Records of the run's steps."""
    rng = np.random.default_rng(1)

    def load(config: Config, console: Console) -> Policy:
        del console  # nothing is read, so there is no progress to show
        stored = config.weight_format or "nvfp4"
        policy = random_policy(
            size, stored, config.lora, config.matmul_kernel or "mosaic_gpu", dtype=jnp.dtype(config.dtype)
        )
        return dataclasses.replace(policy, tokenizer=load_tokenizer(model), source=str(model))

    def limited(policy, prompts, sampling, key, engine=None):
        rows = prompts.lengths.shape[0] * sampling.num_generations
        drawn = rng.lognormal(math.log(MEDIAN_TOKENS), SPREAD, rows) if lengths is None else rng.choice(lengths, rows)
        drawn = np.where(rng.random(rows) < NEVER_STOPS, sampling.max_new_tokens, drawn)
        return generate(policy, prompts, sampling, key, engine, np.clip(drawn, 8, sampling.max_new_tokens).astype(int))

    with (
        unittest.mock.patch.object(prepare, "load", load),
        unittest.mock.patch.object(train, "generate", limited),
    ):
        train.train(config)
    return [json.loads(line) for line in (Path(config.output_dir) / METRICS_FILE).read_text().splitlines()]


def report(args: argparse.Namespace, config: Config, rows: list[dict], seconds: float) -> None:
    """Print the steps and write recipe.json."""
    for row in rows:
        times = ", ".join(f"{phase} {row[f'time/{phase}']:.2f}" for phase in PHASES)
        print(
            f"step {row['step']}: {times} s, {row['tokens']:.0f} tokens in the loss, {row['compilations']} compilations"
        )
    later = rows[1:] or rows
    found = {phase: statistics.median(row[f"time/{phase}"] for row in later) for phase in PHASES}
    found["step"] = sum(found.values())
    tokens = statistics.median(row["completions/mean_length"] for row in later) * config.batch_size
    memory = memory_report(config, device_bytes()).memory
    predicted = max(memory.rollout, memory.update)
    print(
        f"median: {found['step']:.2f} s a step, peak {peak_bytes() / 1e9:.2f} GB (--dry-run says "
        f"{memory.rollout / 1e9:.2f} in the rollout, {memory.update / 1e9:.2f} in the update); run {seconds:.1f} s"
    )
    write_rows(
        args.out / "recipe.json",
        [
            {
                "recipe": args.recipe,
                "phase": phase,
                "seconds": value,
                "tokens": tokens,
                "peak_bytes": peak_bytes(),
                "predicted_bytes": predicted,
                "compilations": rows[-1]["compilations"],
                "first_call_s": rows[0][f"time/{phase}"] if phase in PHASES else None,
                "gpu": jax.local_devices()[0].device_kind,
            }
            for phase, value in found.items()
        ],
        args.commit,
    )


if __name__ == "__main__":
    main()
