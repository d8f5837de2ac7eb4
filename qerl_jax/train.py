"""`python -m qerl_jax.train`: the whole program, from config to adapter, as one straight line.

config -> problems -> prompts -> rollout (noisy policy) -> rewards -> advantages -> update -> checkpoint / export
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from qerl_jax import aqn, keys
from qerl_jax.config import Config
from qerl_jax.data.problems import correctness_of, heaviest
from qerl_jax.data.prompts import EncodedProblem, completion_texts, to_prompts
from qerl_jax.evaluation import evaluate
from qerl_jax.io import run_directory
from qerl_jax.io.adapter import export_adapter
from qerl_jax.io.checkpoint import CHECKPOINTS_DIR, Checkpointer, latest_step
from qerl_jax.io.command_line import parse, take_flag
from qerl_jax.io.signals import StopSignals
from qerl_jax.prepare import Run, check, prepare, with_rewards
from qerl_jax.reporting import sinks
from qerl_jax.reporting.evaluation import Evaluation, Results
from qerl_jax.reporting.metrics import (
    COMPLETIONS_DIR,
    METRICS_FILE,
    append_metrics,
    cut_back,
    read_metrics,
    write_completions,
)
from qerl_jax.reporting.phases import Phases
from qerl_jax.reporting.plan import show_plan
from qerl_jax.reporting.plots import PLOTS_DIR, write_plots
from qerl_jax.reporting.progress import TrainingProgress, summary_table
from qerl_jax.reporting.report import REPORT_FILE, Ending, write_report
from qerl_jax.reporting.summaries import completion_columns, run_metrics, step_metrics
from qerl_jax.rewards import functions
from qerl_jax.rewards.load import load_rewards
from qerl_jax.rl.advantages import group_advantages, make_batch
from qerl_jax.rl.step import grpo_step, init_state
from qerl_jax.rollout.collect import Experience, collect
from qerl_jax.rollout.engine import generate
from qerl_jax.types import FinishReason, Policy, Rollout, TrainState

STOPPED = 130  # exit code
perturb = jax.jit(aqn.perturb)


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a run writes."""

    checkpoints: Checkpointer
    results: Results
    phases: Phases
    curves: sinks.Sinks


def train(config: Config, console: Console | None = None) -> TrainState:
    """Run, or continue, the training that `config` describes; everything it leaves is in `config.output_dir`.

    Raises ConfigError, CheckpointError, DataError, RewardError or FileNotFoundError for input it cannot use, before
    the first step where possible; an error in a later step leaves a checkpoint of the step before. A first SIGINT or
    SIGTERM ends the run after the step in flight, with a checkpoint.
    """
    run = prepare(with_rewards(config), console or Console(highlight=False))
    out, state, tokens = begin(run, init_state(run.policy, run.config))
    state, stopped = steps(run, out, state, tokens)
    finish(run, out, state, stopped)
    return state


def begin(run: Run, state: TrainState) -> tuple[Output, TrainState, int]:
    """Make the directory the run's own, evaluate the policy before the run. Returns where to write, the state to start
    from (`state`, or the one to continue) and the tokens it has seen.
    """
    config, directory, console = run.config, run.directory, run.console
    if config.overwrite or run_directory.is_half_adopted(directory):
        run_directory.clear(directory)
    checkpoints = Checkpointer(directory, config.save_total_limit)
    state = restore(config, checkpoints, state, console)
    run_directory.write_config(directory, config)
    tokens = cut_back(directory, int(state.step))
    results, phases = Results(directory), Phases(directory, config.watchdog_seconds, console)
    curves = sinks.Sinks(config, directory, int(state.step))
    parameters = run.policy.config.parameter_count() / 1e6
    console.print(f"{config.model}: {parameters:,.1f} M parameters, {len(run.stream)} problems, into {directory}")
    if run.test_problems and results.get("before") is None:
        console.print(f"evaluating the policy on {len(run.test_problems)} problems before the run …")
        with phases("evaluation"):
            results.put("before", evaluate_state(run, state))
        curves.log(0, results.get("before").metrics())
    return Output(checkpoints, results, phases, curves), state, tokens


def steps(run: Run, out: Output, state: TrainState, tokens: int) -> tuple[TrainState, int]:
    """Train from `state` to the last step, or to the one in which a signal comes. Returns the last state and the
    signal's number, 0 for none.
    """
    config, first = run.config, int(state.step)
    with run.rewards, StopSignals() as stop, TrainingProgress(first, config.max_steps, run.console) as progress:
        for step in range(first, config.max_steps):
            try:
                state, metrics = take_step(run, out, state, tokens)
            except Exception:
                if step > first:
                    save_what_is_sound(run, out, state)
                raise
            tokens = int(metrics["num_tokens"])
            progress.update(step + 1, metrics)
            stopped = stop.requested  # read once: a signal from here on is the next step's
            if (step + 1) % config.save_steps == 0 or step + 1 == config.max_steps or stopped:
                with out.phases("checkpoint"):
                    out.checkpoints.save(state)
            if stopped:
                return state, stopped
    return state, 0


def take_step(run: Run, out: Output, state: TrainState, tokens: int) -> tuple[TrainState, dict[str, float]]:
    """One step, recorded: noise, rollout, rewards, advantages, update. `tokens` were seen before it."""
    config, step, phases = run.config, int(state.step), out.phases
    phases.step = step + 1
    sigma = aqn.sigma(config, step, config.max_steps)
    noisy = perturb(state.norms, sigma, keys.for_step(config.seed, keys.Purpose.AQN, step))
    actor = run.policy.replace(norms=noisy, lora=state.lora)

    experience = collect_step(run, actor, state, phases)
    scores = jnp.asarray(experience.rewards)
    advantages = group_advantages(scores, config.num_generations, config.scale_rewards)
    batch = make_batch(experience.rollout, advantages, scores, config.mask_truncated_completions)
    advanced = state.replace(cursor=state.cursor + experience.drawn)
    with phases("update"):
        state, update = jax.block_until_ready(grpo_step(advanced, run.policy.frozen, batch))
    if update["skipped"] > 0:
        run_directory.dump_batch(run.directory, step, batch)

    correctness = heaviest(dict(zip(config.reward_funcs, config.reward_weights, strict=True)))
    timing = phases.take("rollout", "grading", "update")
    metrics = step_metrics(experience, update, config.num_generations, timing, correctness)
    metrics |= run_metrics(experience, state, noisy, tokens, len(run.stream))
    append_metrics(run.directory, step + 1, metrics)
    out.curves.log(step + 1, metrics)
    texts = completion_texts(experience.rollout, run.policy.tokenizer)
    write_completions(run.directory, step + 1, completion_columns(experience, texts, advantages))
    return state, metrics


def save_what_is_sound(run: Run, out: Output, state: TrainState) -> None:
    """After an error in the step that follows `state`: the steps before it are not lost with it."""
    step = int(state.step)
    try:
        out.checkpoints.save(state)
    except OSError as error:  # the step's own error says more, and is raised after this
        run.console.print(f"step {step + 1} failed; {error}", soft_wrap=True, markup=False)
    else:
        run.console.print(f"step {step + 1} failed; the state after step {step} is saved, go on from it with")
        run.console.print(how_to_go_on(run.directory), soft_wrap=True)


def how_to_go_on(directory: Path) -> str:
    """The command that continues a run."""
    return f"  python -m qerl_jax.train --config {directory / run_directory.CONFIG_FILE} --resume auto"


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


def collect_step(run: Run, actor: Policy, state: TrainState, phases: Phases) -> Experience:
    """Roll out and score one step's prompts from the data cursor on."""
    config = run.config

    def draw(offset: int, count: int) -> list[EncodedProblem]:
        return run.stream.at(int(state.cursor) + offset, count)

    def roll(items: list[EncodedProblem], key: jax.Array) -> Rollout:
        prompts = to_prompts(items, config.max_prompt_length, actor.config.pad_token_id)
        with phases("rollout"):
            return jax.block_until_ready(generate(actor, prompts, config.sampling, key, config.engine))

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
            rewards, parts = functions.score(run.rewards, config.reward_weights, prompts, texts, answers, **columns)
        failed = np.asarray(rollout.finish) == FinishReason.FAILED  # they count in no mean of their group
        return np.where(failed, np.nan, rewards).tolist(), parts

    key = keys.for_step(config.seed, keys.Purpose.SAMPLE, int(state.step))
    refills = config.max_refill_rounds if config.dynamic_sampling else 0
    return collect(draw, roll, score, key, config.num_prompts, config.num_generations, refills)


def evaluate_state(run: Run, state: TrainState) -> Evaluation:
    """The noise-free policy on the evaluation problems; the same samples' keys before and after."""
    config, name = run.config, correctness_of(run.config.eval_dataset)
    with load_rewards(
        (name,), config.reward_workers, config.reward_timeout, allow_code_execution=config.allow_code_execution
    ) as judge:
        return evaluate(
            run.policy.replace(norms=state.norms, lora=state.lora),
            run.test_problems,
            config.eval_sampling,
            config.seed,
            engine=config.eval_engine,
            reward=judge[name],
        )


def finish(run: Run, out: Output, state: TrainState, stopped: int) -> None:
    """Plots and report always; evaluation, adapter and the closing table once all steps are done."""
    config, directory, console, last = run.config, run.directory, run.console, int(state.step)
    out.checkpoints.close()
    done = last == config.max_steps
    if done and run.test_problems and out.results.get("after") is None:
        console.print("evaluating the trained policy on the same problems …")
        with out.phases("evaluation"):
            out.results.put("after", evaluate_state(run, state))
        out.curves.log(last, out.results.get("after").metrics())
    out.curves.close()
    if done and config.lora_rank:
        trained = run.policy.replace(norms=state.norms, lora=state.lora)
        export_adapter(
            trained, directory / run_directory.ADAPTER_DIR, norms=config.train_norms, base_model=str(config.model)
        )
    rows = read_metrics(directory)
    write_plots(directory, rows)
    reason = "" if done else signal.Signals(stopped).name
    ending = Ending(last, reason, out.results.all(), out.phases.totals, out.phases.overdue)
    write_report(directory, config, rows, ending)
    out.phases.beat("stopped" if reason else "finished")
    if reason:
        console.print(f"stopped by {reason} after step {last} of {config.max_steps}, checkpoint saved; go on with")
        console.print(how_to_go_on(directory), soft_wrap=True)
        return
    files = {
        "report": REPORT_FILE,
        "metrics": METRICS_FILE,
        "completions": COMPLETIONS_DIR,
        "checkpoints": CHECKPOINTS_DIR,
        "plots": PLOTS_DIR,
    } | ({"adapter": run_directory.ADAPTER_DIR} if config.lora_rank else {})
    summary = [(name, result.describe()) for name, result in out.results.all().items()]
    summary_table(console, summary, [(name, str(directory / path)) for name, path in files.items()])


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0: finished; 2: bad input, with one line that says what is wrong; 130: stopped by a
    signal, to be resumed.
    """
    errors, config = Console(stderr=True, highlight=False, soft_wrap=True), None
    try:
        argv, dry_run = take_flag(list(sys.argv[1:] if argv is None else argv), "--dry-run")
        config = parse(argv)
        if dry_run:
            config = with_rewards(config)
            check(config)
            show_plan(config, Console(highlight=False))
            return 0
        state = train(config)
    except (ValueError, OSError) as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        saved = latest_step(Path(config.output_dir)) if config else None
        if saved is None:
            errors.print("interrupted; there is no checkpoint to go on from", markup=False)
        else:
            errors.print(f"interrupted; the newest checkpoint is that of step {saved}, go on from it with")
            errors.print(how_to_go_on(Path(config.output_dir)), markup=False)
        return STOPPED
    return 0 if int(state.step) == config.max_steps else STOPPED


if __name__ == "__main__":
    sys.exit(main())
