"""`python -m qerl_jax.train`: GRPO with adaptive quantization noise, the whole algorithm on one screen.

Each step: prompts → σ → noise → rollout → rewards → advantages → `grpo_step` → record. `train_step` and
`collect_experience` call pure functions of `aqn`, `rollout`, `rewards` and `rl`; `run/` prepares a run (weights,
problems, directory) and records it (metrics, checkpoints, report).

Axes: B completions = P prompts · G group, row = p · G + g.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import Console

from qerl_jax import aqn, command, driver, keys, launch
from qerl_jax.checkpoint import assets
from qerl_jax.checkpoint.orbax import latest_step, saved_inputs
from qerl_jax.checkpoint.run_files import CONFIG_FILE
from qerl_jax.config import Config, ConfigError, flags, load
from qerl_jax.config.fields import answering
from qerl_jax.config.from_trl import from_trl
from qerl_jax.data.prompts import to_prompts
from qerl_jax.messages import IN_MEMORY
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.reporting.console import RunConsole
from qerl_jax.reporting.phases import Phases
from qerl_jax.rewards.functions import BUILT_IN
from qerl_jax.rl.advantages import group_advantages, make_batch
from qerl_jax.rl.experience import Experience, equal_groups, gather_experience, refill_size, replace_equal_groups
from qerl_jax.rl.loss import TokenLoss
from qerl_jax.rl.plan import within
from qerl_jax.rl.reduction import check_same_state
from qerl_jax.rl.step import grpo_step
from qerl_jax.rollout.engine import generate
from qerl_jax.rollout.shares import generate_share
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.devices import use_device_memory
from qerl_jax.run.directory import resume_command
from qerl_jax.run.dry_run import show_dry_run
from qerl_jax.run.grading import Grading
from qerl_jax.run.hooks import Hooks, with_objects
from qerl_jax.run.lifecycle import begin_run, finish_run
from qerl_jax.run.lock import locked
from qerl_jax.run.memory import run_fits
from qerl_jax.run.prepare import Run, check, prepare
from qerl_jax.run.recorder import Recorder
from qerl_jax.types import Prompts, Rollout, TrainState


@answering
def train(
    config: Config,
    console: Console | None = None,
    *,
    reward_funcs: Callable | str | Sequence[Callable | str] | None = None,
    train_dataset: Iterable[Mapping[str, Any]] | None = None,
    eval_dataset: Iterable[Mapping[str, Any]] | None = None,
    problems: Callable[[int], Sequence[int]] | None = None,
    sigma: Callable[[int], float] | None = None,
    perturb: Callable[[Any, float, Array], Any] | None = None,
    token_loss: TokenLoss | None = None,
    with_reference: bool = False,
    optimizer: Any = None,
    on_step: Callable[[dict[str, float], TrainState], None] | None = None,
    replicas: Replicas = ALONE,
    dry_run: bool = False,
) -> TrainState | None:
    """Run, or resume, the training that `config` describes; all output goes to `config.output_dir`.

    Args:
      config: settings of the run.
      console: for messages; None: the terminal.
      reward_funcs: in place of the config's: functions, called in this process without a time limit, and names; or one.
      train_dataset, eval_dataset: in place of the config's: records in memory, a `datasets.Dataset` or a list of dicts.
      problems: `problems(step)`, the ids of the `batch_size / num_generations` problems of rollout `step`, from 0, in
        place of `data_order`. An id is the number of a record, from 0, counted over all records of all datasets. It is
        called for rollout 0 once more, before anything is loaded.
      sigma: `sigma(step)`, the noise's standard deviation in rollout `step`, from 0; in place of the config's schedule.
      perturb: `perturb(norms, sigma, key)`, the layer norms of the rollout, in place of `aqn.perturb`. `key` is one
        for each rollout.
      token_loss, with_reference: as in `grpo_step`.
      optimizer: as in `init_state`.
      on_step: `on_step(metrics, state)`, called when a step has been recorded, with its metrics and the state after it.
        What it raises ends the run like an error of the step.
      replicas: the processes that share the run's work, each of which calls this function. The first writes all output,
        and the results of its `problems` and `sigma` are used; `on_step` is called in each.
      dry_run: show what the flag `--dry-run` shows, in place of a run; the result is None.

    A run with functions or records of its own is resumed by `train` with the same ones and `resume="auto"`: a
    checkpoint holds their fingerprints.

    Raises ConfigError, CheckpointError, DataError, RewardError or FileNotFoundError for unusable input, before the
    first step where possible, MemoryError if an update runs out of device memory, and ValueError if updates only skip,
    or no step of the run trained anything; its last step leaves no checkpoint then. Any other error in a later step
    leaves one of the step before. The first SIGINT, SIGTERM or SIGHUP ends the run after the current step, with a
    checkpoint; so does a closed output pipe. `int(state.step) < state.config.num_rollouts` then holds for the state
    that is returned.
    """
    console = console if console and replicas.is_first else RunConsole(quiet=not replicas.is_first)
    hooks = Hooks(problems, sigma, perturb, token_loss, with_reference, optimizer, on_step)
    with replicas:
        config = with_objects(config, reward_funcs, train_dataset, eval_dataset)
        hooks.check(config)
        config = with_rewards(config)
        if dry_run:
            check(config, replicas.count, replicas.tensor_parallel)
            show_dry_run(config, console, replicas.count, replicas.tensor_parallel, hooks)
            return None
        run, state = prepare(config, console, hooks, replicas)
        lock = locked(run.directory) if replicas.is_first else contextlib.nullcontext()
        with run.rewards, contextlib.closing(run.workers), run.programs, run.vllm or contextlib.nullcontext(), lock:
            recorder, state = begin_run(run, state)
            with recorder:
                for _ in range(int(state.step), run.config.num_rollouts):
                    state = train_step(run, recorder, state)
                    if recorder.end_step(state):
                        break
            finish_run(run, recorder, state)
    return state


def train_step(run: Run, recorder: Recorder, state: TrainState) -> TrainState:
    """One step: rollout under noise, rewards, advantages, then `num_iterations` updates in `grpo_step` (`rl/step.py`;
    ratio, clipping and importance weight are in `rl/loss.py`). The first update computes `old_logp` with the clean
    policy. The step is recorded.
    """
    config, hooks = run.config, run.hooks
    sigma = hooks.sigma_at(config, int(state.step), run.replicas)
    experience = collect_experience(run, recorder.phases, state, sigma)
    rewards = jnp.asarray(experience.rewards)
    advantages = group_advantages(rewards, config.num_generations, config.scale_rewards)
    batch = make_batch(experience.rollout, advantages, rewards, config.mask_truncated_completions)
    recorder.write_completions(int(state.step) + 1, experience, advantages)

    with recorder.phases("update"):
        own = {"drawn": experience.drawn, "token_loss": hooks.token_loss, "with_reference": hooks.with_reference}
        state, update_metrics = grpo_step(state, run.policy.frozen, batch, run.plan, replicas=run.replicas, **own)
        check_same_state(run.replicas, state)
    metrics = recorder.record(state, experience, batch, update_metrics, sigma)
    if hooks.on_step is not None:
        hooks.on_step(metrics, state)
    return state


def collect_experience(run: Run, phases: Phases, state: TrainState, sigma: float) -> Experience:
    """P scored groups, sampled under noise, from the data cursor on.

    Under dynamic sampling, fresh groups replace those with equal rewards (all advantages are 0), for at most
    `max_refill_rounds` rounds of as many prompts as are needed (`refill_size`), which run in the programs of the first;
    after that, equal groups stay. Without it all groups stay, as in TRL: the tokens of equal groups count in the loss's
    denominator (metric `frac_reward_zero_std`).
    """
    config, experience, count, drawn = run.config, None, run.config.num_prompts, 0
    # Only the rollout sees the noisy norms; `state` stays clean, and the update trains that clean policy. The
    # log-probabilities under noise travel in `batch.logprobs`, for the weight that corrects the mismatch.
    noise_key = keys.for_step(config.seed, keys.Purpose.AQN, int(state.step))
    noisy = run.hooks.noisy(state.norms, sigma, noise_key)
    perturbed = aqn.count_perturbed(state.norms, noisy)  # counted on the device before it samples
    actor = run.policy.replace(norms=noisy, lora=state.lora)
    step_key = keys.for_step(config.seed, keys.Purpose.SAMPLE, int(state.step))
    engine = within(run.plan, config.engine).replace(prompts=run.replicas.largest_share(config.num_prompts))
    for resampling_round in range(1 + config.resampling_rounds):
        problems = run.problems(state, drawn, count)
        prompts = to_prompts(problems, config.max_prompt_length)
        key = keys.for_round(step_key, resampling_round)
        grading = Grading(run, problems)
        # vLLM gives all completions at once.
        sample = run.vllm.generate if run.vllm else functools.partial(generate, on_progress=grading.begin)

        def completed(prompts: Prompts, sample: Callable = sample, key: Array = key) -> Rollout:
            return sample(actor, prompts, config.sampling, key, engine)

        with phases("rollout"):
            rollout = jax.block_until_ready(generate_share(run.replicas, prompts, completed))
        with phases("grading"):
            fresh = grading.finish(rollout) if rollout else None
        if run.replicas.count > 1:
            with phases("gather"):
                fresh = gather_experience(run.replicas, fresh, problems, actor.config.pad_token_id)
        experience = replace_equal_groups(experience, fresh, config.num_generations) if experience else fresh
        equal, drawn = equal_groups(experience.rewards, config.num_generations), experience.drawn
        if not equal.any():
            break
        count = refill_size(equal, drawn)
    return dataclasses.replace(experience, perturbed=int(perturbed))


@dataclasses.dataclass(frozen=True)
class _Arguments(launch.Devices, Config):
    """Train a model of the architecture of Qwen2.5, Qwen3 or Llama 3 with GRPO, on a quantized base or in bf16. Without
    --config and --model it runs the bundled tiny policy (configs/tiny.yaml)."""

    config: str | None = None
    """YAML file with these fields, or the name of a bundled recipe; flags override it."""
    from_trl: str | None = None
    """YAML file of TRL's command `trl grpo`: print it as a config, with what it leaves out; train nothing."""
    dry_run: bool = False
    """Show the resolved config, the parameters, a memory estimate, the first prompt and what the rewards pay for a
    right, a wrong and an unreadable answer; train nothing."""


_INSTEAD = {
    "from_trl": "python -m qerl_jax.train --from-trl FILE > mine.yaml, then parse(['--config', 'mine.yaml'])",
    "dry_run": "here it is train(config, dry_run=True)",
}
"""What to call in Python in place of a flag that makes no config."""

_REPLACED = {
    "--num-train-epochs": ("max_steps", -1),
    "--reward-funcs": ("reward_weights", None),
    "--dataset": ("dataset_weights", None),
    "--prompt-format": ("system_prompt", None),
    "--system-prompt": ("prompt_format", None),
}
"""The setting of a config file that a flag replaces beside its own, which would contradict it, and by what."""


def main(argv: list[str] | None = None, gpus: Sequence[driver.Described] | None = None) -> int:
    """Command line, on a machine with these GPUs (None: those that the driver names). Exit code 0: finished; 2: bad
    input or too little memory, with a one-line error message; 130: stopped by a signal, to be resumed.
    """
    output: list[Path] = []

    def body() -> int:
        words = sys.argv[1:] if argv is None else argv
        if "--from-trl" in (given := flags.given(words)):
            print(from_trl(_alone(given)), end="")
            return 0
        found, config = _parsed(words)
        refuse_hooks(config)
        output.append(Path(config.output_dir))
        use_device_memory(config.vllm_share)
        found = found.of_one() if config.rollout_backend == "vllm" else found
        program = "-m", "qerl_jax.train", *words
        found, program = launch.sized(found, program, functools.partial(run_fits, config), gpus)
        if found.dry_run:
            config = with_rewards(config)
            sizes = launch.count(found), found.tensor_parallel_size or 1
            check(config, *sizes)
            show_dry_run(config, Console(highlight=False), *sizes)
            return 0

        def trained(replicas: Replicas) -> int:
            state = train(config, replicas=replicas)
            return 0 if int(state.step) == state.config.num_rollouts else command.STOPPED

        return launch.run(found, program, trained)

    return command.run(body, lambda: interrupted(*output))


def _alone(given: Mapping[str, list[str]]) -> Path:
    """The file of `--from-trl`. Raises ConfigError beside other flags, which would be lost."""
    if len(given["--from-trl"]) != 1 or len(given) != 2 or given[""]:
        raise ConfigError("--from-trl FILE stands alone; flags go to the run with the config that it prints")
    return Path(given["--from-trl"][0])


def parse(argv: Sequence[str]) -> Config:
    """The config of a command line: flags over the file of `--config`; without it and `--model`, over the bundled
    `tiny` run. Raises ConfigError for a flag that asks for something else than a config, which would be lost.
    """
    found, config = _parsed(argv)
    for field in dataclasses.fields(_Arguments):
        value = str(getattr(found, field.name))
        if field.name not in (*vars(config), "config") and value not in (str(field.default), "1"):
            instead = _INSTEAD.get(field.name, "it is no setting of a config")
            raise ConfigError(f"--{field.name.replace('_', '-')} goes to the command: {instead}")
    return config


def _parsed(argv: Sequence[str]) -> tuple[_Arguments, Config]:
    given = flags.given(argv)
    file = " ".join(given.get("--config", [])) or (None if "--model" in given else "tiny")
    default = load(assets.find_config(file)) if file else Config()
    for flag, (field, value) in _REPLACED.items():
        if flag in given and f"--{field.replace('_', '-')}" not in given:
            default = dataclasses.replace(default, **{field: value})
    description = f"{_Arguments.__doc__} Recipes: {', '.join(assets.recipes())}."
    if file:
        description += (
            f" The defaults shown are those of the recipe {file}; --model MODEL --help shows those without one."
        )
    found = flags.parse(_Arguments, argv, "python -m qerl_jax.train", description, _Arguments(**vars(default)))
    config = Config(**{field.name: getattr(found, field.name) for field in dataclasses.fields(Config)})
    if found.config is not None:
        refuse_moved(config, Path(found.config))
        refuse_given(config, Path(found.config))
    return found, config


def refuse_moved(config: Config, file: Path) -> None:
    """Raise ConfigError if `resume` "auto" would begin anew in `output_dir` while checkpoints lie beside the config
    file, as in the directory of a run that was moved.
    """
    lost = config.resume == "auto" and latest_step(Path(config.output_dir)) is None
    if lost and (step := latest_step(file.parent)) is not None:
        raise ConfigError(
            f"output_dir {config.output_dir} holds no checkpoint, but {file} lies beside that of step {step}: if the "
            f"run was moved, resume it with --output-dir {shlex.quote(str(file.parent))}"
        )


def refuse_given(config: Config, file: Path) -> None:
    """Raise ConfigError for the config file of a run whose functions or records were given to `train`: it has their
    names alone.
    """
    given = [name for name in (*config.dataset, config.eval_dataset) if name in IN_MEMORY]
    given += [name for name in config.reward_funcs or () if name not in BUILT_IN and ":" not in name]
    if given and latest_step(file.parent) is not None:
        raise _begun_in_python(file, given)


def refuse_hooks(config: Config) -> None:
    """Raise ConfigError for a command line that would resume a run whose functions were given to `train`."""
    if config.resume == "never" or config.allow_changed_inputs:
        return
    output, none = Path(config.output_dir), Hooks().fingerprints()
    saved = saved_inputs(output)
    if given := [name.removeprefix("hook ") for name in none if saved.get(name) not in (None, none[name])]:
        raise _begun_in_python(output, given)


def _begun_in_python(run: Path, given: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the run of {run} was begun by train(…) in Python with {', '.join(given)}: call it again with the same "
        "arguments and resume='auto'"
    )


def interrupted(output: Path | None = None) -> str:
    """What to say after Ctrl-C in a run that writes to `output`."""
    if output is None or not (output / CONFIG_FILE).exists():
        return "interrupted; nothing was written"
    if (saved := latest_step(output)) is None:
        return f"interrupted; there is no checkpoint yet, start again with\n{resume_command(output)}"
    return f"interrupted; the newest checkpoint is that of step {saved}, resume from it with\n{resume_command(output)}"


if __name__ == "__main__":
    command.end(main)
