"""Channel scales that leave less error when weights are rounded (AWQ, arXiv 2306.00978, §3.2).

A projection y = W x is stored as `W' = W · diag(columns)` and reads `x / columns`. Input features with large values get
large columns, so that rounding W' hurts them less. The division costs nothing: it is folded into the operation before,
exactly.

- Inputs of q, k, v and of gate, up: the weight of the RMSNorm before them is divided.
- Inputs of o: the rows of v (and its bias), which attention only averages. Query heads that share a key/value head
  share its scales.
- Inputs of down: the rows of up, because `silu(gate) · up` is linear in up.

`columns = m^(α/2)` with m the mean square of each feature over calibration tokens, divided by their geometric mean.
α and the global scale are those of a grid with the least error of the projection's output on some of these tokens.

Axes: T tokens, N output features, K input features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array, Float, Float32

from qerl_jax.models.config import ModelConfig
from qerl_jax.models.formats import nvfp4, nvfp4_search

_EXPONENTS = tuple(i / 10 for i in range(11))  # α; 0 leaves the columns alone
_LARGEST_FRACTIONS = (1.0, 0.875, 0.75, 0.625)  # largest block scale by round-to-nearest, as a share of 448
_TINY = float(np.finfo(np.float32).tiny)
_FLOOR = 1e-4  # a mean square counts at least this share of their mean: a feature that was not seen may still occur


@dataclasses.dataclass(frozen=True)
class Activations:
    """Inputs of one projection.

    Attributes:
      mean_squares: mean square of each feature over all calibration tokens.
      samples: inputs of some of these tokens.
    """

    mean_squares: Float32[np.ndarray, " K"]
    samples: Float32[Array, "T K"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """How the (fused) projections that read the same input are stored.

    Attributes:
      columns: the factor of each input feature.
      importance: mean square of each feature of the input that the stored weight reads.
      largest_fraction: the global scale maps the largest magnitude of all parts to 6 · 448 · this.
      alpha: the exponent α of the columns.
    """

    columns: Float32[np.ndarray, " K"]
    importance: Float32[np.ndarray, " K"]
    largest_fraction: float
    alpha: float

    def divisor(self, largest: float) -> np.float32:
        """The global scale of parts whose largest stored magnitude is given."""
        return np.float32(nvfp4.global_scale(largest, np.float32) * np.float32(self.largest_fraction))


def choose(
    weight: Float32[Array, "N K"],
    part_sizes: Sequence[int],
    rows: Float32[np.ndarray, " N"],
    activations: Activations,
    admit: Callable[[np.ndarray], np.ndarray] = lambda columns: columns,
) -> Choice:
    """The best columns and global scale for a (fused) projection: errors of its parts count relative to their outputs.

    Args:
      weight: the unquantized weight.
      part_sizes: output features of its parts.
      rows: divisors of its rows, for the projection that reads its output.
      activations: inputs of the unquantized model.
      admit: the columns nearest to given ones that can be folded exactly.
    """
    moments = np.maximum(activations.mean_squares, _FLOOR * activations.mean_squares.mean())
    moments = np.where(moments > 0, moments, 1).astype(np.float32)
    ends = np.cumsum(part_sizes).tolist()
    parts = list(zip([0, *ends[:-1]], ends, strict=True))
    energies = [nvfp4_search.output_energy(weight, activations.samples, part) for part in parts]

    def choice(alpha: float, largest_fraction: float) -> Choice:
        columns = moments ** np.float32(alpha / 2)
        columns = admit((columns / np.exp(np.log(columns).mean(dtype=np.float64))).astype(np.float32))
        return Choice(columns, moments / columns**2, largest_fraction, alpha)

    def error(choice: Choice) -> float:
        divisor = choice.divisor(nvfp4_search.largest_magnitude(weight, rows, choice.columns))
        stored = (weight, rows, choice.columns, choice.importance, divisor, activations.samples)
        errors = [nvfp4_search.output_error(*stored, part) for part in parts]
        return sum(found / max(energy, _TINY) for found, energy in zip(errors, energies, strict=True))

    best = min((choice(alpha, 1.0) for alpha in _EXPONENTS), key=error)
    return min((choice(best.alpha, fraction) for fraction in _LARGEST_FRACTIONS), key=error)


def shared_by_heads(columns: Float[np.ndarray, " K"], model: ModelConfig) -> Float[np.ndarray, " K"]:
    """Columns of o with their geometric mean over the query heads that read the same feature of a key/value head."""
    heads = np.log(columns).reshape(model.num_kv_heads, -1, model.head_dim)
    return np.exp(np.broadcast_to(heads.mean(1, keepdims=True), heads.shape)).reshape(-1)


def values_rows(columns: Float[np.ndarray, " K"], model: ModelConfig) -> Float[np.ndarray, " N"]:
    """Divisors of v's rows, from columns of o that query heads share."""
    return columns.reshape(model.num_kv_heads, -1, model.head_dim)[:, 0].reshape(-1)


def queries_columns(rows: Float[np.ndarray, " N"], model: ModelConfig) -> Float[np.ndarray, " K"]:
    """Columns of o, from divisors of v's rows."""
    heads = rows.reshape(model.num_kv_heads, 1, model.head_dim)
    return np.repeat(heads, model.num_heads // model.num_kv_heads, axis=1).reshape(-1)
