"""Residual streams of texts that pass a model layer by layer, unquantized and quantized side by side.

Axes: B sequences, T tokens, K input features, V vocab.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from qerl_jax.io import names
from qerl_jax.io.load import read_layer
from qerl_jax.io.rounding import kl_divergence
from qerl_jax.io.safetensors import TensorSource
from qerl_jax.io.streamed import head_logits, run_and_record, run_layer
from qerl_jax.io.weights import WeightReader
from qerl_jax.models.awq import Activations
from qerl_jax.models.config import FUSED_PROJECTIONS, ModelConfig
from qerl_jax.models.qwen2 import DecoderLayer

PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": FUSED_PROJECTIONS["qkv_proj"],
    "o_proj": ("o_proj",),
    "gate_up_proj": FUSED_PROJECTIONS["gate_up_proj"],
    "down_proj": ("down_proj",),
}
"""Parts of each (fused) projection, in the order of their use."""

_BATCH, _PAD = 4, 32  # sequences of a batch; its length is a multiple of this, so that few programs are compiled
_SAMPLES = 512  # tokens on which outputs are compared


@dataclasses.dataclass(frozen=True)
class Batch:
    """Texts padded on the right: under causal attention no token reads padding."""

    tokens: Int32[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"]


def batches(texts: Sequence[np.ndarray]) -> list[Batch]:
    """Texts in batches of similar length."""
    ordered = sorted(texts, key=len)
    found = []
    for start in range(0, len(ordered), _BATCH):
        rows = ordered[start : start + _BATCH]
        length = -(-len(rows[-1]) // _PAD) * _PAD
        lengths = np.array([len(row) for row in rows])
        tokens = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
        found.append(Batch(tokens, np.arange(length) < lengths[:, None]))
    return found


class LayerStreams:
    """The stream of calibration texts through the unquantized model, and those of held-out texts through the
    unquantized model and each quantized one.

    Args:
      tensors: the unquantized checkpoint.
      model: its shape.
      texts, heldout: token ids.
      kinds: names of the quantized models.
    """

    def __init__(
        self,
        tensors: TensorSource,
        model: ModelConfig,
        texts: Sequence[np.ndarray],
        heldout: Sequence[np.ndarray],
        kinds: Sequence[str],
    ):
        self._model, self._texts, self._heldout = model, batches(texts), batches(heldout)
        self._reader = WeightReader(tensors, None, "bf16", jnp.float32, "xla")
        embedding = self._reader.on_host(names.EMBED, (model.vocab_size, model.hidden_size))

        def embedded(texts: list[Batch]) -> list[Array]:
            return [jnp.asarray(embedding[batch.tokens], jnp.float32) for batch in texts]

        self._stream, self._before, self._exact = (embedded(each) for each in (self._texts, *2 * (self._heldout,)))
        self._quantized = {kind: embedded(self._heldout) for kind in kinds}
        self.tokens = sum(int(batch.mask.sum()) for batch in self._texts)

    def read_layer(self, source: TensorSource, layer: int) -> DecoderLayer:
        """A layer in fp32 on the device; the host gives up each weight before the next is copied."""
        reader = WeightReader(source, None, "bf16", jnp.float32, "xla")
        host = read_layer(reader, self._model, layer)
        weights = {name: reader.to_device(host.pop(name)) for name in list(host)}
        return DecoderLayer(self._model, weights, {fused: {} for fused in PARTS}, jnp.dtype(jnp.float32))

    def pass_exact(self, layer: DecoderLayer) -> dict[str, Activations]:
        """Move the streams of the unquantized model behind a layer; returns the inputs of its projections in the
        calibration texts.
        """
        sampled = np.unique(np.linspace(0, self.tokens - 1, _SAMPLES).astype(int))
        squares: dict[str, np.ndarray] = {}
        samples: dict[str, list[Array]] = {fused: [] for fused in PARTS}
        start = 0
        for i, (batch, x) in enumerate(zip(self._texts, self._stream, strict=True)):
            self._stream[i], inputs = run_and_record(self._model, layer, x)
            real = np.flatnonzero(batch.mask)
            rows = real[sampled[(sampled >= start) & (sampled < start + len(real))] - start]
            start += len(real)
            for fused, found in zip(PARTS, inputs, strict=True):
                flat = found.reshape(-1, found.shape[-1])
                samples[fused].append(flat[rows])
                squares[fused] = squares.get(fused, 0.0) + np.asarray(_squares(flat, batch.mask.ravel()), np.float64)
        self._before, self._exact = self._exact, [run_layer(self._model, layer, x) for x in self._exact]
        means = {fused: (found / self.tokens).astype(np.float32) for fused, found in squares.items()}
        return {fused: Activations(means[fused], jnp.concatenate(samples[fused])) for fused in PARTS}

    def pass_quantized(self, kind: str, layer: DecoderLayer) -> float:
        """Move the stream of a quantized model behind its layer, whose unquantized twin has been passed.

        Returns `‖f'(x) − f(x)‖ / ‖f(x)‖` over the held-out tokens: x is the unquantized model's residual stream, to
        which its layer adds f(x) and the quantized one f'(x).
        """
        error, whole = 0.0, 0.0
        for batch, before, exact in zip(self._heldout, self._before, self._exact, strict=True):
            found = run_layer(self._model, layer, before)
            error += float(_squares((found - exact).reshape(-1, found.shape[-1]), batch.mask.ravel()).sum())
            whole += float(_squares((exact - before).reshape(-1, found.shape[-1]), batch.mask.ravel()).sum())
        self._quantized[kind] = [run_layer(self._model, layer, x) for x in self._quantized[kind]]
        return math.sqrt(error / whole) if whole else 0.0

    def kl(self) -> tuple[list[int], dict[str, list[float]]]:
        """Predicted tokens of each held-out text, and the sum over them of KL(unquantized ‖ quantized), in nats."""
        tokens: list[int] = []
        found: dict[str, list[float]] = {kind: [] for kind in self._quantized}
        for i, batch in enumerate(self._heldout):
            for row, length in enumerate(batch.mask.sum(1) - 1):  # nothing follows the last token
                tokens.append(int(length))
                exact = self._logits(self._exact[i][row : row + 1, :length])
                for kind, stream in self._quantized.items():
                    logits = self._logits(stream[i][row : row + 1, :length])
                    found[kind].append(float(kl_divergence(exact, logits).sum()))
        return tokens, found

    def _logits(self, x: Float32[Array, "1 T D"]) -> Float32[np.ndarray, "1 T V"]:
        return head_logits(self._reader, self._model, x)


@jax.jit
def _squares(flat: Float32[Array, "T K"], mask: Bool[Array, " T"]) -> Float32[Array, " K"]:
    return jnp.sum(jnp.where(mask[:, None], flat, 0) ** 2, axis=0)
