"""Models of the Hugging Face hub: downloaded once into its cache, where a run names ORGANIZATION/NAME."""

from __future__ import annotations

import re
from pathlib import Path

from qerl_jax.config import ConfigError

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]  # config, tokenizer, chat template
_WEIGHTS = ["*.safetensors"]
_ELSEWHERE = ["*/*"]  # copies in other formats


def is_hub_id(model: str) -> bool:
    """Whether a name has the form ORGANIZATION/NAME and is no path here: neither it nor its first part exists."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model)) and not Path(model).parent.exists()


def download(model: str, weights: bool) -> Path:
    """The directory of a model of the hub in the hub's cache, what is missing of it downloaded with a progress bar.

    Args:
      model: ORGANIZATION/NAME.
      weights: also the safetensors; else config and tokenizer alone.

    Raises:
      ConfigError: no such model, no access, or no connection and no copy in the cache.
    """
    import huggingface_hub

    patterns = [*_SMALL_FILES, *(_WEIGHTS if weights else [])]
    skipped = [*_ELSEWHERE, *([] if weights else ["*.safetensors.index.json"])]
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns, ignore_patterns=skipped))
    except Exception as error:  # whatever the hub's client raises without a connection, which differs by version
        raise ConfigError(f"model {model} is no directory here, and {_refusal(model, error)}") from error


def _refusal(model: str, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"its licence must be accepted first: see https://huggingface.co/{model}, then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no model of that name that HF_TOKEN may read"
    first = re.split(r"\n|(?<=\w)\. ", str(error).strip(), maxsplit=1)[0]
    return (
        f"it cannot be downloaded ({type(error).__name__}: {first}); offline, name a directory with config.json, "
        "safetensors and tokenizer in its place (train: --model DIR)"
    )
