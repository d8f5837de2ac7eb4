"""A Config as YAML, and what may differ between a checkpoint and the run that resumes it."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from qerl_jax.config.fields import Config, upper_clip
from qerl_jax.config.foreign import advice
from qerl_jax.config.values import ConfigError
from qerl_jax.untrusted import require_regular, shown

# Fields that may differ between a checkpoint and the run that resumes it. Those on memory change the order of sums, and
# programs that are compiled anew may round differently, so a resumed run may differ in rounding.
FREE_ON_RESUME = frozenset(
    {
        "output_dir",
        "resume",
        "overwrite",
        "allow_changed_inputs",
        "save_steps",
        "save_total_limit",
        "report_to",
        "compilation_cache_dir",
        "rollout_memory_gb",
        "vllm_gpu_memory_utilization",
        "tokens_per_micro_batch",
        "update_memory_gb",
        "logprob_chunk_size",
        "eval_batch_size",
        "reward_workers",
        "reward_timeout",
        "allow_code_execution",
    }
)


def from_mapping(values: dict[Any, Any], where: str) -> Config:
    """A Config from YAML's mapping; `-` in a key means `_`. `where` names the file in errors."""
    fields = {field.name for field in dataclasses.fields(Config)}
    known, foreign = {}, [f"{key!r} {said}" for key in values if (said := advice(str(key).replace("-", "_")))]
    if foreign:
        raise ConfigError(f"{where}: {'; '.join(foreign)}")
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ConfigError(f"{where}: unknown key {shown(key)}{_suggestion(name, fields)}")
        if name in known:
            raise ConfigError(f"{where}: {name} is given twice, as {shown(known[name])} and as {shown(value)}")
        known[name] = value
    try:
        return Config(**known)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _suggestion(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def load(path: str | Path) -> Config:
    """Read a YAML file. Raises ConfigError naming the file."""
    import yaml

    path = Path(path)
    if not path.exists():
        raise ConfigError(f"config file {path} does not exist")
    try:
        require_regular(path)
        text = path.read_text(encoding="utf-8")
        _refuse_doubles(yaml.compose(text, yaml.SafeLoader), str(path))
        values = yaml.safe_load(text)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}, line {error.problem_mark.line + 1} is not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, a date that is none, nested too deep
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not a mapping of fields")
    return from_mapping(values, str(path))


def _refuse_doubles(node: Any, where: str) -> None:
    """Refuse duplicate keys, of which YAML readers silently take the last."""
    seen: dict[str, int] = {}
    for key, _ in node.value if getattr(node, "id", None) == "mapping" else ():
        if not isinstance(key.value, str):
            continue
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigError(f"{where}: {key.value!r} is given twice, in lines {seen[key.value]} and {line}")
        seen[key.value] = line


def to_mapping(config: Config) -> dict[str, Any]:
    """Plain values, tuples as lists: what `dump` writes and a checkpoint keeps."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def dump(config: Config) -> str:
    """The config as YAML that `load` reads back to an equal one."""
    import yaml

    return yaml.safe_dump(to_mapping(config), sort_keys=False)


def differences(ours: Config, theirs: dict[str, Any]) -> list[str]:
    """Fields in which a checkpoint's config contradicts ours, as "name: theirs -> ours"; those free to change left
    out. A field that the checkpoint's version did not have yet counts as its default.
    """
    mine, theirs = to_mapping(ours), to_mapping(Config()) | theirs
    if upper_clip(theirs["loss_type"], theirs["epsilon_high"]) == ours.upper_clip:  # None and a number may be the same
        theirs["epsilon_high"] = mine["epsilon_high"]
    return [
        f"{name}: {theirs[name]!r} -> {mine[name]!r}"
        for name in mine
        if name not in FREE_ON_RESUME and theirs[name] != mine[name]
    ]
