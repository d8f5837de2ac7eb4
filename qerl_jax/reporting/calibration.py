"""What calibration gained over round-to-nearest, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from qerl_jax.evaluation.statistics import Estimate, reduction

KINDS = ("rounded", "calibrated")
"""Round-to-nearest, and with calibration."""


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """Errors of a layer by `KINDS`, relative to the unquantized layer.

    Attributes:
      weights: Frobenius norm over the seven projections; calibration does not minimize this one.
      outputs: norm of the layer's output on held-out texts, its residual left out, for the input of the unquantized
        model.
    """

    weights: Mapping[str, float]
    outputs: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How a model was calibrated, and the errors on held-out texts.

    Attributes:
      texts: name of the file.
      sequences, tokens: texts that the scales were chosen on, and their tokens.
      heldout_tokens: predicted tokens of each held-out text.
      kl: KL(unquantized ‖ quantized) by `KINDS`, in nats, summed over the tokens of each held-out text.
      layers: errors of each layer.
    """

    texts: str
    sequences: int
    tokens: int
    heldout_tokens: Sequence[int]
    kl: Mapping[str, Sequence[float]]
    layers: Sequence[LayerErrors]

    def mean_kl(self, kind: str) -> float:
        """KL of the next token in nats."""
        return sum(self.kl[kind]) / sum(self.heldout_tokens)

    def kl_reduction(self) -> Estimate:
        """Share of round-to-nearest's KL that calibration takes away, with its interval over texts."""
        return reduction(self.kl["rounded"], self.kl["calibrated"])

    def as_json(self) -> dict[str, Any]:
        """All of it, with the figures that follow."""
        return {
            **dataclasses.asdict(self),
            "mean_kl": {kind: self.mean_kl(kind) for kind in KINDS},
            "kl_reduction": self.kl_reduction()._asdict(),
        }

    def table(self) -> Table:
        """Errors of each layer in percent."""
        table = Table()
        for title in ("layer", "weights, rounded", "calibrated", "outputs, rounded", "calibrated"):
            table.add_column(title, justify="right")
        for number, layer in enumerate(self.layers):
            errors = [source[kind] for source in (layer.weights, layer.outputs) for kind in KINDS]
            table.add_row(str(number), *(f"{100 * error:.2f} %" for error in errors))
        means = [
            np.mean([getattr(layer, of)[kind] for layer in self.layers])
            for of in ("weights", "outputs")
            for kind in KINDS
        ]
        table.add_section()
        table.add_row("mean", *(f"{100 * error:.2f} %" for error in means))
        return table

    def sentence(self) -> str:
        """The KL of both."""
        gain = self.kl_reduction()
        rounded, calibrated = map(self.mean_kl, KINDS)
        return (
            f"KL from the unquantized model on {len(self.heldout_tokens)} held-out texts ({sum(self.heldout_tokens):,} "
            f"tokens): {calibrated:.3g} nats a token, {rounded:.3g} by round-to-nearest: {100 * gain.value:.0f} % less "
            f"(95 % interval {100 * gain.low:.0f} to {100 * gain.high:.0f} %)."
        )
