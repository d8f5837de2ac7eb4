"""`python -m qerl_jax.train`: the whole program, from config to adapter, as one straight line.

config -> problems -> prompts -> rollout (noisy policy) -> rewards -> advantages -> update -> checkpoint / export
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from qerl_jax import aqn, keys
from qerl_jax.config import Config, ConfigError
from qerl_jax.data.problems import correctness_of, heaviest, rewards_of
from qerl_jax.data.prompts import EncodedProblem, completion_texts, load_encoded, to_prompts
from qerl_jax.data.stream import Stream
from qerl_jax.evaluation import evaluate
from qerl_jax.io import assets, run_directory
from qerl_jax.io.adapter import export_adapter
from qerl_jax.io.checkpoint import CHECKPOINTS_DIR, Checkpointer
from qerl_jax.io.command_line import parse, take_flag
from qerl_jax.io.devices import make_deterministic
from qerl_jax.io.load import load_policy
from qerl_jax.io.signals import StopSignals
from qerl_jax.reporting import metrics as sink
from qerl_jax.reporting import sinks
from qerl_jax.reporting.evaluation import Evaluation, Results
from qerl_jax.reporting.phases import Phases
from qerl_jax.reporting.plan import show_plan
from qerl_jax.reporting.plots import PLOTS_DIR, write_plots
from qerl_jax.reporting.progress import TrainingProgress, summary_table
from qerl_jax.reporting.report import REPORT_FILE, Ending, write_report
from qerl_jax.reporting.summaries import completion_columns, step_metrics
from qerl_jax.rewards import functions
from qerl_jax.rewards.workers import Rewards, load_rewards
from qerl_jax.rl.advantages import group_advantages, make_batch
from qerl_jax.rl.step import grpo_step, init_state, learning_rate
from qerl_jax.rollout.collect import Experience, collect
from qerl_jax.rollout.engine import generate
from qerl_jax.rollout.plan import Engine, make_plan
from qerl_jax.types import Policy, Rollout, TrainState

STOPPED = 130  # exit code
perturb = jax.jit(aqn.perturb)


def train(config: Config, console: Console | None = None) -> TrainState:
    """Run, or continue, the training that `config` describes; everything it leaves is in `config.output_dir`.

    Raises ConfigError, CheckpointError, DataError, RewardError or FileNotFoundError for input it cannot use, before
    the first step where possible. A first SIGINT or SIGTERM ends the run after the step in flight, with a checkpoint.
    """
    console = console or Console(highlight=False)
    config = with_rewards(config)
    correctness = heaviest(dict(zip(config.reward_funcs, config.reward_weights, strict=True)))
    directory = Path(config.output_dir)
    run_directory.check(directory, config)
    sinks.check(config)
    if config.deterministic:
        make_deterministic()

    rewards = load_rewards(
        config.reward_funcs,
        config.reward_workers,
        config.reward_timeout,
        console.print,
        config.allow_code_execution,
    )
    if config.eval_dataset:
        load_judge(config, workers=min(config.reward_workers, 1)).close()  # raises if it cannot
    policy = load(config)
    state = init_state(policy, config)
    lengths = config.max_prompt_length, config.max_completion_length
    if sum(lengths) > policy.config.max_position_embeddings:
        raise ConfigError(
            f"max_prompt_length {lengths[0]} + max_completion_length {lengths[1]} exceed max_position_embeddings "
            f"{policy.config.max_position_embeddings} of {assets.model_path(config.model) / 'config.json'}"
        )
    engine = Engine(memory_gb=config.rollout_memory_gb, batch_invariant=config.batch_invariant)
    make_plan(policy, config.num_prompts, config.num_generations, *lengths, engine)  # raises if it cannot fit
    stream, test_problems = load_problems(config, policy, console)

    if config.overwrite or run_directory.is_half_adopted(directory):
        run_directory.clear(directory)
    checkpoints = Checkpointer(directory, config.save_total_limit)
    state = restore(config, checkpoints, state, console)
    run_directory.write_config(directory, config)
    tokens_seen = sink.cut_back(directory, int(state.step))
    results, phases = Results(directory), Phases(directory, config.watchdog_seconds, console)
    curves = sinks.Sinks(config, directory, int(state.step))
    parameters = policy.config.parameter_count() / 1e6
    console.print(f"{config.model}: {parameters:,.1f} M parameters, {len(stream)} problems, into {directory}")
    if test_problems and results.get("before") is None:
        console.print(f"evaluating the policy on {len(test_problems)} problems before the run …")
        with phases("evaluation"):
            results.put("before", evaluate_state(config, policy, state, test_problems))
        curves.log(0, results.get("before").metrics())

    with rewards, StopSignals() as stop, TrainingProgress(int(state.step), config.max_steps, console) as progress:
        for step in range(int(state.step), config.max_steps):
            phases.step = step + 1
            sigma = aqn.sigma(config, step, config.max_steps)
            noisy = perturb(state.norms, sigma, keys.for_step(config.seed, keys.Purpose.AQN, step))
            actor = policy.replace(norms=noisy, lora=state.lora)

            experience = collect_step(config, actor, state, stream, rewards, engine, phases)
            advantages = group_advantages(jnp.asarray(experience.rewards), config.num_generations, config.scale_rewards)
            batch = make_batch(
                experience.rollout, advantages, jnp.asarray(experience.rewards), config.mask_truncated_completions
            )
            advanced = state.replace(cursor=state.cursor + experience.drawn)
            with phases("update"):
                state, update = jax.block_until_ready(grpo_step(advanced, policy.frozen, batch))
            if update["skipped"] > 0:
                run_directory.dump_batch(directory, step, batch)

            timing = phases.take("rollout", "grading", "update")
            noise = {
                "aqn/sigma": sigma,
                "aqn/norms": aqn.count(noisy),
                "learning_rate": float(learning_rate(config)(step * config.num_iterations)),
            }
            tokens_seen += int(experience.rollout.lengths.sum())
            seen = {"num_tokens": tokens_seen, "epoch": int(state.cursor) / len(stream)}
            metrics = step_metrics(experience, update, config.num_generations, timing, correctness) | noise | seen
            sink.append_metrics(directory, step + 1, metrics)
            curves.log(step + 1, metrics)
            sink.write_completions(
                directory,
                step + 1,
                completion_columns(experience, completion_texts(experience.rollout, policy.tokenizer), advantages),
            )
            progress.update(step + 1, metrics)
            if (step + 1) % config.save_steps == 0 or step + 1 == config.max_steps or stop.requested:
                with phases("checkpoint"):
                    checkpoints.save(state)
            if stop.requested:
                break
    checkpoints.close()
    finish(config, policy, state, test_problems, results, phases, curves, stop.requested, console)
    return state


def load(config: Config) -> Policy:
    """The policy of a config, its adapters initialized from the seed or imported."""
    if not config.model:
        raise ConfigError('model is empty: name a Hugging Face directory, or "tiny" for the bundled policy')
    return load_policy(
        assets.model_path(config.model),
        config.weight_format,
        config.lora,
        jnp.dtype(config.dtype),
        config.adapter,
        config.seed,
        config.matmul_kernel,
    )


def with_rewards(config: Config) -> Config:
    """The config with its rewards and their weights spelled out: those that go with the dataset, unless it names its
    own.

    Raises DataError for an unknown dataset, or several that come with different rewards.
    """
    funcs, weights = config.reward_funcs, config.reward_weights
    if funcs is None:
        rewards = rewards_of(config.dataset)
        funcs, weights = tuple(rewards), tuple(rewards.values())
    return dataclasses.replace(config, reward_funcs=funcs, reward_weights=weights or (1.0,) * len(funcs))


def load_problems(config: Config, policy: Policy, console: Console) -> tuple[Stream, list[EncodedProblem]]:
    """The training problems as an endless stream, and the problems of the evaluation (empty without one)."""
    load = functools.partial(
        load_encoded,
        tokenizer=policy.tokenizer,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        system_prompt=config.system_prompt,
        max_prompt_length=config.max_prompt_length,
        overlong_prompts=config.overlong_prompts,
    )
    evaluation, notes = [], []
    if config.eval_dataset:
        evaluation, _, notes = load(config.eval_dataset, "test", limit=config.eval_samples, need_answers=True)
    sets, first_id = [], 0
    for name in config.dataset:
        items, dataset, told = load(name, "train", reward_columns=config.reward_columns, first_id=first_id)
        sets.append(items)
        first_id += dataset.size
        notes += told
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    return Stream(tuple(sets), config.dataset_weights, config.seed), evaluation


def restore(config: Config, checkpoints: Checkpointer, state: TrainState, console: Console) -> TrainState:
    """The state to start from: `state` itself, or the newest checkpoint under `resume`, with the files of its run where
    that is another.
    """
    if config.resume == "never":
        return state
    directory = Path(config.output_dir)
    elsewhere = config.resume != "auto" and Path(config.resume).resolve() != directory.resolve()
    source = Checkpointer(Path(config.resume), keep=None) if elsewhere else checkpoints
    for step in source.incomplete_steps():
        console.print(f"{source.directory / str(step)} is incomplete and left out: it has no manifest")
    if config.resume == "auto" and source.latest_step() is None:
        return state
    state = source.restore(state)
    if elsewhere:
        run_directory.adopt(directory, Path(config.resume))
        checkpoints.save(state)
    console.print(f"continuing after step {int(state.step)} of {config.max_steps}")
    return state


def collect_step(
    config: Config,
    actor: Policy,
    state: TrainState,
    stream: Stream,
    rewards: Rewards,
    engine: Engine,
    phases: Phases,
) -> Experience:
    """Roll out and score one step's prompts from the data cursor on."""

    def draw(offset: int, count: int) -> list[EncodedProblem]:
        return stream.at(int(state.cursor) + offset, count)

    def roll(items: list[EncodedProblem], key: jax.Array) -> Rollout:
        prompts = to_prompts(items, config.max_prompt_length, actor.config.pad_token_id)
        with phases("rollout"):
            return jax.block_until_ready(generate(actor, prompts, config.sampling, key, engine))

    def score(items: list[EncodedProblem], rollout: Rollout) -> tuple[list[float], dict[str, list[float]]]:
        rows = [items[p].problem for p in np.asarray(rollout.prompt_index)]
        texts = completion_texts(rollout, actor.tokenizer)
        names = sorted({name for row in rows for name in row.extra})
        columns = {name: [row.extra.get(name) for row in rows] for name in names}
        limits = {
            "max_completion_length": config.max_completion_length,
            "overlong_buffer": config.overlong_tokens,
            "reward_timeout": config.reward_timeout,
        }
        columns |= {name: [value] * len(rows) for name, value in limits.items()}
        columns["completion_lengths"] = np.asarray(rollout.lengths - rollout.prompt_lengths).tolist()
        prompts, answers = [row.prompt for row in rows], [row.answer for row in rows]
        with phases("grading"):
            return functions.score(rewards, config.reward_weights, prompts, texts, answers, **columns)

    key = keys.for_step(config.seed, keys.Purpose.SAMPLE, int(state.step))
    refills = config.max_refill_rounds if config.dynamic_sampling else 0
    return collect(draw, roll, score, key, config.num_prompts, config.num_generations, refills)


def evaluate_state(config: Config, policy: Policy, state: TrainState, problems: list[EncodedProblem]) -> Evaluation:
    """The noise-free policy on the evaluation problems; the same samples' keys before and after."""
    current = policy.replace(norms=state.norms, lora=state.lora)
    with load_judge(config, config.reward_workers) as judge:
        return evaluate(
            current,
            problems,
            config.eval_sampling,
            config.seed,
            engine=Engine(config.eval_batch_size, config.rollout_memory_gb, batch_invariant=config.batch_invariant),
            reward=judge[correctness_of(config.eval_dataset)],
        )


def load_judge(config: Config, workers: int) -> Rewards:
    """The reward that tells right from wrong in evaluations. Raises RewardError if it cannot be loaded."""
    name = correctness_of(config.eval_dataset)
    return load_rewards((name,), workers, config.reward_timeout, allow_code_execution=config.allow_code_execution)


def finish(
    config: Config,
    policy: Policy,
    state: TrainState,
    test_problems: list[EncodedProblem],
    results: Results,
    phases: Phases,
    curves: sinks.Sinks,
    stopped: int,
    console: Console,
) -> None:
    """Plots and report always; evaluation, adapter and the closing table once all steps are done."""
    directory, steps = Path(config.output_dir), int(state.step)
    done = steps == config.max_steps
    if done and test_problems and results.get("after") is None:
        console.print("evaluating the trained policy on the same problems …")
        with phases("evaluation"):
            results.put("after", evaluate_state(config, policy, state, test_problems))
        curves.log(steps, results.get("after").metrics())
    curves.close()
    if done and config.lora_rank:
        trained = policy.replace(norms=state.norms, lora=state.lora)
        export_adapter(
            trained, directory / run_directory.ADAPTER_DIR, norms=config.train_norms, base_model=str(config.model)
        )
    rows = sink.read_metrics(directory)
    write_plots(directory, rows)
    reason = "" if done else signal.Signals(stopped).name
    write_report(directory, config, rows, Ending(steps, reason, results.all(), phases.totals, phases.overdue))
    phases.beat("stopped" if reason else "finished")
    if reason:
        console.print(f"stopped by {reason} after step {steps} of {config.max_steps}, checkpoint saved; go on with")
        again = directory / run_directory.CONFIG_FILE
        console.print(f"  python -m qerl_jax.train --config {again} --resume auto", soft_wrap=True)
        return
    files = [
        ("report", REPORT_FILE),
        ("metrics", sink.METRICS_FILE),
        ("completions", sink.COMPLETIONS_DIR),
        ("checkpoints", CHECKPOINTS_DIR),
        ("plots", PLOTS_DIR),
        *([("adapter", run_directory.ADAPTER_DIR)] if config.lora_rank else []),
    ]
    summary = [(name, result.describe()) for name, result in results.all().items()]
    summary_table(console, summary, [(name, str(directory / path)) for name, path in files])


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0: finished; 2: bad input, with one line that says what is wrong; 130: stopped by a
    signal, to be resumed.
    """
    try:
        argv, dry_run = take_flag(list(sys.argv[1:] if argv is None else argv), "--dry-run")
        config = parse(argv)
        if dry_run:
            show_plan(with_rewards(config), Console(highlight=False))
            return 0
        state = train(config)
    except (ValueError, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted outside of a step: nothing to save")
        return STOPPED
    return 0 if int(state.step) == config.max_steps else STOPPED


if __name__ == "__main__":
    sys.exit(main())
