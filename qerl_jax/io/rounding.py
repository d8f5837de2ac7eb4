"""How far an export's logits may lie from its policy's.

Rounding moves weight i by e_i, |e_i| <= E_i: half a unit in the last place of bf16 (2^-8 |w|), or half the gap between
two NVFP4 values. To first order a logit then moves by Σ g_i e_i, with g_i its derivative. Where errors have independent
signs, its variance is at most Σ g_i² E_i², that of the same sum with errors ±E_i of random signs. `Perturbed` is the
export with such errors, and the distance of its logits from the export's is an upper estimate for rounding. The bound
is twice its largest difference and one and a half times its mean one, because both distances are single draws.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64

from qerl_jax.io import names
from qerl_jax.io.policy_tensors import DenseTensors
from qerl_jax.io.safetensors import Overlay, TensorSource, open_checkpoint
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.formats import nvfp4

_UNIT = np.float32(2.0**-8)  # largest relative error of rounding to bf16, which has 8 significant bits
_LARGEST_MARGIN, _MEAN_MARGIN = 2.0, 1.5


@dataclasses.dataclass(frozen=True)
class Distance:
    """Distance of two sets of logits.

    Attributes:
      largest: maximum of the absolute differences.
      mean: their mean.
    """

    largest: float
    mean: float

    @classmethod
    def between(cls, one: Float32[np.ndarray, "B T V"], other: Float32[np.ndarray, "B T V"]) -> Distance:
        """The distance of two arrays; not finite where one of them is not."""
        difference = np.abs(one - other)
        return cls(float(difference.max()), float(difference.mean()))

    def bound(self) -> Distance:
        """The largest distance admitted for an export, from that of its `Perturbed` twin."""
        return Distance(_LARGEST_MARGIN * self.largest, _MEAN_MARGIN * self.mean)

    def within(self, bound: Distance) -> bool:
        """Whether neither figure is above the bound's; False for what is no number."""
        return self.largest <= bound.largest and self.mean <= bound.mean

    def __str__(self) -> str:
        return f"{self.largest:.3g} (mean {self.mean:.3g})"


class Perturbed(Overlay):
    """An export with an error of the largest size and random sign on each rounded weight, unquantized in fp32.

    Args:
      directory: a model, in bf16 or quantized by `quantize_checkpoint`.
      rounded: names of the tensors that get errors.
    """

    def __init__(self, directory: Path, rounded: frozenset[str]):
        super().__init__(DenseTensors(directory, dtype=np.float32))
        self._stored, self._rounded = open_checkpoint(directory), rounded

    def __getitem__(self, name: str) -> np.ndarray:
        values = self._tensors[name]
        if name not in self._rounded:
            return values
        return values + _random_signs(name, values.shape) * self._errors(name, values)

    def _errors(self, name: str, values: np.ndarray) -> np.ndarray:
        errors = _UNIT * np.abs(values)
        module = name.removesuffix(".weight")
        _, scale_name, global_name, _ = (f"{module}.{suffix}" for suffix in names.QUANTIZED["compressed-tensors"])
        if scale_name not in self._stored:
            return errors
        steps = self._stored[scale_name].astype(np.float32) / self._stored[global_name]
        return errors + half_gaps(values, steps)


def half_gaps(values: Float32[np.ndarray, "n k"], steps: Float32[np.ndarray, "n k_blocks"]) -> np.ndarray:
    """Half the gap between an NVFP4 value and the next larger one, for each weight; `steps` is the scale of each block
    of 16, by which the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 are multiplied.
    """
    step = np.repeat(steps, nvfp4.NVFP4_BLOCK, axis=1)
    magnitude = np.abs(values)
    return step * np.select([magnitude < 2 * step, magnitude < 4 * step], [0.25, 0.5], 1.0).astype(np.float32)


def _random_signs(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """±1 in fp32, the same in every call."""
    count = int(np.prod(shape))
    random = np.random.default_rng(zlib.crc32(name.encode()))
    bits = np.unpackbits(np.frombuffer(random.bytes(-(-count // 8)), np.uint8), count=count)
    return (2 * bits.astype(np.float32) - 1).reshape(shape)


def weight_errors(policy: TensorSource, directory: Path, model: ModelConfig) -> list[float]:
    """`‖Q − W‖ / ‖W‖` (Frobenius) of each layer: W its seven projections in `policy`, Q those of a quantized model."""
    quantized = DenseTensors(directory, dtype=np.float32)

    def squares(layer: int) -> tuple[float, float]:
        error, whole = 0.0, 0.0
        for part in model.projection_shapes():
            name = f"{names.projection(layer, part)}.weight"
            exact = policy[name].astype(np.float32)
            error += float(np.linalg.norm(quantized[name] - exact)) ** 2
            whole += float(np.linalg.norm(exact)) ** 2
        return error, whole

    return [math.sqrt(error / whole) if whole else 0.0 for error, whole in map(squares, range(model.num_layers))]


def kl_divergence(reference: Float32[np.ndarray, "B T V"], other: Float32[np.ndarray, "B T V"]) -> np.ndarray:
    """KL(reference ‖ other) of the next token at each position [B, T], in nats."""
    rows = zip(reference, other, strict=True)  # one by one: fp64 copies of all would be twice both
    return np.stack([_kl(_log_softmax(p), _log_softmax(q)) for p, q in rows])


def _kl(p: Float64[np.ndarray, "T V"], q: Float64[np.ndarray, "T V"]) -> Float64[np.ndarray, " T"]:
    return (np.exp(p) * (p - q)).sum(-1)


def _log_softmax(logits: Float32[np.ndarray, "T V"]) -> Float64[np.ndarray, "T V"]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
