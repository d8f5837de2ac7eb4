"""Checkpoints derived from an unquantized one: with channel scales folded in, which leaves its function as it is, or
with rounded projections.

Axes: D model, F ffn, M features of all query heads, V of all key/value heads, K input features, N output features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float, Float32

from qerl_jax.io import names
from qerl_jax.io.policy_tensors import dense_values
from qerl_jax.io.quantize import Quantizer, quantized
from qerl_jax.io.safetensors import Overlay, Spec, TensorSource
from qerl_jax.models.awq import values_rows
from qerl_jax.models.config import LAYER_NORMS, ModelConfig
from qerl_jax.models.formats.nvfp4 import row_slices

READS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    "o_proj": "o_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    "down_proj": "down_proj",
}
"""The fused projection that each projection belongs to: its parts read the same input."""


@dataclasses.dataclass(frozen=True)
class LayerScales:
    """Factors of the input features of a layer's projections.

    Attributes:
      qkv_proj, o_proj, gate_up_proj, down_proj: by which the columns of each weight are multiplied, and its input is
        divided. Query heads of a key/value head share those of o_proj.
    """

    qkv_proj: Float32[np.ndarray, " D"]
    o_proj: Float32[np.ndarray, " M"]
    gate_up_proj: Float32[np.ndarray, " D"]
    down_proj: Float32[np.ndarray, " F"]

    @classmethod
    def ones(cls, model: ModelConfig) -> LayerScales:
        """No scaling."""
        shapes = model.projection_shapes()
        return cls(**{fused: np.ones(shapes[part][1], np.float32) for part, fused in READS.items()})

    def rows(self, part: str, model: ModelConfig) -> Float32[np.ndarray, " N"]:
        """Divisors of a projection's rows: the factors of the projection that reads its output."""
        if part == "v_proj":
            return values_rows(self.o_proj, model)
        return self.down_proj if part == "up_proj" else np.ones(model.projection_shapes()[part][0], np.float32)


def divided(vector: Float[np.ndarray, " K"], scales: Float32[np.ndarray, " K"]) -> np.ndarray:
    """`vector / scales`, rounded to the vector's dtype; the vector itself where that is 0 or not finite."""
    with np.errstate(over="ignore"):
        found = (vector.astype(np.float32) / scales).astype(vector.dtype)
    return np.where(np.isfinite(found.astype(np.float32)) & (found != 0), found, vector)


def exact(vector: Float[np.ndarray, " K"], scales: Float32[np.ndarray, " K"]) -> Float32[np.ndarray, " K"]:
    """The scales near given ones by which `vector` is divided exactly: the quotient of the vector and its `divided`
    form. Where the vector is 0, any scale is exact, and the given one stays.
    """
    wide, found = vector.astype(np.float32), divided(vector, scales).astype(np.float32)
    return np.where(wide == 0, scales, wide / np.where(found == 0, 1, found)).astype(np.float32)


class RoundedTensors(Overlay):
    """A checkpoint whose projections have the fp32 values that they would have in NVFP4.

    Args:
      tensors: an unquantized checkpoint.
      quantizer: global and block scales.
    """

    def __init__(self, tensors: TensorSource, quantizer: Quantizer):
        super().__init__(tensors)
        self._quantizer = quantizer

    def __getitem__(self, name: str) -> np.ndarray:
        array, module = self._tensors[name], name.removesuffix(".weight")
        if module not in self._quantizer.divisors:
            return array
        weight, (n, k) = quantized(self._quantizer, module, array), array.shape
        values = np.empty((n, k), np.float32)
        for start, stop in row_slices(n, k):
            values[start:stop] = dense_values(jax.tree.map(lambda rows, a=start, b=stop: rows[a:b], weight))
        return values

    def spec(self, name: str) -> Spec:
        """dtype and shape."""
        dtype, shape = super().spec(name)
        return (np.dtype(np.float32) if name.removesuffix(".weight") in self._quantizer.divisors else dtype), shape


class FoldedTensors(Overlay):
    """A checkpoint whose projections are multiplied by factors of their inputs, in fp32, and whose layer norms, rows of
    v and up, and bias of v are divided by them, in their own dtype.

    Args:
      tensors: an unquantized checkpoint.
      model: its shape.
      scales: factors of each layer, `exact` for the vectors that are divided.
    """

    def __init__(self, tensors: TensorSource, model: ModelConfig, scales: Sequence[LayerScales]):
        super().__init__(tensors)
        self._model = model
        self._weights: dict[str, tuple[LayerScales, str]] = {}
        self._vectors: dict[str, np.ndarray] = {}
        for layer, found in enumerate(scales):
            for part in READS:
                self._weights[f"{names.projection(layer, part)}.weight"] = found, part
            for norm, fused in zip(LAYER_NORMS, ("qkv_proj", "gate_up_proj"), strict=True):
                self._vectors[names.layer_norm(layer, norm)] = getattr(found, fused)
            if model.qkv_bias:
                self._vectors[f"{names.projection(layer, 'v_proj')}.bias"] = found.rows("v_proj", model)

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[name]
        if name in self._vectors:
            return divided(np.asarray(array), self._vectors[name])
        if name not in self._weights:
            return array
        scales, part = self._weights[name]
        columns: Mapping[str, np.ndarray] = vars(scales)
        folded = array.astype(np.float32)
        folded *= columns[READS[part]]
        if part in ("v_proj", "up_proj"):
            folded /= scales.rows(part, self._model)[:, None]
        return folded

    def spec(self, name: str) -> Spec:
        """dtype and shape."""
        dtype, shape = super().spec(name)
        return (np.dtype(np.float32) if name in self._weights else dtype), shape
