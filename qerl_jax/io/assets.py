"""Files that travel in the wheel: the bundled policy and the configs."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
TINY_MODEL = "tiny"


def config_path(name: str) -> Path:
    """`configs/NAME.yaml` of an installed wheel or of a checkout."""
    installed = _PACKAGE / "configs" / f"{name}.yaml"
    return installed if installed.exists() else _PACKAGE.parent / "configs" / f"{name}.yaml"


def model_path(model: str) -> Path:
    """The bundled policy for "tiny", else the directory named."""
    return _PACKAGE / "assets" / "tiny-qwen2" if model == TINY_MODEL else Path(model)
