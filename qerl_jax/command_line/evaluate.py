"""`python -m qerl_jax.evaluate MODEL [--adapter DIR] --dataset …`: pass@1 or avg@k of a policy, with an interval."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp

from qerl_jax.command_line import flags, process
from qerl_jax.compilation import use_compilation_cache
from qerl_jax.config import Config, ConfigError
from qerl_jax.data.prompts import load_encoded
from qerl_jax.evaluation import Evaluation, evaluate
from qerl_jax.io.assets import model_path
from qerl_jax.io.files import check_file_writable, write_json
from qerl_jax.io.load import load_policy
from qerl_jax.io.tokenizer import leave_out_torch
from qerl_jax.models.lora import LoraConfig
from qerl_jax.rewards.load import load_rewards
from qerl_jax.rollout.shapes import cache_note, endless_note
from qerl_jax.run.choose_rewards import correctness_reward
from qerl_jax.run.devices import missing_kernels_note

# Fields of Config that are flags here under the same name, and those under another name.
_SAME = (
    "adapter",
    "prompt_column",
    "answer_column",
    "system_prompt",
    "max_prompt_length",
    "overlong_prompts",
    "max_completion_length",
    "rollout_memory_gb",
    "kv_cache_dtype",
    "batch_invariant",
    "weight_format",
    "dtype",
    "matmul_kernel",
    "compilation_cache_dir",
    "reward_workers",
    "reward_timeout",
    "seed",
)
_RENAMED = {
    "num_generations": "eval_num_generations",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "batch_size": "eval_batch_size",
}
_FIELDS = _RENAMED | {name: name for name in _SAME}


@dataclasses.dataclass(frozen=True)
class _OwnArguments:
    model: str
    """Hugging Face directory, ORGANIZATION/NAME on the hub, or "tiny" for the bundled policy."""
    dataset: str = "gsm8k"
    """gsm8k, math, math500 (from the hub), PRESET:PATH (a local copy of one), arithmetic (generated), or a .jsonl,
    .json or .parquet file or a directory of them."""
    split: str = "test"
    """Split of a named dataset."""
    samples: int | None = None
    """Only the first so many problems."""
    output: str | None = None
    """Also write the result to this JSON file."""


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 2 for bad input, with a one-line error message."""
    return process.run(
        lambda: _main(sys.argv[1:] if argv is None else argv), lambda: "interrupted; nothing was evaluated"
    )


def command() -> NoReturn:
    """The program."""
    process.end(main)


def _main(argv: Sequence[str]) -> int:
    description = "Evaluate a model, with or without an adapter, on a dataset of problems with answers."
    kind = flags.fields_of_config(_FIELDS, (_OwnArguments,))
    arguments = flags.parse(kind, argv, "python -m qerl_jax.evaluate", description)
    result = _run(arguments)
    try:
        _show(result)  # before the file: a full disk must not lose hours of work
    finally:
        if arguments.output is not None:
            write_json(Path(arguments.output), dataclasses.asdict(result))
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


def _config(arguments: Any) -> Config:
    """The arguments as a Config, which checks them; errors name the flag."""
    try:
        return Config(model=arguments.model, **{name: getattr(arguments, flag) for flag, name in _FIELDS.items()})
    except ConfigError as error:
        message = str(error)
        for flag, name in _RENAMED.items():
            message = message.replace(name, flag)
        raise ConfigError(message) from error


def _run(arguments: Any) -> Evaluation:
    config = _config(arguments)
    if arguments.samples is not None and arguments.samples < 1:
        raise ValueError(f"samples must be at least 1, got {arguments.samples}")
    if arguments.output is not None:
        check_file_writable(Path(arguments.output), "output")
    print(use_compilation_cache(config.compilation_cache_dir), flush=True)
    if note := missing_kernels_note(config.matmul_kernel):
        print(note, flush=True)
    leave_out_torch()
    policy = load_policy(
        model_path(config.model),
        config.weight_format,
        lora=LoraConfig(rank=0) if config.adapter is None else None,
        dtype=jnp.dtype(config.dtype),
        adapter=config.adapter,
        matmul_kernel=config.matmul_kernel,
    )
    problems, _, notes = load_encoded(
        arguments.dataset,
        arguments.split,
        policy.tokenizer,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        system_prompt=config.system_prompt,
        max_prompt_length=config.max_prompt_length,
        overlong_prompts=config.overlong_prompts,
        limit=arguments.samples,
        need_answers=True,
    )
    notes += filter(None, (cache_note(policy, config.kv_cache_dtype), endless_note(policy.config)))
    for note in notes:
        print(note, flush=True)
    name = correctness_reward(arguments.dataset)
    with load_rewards((name,), config.reward_workers, config.reward_timeout) as rewards:
        return evaluate(
            policy, problems, config.eval_sampling, config.seed, engine=config.eval_engine, reward=rewards[name]
        )
