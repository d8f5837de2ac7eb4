"""Functions of the user's in a run: `train` takes them by name, and calls its own where none is given."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from qerl_jax import aqn
from qerl_jax.config import Config, ConfigError
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.data.stream import ProblemStream
from qerl_jax.messages import IN_MEMORY, Given, shown
from qerl_jax.parallel import Replicas
from qerl_jax.programs import program
from qerl_jax.rewards.functions import BUILT_IN
from qerl_jax.rl.loss import TokenLoss
from qerl_jax.run.fingerprints import function_fingerprint, name_of
from qerl_jax.types import TrainState

_perturb = program(aqn.perturb)
_TRAINING = (
    "problems",
    "sigma",
    "perturb",
    "token_loss",
    "optimizer",
)  # these change the result; `on_step` only looks on


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions of a run, as `train` documents them; None: that of the config."""

    problems: Callable[[int], Sequence[int]] | None = None
    sigma: Callable[[int], float] | None = None
    perturb: Callable[[Any, float, Array], Any] | None = None
    token_loss: TokenLoss | None = None
    with_reference: bool = False
    optimizer: Any = None
    on_step: Callable[[dict[str, float], TrainState], None] | None = None

    def check(self, config: Config) -> None:
        """Raise ConfigError for a setting that a function contradicts."""
        own = {"dynamic_sampling": "draws others", "data_order": "orders them", "dataset_weights": "draws them"}
        for name, does in own.items():
            if self.problems is not None and (value := getattr(config, name)) != getattr(Config, name):
                given = f"problems(step) names the problems of a step, {name} {shown(value)} {does}"
                raise ConfigError(f"{given}: give one")

    def ids_at(self, step: int, count: int) -> list[int]:
        """The ids of a step's `count` problems; none where the config chooses. Raises ConfigError for another number,
        and for what is no ids.
        """
        if self.problems is None:
            return []
        try:
            inspect.signature(self.problems).bind(step)
        except TypeError as error:
            raise ConfigError(f"problems is called as problems({step}), with the step: {error}") from None
        except ValueError:  # it has no signature
            pass
        given = self.problems(step)
        try:
            ids = [operator.index(number) for number in given]
        except TypeError:
            wanted = f"expected {count} ids, the numbers of records, from 0"
            raise ConfigError(f"problems({step}) returned {shown(given)}, {wanted}") from None
        if len(ids) != count:
            raise ConfigError(f"problems({step}) returned {len(ids)} ids, expected the {count} of a rollout")
        return ids

    def problems_at(
        self, step: int, stream: ProblemStream[EncodedProblem], count: int, replicas: Replicas
    ) -> list[EncodedProblem]:
        """The `count` problems of a step, those of the first replica: functions that draw at random would differ.
        Raises ConfigError as `ids_at` and `with_ids` do.
        """
        return with_ids(replicas.broadcast(self.ids_at(step, count)), step, stream)

    def sigma_at(self, config: Config, step: int, replicas: Replicas) -> float:
        """Standard deviation of the noise, that of the first replica. Raises ValueError for a result that is none."""
        if self.sigma is None:
            return aqn.sigma(config, step, config.num_rollouts)
        value = replicas.broadcast(self.sigma(step))
        if not 0 <= float(value) < math.inf:
            raise ValueError(f"sigma({step}) returned {value!r}, expected a finite number of at least 0")
        return float(value)

    def noisy(self, clean: Any, sigma: float, key: Array) -> Any:
        """Layer norms of the rollout. Raises ValueError for a result of another form than `clean`."""
        if self.perturb is None:
            return _perturb(clean, np.float32(sigma), key)
        found = self.perturb(clean, sigma, key)
        wanted, given = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree) for tree in (clean, found))
        if wanted != given:
            raise ValueError(f"perturb returned norms of the form {given}, expected that of its argument, {wanted}")
        return found

    def given(self) -> dict[str, str]:
        """Name of each function that changes the training, by its hook."""
        return {name: name_of(getattr(self, name)) for name in _TRAINING if getattr(self, name) is not None}

    def fingerprints(self) -> dict[str, str]:
        """`function_fingerprint` of each: a checkpoint is not resumed with other functions than it was made with."""
        return {f"hook {name}": function_fingerprint(getattr(self, name)) for name in _TRAINING}


def with_ids(ids: Sequence[int], step: int, stream: ProblemStream[EncodedProblem]) -> list[EncodedProblem]:
    """The problems of these ids of a step. Raises ConfigError for an id that none has."""
    found = {item.problem.id: item for items in stream.sets for item in items}
    for number in ids:
        if number not in found:
            raise ConfigError(f"problems({step}) returned {number}, but no problem, or an unusable one, has this id")
    return [found[number] for number in ids]


def with_objects(
    config: Config,
    reward_funcs: Callable | str | Sequence[Callable | str] | None,
    train_dataset: Iterable[Mapping[str, Any]] | None,
    eval_dataset: Iterable[Mapping[str, Any]] | None,
) -> Config:
    """The config with a `Given` for each object of the user's that replaces its rewards or datasets; a function goes by
    its name. Raises ConfigError for what cannot be one.
    """
    changes: dict[str, Any] = {}
    if isinstance(reward_funcs, str) or callable(reward_funcs):
        reward_funcs = [reward_funcs]
    if reward_funcs is not None:
        changes["reward_funcs"] = tuple(f if isinstance(f, str) else Given(_short_name(f), f) for f in reward_funcs)
    fields, given = ("dataset", "eval_dataset"), (train_dataset, eval_dataset)
    for field, name, records in zip(fields, IN_MEMORY, given, strict=True):
        if isinstance(records, Iterator | Mapping | str | Path):
            why = ", which is read only once" if isinstance(records, Iterator) else ""
            raise ConfigError(
                f"{name} is a {type(records).__name__}{why}: give a datasets.Dataset (one split) or a list of dicts; a "
                f"file, or a dataset by its name, is Config's {field}"
            )
        if records is not None:
            changes[field] = Given(name, records)
    return dataclasses.replace(config, **changes)


def _short_name(reward: Any) -> str:
    """Name of a reward in config, metrics and records."""
    name = getattr(reward, "__name__", type(reward).__name__)
    if name in BUILT_IN:
        raise ConfigError(f"reward_funcs holds a function called {name!r}, as a built-in reward is: rename it")
    return name
