"""The terms of the epilogue, fixed at trace time."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Terms:
    """`y = multiplier · acc (+ bias) (+ scale · (x A) B)`.

    Attributes:
      has_bias: True if the epilogue adds a bias.
      lora_widths: output features of each adapter; empty without LoRA.
      scale: LoRA scale alpha / R.
      has_partials: whether `x A` comes as split-K partials.
    """

    has_bias: bool = False
    lora_widths: tuple[int, ...] = ()
    scale: float = 1.0
    has_partials: bool = False

    @property
    def has_lora(self) -> bool:
        """Whether adapters are added."""
        return bool(self.lora_widths)
