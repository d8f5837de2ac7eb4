"""The training command line: a YAML file or a bundled recipe, and flags that override it."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from qerl_jax import config as configuration
from qerl_jax.command_line import flags, process
from qerl_jax.config import Config, ConfigError
from qerl_jax.config.foreign import advice
from qerl_jax.io import assets
from qerl_jax.io.checkpoint import latest_step
from qerl_jax.io.tokenizer import leave_out_torch
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.devices import use_device_memory
from qerl_jax.run.directory import resume_command
from qerl_jax.run.dry_run import show_dry_run
from qerl_jax.run.prepare import check
from qerl_jax.types import TrainState

_DESCRIPTION = (
    "Train a Qwen2.5 policy with GRPO on a quantized base. --config NAME takes a bundled recipe ({recipes}), "
    "--config FILE.yaml a file with the fields below; flags override it. --dry-run shows the resolved config, the "
    "parameters and a memory estimate, and runs nothing. Without --config and --model it runs the bundled tiny policy "
    "(configs/tiny.yaml)."
)


def run(train: Callable[[Config], TrainState], argv: list[str] | None = None) -> int:
    """Parse the command line and call `train`. Exit code 0: finished; 2: bad input or too little memory, with a
    one-line error message; 130: stopped by a signal, to be resumed.
    """
    config: Config | None = None

    def body() -> int:
        nonlocal config
        arguments, is_dry_run = take_flag(list(sys.argv[1:] if argv is None else argv), "--dry-run")
        config = parse(arguments)
        use_device_memory(config.vllm_share)
        if is_dry_run:
            config = with_rewards(config)
            check(config)
            show_dry_run(config, Console(highlight=False))
            return 0
        if not any(":" in name for name in config.reward_funcs or ()):
            leave_out_torch()
        state = train(config)
        return 0 if int(state.step) == state.config.num_rollouts else process.STOPPED

    return process.run(body, lambda: interrupted(config))


def interrupted(config: Config | None) -> str:
    """What to say after Ctrl-C."""
    saved = latest_step(Path(config.output_dir)) if config else None
    if saved is None:
        return "interrupted; there is no checkpoint to resume from"
    command = resume_command(Path(config.output_dir))
    return f"interrupted; the newest checkpoint is that of step {saved}, resume from it with\n{command}"


def parse(argv: list[str]) -> Config:
    """The config of a command line: `--config FILE or NAME`, overridden by flags. Without `--config` and `--model`, the
    bundled `tiny` run.
    """
    argv, path = take_option(argv, "--config")
    argv = take_booleans(argv)
    given = {argument.partition("=")[0].replace("_", "-") for argument in argv}
    names_model = "--model" in given
    if path is not None:
        default = configuration.load(assets.find_config(path))
    else:
        default = Config() if names_model else configuration.load(assets.find_config("tiny"))
    refuse_foreign(argv)
    if "--num-train-epochs" in given and "--max-steps" not in given:
        default = dataclasses.replace(default, max_steps=-1)  # the flag counts, not the file's max_steps
    description = _DESCRIPTION.format(recipes=", ".join(assets.recipes()))
    names = [field.name for field in dataclasses.fields(Config)]
    kind = flags.fields_of_config({name: name for name in names})
    values = kind(**{name: getattr(default, name) for name in names})
    own = ("--config", "--dry-run")
    arguments = flags.parse(kind, argv, "python -m qerl_jax.train", description, values, own)
    config = Config(**{name: getattr(arguments, name) for name in names})
    if path is not None:
        refuse_moved(config, Path(path))
    return config


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


def take_booleans(argv: list[str]) -> list[str]:
    """Truth values as other programs write them, `--train-norms True` or `--train-norms=False`, as flags."""
    names = {field.name for field in dataclasses.fields(Config) if isinstance(field.default, bool)}
    rest, i = [], 0
    while i < len(argv):
        flag, equals, value = argv[i].partition("=")
        i += 1
        if flag.startswith("--") and flag[2:].replace("-", "_") in names:
            if not equals and i < len(argv) and argv[i].lower() in ("true", "false"):
                value, i = argv[i], i + 1
            flag = f"--no-{flag[2:]}" if value.lower() == "false" else flag
            rest.append(flag if value.lower() in ("", "true", "false") else f"{flag}={value}")
        else:
            rest.append(argv[i - 1])
    return rest


def refuse_foreign(argv: list[str]) -> None:
    """Raise ConfigError for flags that are other programs' names, with the names here."""
    flags = [argument.partition("=")[0] for argument in argv if argument.startswith("--")]
    foreign = [f"{flag} {said}" for flag in flags if (said := advice(flag[2:].replace("-", "_"), "--", "-"))]
    if foreign:
        raise ConfigError("; ".join([*foreign, "docs/migration.md has the whole list"]))


def take_flag(argv: list[str], name: str) -> tuple[list[str], bool]:
    """Remove a flag without a value from a command line; returns the rest, and whether it was there."""
    return [argument for argument in argv if argument != name], name in argv


def take_option(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """Remove `name VALUE` or `name=VALUE` from a command line; returns the rest and the value. Raises ConfigError
    without a value, or with two.
    """
    rest, values = [], []
    arguments = iter(argv)
    for argument in arguments:
        if argument == name:
            values.append(next(arguments, ""))
        elif argument.startswith(f"{name}="):
            values.append(argument.partition("=")[2])
        else:
            rest.append(argument)
    if len(values) > 1:
        raise ConfigError(f"{name} is given twice, as {values[0]!r} and as {values[1]!r}")
    if values == [""]:
        raise ConfigError(f"{name} needs a file or the name of a bundled recipe")
    return rest, values[0] if values else None
