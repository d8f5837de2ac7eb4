"""`python -m qerl_jax.evaluate MODEL [--adapter DIR] --dataset …`: pass@1 or avg@k of a policy, with an interval."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from qerl_jax.data.problems import correctness_of
from qerl_jax.data.prompts import load_encoded
from qerl_jax.evaluation import evaluate
from qerl_jax.io.assets import model_path
from qerl_jax.io.devices import keep_all_compiled
from qerl_jax.io.files import check_writable, write_json
from qerl_jax.io.load import load_policy
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.evaluation import Evaluation
from qerl_jax.rewards.load import check_rewards, load_rewards
from qerl_jax.rollout.shapes import cache_note
from qerl_jax.types import Engine, Sampling


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Evaluate a model, with or without an adapter, on a dataset of problems with numeric answers."""

    model: str
    """Hugging Face directory, or "tiny" for the bundled policy."""
    dataset: str = "gsm8k"
    """gsm8k, math, math500 (from the hub), PRESET:PATH (a local copy of one), arithmetic (generated), or a .jsonl,
    .json or .parquet file or a directory of them."""
    adapter: str | None = None
    """PEFT adapter directory, norms included if it has them."""
    split: str = "test"
    """Split of a named dataset."""
    prompt_column: str = "question"
    """Column of a file of no preset that holds the problem."""
    answer_column: str = "answer"
    """Column of such a file that holds the answer."""
    system_prompt: str | None = None
    """System message; None takes the dataset's or the prompt's own, "" sends none."""
    samples: int | None = None
    """Only the first so many problems."""
    num_generations: int = 1
    """Completions of each problem."""
    temperature: float = 0.6
    """Sampling temperature; 0 is greedy."""
    top_p: float = 0.95
    """Sample from the smallest set of tokens with this probability."""
    max_prompt_length: int = 512
    """Longest prompt in tokens."""
    overlong_prompts: Literal["drop", "truncate_left", "error"] = "drop"
    """What becomes of longer ones: left out and counted, cut to their last tokens, or an error."""
    max_completion_length: int = 4096
    """Longest completion in tokens."""
    batch_size: int = 64
    """Completions decoded together."""
    rollout_memory_gb: float | None = None
    """Their key-value caches in 1e9 bytes: fewer are decoded together where not all fit."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Those caches: in the compute dtype, or one byte a number where a layer's key bias allows it."""
    weight_format: str | None = None
    """Quantize an unquantized checkpoint while loading: nvfp4, mxfp4 or nf4."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype."""
    matmul_kernel: Literal["auto", "xla", "mosaic_gpu"] = "auto"
    """Product with 4-bit weights: plain XLA, the Pallas kernels of a Hopper GPU, or what can run."""
    reward_workers: int = 4
    """Processes that grade, where the dataset's reward needs them (`math_verify`)."""
    reward_timeout: float = 20.0
    """Seconds after which a completion that is not graded yet counts as wrong."""
    seed: int = 0
    """Of the samples."""
    output: str | None = None
    """Also write the result to this JSON file."""


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 for bad input, with one line that says what is wrong."""
    import tyro

    arguments = tyro.cli(
        _Arguments, args=argv, prog="python -m qerl_jax.evaluate", config=(tyro.conf.PositionalRequiredArgs,)
    )
    try:
        result = _run(arguments)
        _show(result)  # before the file: a full disk must not take hours of work along
        if arguments.output is not None:
            write_json(Path(arguments.output), dataclasses.asdict(result))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _show(result: Evaluation) -> None:
    print(result.describe())
    if result.generations > 1:
        print(f"pass@{result.generations} {100 * result.pass_at_k:.1f} %")
    print(
        f"format {100 * result.format:.1f} %, truncated {100 * result.truncated:.1f} %, "
        f"mean length {result.mean_length:.1f} tokens",
        flush=True,
    )


def _run(arguments: _Arguments) -> Evaluation:
    for name in ("samples", "batch_size", "max_prompt_length", "max_completion_length", "num_generations"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if arguments.output is not None:
        if Path(arguments.output).is_dir():
            raise ValueError(f"output {arguments.output} is a directory: name a file")
        check_writable(Path(arguments.output).parent, "the directory of output")
    check_rewards((), arguments.reward_workers, arguments.reward_timeout)
    sampling = Sampling(
        arguments.max_completion_length,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        num_generations=arguments.num_generations,
    )
    keep_all_compiled()
    policy = load_policy(
        model_path(arguments.model),
        arguments.weight_format,
        lora=LoraConfig(rank=0) if arguments.adapter is None else None,
        dtype=jnp.dtype(arguments.dtype),
        adapter=arguments.adapter,
        matmul_kernel=arguments.matmul_kernel,
    )
    problems, _, notes = load_encoded(
        arguments.dataset,
        arguments.split,
        policy.tokenizer,
        prompt_column=arguments.prompt_column,
        answer_column=arguments.answer_column,
        system_prompt=arguments.system_prompt,
        max_prompt_length=arguments.max_prompt_length,
        overlong_prompts=arguments.overlong_prompts,
        limit=arguments.samples,
        need_answers=True,
    )
    if note := cache_note(policy, arguments.kv_cache_dtype):
        notes.append(note)
    for note in notes:
        print(note, flush=True)
    name = correctness_of(arguments.dataset)
    with load_rewards((name,), arguments.reward_workers, arguments.reward_timeout) as judge:
        engine = Engine(arguments.batch_size, arguments.rollout_memory_gb, kv_cache_dtype=arguments.kv_cache_dtype)
        return evaluate(policy, problems, sampling, arguments.seed, engine=engine, reward=judge[name])


if __name__ == "__main__":
    sys.exit(main())
