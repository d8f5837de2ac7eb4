"""A checkpoint quantized to NVFP4 with calibration data, layer by layer: the body of `quantize --calibration`.

Calibration texts run through the unquantized model, so that a layer's choice depends on no other layer's and its error
is its own. Held-out texts, which choose nothing, run beside them through the unquantized, the rounded and the
calibrated model, and give the errors of the report.

Memory holds one layer in fp32, the residual streams, and the activations of one batch. Nothing of a layer is kept but
its channel scales and the importance of its input features: its weights are rounded once more when they are written.

Axes: N output features, K input features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from qerl_jax.data.files import DataError
from qerl_jax.data.texts import load_texts
from qerl_jax.io import names
from qerl_jax.io.files import atomic_directory, write_json
from qerl_jax.io.folding import FoldedTensors, LayerScales, RoundedTensors, exact
from qerl_jax.io.quantize import RoundToNearest, global_scales, read_unquantized, write_nvfp4
from qerl_jax.io.rewrite import check_output
from qerl_jax.io.safetensors import TensorSource, open_checkpoint
from qerl_jax.io.tensor_names import check_names
from qerl_jax.io.tokenizer import load_tokenizer
from qerl_jax.models import awq
from qerl_jax.models.config import LAYER_NORMS, ModelConfig
from qerl_jax.models.formats import nvfp4, nvfp4_search
from qerl_jax.models.qwen2 import DecoderLayer
from qerl_jax.reporting.calibration import KINDS, Calibration, LayerErrors
from qerl_jax.run.layer_streams import PARTS, LayerStreams

REPORT_FILE = "calibration.json"
SEQUENCES, TOKENS = 64, 256
_HELD_OUT_EVERY = 4


@dataclasses.dataclass(frozen=True)
class CalibratedScales:
    """Block scales by `nvfp4_search`, for weights whose columns are scaled; a `Quantizer`.

    Attributes:
      divisors: global scale of each module.
      importance: importance of the input features of each module.
    """

    divisors: dict[str, np.float32]
    importance: dict[str, np.ndarray]

    def block_scales(self, module: str, weight: Float32[np.ndarray, "N K"]) -> np.ndarray:
        """The scales that leave the least error, weighted by importance."""
        return nvfp4_search.block_scales(weight, self.importance[module], self.divisors[module])


def calibrate_checkpoint(
    src: str | Path,
    dst: str | Path,
    calibration: str | Path,
    sequences: int = SEQUENCES,
    tokens: int = TOKENS,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Calibration:
    """Quantize as `quantize_checkpoint` does, to the same layout, with channel scales (`models.awq`) and block scales
    (`nvfp4_search`) chosen on texts. `calibration.json` in `dst` holds the errors that are returned.

    Layer norms, the rows of up and v and the bias of v take over the channel scales, so adapters of the unquantized
    model do not fit the result.

    Args:
      src, dst, overwrite: as for `quantize_checkpoint`.
      calibration: file of texts (`data.texts.load_texts`).
      sequences: most texts that are read; every fourth of them is held out.
      tokens: after which a text is cut.
      progress: called with "calibrate" and the numbers of layers done and of all layers, then with "quantize" and
        those of tensors.

    Raises as `quantize_checkpoint` and `load_texts` do, and DataError for fewer than four texts.
    """
    src, dst, calibration = Path(src), Path(dst), Path(calibration)
    check_output([src], dst, overwrite)
    model, raw_config = read_unquantized(src)
    tensors = open_checkpoint(src)
    check_names(tensors, model, None)
    for n, k in model.projection_shapes().values():
        nvfp4.check_input_features(n, k)
    if sequences < _HELD_OUT_EVERY or tokens < 2:
        raise DataError(f"calibration needs {_HELD_OUT_EVERY} sequences of 2 tokens, got {sequences} of {tokens}")
    longest = min(tokens, model.max_position_embeddings)
    texts = load_texts(calibration, load_tokenizer(src, model.vocab_size), sequences, longest)
    if len(texts) < _HELD_OUT_EVERY:
        raise DataError(
            f"{calibration} holds {len(texts)} texts of two tokens or more, calibration needs {_HELD_OUT_EVERY}"
        )
    heldout = texts[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    used = [text for i, text in enumerate(texts, 1) if i % _HELD_OUT_EVERY]
    run = _Run(tensors, model, LayerStreams(tensors, model, used, heldout, KINDS))
    with atomic_directory(dst) as directory:
        for layer in range(model.num_layers):
            run.calibrate(layer)
            progress("calibrate", layer + 1, model.num_layers)
        heldout_tokens, kl = run.streams.kl()
        report = Calibration(calibration.name, len(used), run.streams.tokens, heldout_tokens, kl, run.errors)
        write_nvfp4(src, directory, run.folded(), raw_config, run.calibrated, progress, leave_out=(REPORT_FILE,))
        write_json(directory / REPORT_FILE, report.as_json())
    return report


class _Run:
    """The choices made so far, and their errors."""

    def __init__(self, tensors: TensorSource, model: ModelConfig, streams: LayerStreams):
        self._tensors, self._model, self.streams = tensors, model, streams
        self._scales: list[LayerScales] = []
        self.calibrated = CalibratedScales({}, {})
        self.errors: list[LayerErrors] = []

    def folded(self) -> FoldedTensors:
        """The unquantized checkpoint with the channel scales chosen so far."""
        return FoldedTensors(self._tensors, self._model, self._scales)

    def calibrate(self, layer: int) -> None:
        """Choose a layer's scales, and move all streams behind it."""
        self._choose(layer)
        rounding = RoundToNearest(global_scales(self._tensors, layer))
        sources = (
            (RoundedTensors(self._tensors, rounding), LayerScales.ones(self._model)),
            (RoundedTensors(self.folded(), self.calibrated), self._scales[layer]),
        )
        weights, outputs = {}, {}
        for kind, (source, scales) in zip(KINDS, sources, strict=True):
            quantized = self.streams.read_layer(source, layer)
            outputs[kind] = self.streams.pass_quantized(kind, quantized)
            weights[kind] = self._weight_error(layer, quantized, scales)
            del quantized  # before the next is read
        self.errors.append(LayerErrors(weights, outputs))

    def _choose(self, layer: int) -> None:
        unquantized = self.streams.read_layer(self._tensors, layer)
        activations = self.streams.pass_exact(unquantized)
        norms = {name: self._tensors[names.layer_norm(layer, name)] for name in LAYER_NORMS}
        bias = self._tensors[f"{names.projection(layer, 'v_proj')}.bias"] if self._model.qkv_bias else None
        choices = choose_layer(self._model, unquantized, activations, norms, bias)
        self._scales.append(LayerScales(**{fused: choice.columns for fused, choice in choices.items()}))
        folded = self.folded()
        for fused, choice in choices.items():
            modules = [names.projection(layer, part) for part in PARTS[fused]]
            largest = max(nvfp4.max_magnitude(folded[f"{module}.weight"]) for module in modules)
            self.calibrated.divisors.update(dict.fromkeys(modules, choice.divisor(largest)))
            self.calibrated.importance.update(dict.fromkeys(modules, choice.importance))

    def _weight_error(self, layer: int, quantized: DecoderLayer, scales: LayerScales) -> float:
        """`‖W' − W‖ / ‖W‖` (Frobenius) over the seven projections, W' without the scales that were folded in."""
        error, whole = 0.0, 0.0
        for (fused, parts), projection in zip(PARTS.items(), quantized.projections(), strict=True):
            stored, start = projection.weight.get_value().values, 0
            for part in parts:
                weight, rows = self._tensors[f"{names.projection(layer, part)}.weight"], scales.rows(part, self._model)
                for a, b in nvfp4.row_slices(*weight.shape):
                    values = stored[start + a : start + b]
                    norms = _squared_norms(values, jnp.asarray(weight[a:b]), rows[a:b], getattr(scales, fused))
                    error, whole = error + float(norms[0]), whole + float(norms[1])
                start += len(weight)
        return math.sqrt(error / whole) if whole else 0.0


def choose_layer(
    model: ModelConfig,
    layer: DecoderLayer,
    activations: Mapping[str, awq.Activations],
    norms: Mapping[str, Float[np.ndarray, " K"]],
    v_bias: Float[np.ndarray, " N"] | None,
) -> dict[str, awq.Choice]:
    """Choices for the four (fused) projections, in the order of their use. First those of o and down, because the
    projections before them take over their channel scales.

    Args:
      model: its shape.
      layer: unquantized, in fp32.
      activations: inputs of its projections.
      norms: weights of its layer norms, in the dtype in which they are stored.
      v_bias: bias of v, likewise; None: none.
    """
    weights = {fused: p.weight.get_value().values for fused, p in zip(PARTS, layer.projections(), strict=True)}
    sizes = {part: n for part, (n, _) in model.projection_shapes().items()}

    def choose(fused: str, rows: Mapping[str, np.ndarray], admit: Callable = lambda columns: columns) -> awq.Choice:
        divisors = [rows.get(part, np.ones(sizes[part], np.float32)) for part in PARTS[fused]]
        part_sizes = [sizes[part] for part in PARTS[fused]]
        return awq.choose(weights[fused], part_sizes, np.concatenate(divisors), activations[fused], admit)

    def shared(columns: np.ndarray) -> np.ndarray:
        rows = awq.values_rows(awq.shared_by_heads(columns, model), model)
        return awq.queries_columns(rows if v_bias is None else exact(v_bias, rows), model)

    before, after = (np.asarray(norms[name]) for name in LAYER_NORMS)
    o, down = choose("o_proj", {}, shared), choose("down_proj", {})
    v_rows = {"v_proj": awq.values_rows(o.columns, model)}
    qkv = choose("qkv_proj", v_rows, lambda columns: exact(before, columns))
    gate_up = choose("gate_up_proj", {"up_proj": down.columns}, lambda columns: exact(after, columns))
    return {"qkv_proj": qkv, "o_proj": o, "gate_up_proj": gate_up, "down_proj": down}


@jax.jit
def _squared_norms(stored, weight, rows, columns) -> tuple[Array, Array]:
    wide = weight.astype(jnp.float32)
    return jnp.sum((stored * rows[:, None] / columns - wide) ** 2), jnp.sum(wide**2)
