"""The training command line: a YAML file or a bundled recipe, and flags over it."""

from __future__ import annotations

from qerl_jax import config as configuration
from qerl_jax.config import Config, ConfigError
from qerl_jax.io import assets

_DESCRIPTION = (
    "Train a Qwen2.5 policy with GRPO on a quantized base. --config NAME takes a bundled recipe ({recipes}), "
    "--config FILE.yaml a file with the fields below; flags override it. --dry-run shows the resolved config, the "
    "parameters and a memory estimate, and runs nothing. Without --config and --model it runs the bundled tiny policy "
    "(configs/tiny.yaml)."
)


def parse(argv: list[str]) -> Config:
    """The config of a command line: `--config FILE or NAME`, with flags over it. Without either `--config` or
    `--model`, the bundled `tiny` run.
    """
    import tyro

    argv, path = take_option(argv, "--config")
    names_model = any(argument == "--model" or argument.startswith("--model=") for argument in argv)
    if path is not None:
        default = configuration.load(assets.find_config(path))
    else:
        default = Config() if names_model else configuration.load(assets.find_config("tiny"))
    description = _DESCRIPTION.format(recipes=", ".join(assets.recipes()))
    return tyro.cli(Config, default=default, args=argv, prog="python -m qerl_jax.train", description=description)


def take_flag(argv: list[str], name: str) -> tuple[list[str], bool]:
    """Remove a flag without a value from a command line; returns the rest, and whether it was there."""
    return [argument for argument in argv if argument != name], name in argv


def take_option(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """Remove `name VALUE` or `name=VALUE` from a command line; returns the rest and the value. Raises ConfigError
    without a value.
    """
    rest, value = [], None
    arguments = iter(argv)
    for argument in arguments:
        if argument == name:
            value = next(arguments, None)
            if value is None:
                raise ConfigError(f"{name} needs a file or the name of a bundled recipe")
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
        else:
            rest.append(argument)
    return rest, value
