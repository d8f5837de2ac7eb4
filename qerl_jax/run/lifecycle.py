"""The two ends of a run. Start: output directory, checkpoint to resume, first evaluation. End: second evaluation,
adapter, plots, report.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from qerl_jax import aqn
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.hub import is_hub_id
from qerl_jax.checkpoint.orbax import Checkpointer, model_input, saved_inputs
from qerl_jax.checkpoint.run_files import (
    ADAPTER_DIR,
    CHECKPOINTS_DIR,
    COMPLETIONS_DIR,
    METRICS_FILE,
    PLOTS_DIR,
    REPORT_FILE,
)
from qerl_jax.config import Config
from qerl_jax.config.values import LARGEST_INT
from qerl_jax.evaluation import Evaluation, evaluate
from qerl_jax.evaluation.grading import grader_of
from qerl_jax.reporting import health
from qerl_jax.reporting.console import say
from qerl_jax.reporting.metrics import cut_back, read_evaluations, write_evaluations
from qerl_jax.reporting.progress import summary_table
from qerl_jax.rewards.load import load_rewards
from qerl_jax.rl.adamw import AdamW, learning_rate_at
from qerl_jax.rl.plan import within
from qerl_jax.run import directory as run_directory
from qerl_jax.run.choose_rewards import correctness_reward
from qerl_jax.run.fingerprints import PROMPTS_DATE, fingerprints
from qerl_jax.run.prepare import Run
from qerl_jax.run.recorder import Recorder
from qerl_jax.run.rehearsal import rehearse_evaluation, rehearse_evaluation_of_run
from qerl_jax.run.signals import interrupting
from qerl_jax.types import Policy, TrainState


def begin_run(run: Run, state: TrainState) -> tuple[Recorder, TrainState]:
    """Take over the output directory and evaluate the policy before training. Returns the recorder and the state to
    start from: `state`, or that of the checkpoint to resume. Of several replicas the first takes the directory over;
    the others read the same checkpoint.

    Raises ValueError where the replicas' inputs differ.
    """
    config, directory, console = run.config, run.directory, run.console
    inputs = fingerprints(config, run.stream.sets, run.eval_problems) | run.hooks.fingerprints()
    inputs[PROMPTS_DATE] = str(run.date)
    run.replicas.check_equal(inputs, "model, data or functions, by fingerprint")
    checkpoints, place, evaluations = None, (0, 0), None
    if run.replicas.is_first:
        run_directory.check(directory, config)  # again: another run may have used the directory while this one loaded
        if config.overwrite and (deleted := run_directory.clear(directory)):
            say(console, f"overwrite: deleted of the run before: {', '.join(deleted)}")
        checkpoints = Checkpointer(directory, config.save_total_limit or LARGEST_INT, inputs)
        state = restore(config, checkpoints, state, console)
        place = int(state.step), cut_back(directory, int(state.step))
        evaluations = _kept_evaluations(config, inputs, place[0])
        if place[0] < config.num_rollouts:  # also of a run that was finished and now goes on
            run_directory.clear(directory, (ADAPTER_DIR, REPORT_FILE))
        run_directory.write_config(directory, config)
    step, tokens = run.replicas.broadcast(place)
    if checkpoints is None and step:
        state = Checkpointer(directory, keep=None, inputs=inputs).restore(state, step)
    recorder = Recorder(run, checkpoints, step, tokens, evaluations)
    parameters = run.policy.config.parameter_count() / 1e6
    say(console, f"{config.model}: {parameters:,.1f} M parameters, {len(run.stream)} problems, into {directory}")
    if step == 0 and run.hooks.sigma is None and (note := aqn.note(config, config.num_rollouts)):
        say(console, note)
    if _lacks(run, recorder, "before"):
        say(console, f"evaluating the policy on {len(run.eval_problems)} problems before training …")
        _evaluate(run, recorder, run.policy, "before", 0)
    if run.programs:
        run.programs.submit(run.workers.close)
    if step < config.num_rollouts:
        say(console, f"step {step + 1} waits until its programs are compiled …")
    return recorder, state


def _kept_evaluations(config: Config, inputs: Mapping[str, str], step: int) -> dict[str, Evaluation]:
    """The results in the output directory that are still those of a run that goes on after `step`: none where it begins
    or has other problems to evaluate, and none after training where it trains on.
    """
    directory, problems = Path(config.output_dir), f"eval_dataset {config.eval_dataset}"
    found = read_evaluations(directory)
    if step == 0 or saved_inputs(directory).get(problems) != inputs.get(problems):
        kept = {}
    elif step < config.num_rollouts:
        kept = {name: result for name, result in found.items() if name != "after"}
    else:
        kept = found
    if kept != found:
        write_evaluations(directory, kept)
    return kept


def restore(config: Config, checkpoints: Checkpointer, state: TrainState, console: Console) -> TrainState:
    """The newest checkpoint under `resume`; else `state`."""
    if config.resume == "never":
        return state
    if checkpoints.latest_step() is None:
        say(console, f"no checkpoint to resume in {config.output_dir}: starting from the beginning")
        return state
    state = checkpoints.restore(state)
    if (before := checkpoints.manifest(int(state.step))["config"]["max_steps"]) != config.max_steps:
        say(console, f"max_steps: {before} -> {config.max_steps}{_of_new_length(state, config, before)}")
    done, last = int(state.step), config.num_rollouts
    rest = "" if done < last else ": nothing is left to train, a larger max_steps goes on"
    say(console, f"resuming after step {done} of {last}{rest}")
    return state


def _of_new_length(state: TrainState, config: Config, before: int) -> str:
    """The config's learning rate and noise of the next step, under `max_steps` before and now."""
    step, lengths, said = int(state.step), (dataclasses.replace(config, max_steps=before), config), ""
    if step < config.num_rollouts and isinstance(state.optimizer, AdamW):
        rates = [float(learning_rate_at(AdamW.of(c), int(AdamW.count(state.opt_state)))) for c in lengths]
        said += f"; learning rate of step {step + 1}: {rates[0]:.3g} -> {rates[1]:.3g}"
    if step < config.num_rollouts and config.sigma_start:
        noise = [aqn.sigma(c, min(step, c.num_rollouts - 1), c.num_rollouts) for c in lengths]
        said += f"; its noise: {noise[0]:.3g} -> {noise[1]:.3g}"
    return said


def finish_run(run: Run, recorder: Recorder, state: TrainState) -> None:
    """Write plots and report; after the last step also export the adapter, before all that may fail, evaluate, and
    print the summary.
    """
    config, directory, console, last = run.config, run.directory, run.console, int(state.step)
    is_done = last == config.num_rollouts
    if recorder.checkpoints and is_done:
        fingerprint = recorder.checkpoints.inputs.get(model_input(config))
        export_trained(run.policy, state, directory / ADAPTER_DIR, fingerprint)
    if is_done and _lacks(run, recorder, "after"):
        say(console, "evaluating the trained policy on the same problems …")
        try:
            _evaluate(run, recorder, run.policy.replace(norms=state.norms, lora=state.lora), "after", last)
        except KeyboardInterrupt:
            said = (
                f"interrupted; the training is saved, the evaluation is not: make up for it with\n{run.resume_command}"
            )
            raise KeyboardInterrupt(said) from None
    if recorder.checkpoints is None:
        return
    recorder.curves.close()
    recorder.mend()
    reason = "" if is_done else signal.Signals(recorder.stopped).name
    recorder.report(last, reason)
    if reason:
        say(console, f"stopped by {reason} after step {last} of {config.num_rollouts}, checkpoint saved; resume with")
        say(console, run.resume_command)
        return
    files = {
        "report": REPORT_FILE,
        "metrics": METRICS_FILE,
        "completions": COMPLETIONS_DIR,
        "checkpoints": CHECKPOINTS_DIR,
        "plots": PLOTS_DIR,
        "adapter": ADAPTER_DIR,
    }
    if health.refuse_untrained(recorder.metrics.rows, config):
        files["adapter, which no step trained"] = files.pop("adapter")
    summary = [(name, result.describe()) for name, result in recorder.evaluations.items()]
    summary_table(console, summary, str(directory), list(files.items()))


def export_trained(policy: Policy, state: TrainState, directory: Path, fingerprint: str | None = None) -> None:
    """Write the adapter of a run, with the layer norms where they were trained or imported. `fingerprint`: of its
    model.
    """
    config = state.config
    trained = policy.replace(norms=state.norms, lora=state.lora)
    norms = config.train_norms or trained.base_norms is not None
    base_model = config.model if is_hub_id(config.model) else str(Path(policy.source).absolute())
    export_adapter(trained, directory, norms=norms, base_model=base_model, beside_others=True, fingerprint=fingerprint)


def _lacks(run: Run, recorder: Recorder, name: str) -> bool:
    """Whether an evaluation is still to be done, as the first replica knows."""
    is_missing = recorder.evaluations is not None and name not in recorder.evaluations
    return bool(run.eval_problems) and run.replicas.broadcast(is_missing)


def _evaluate(run: Run, recorder: Recorder, policy: Policy, name: str, step: int) -> None:
    """Evaluate the policy of a step, without noise, and keep the result as `name`."""
    problems = len(run.eval_problems)
    if name == "before" and run.programs and run.vllm is None and run.replicas.share(problems):
        sizes = run.replicas.largest_share(problems), max(len(problem.tokens) for problem in run.eval_problems)
        run.workers.submit(rehearse_evaluation_of_run, run.config, run.plan, *sizes)
        run.programs.submit(rehearse_evaluation, run.config, policy, run.plan, *sizes)
    with recorder.phases("evaluation"), interrupting():
        result = evaluate_policy(run, policy)
        if recorder.evaluations is not None:
            recorder.evaluations[name] = result
            write_evaluations(run.directory, recorder.evaluations)
    recorder.curves.log(step, result.metrics())


def evaluate_policy(run: Run, policy: Policy) -> Evaluation:
    """Accuracy of a policy on the evaluation problems, with the same sampling keys at every call."""
    config, reward = run.config, correctness_reward(run.config.eval_dataset)
    engine = within(run.plan, config.eval_engine).replace(prompts=run.replicas.largest_share(len(run.eval_problems)))
    with load_rewards(
        (reward,), config.reward_workers, config.reward_timeout, allow_code_execution=config.allow_code_execution
    ) as rewards:
        return evaluate(
            policy,
            run.eval_problems,
            config.eval_sampling,
            config.seed,
            engine=engine,
            reward=grader_of(reward, rewards[reward]),
            sample=run.vllm and run.vllm.generate,
            replicas=run.replicas,
        )
