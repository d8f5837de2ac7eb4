"""`python -m qerl_jax.evaluate MODEL [--adapter DIR] --dataset …`: pass@1, avg@n, pass@k and maj@n with intervals."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from qerl_jax import command, launch
from qerl_jax.atomic import check_file_writable, write_json
from qerl_jax.backends.vllm_engine import VllmEngine, Weights
from qerl_jax.backends.vllm_settings import VERSION, engine_options
from qerl_jax.backends.vllm_settings import check as check_vllm
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.of_run import base_note, format_for, loaded_format
from qerl_jax.checkpoint.peft_config import adapter_config
from qerl_jax.checkpoint.safetensors import CheckpointError, model_fingerprint, read_json
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.compilation import use_compilation_cache
from qerl_jax.config import Config, ConfigError, flags
from qerl_jax.data.prompts import EncodedProblem, freeze_date, load_encoded
from qerl_jax.evaluation import Evaluation, sampled_items, summarize
from qerl_jax.evaluation.grading import grader_of
from qerl_jax.evaluation.harness import Generate
from qerl_jax.evaluation.records import kept_settings, open_records
from qerl_jax.lowered import LoweredPrograms
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.lora import LoraConfig
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.rewards.load import load_rewards
from qerl_jax.rollout.engine import check_positions, generate
from qerl_jax.rollout.shapes import ending_note
from qerl_jax.run.choose_rewards import correctness_reward
from qerl_jax.run.devices import free_device_bytes, kernels_note, make_deterministic, use_device_memory
from qerl_jax.run.fingerprints import PROMPTS_DATE, evaluation_date, problems_fingerprint
from qerl_jax.run.memory import evaluation_fits
from qerl_jax.types import Prompts, Rollout

# Fields of Config that are flags here under the same name, and those under another name.
_SAME = (
    "prompt_column",
    "answer_column",
    "prompt_format",
    "system_prompt",
    "overlong_prompts",
    "rollout_memory_gb",
    "batch_invariant",
    "deterministic",
    "weight_format",
    "dtype",
    "matmul_kernel",
    "compilation_cache_dir",
    "reward_workers",
    "reward_timeout",
    "vllm_gpu_memory_utilization",
    "seed",
)
_RENAMED = {
    "backend": "rollout_backend",
    "num_generations": "eval_num_generations",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "batch_size": "eval_batch_size",
}
_LENGTHS = ("max_prompt_length", "max_completion_length")  # of Config, with defaults of their own
_FIELDS = _RENAMED | {name: name for name in _SAME}
_NOT_SETTINGS = (  # no item depends on these
    *("output", "records", "compilation_cache_dir", "reward_workers", "vllm_gpu_memory_utilization"),
    *(field.name for field in dataclasses.fields(launch.Devices)),
)
_VLLM_SHARE = 0.85  # share of the GPU's memory; JAX needs little here

_BATCHES = 8  # batches of completions of each process sampled together: slots idle only while the last of them end


@dataclasses.dataclass(frozen=True)
class _OwnArguments(launch.Devices):
    """Evaluate a model, with or without an adapter, on a dataset of problems with answers."""

    model: str
    """Hugging Face directory, ORGANIZATION/NAME on the hub, or "tiny" for the bundled policy."""
    adapter: str | None = None
    """PEFT adapter directory to evaluate on the model: adapter/ of a run, an export of it, or one that peft wrote."""
    dataset: str = "gsm8k"
    """gsm8k, math, math500, aime24, aime25, amc23 (from the hub), PRESET:PATH (a local copy of one), arithmetic
    (bundled), or a .jsonl, .json or .parquet file or a directory of them."""
    split: str = "test"
    """Split of a named dataset."""
    samples: int | None = None
    """Only the first so many problems."""
    max_prompt_length: int = 4096
    """Most tokens of a prompt; `overlong_prompts` says what happens to longer ones."""
    max_completion_length: int = 4096
    """Longest completion in tokens."""
    output: str | None = None
    """Also write the result to this JSON file."""
    records: str | None = None
    """Also write every problem with its completions and verdicts to this .jsonl file, as they come. If it exists, the
    evaluation goes on where it was killed; a file of other settings is refused."""
    problems_at_once: int | None = None
    """Problems sampled together and then written to `records`; what a kill can lose. None: as many as make 8 batches
    of completions of each process."""


def main(argv: Sequence[str] | None = None, generate: Generate = generate) -> int:
    """Command line. Exit code 2 for bad input, with a one-line error message. `generate` samples for backend jax."""

    def body() -> int:
        words = sys.argv[1:] if argv is None else argv
        arguments, config = parse(words)

        def evaluated(replicas: Replicas) -> int:
            with replicas:
                result = run(arguments, config, generate, replicas)
            if not replicas.is_first:
                return 0
            try:
                print("\n".join(result.table()), flush=True)  # before the file: a full disk must not lose hours of work
            finally:
                if arguments.output is not None:
                    write_json(Path(arguments.output), dataclasses.asdict(result))
            return 0

        use_device_memory(config.vllm_share)
        found = arguments.of_one() if config.rollout_backend == "vllm" else arguments
        program = "-m", "qerl_jax.evaluate", *words
        found, program = launch.sized(found, program, functools.partial(evaluation_fits, config))
        return launch.run(found, program, evaluated)

    return command.run(body, lambda: "interrupted; the same command goes on with --records, and begins anew without")


def parse(words: Sequence[str]) -> tuple[Any, Config]:
    """The flags of a command line, and their config. Raises ValueError or OSError for those that cannot be used."""
    kind = flags.fields_of_config(_FIELDS, (_OwnArguments,))
    arguments = flags.parse(kind, words, "python -m qerl_jax.evaluate", inspect.getdoc(_OwnArguments))
    if arguments.adapter is not None:
        base = model_path(arguments.model, weights=False)
        trained = format_for(Path(arguments.adapter), base, arguments.weight_format)
        arguments = dataclasses.replace(arguments, weight_format=trained)
    config = _config(arguments)
    _check(arguments, config)
    return arguments, config


def _config(arguments: Any) -> Config:
    """The arguments as a Config, which checks them; errors name the flag."""
    try:
        given = {name: getattr(arguments, flag) for flag, name in _FIELDS.items()}
        if given["rollout_backend"] == "vllm" and given["vllm_gpu_memory_utilization"] is None:
            given["vllm_gpu_memory_utilization"] = _VLLM_SHARE
        given |= {name: getattr(arguments, name) for name in ("model", "adapter", *_LENGTHS)}
        return Config(**given)
    except ConfigError as error:
        message = str(error)
        for flag, name in _RENAMED.items():
            message = message.replace(name, flag)
        raise ConfigError(message) from error


def run(arguments: Any, config: Config, generate: Generate, replicas: Replicas = ALONE) -> Evaluation:
    """The evaluation that flags and their config describe. Of the replicas that share its problems, the first keeps the
    records.
    """
    if config.deterministic:
        make_deterministic()
    print(use_compilation_cache(config.compilation_cache_dir), flush=True)
    if config.rollout_backend == "jax" and (note := kernels_note(config.matmul_kernel)):
        print(note, flush=True)
    directory = model_path(config.model)
    if config.rollout_backend == "vllm":
        check_vllm(config, directory, replicas.count * replicas.tensor_parallel, "backend")
    if config.adapter and (note := base_note(Path(config.adapter), directory, config.weight_format)):
        print(note, flush=True)
    model = model_config(directory)
    print(
        f"weights in {loaded_format(directory, config.weight_format).upper()}, computed in {config.dtype}", flush=True
    )
    tokenizer = load_tokenizer(directory, model.vocab_size)
    kept = kept_settings(Path(arguments.records)) if arguments.records else {}
    date = replicas.broadcast(evaluation_date(kept.get(PROMPTS_DATE), config.adapter and Path(config.adapter)))
    if is_dated := freeze_date(tokenizer, date):
        print(f"the chat template writes the date {date}", flush=True)
    print(f"reading and tokenizing {arguments.dataset} …", flush=True)
    problems, _, notes = load_encoded(
        arguments.dataset,
        arguments.split,
        tokenizer,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        system_prompt=config.system_message,
        max_prompt_length=config.max_prompt_length,
        overlong_prompts=config.overlong_prompts,
        limit=arguments.samples,
        need_answers=True,
    )
    for note in notes:
        print(note, flush=True)
    longest = max(len(item.tokens) for item in problems)
    check_positions(model, longest, config.max_completion_length)
    at_once = problems_at_once(arguments.problems_at_once, kept.get("problems_at_once"), config, replicas.count)
    at_once = replicas.broadcast(at_once)
    with contextlib.ExitStack() as stack:
        records = None
        if arguments.records is not None and replicas.is_first:
            settings = _settings(arguments, directory, problems, at_once)
            settings |= {PROMPTS_DATE: str(date)} if is_dated else {}
            ids = [item.problem.id for item in problems]
            opened = open_records(Path(arguments.records), settings, ids, at_once, config.eval_num_generations)
            records = stack.enter_context(opened)
        name = correctness_reward(arguments.dataset)
        rewards = stack.enter_context(load_rewards((name,), config.reward_workers, config.reward_timeout))
        grader = grader_of(name, rewards[name])
        items = replicas.broadcast(list(records.items) if records else [])
        if items:
            print(f"{len(items)} of {len(problems)} problems are in the records", flush=True)
        if len(items) < len(problems):  # else no model is loaded
            room = replicas.largest_share(min(at_once, len(problems)))
            print(f"loading {config.model} …", flush=True)
            settings = config, directory, model, longest, room, stack, generate
            sample = _sampler(*settings, replicas.tensor_parallel)
            print(ending_note(model, tokenizer), flush=True)
            print("sampling; the first problems wait until the programs are compiled …", flush=True)
            if kept := LoweredPrograms.beside_compiled():
                stack.enter_context(kept.used())
            parts = sampled_items(sample, tokenizer, problems, grader, config.seed, at_once, len(items), replicas)
            for part in parts:
                if records:
                    records.append(part)
                items += part
                if len(problems) > at_once:
                    print(f"{len(items)} of {len(problems)} problems", flush=True)
        return summarize(items, grader.votes)


def problems_at_once(given: int | None, kept: Any, config: Config, processes: int) -> int:
    """Problems that are sampled together: the number `given`, else the one `kept` with the records, perhaps of another
    number of processes, else `_BATCHES` of each process.
    """
    own = math.ceil(_BATCHES * config.eval_batch_size / config.eval_num_generations) * processes
    return given or (kept if isinstance(kept, int) and kept > 0 else own)


def _check(arguments: Any, config: Config) -> None:
    """Raise ValueError or OSError for flags that cannot be used, before anything is read."""
    if (at_once := arguments.problems_at_once) is not None and at_once < 1:
        raise ValueError(f"problems_at_once must be at least 1, got {at_once}")
    if config.rollout_backend == "vllm" and config.matmul_kernel != "auto":
        raise ValueError(
            f"matmul_kernel {config.matmul_kernel!r} contradicts backend 'vllm': it has kernels of its own"
        )
    if config.adapter is not None:
        adapter_config(Path(config.adapter))
    for name in ("output", "records"):
        if getattr(arguments, name) is not None:
            check_file_writable(Path(getattr(arguments, name)), name)
    files = [Path(name).resolve() for name in (arguments.output, arguments.records) if name is not None]
    if len(set(files)) < len(files):
        raise ValueError(f"output and records are the same file, {arguments.output}")
    if arguments.output is not None:
        _refuse_other(Path(arguments.output))


def _refuse_other(output: Path) -> None:
    """Raise ConfigError for a file with anything in it but an earlier result, such as the dataset, config.json of the
    model or evaluation.json of a run.
    """
    if output.is_file() and output.stat().st_size:
        try:
            Evaluation.from_json(read_json(output))
        except (CheckpointError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"output {output} is no result of an evaluation, so it is not replaced: name another"
            ) from error


def _settings(arguments: Any, directory: Path, problems: Sequence[EncodedProblem], at_once: int) -> dict[str, Any]:
    """All that the items of an evaluation depend on, as JSON: the flags, the files behind them, and the machine, whose
    arithmetic decides between samples that are all but equal.
    """
    found = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in _NOT_SETTINGS}
    if found.pop("backend") == "vllm":
        found["vllm"] = VERSION
    found |= {"problems_at_once": at_once, "model_files": model_fingerprint(directory)}
    if arguments.adapter is not None and Path(arguments.adapter).is_dir():
        found["adapter_files"] = model_fingerprint(Path(arguments.adapter))
    found["prompts_and_answers"] = problems_fingerprint(problems)
    return found | {"jax": jax.__version__, "device": jax.local_devices()[0].device_kind}


def _sampler(
    config: Config,
    directory: Path,
    model: ModelConfig,
    longest: int,
    room: int,
    stack: contextlib.ExitStack,
    generate: Generate,
    tensor_parallel: int,
) -> Callable[[Prompts, Array], Rollout]:
    """The loaded model as a function that samples the completions of up to `room` prompts of at most `longest` tokens,
    the last ones of an evaluation in the programs of all others.
    """
    sampling = config.eval_sampling
    if config.rollout_backend == "jax":
        policy = load_policy(
            directory,
            config.weight_format,
            lora=LoraConfig(rank=0) if config.adapter is None else None,
            dtype=jnp.dtype(config.dtype),
            adapter=config.adapter,
            matmul_kernel=config.matmul_kernel,
            tensor_parallel=tensor_parallel,
        )
        engine = config.eval_engine.replace(prompts=room, free_bytes=free_device_bytes())
        return lambda prompts, key: generate(policy, prompts, sampling, key, engine)
    weights = Weights.of_files(directory, None if config.adapter is None else Path(config.adapter))
    width, rank = longest + config.max_completion_length, weights.config.rank
    options = engine_options(config, directory, width, config.eval_batch_size, rank, config.vllm_share)
    print(f"starting vLLM {VERSION}", flush=True)
    engine = stack.enter_context(VllmEngine(options, model))
    engine.set_weights(weights)
    print(f"vLLM {engine.version}: {len(weights.norms)} layer norms and {len(weights.lora)} matrices set", flush=True)
    return lambda prompts, key: engine.sample(prompts, sampling, key)


if __name__ == "__main__":
    command.end(main)
