"""The record of a run while it trains: metrics, completions, curves, progress bar, checkpoints, stop signals."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from jaxtyping import Array, Float32

from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.checkpoint.run_files import CHECKPOINTS_DIR, COMPLETIONS_DIR, CONFIG_FILE, METRICS_FILE
from qerl_jax.compilation import CompilationCounter
from qerl_jax.config import Config
from qerl_jax.evaluation import Evaluation
from qerl_jax.parallel import ReplicaError
from qerl_jax.reporting import health
from qerl_jax.reporting.console import say
from qerl_jax.reporting.metrics import MetricsFile, write_completions
from qerl_jax.reporting.phases import Phases
from qerl_jax.reporting.plots import write_plots
from qerl_jax.reporting.progress import TrainingProgress
from qerl_jax.reporting.report import Ending, write_report
from qerl_jax.reporting.sinks import Sinks
from qerl_jax.reporting.summaries import completion_columns, run_metrics, step_metrics
from qerl_jax.rewards.outcomes import RewardError
from qerl_jax.rl.experience import Experience
from qerl_jax.run import directory as run_directory
from qerl_jax.run.choose_rewards import verdict_reward
from qerl_jax.run.prepare import Run
from qerl_jax.run.signals import StopSignals
from qerl_jax.types import Batch, TrainState


def checkpoint_is_due(step: int, config: Config) -> bool:
    """Whether one of the step's updates is a multiple of `save_steps`, or the step is the last."""
    updates, before = step * config.num_iterations, (step - 1) * config.num_iterations
    return updates // config.save_steps > before // config.save_steps or step == config.num_rollouts


class Recorder:
    """Writes and shows each step of a run. As a context it catches stop signals and shows the progress bar.

    Of several replicas the first does that. The others keep their times and catch signals: one that any of them got
    stops all after the same step.

    Args:
      run: the run.
      checkpoints: the checkpoints of its directory; None: this replica writes nothing.
      step: steps done before.
      tokens: tokens seen before.
      evaluations: results that are there already; None like `checkpoints`.

    Attributes:
      checkpoints: as given.
      metrics: of every step; None like `checkpoints`.
      evaluations: results before and after training, by these words; None like `checkpoints`.
      phases: times of rollout, grading, update, checkpoint and evaluation.
      curves: TensorBoard and Weights & Biases.
      stopped: number of the signal that ended the run, 0 for none.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpointer | None,
        step: int,
        tokens: int,
        evaluations: dict[str, Evaluation] | None = None,
    ):
        self._run, self._first, self._tokens = run, step, tokens
        self._metrics: dict[str, float] = {}
        self._warned: set[str] = set()
        self._newest: TrainState | None = None  # state after the newest step of this process
        self._verdict = verdict_reward(dict(zip(run.config.reward_funcs, run.config.reward_weights, strict=True)))
        self.checkpoints = checkpoints
        self.metrics = MetricsFile(run.directory) if checkpoints else None
        self.evaluations = evaluations
        self.phases = Phases(run.clock)
        config = run.config if checkpoints else dataclasses.replace(run.config, report_to=())
        self.curves = Sinks(config, run.directory, step, run.console)
        self.stopped = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as contexts:
            self._signals = contexts.enter_context(StopSignals(answers=self.checkpoints is not None))
            self._compilations = contexts.enter_context(CompilationCounter())
            self._writer = contexts.enter_context(ThreadPoolExecutor(1))
            progress = TrainingProgress(self._first, self._run.config.num_rollouts, self._run.console)
            self._progress = contexts.enter_context(progress)
            self._contexts = contexts.pop_all()
        if self._run.replicas.link is not None:
            self._run.replicas.link.before_end(self._save_after_error)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Whatever ends the run, no finished step is lost, unless none of them trained anything, which leaves a report
        alone.
        """
        with self._contexts:
            if not isinstance(error, health.UntrainedError | None):
                self._save_after_error(error)
            elif error and self.metrics:
                with contextlib.suppress(OSError):  # the error says more
                    self.report(self.metrics.rows[-1]["step"], "an error")

    def write_completions(self, step: int, experience: Experience, advantages: Float32[Array, " B"]) -> None:
        """Begin to write the completions of the step that goes on, beside its update; `record` waits for the file and
        raises what writing it raised.
        """
        directory, order = self._run.directory, self._run.config.order_column

        def write() -> None:
            write_completions(directory, step, completion_columns(experience, advantages, order))

        if self.checkpoints:
            self._written = self._writer.submit(write)

    def record(
        self,
        state: TrainState,
        experience: Experience,
        batch: Batch,
        update_metrics: Mapping[str, Array],
        sigma: float,
    ) -> dict[str, float]:
        """Write the metrics of the step that ended in `state`, and the batch of a non-finite update. The metric
        `compilations` is the number of programs compiled or loaded since the step before. Returns the metrics.
        """
        run, step = self._run, int(state.step)
        timing = self.phases.take("rollout", "grading", "update", *(["gather"] if run.replicas.count > 1 else []))
        metrics = step_metrics(experience, update_metrics, run.config.num_generations, timing, self._verdict)
        metrics |= run_metrics(
            experience, state, float(update_metrics["skipped"]), sigma, self._tokens, len(run.stream)
        )
        metrics["compilations"] = len(self._compilations.take())
        self._metrics, self._tokens = metrics, int(metrics["num_tokens"])
        if self.checkpoints:
            if update_metrics["skipped"] > 0:
                run_directory.dump_batch(run.directory, step, batch)
            self.mend()
            self.metrics.append(step, metrics)
            self.curves.log(step, metrics)
            self._written.result()
        return metrics

    def end_step(self, state: TrainState) -> bool:
        """Show the recorded step; save a checkpoint if one is due. Returns whether the run is to stop: at a signal, or
        because nobody reads its output any more. Raises ValueError for a run that trains nothing.
        """
        config, step = self._run.config, int(state.step)
        rows = self.metrics.rows if self.metrics else []
        health.refuse_skipped(rows, config)
        if step == config.num_rollouts and (said := health.refuse_untrained(rows, config)):
            say(self._run.console, said)
        self._newest = state
        self._progress.update(step, self._metrics)
        self._warn(step, rows)
        stopped = self._signals.requested  # read once: a later signal counts for the next step
        if not stopped and getattr(self._run.console, "is_closed", False):
            stopped = signal.SIGPIPE
        self.stopped = next(filter(None, self._run.replicas.gather(stopped)), 0)
        if self.checkpoints and (checkpoint_is_due(step, config) or self.stopped):
            with self.phases("checkpoint"):
                try:
                    self.checkpoints.save(state)
                except OSError:  # it says what is saved
                    self._newest = None
                    raise
        return self.stopped != 0

    def report(self, step: int, reason: str) -> None:
        """Write plots and report of a run that ended after `step` by `reason`, "" where all steps are done."""
        run, rows = self._run, self.metrics.rows
        write_plots(run.directory, rows)
        seconds = self.phases.totals | Counter(compiling=run.programs.waited if run.programs else 0)
        ending = Ending(step, reason, self.evaluations, seconds, run.given)
        write_report(run.directory, run.config, rows, ending)

    def mend(self) -> None:
        """Write metrics and config again where another program removed or cut them, and say so: what was in the output
        directory besides is lost.
        """
        directory, found = self._run.directory, [METRICS_FILE] if self.metrics.mend() else []
        if not (directory / CONFIG_FILE).exists():
            run_directory.write_config(directory, self._run.config)
            found.append(CONFIG_FILE)
        if found:
            say(
                self._run.console,
                f"another program removed or cut {' and '.join(found)} in {directory}: written again; see whether "
                f"{COMPLETIONS_DIR}/ and {CHECKPOINTS_DIR}/ are whole",
            )

    def _warn(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Say once of each kind that nothing, or the wrong thing, is learned."""
        for kind, sentence in health.warnings(rows).items():
            if kind not in self._warned:
                self._warned.add(kind)
                say(self._run.console, f"step {step}: {sentence}")

    def _save_after_error(self, error: BaseException | None = None) -> None:
        """Save the state after the newest finished step, where there is one and this replica writes, also where the
        output directory was deleted; the error that ends the run is raised after this.
        """
        if not self.checkpoints or self._newest is None:
            return
        state, step, console = self._newest, int(self._newest.step), self._run.console
        try:
            self.checkpoints.save(state)
            self.mend()
        except OSError as failure:
            say(console, f"step {step + 1} did not end; {failure}")
        else:
            say(console, f"step {step + 1} did not end; the state after step {step} is saved, resume from it with")
            say(console, self._run.resume_command)
            is_of_other = isinstance(error, ReplicaError) and re.search(r" failed: RewardError\b", str(error))
            if is_of_other or isinstance(error, RewardError):
                say(console, "and with allow_changed_inputs once the reward's source is mended")
