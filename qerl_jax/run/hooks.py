"""Functions of the user's in a run: `train` takes them by name, and calls its own where none is given."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import tokenize
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from qerl_jax import aqn
from qerl_jax.config import Config
from qerl_jax.programs import program
from qerl_jax.rl.loss import TokenLoss
from qerl_jax.types import TrainState

_PERTURB = {target: program(perturb) for target, perturb in aqn.PERTURBATIONS.items()}
_TRAINING = ("sigma", "perturb", "token_loss", "optimizer")  # these change the result; `on_step` only looks on


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions of a run, as `train` documents them; None: that of the config."""

    sigma: Callable[[int], float] | None = None
    perturb: Callable[[Any, float, Array], Any] | None = None
    token_loss: TokenLoss | None = None
    with_reference: bool = False
    optimizer: Any = None
    on_step: Callable[[dict[str, float], TrainState], None] | None = None

    def sigma_at(self, config: Config, step: int) -> float:
        """Standard deviation of the noise. Raises ValueError for a result that is none."""
        if self.sigma is None:
            return aqn.sigma(config, step, config.num_rollouts)
        value = self.sigma(step)
        if not 0 <= float(value) < math.inf:
            raise ValueError(f"sigma({step}) returned {value!r}, expected a finite number of at least 0")
        return float(value)

    def noisy(self, config: Config, clean: Any, sigma: float, key: Array) -> Any:
        """Layer norms or adapters of the rollout, as `noise_target` says. Raises ValueError for a result of another
        form than `clean`.
        """
        if self.perturb is None:
            return _PERTURB[config.noise_target](clean, np.float32(sigma), key)
        found = self.perturb(clean, sigma, key)
        wanted, given = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree) for tree in (clean, found))
        if wanted != given:
            raise ValueError(
                f"perturb returned {config.noise_target} of the form {given}, expected that of its argument, {wanted}"
            )
        return found

    def given(self) -> dict[str, str]:
        """Name of each function that changes the training, by its hook."""
        return {name: _name(getattr(self, name)) for name in _TRAINING if getattr(self, name) is not None}

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of each function's source (or of its name, where Python has no source), or of nothing: a checkpoint
        is not resumed with other functions than it was made with.
        """
        return {f"hook {name}": _fingerprint(getattr(self, name)) for name in _TRAINING}


def _name(function: Any) -> str:
    function = getattr(function, "update", function)  # an optax transformation
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _fingerprint(function: Any) -> str:
    text = ""
    if function is not None:
        try:
            text = inspect.getsource(function)
        except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # no file, or one that is not Python
            text = _name(function)
    return hashlib.sha256(text.encode()).hexdigest()
