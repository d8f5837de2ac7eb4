"""A Config as YAML, and what may differ between a checkpoint and the run that resumes it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from qerl_jax.config.fields import Config
from qerl_jax.config.foreign import FOREIGN
from qerl_jax.config.values import ConfigError

# Fields that may differ between a checkpoint and the run that resumes it. Those on memory change the order of sums, and
# programs that are compiled anew may round differently, so a resumed run may differ in rounding. Another length gives
# the steps to come the learning rates and the noise of a run of that length.
FREE_ON_RESUME = frozenset(
    {
        "output_dir",
        "resume",
        "overwrite",
        "allow_changed_inputs",
        "max_steps",
        "num_train_epochs",
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


class _Loader(yaml.SafeLoader):
    """YAML whose plain words are texts, but for null, true and false (core schema of YAML 1.2). Numbers are read by the
    fields that want them, from what is written: YAML 1.1 makes 8 of 010, 90 of 1:30 and 10 of 1_0.
    """

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"{name!r} is given twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", "~|null|Null|NULL|", "~nN"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), [*_first])
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("$"), [""])


def load(path: str | Path) -> Config:
    """Read a YAML file. Raises ConfigError naming the file."""
    values = read_yaml(path)
    try:
        return Config(**values)
    except ConfigError as error:
        unknown = {name.replace("-", "_") for name in values} - {field.name for field in dataclasses.fields(Config)}
        theirs = [name for name in unknown & FOREIGN.keys() if "TRL" in FOREIGN[name].origin]
        hint = f". A file of TRL's? `python -m qerl_jax.train --from-trl {path}` prints it as a config"
        raise ConfigError(f"{path}: {error}" + (hint if len(theirs) > max(len(unknown) / 2, 1) else "")) from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file: numbers are texts. Raises ConfigError naming the file."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"config file {path} does not exist")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        if not isinstance(values, dict | None):
            raise ConfigError(f"it holds a {type(values).__name__}, not a mapping of fields")
        return {str(key): value for key, value in (values or {}).items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}, line {error.problem_mark.line + 1} is not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, a control character, nested too deep
        raise ConfigError(f"{path} is not YAML: {error}") from error


def to_mapping(config: Config) -> dict[str, Any]:
    """Plain values, tuples as lists: what `dump` writes and a checkpoint keeps."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def dump(config: Config) -> str:
    """The config as YAML that `load` reads back to an equal one."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False)


def differences(ours: Config, theirs: dict[str, Any]) -> list[str]:
    """Fields in which a checkpoint's config contradicts ours, as "name: theirs -> ours"; those free to change left
    out.
    """
    mine = to_mapping(ours)
    return [
        f"{name}: {theirs.get(name)!r} -> {mine.get(name)!r}"
        for name in mine | theirs
        if name not in FREE_ON_RESUME and theirs.get(name) != mine.get(name)
    ]
