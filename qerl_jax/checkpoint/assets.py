"""Files that travel in the wheel: the bundled policy and the configs."""

from __future__ import annotations

import difflib
from pathlib import Path

from qerl_jax.checkpoint import hub
from qerl_jax.config import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
TINY_MODEL = "tiny"


def config_directory() -> Path:
    """`configs/` of an installed wheel or of a checkout."""
    installed = _PACKAGE / "configs"
    return installed if installed.exists() else _PACKAGE.parent / "configs"


def recipes() -> list[str]:
    """Names of the bundled recipes."""
    return sorted(path.stem for path in config_directory().glob("*.yaml"))


def find_config(name: str) -> Path:
    """The file named, or the bundled recipe of that name. A file in the working directory comes first.

    Raises ConfigError where there is neither, naming the nearest recipes.
    """
    path = Path(name)
    if path.is_file():
        return path
    if name in recipes():
        return config_directory() / f"{name}.yaml"
    close = difflib.get_close_matches(name, recipes(), cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "python -m qerl_jax.train --help names all"
    raise ConfigError(f"config file {name} does not exist, nor a bundled recipe of that name; {hint}")


def model_path(model: str, weights: bool = True) -> Path:
    """The bundled policy for "tiny", the hub's model for ORGANIZATION/NAME, else the directory named.

    Args:
      model: as in `Config.model`.
      weights: whether the weights are downloaded, too, or config and tokenizer alone.

    Raises ConfigError where none is named or the hub's cannot be downloaded.
    """
    if not model:
        raise ConfigError('model is empty: name a Hugging Face directory, or "tiny" for the bundled policy')
    if model == TINY_MODEL:
        return _PACKAGE / "assets" / "tiny-qwen2"
    return hub.download(model, weights) if hub.is_hub_id(model) else Path(model)
