"""Checks and loading: most errors in the input are raised here, before anything is written."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from qerl_jax.backends.vllm_engine import VllmEngine
from qerl_jax.backends.vllm_settings import check as check_vllm
from qerl_jax.backends.vllm_settings import engine_options
from qerl_jax.checkpoint import assets
from qerl_jax.checkpoint.adapter import open_adapter
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.checkpoint.load import accepted_quantization, load_policy, read_tokenizer
from qerl_jax.checkpoint.of_run import base_note
from qerl_jax.checkpoint.orbax import refuse_changed
from qerl_jax.checkpoint.peft_config import adapter_config
from qerl_jax.compilation import committed, use_compilation_cache
from qerl_jax.config import Config, ConfigError
from qerl_jax.config.fields import PROMPT_LENGTH
from qerl_jax.data.files import DataError
from qerl_jax.data.problems import check_dataset
from qerl_jax.data.prompts import EncodedProblem, freeze_date, load_encoded
from qerl_jax.data.stream import ProblemStream
from qerl_jax.lowered import LoweredPrograms
from qerl_jax.messages import Given, shown
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.programs import Ahead
from qerl_jax.reporting import sinks
from qerl_jax.reporting.console import say
from qerl_jax.rewards.functions import BUILT_IN
from qerl_jax.rewards.load import Rewards, check_rewards, load_rewards
from qerl_jax.rl.plan import UpdatePlan, make_update_plan
from qerl_jax.rl.state import init_state
from qerl_jax.rollout.shapes import choose_shapes, ending_note
from qerl_jax.run import directory as run_directory
from qerl_jax.run.choose_rewards import correctness_reward
from qerl_jax.run.devices import device_bytes, free_device_bytes, kernels_note, make_deterministic
from qerl_jax.run.fingerprints import prompts_date
from qerl_jax.run.hooks import Hooks, with_ids
from qerl_jax.run.lock import refuse_locked
from qerl_jax.run.lowering_workers import LoweringWorkers, useful_workers
from qerl_jax.run.memory import refuse_division, refuse_oversized
from qerl_jax.run.rehearsal import rehearse_run, rehearse_step
from qerl_jax.run.sample import try_rewards
from qerl_jax.types import Policy, TrainState


@dataclasses.dataclass(frozen=True)
class Run:
    """The loaded inputs of a run.

    Attributes:
      config: with its rewards (`choose_rewards.with_rewards`), `max_prompt_length` and `max_steps` filled in.
      directory: `config.output_dir`.
      console: for messages to the user.
      policy: with fresh or imported adapters.
      rewards: functions by name, and the worker processes of some.
      stream: training problems, endless.
      eval_problems: problems of `config.eval_dataset`; empty without one.
      hooks: functions of the user's.
      plan: of every update; None: that of a device without limit.
      programs: compiles them before their first calls; None: each is compiled at its first call.
      workers: lower some of them.
      vllm: what samples completions under `rollout_backend` vllm, else None.
      replicas: the processes that share its work.
      date: in prompts whose chat template has one.
    """

    config: Config
    directory: Path
    console: Console
    policy: Policy
    rewards: Rewards
    stream: ProblemStream
    eval_problems: list[EncodedProblem]
    hooks: Hooks = dataclasses.field(default_factory=Hooks)
    plan: UpdatePlan | None = None
    programs: Ahead | None = None
    workers: LoweringWorkers = dataclasses.field(default_factory=LoweringWorkers)
    vllm: VllmEngine | None = None
    replicas: Replicas = ALONE
    date: datetime.date | None = None

    @property
    def given(self) -> dict[str, str]:
        """Names of the user's functions and records, by the argument of `train`."""
        config = self.config
        names = {
            "reward_funcs": config.reward_funcs,
            "train_dataset": config.dataset,
            "eval_dataset": [config.eval_dataset],
        }
        own = {argument: ", ".join(n for n in of if isinstance(n, Given)) for argument, of in names.items()}
        return self.hooks.given() | {argument: found for argument, found in own.items() if found}

    @property
    def resume_command(self) -> str:
        """How to resume the run: a command line knows no functions of the user's."""
        if given := ", ".join(self.given):
            return f"  train(Config(…, resume='auto'), …) and the same arguments: {given}"
        return run_directory.resume_command(self.directory)

    def problems(self, state: TrainState, drawn: int, count: int) -> list[EncodedProblem]:
        """`count` problems of a step that has `drawn` others, of earlier rounds of dynamic sampling."""
        if self.hooks.problems is None:
            return self.stream.at(int(state.cursor) + drawn, count)
        return self.hooks.problems_at(int(state.step), self.stream, count, self.replicas)

    def clock(self) -> float:
        """Seconds, but for those in which calls waited for their programs."""
        return time.perf_counter() - (self.programs.waited if self.programs else 0.0)


def prepare(config: Config, console: Console, hooks: Hooks, replicas: Replicas = ALONE) -> tuple[Run, TrainState]:
    """Check the config and load everything, before anything is written or deleted. The run's programs are compiled
    meanwhile. Returns the run and the state before its first step. Raises what `check` and `init_state` raise.
    """
    directory = Path(config.output_dir)
    if replicas.is_first:
        check_output(config)
        check(config, replicas.count, replicas.tensor_parallel)
    replicas.agree()
    config = with_prompt_length(config, console)
    refuse_changed(config)
    ids = hooks.ids_at(0, config.num_prompts)
    if config.deterministic:
        make_deterministic()
    say(console, use_compilation_cache(config.compilation_cache_dir))
    programs, reader = None, ThreadPoolExecutor(1)
    rewards = ready_rewards(config, console)
    workers = LoweringWorkers(useful_workers(hooks, replicas))
    try:
        if replicas.is_first:
            assets.model_path(config.model)  # downloads what the hub has, before anybody reads it
        replicas.agree()
        # In a thread from here on: importing transformers takes seconds, and so do starting a device and its weights.
        say(console, f"reading and tokenizing {', '.join(config.dataset)} …")
        date = prompts_date(config, replicas)
        tokenizer = reader.submit(read_tokenizer, assets.model_path(config.model), config.adapter)
        problems = reader.submit(_problems, config, tokenizer, date, console, ids)
        if note := kernels_note(config.matmul_kernel):
            say(console, note)
        limit = smallest(replicas.gather(device_bytes()))
        refuse_oversized(config, limit, replicas.count, replicas.tensor_parallel)
        if kept := LoweredPrograms.beside_compiled():
            kept.on_missing = functools.partial(workers.begin, kept)
            workers.submit(rehearse_run, config, hooks, limit, dataclasses.replace(replicas, link=None))
        programs = Ahead(done=functools.partial(say, console), kept=kept, replicas=replicas)
        programs.submit(rehearse_run, config, hooks, limit, replicas)
        if config.adapter is not None:
            base = assets.model_path(config.model)
            if note := base_note(Path(config.adapter), base, config.weight_format):
                say(console, note)
        say(console, f"loading {config.model} …")
        loaded = load(config, console, replicas.tensor_parallel, tokenizer, problems)
        policy = committed(loaded, replicas.tensor_parallel).replace(tokenizer=loaded.tokenizer, source=loaded.source)
        if config.rollout_backend == "jax":
            refuse_rollout(policy, config, replicas, free_device_bytes())
        stream, eval_problems = problems.result()
        say(console, ending_note(policy.config, loaded.tokenizer))
        config = config.with_max_steps(len(stream))
        if hooks.problems is None:
            say_left_out(config, len(stream), console)
        state = init_state(policy, config, hooks.optimizer)
        # Again: weights in an unusual form have other programs.
        plan = make_update_plan(state, policy.frozen, limit, replicas=replicas.count)
        programs.submit(rehearse_step, config, hooks, policy, state, plan, replicas)
        vllm = start_vllm(config, policy, console) if config.rollout_backend == "vllm" else None
    except BaseException:
        if programs:
            programs.cancel()
        workers.close()
        rewards.close()
        raise
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
    inputs = config, directory, console, policy, rewards, stream, eval_problems
    return Run(*inputs, hooks, plan, programs, workers, vllm, replicas, date), state


def _problems(
    config: Config, tokenizer: Future, date: datetime.date, console: Console, ids: Sequence[int]
) -> tuple[ProblemStream, list[EncodedProblem]]:
    """`load_problems` with a chat template that writes this date. Raises ConfigError where the first step has an id
    that no problem has.
    """
    freeze_date(tokenizer.result(), date)
    stream, evaluation = load_problems(config, tokenizer.result(), console)
    with_ids(ids, 0, stream)
    return stream, evaluation


def smallest(limits: Sequence[int | None]) -> int | None:
    """Memory that all replicas have, on which they plan alike; None where a backend does not say."""
    return None if None in limits else min(limits)


def refuse_rollout(policy: Policy, config: Config, replicas: Replicas, free_bytes: int | None) -> None:
    """Raise ValueError where a replica's part of a rollout does not fit so much free memory (None: no limit)."""
    sizes = replicas.largest_share(config.num_prompts), config.num_generations
    engine = config.engine.replace(free_bytes=free_bytes)
    choose_shapes(policy, *sizes, config.max_prompt_length, config.max_completion_length, engine)


def ready_rewards(config: Config, console: Console, download: bool = True) -> Rewards:
    """The rewards, loaded and called once, as `try_rewards` does. Raises RewardError, and DataError for a dataset
    without a first problem.
    """
    grading = config.reward_workers, config.reward_timeout, functools.partial(say, console), config.allow_code_execution
    rewards = load_rewards(config.reward_funcs, *grading)
    try:
        try_rewards(config, rewards, download)
    except BaseException:
        rewards.close()
        raise
    return rewards


def start_vllm(config: Config, policy: Policy, console: Console) -> VllmEngine:
    """vLLM with the base of a run, once JAX has its share of the memory. Raises VllmError if it does not start."""
    base, width = assets.model_path(config.model), config.max_prompt_length + config.max_completion_length
    sequences = max(config.batch_size, config.eval_batch_size if config.eval_dataset else 0)
    options = engine_options(config, base, width, sequences, config.lora_rank, config.vllm_share)
    with console.status("starting vLLM …"):
        engine = VllmEngine(options, policy.config)
    say(console, f"vLLM {engine.version} samples with {config.vllm_share:g} of the GPU's memory; its log: {engine.log}")
    return engine


def check_output(config: Config) -> None:
    """Raise ConfigError or OSError where a run may not write into its output directory."""
    run_directory.check(Path(config.output_dir), config)
    refuse_locked(Path(config.output_dir))


def check(config: Config, processes: int = 1, tensor_parallel: int = 1) -> None:
    """Check everything that needs no weights, for a run of so many processes with so many devices each, and a dry run
    alike. The rewards of `config` are filled in. Raises ConfigError, CheckpointError, DataError, RewardError, OSError,
    or ValueError for a `weight_format` that is not the stored one.
    """
    sinks.check(config)
    check_rewards(config.reward_funcs, config.allow_code_execution)
    if config.eval_dataset:
        check_rewards((correctness_reward(config.eval_dataset),), config.allow_code_execution)
        check_dataset(config.eval_dataset, "test")
    for name in config.dataset:
        check_dataset(name, "train")
    if config.adapter is not None:
        adapter_config(Path(config.adapter))  # before anything is downloaded
    directory = assets.model_path(config.model, weights=False)
    refuse_division(config, tensor_parallel)
    model = dataclasses.replace(model_config(directory), tensor_parallel=tensor_parallel)
    positions = model.max_position_embeddings
    accepted_quantization(directory, config.weight_format)
    if config.adapter is not None:
        open_adapter(Path(config.adapter), model, config.lora)
    completion, room = config.max_completion_length, positions - config.max_completion_length
    limit = f"max_position_embeddings {positions} of {directory / 'config.json'}"
    if room < 1:
        advice = f"{positions // 2} leaves them {positions - positions // 2}"
        raise ConfigError(f"max_completion_length {completion} leaves prompts nothing of {limit}: {advice}")
    if config.max_prompt_length is not None and config.max_prompt_length > room:
        raise ConfigError(
            f"max_prompt_length {config.max_prompt_length} + max_completion_length {completion} exceed {limit}: give a "
            f"max_prompt_length of at most {room}"
        )
    if config.rollout_backend == "vllm":
        check_vllm(config, directory, processes * tensor_parallel)


def with_prompt_length(config: Config, console: Console) -> Config:
    """The config with `max_prompt_length` for its model, which is said where the model's positions set it."""
    positions = model_config(assets.model_path(config.model, weights=False)).max_position_embeddings
    chosen = config.with_max_prompt_length(positions)
    if config.max_prompt_length is None and chosen.max_prompt_length < PROMPT_LENGTH:
        say(
            console,
            f"max_prompt_length {chosen.max_prompt_length}: what max_completion_length {config.max_completion_length} "
            f"leaves of the model's {positions} positions",
        )
    return chosen


def load(
    config: Config,
    console: Console | None = None,
    tensor_parallel: int = 1,
    tokenizer: Future | None = None,
    problems: Future | None = None,
) -> Policy:
    """The policy of a config, its adapters initialized from the seed or imported, its layers divided over so many
    devices. On a terminal, `console` shows a bar that counts layers. `tokenizer`: as of `load_policy`. `problems`: read
    meanwhile; what is wrong with them is raised between layers.
    """
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=console is None or not console.is_terminal) as bar:
        task = bar.add_task(f"loading {config.model}", total=None)

        def report(done: int, total: int) -> None:
            if problems is not None and problems.done():
                problems.result()
            bar.update(task, completed=done, total=total)

        return load_policy(
            assets.model_path(config.model),
            config.weight_format,
            config.lora,
            jnp.dtype(config.dtype),
            config.adapter,
            config.seed,
            config.matmul_kernel,
            report,
            tensor_parallel,
            tokenizer,
        )


def load_problems(config: Config, tokenizer: Any, console: Console) -> tuple[ProblemStream, list[EncodedProblem]]:
    """The training problems as an endless stream, and the problems of the evaluation (empty without one)."""
    load = functools.partial(
        load_encoded,
        tokenizer=tokenizer,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        system_prompt=config.system_message,
        max_prompt_length=config.max_prompt_length,
        overlong_prompts=config.overlong_prompts,
    )
    evaluation, notes = [], []
    if config.eval_dataset:
        evaluation, _, notes = load(config.eval_dataset, "test", limit=config.eval_samples, need_answers=True)
    sets, first_id = [], 0
    for name in config.dataset:
        items, dataset, told = load(name, "train", reward_columns=config.read_columns, first_id=first_id)
        sets.append(items)
        first_id += dataset.size
        notes += told
        if dataset.unread and not set(config.reward_funcs or ()) <= BUILT_IN.keys():
            notes.append(f"{name}: columns not given to rewards: {', '.join(dataset.unread)} (reward_columns)")
    for note in notes:
        say(console, note)
    if (column := config.order_column) is not None:
        values = [item.problem.extra[column] for items in sets for item in items]
        check_sortable(column, values)
        if isinstance(values[0], str):
            found = sorted(set(values))
            listed = ", ".join(map(shown, found[:5])) + (", …" if len(found) > 5 else "")
            say(console, f"data_order {column}: its values are texts, in the order {listed}; numbers (1, 2) go by size")
    key = None if column is None else lambda item: item.problem.extra[column]
    shuffled = config.data_order == "shuffled"
    return ProblemStream(tuple(sets), config.dataset_weights, config.seed, shuffled, key), evaluation


def say_left_out(config: Config, problems: int, console: Console) -> None:
    """Say how many of so many problems, the last of their order, no rollout of the run reaches, in which step a
    curriculum begins anew, or that there are too few for a rollout.
    """
    if config.num_prompts > problems:
        say(console, f"a rollout of {config.num_prompts} prompts has some of the {problems} problems more than once")
    is_one_walk = config.data_order != "shuffled" and config.dataset_weights is None and not config.resampling_rounds
    left = problems - config.num_rollouts * config.num_prompts
    if is_one_walk and left > 0:
        rollouts = f"{config.num_rollouts} rollouts of {config.num_prompts}"
        say(console, f"data_order {config.data_order}: {rollouts} leave out the last {left} of {problems} problems")
    if is_one_walk and left < 0 and config.order_column:
        again = problems // config.num_prompts + 1
        say(console, f"data_order {config.data_order}: the {problems} problems begin anew in step {again}")


def check_sortable(column: str, values: Iterable[Any]) -> None:
    """Raise DataError unless a column holds numbers alone, texts alone or booleans alone."""

    def kind(value: Any) -> str:
        if isinstance(value, str):
            return "text"
        if isinstance(value, int) and not -(2**63) <= value < 2**63:  # no column of the completions' files holds it
            return "int of more than 64 bits"
        if isinstance(value, float) and value != value:
            return "NaN"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return "number" if is_number else type(value).__name__

    kinds = set(map(kind, values))
    if kinds not in ({"number"}, {"text"}, {"bool"}):
        raise DataError(
            f"data_order {column!r}: the column holds {' and '.join(sorted(kinds))}, which cannot be sorted"
        )
