"""What the layers of an update keep between the passes, and the bytes on the device at each moment of a micro-batch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from qerl_jax.config import Config
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.linear import XlaMatmuls
from qerl_jax.rl import flash_attention
from qerl_jax.rl.micro_batches import PackShape


class Keeps(enum.Enum):
    """What a layer keeps for its backward pass, besides its input."""

    ALL = "all"
    ALL_BUT_GATE_UP = "all but gate and up, whose projection runs again"
    INPUT = "nothing; its forward pass runs again"


class LayerBytes(NamedTuple):
    """Bytes of an update: arrays that a layer keeps, and the most that programs need besides.

    Attributes:
      input: a layer's input.
      gate_up: gate and up.
      rest: what a layer keeps besides these.
      forward: a layer's forward pass, without its results.
      mlp: the MLP's backward pass.
      attention: attention's backward pass.
      gate_up_again: the MLP's backward pass where gate and up are computed again, without them.
      layer_again: the MLP's backward pass where the whole layer is computed again, without what it keeps otherwise.
      head: the head, its input included.
    """

    input: int
    gate_up: int
    rest: int
    forward: int
    mlp: int
    attention: int
    gate_up_again: int
    layer_again: int
    head: int

    def kept(self, keeps: Keeps) -> int:
        """Bytes on the device that a layer keeps besides its input."""
        return {
            Keeps.ALL: self.rest + self.gate_up,
            Keeps.ALL_BUT_GATE_UP: self.rest,
            Keeps.INPUT: 0,
        }[keeps]

    def backward(self, keeps: Keeps) -> int:
        """Bytes that a layer's backward pass needs besides what is kept."""
        return {
            Keeps.ALL: max(self.mlp, self.attention),
            Keeps.ALL_BUT_GATE_UP: max(self.gate_up_again + self.gate_up, self.attention),
            Keeps.INPUT: max(self.layer_again, self.attention) + self.rest + self.gate_up,
        }[keeps]


def layer_bytes(model: ModelConfig, itemsize: int, pack: PackShape, config: Config, xla: XlaMatmuls) -> LayerBytes:
    """`LayerBytes` of a pack.

    Args:
      model: shape of the model, or of one device's part of it.
      itemsize: bytes of the compute dtype.
      pack: of whole micro-batches, or of the half.
      config, xla: of the update.
    """
    d, f, t = model.hidden_size, model.intermediate_size, pack.tokens
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    rest = itemsize * t * (2 * heads + 2 * kv_heads + d)
    attention = 4 * itemsize * t * heads
    if itemsize == 2:
        rest += 4 * t * model.num_heads  # statistics of the softmax
        segments = max(flash_attention.views(kind)[1] for kind in pack.kinds())
        of_prefixes = flash_attention.row_segments(pack.prefixes)
        # cuDNN's, for every segment as long as a row: sums of dq in fp32, dk and dv of all query heads in bf16.
        attention += 8 * t * heads * max(segments, of_prefixes)
        attention += 4 * model.num_heads * t * (segments + of_prefixes)  # statistics by segment
    else:
        attention += 12 * model.num_heads * pack.longest_suffix * pack.longest  # scores, weights, a gradient
    mlp = t * (itemsize * (4 * f + 2 * d) + 4 * 3 * d)
    chunk = min(config.logprob_chunk_size, t)
    head = chunk * model.vocab_size * (4 + itemsize) + t * d * (4 + 2 * itemsize)
    # With tensor parallelism a sum over devices in fp32, and what is summed.
    more = xla.dequantized_bytes + (8 * t * d if model.is_part else 0)
    wide_gate_up, wide_x = (xla.wide(t, width) for width in (2 * f, d))
    return LayerBytes(
        input=4 * d * t,
        gate_up=2 * itemsize * t * f,
        rest=rest,
        forward=itemsize * t * (f + d) + wide_gate_up + more,
        mlp=mlp + more,
        attention=attention + more,
        gate_up_again=mlp + wide_gate_up + more,
        layer_again=mlp + wide_gate_up + wide_x + more,
        head=head,
    )


def peak_bytes(layers: Sequence[Keeps], need: LayerBytes) -> int:
    """Most bytes on the device at any moment of a micro-batch: while a layer's forward pass, the head or a layer's
    backward pass runs.

    In a layer's forward pass, inputs and results of the layers so far are there. In a layer's backward pass those
    behind it are freed: inputs and results of the layers up to it are there. One more input is counted, for the next
    micro-batch where a device frees memory later than the host drops it.
    """
    most, kept = 0, 0
    for i, keeps in enumerate(layers):
        own = need.gate_up + (0 if keeps is Keeps.INPUT else need.rest)
        most = max(most, (i + 2) * need.input + kept + own + need.forward)
        kept += need.kept(keeps)
        most = max(most, (i + 2) * need.input + kept + need.backward(keeps))
    return max(most, (len(layers) + 1) * need.input + kept + need.head)
