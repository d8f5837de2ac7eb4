"""One decoder layer of the update, forward and backward, on packed sequences.

Layers have one shape, so each function here is one program whatever the depth. Between the passes a layer keeps
(`Kept`) the results of its matmuls and of attention; norms, SiLU and casts are computed again. No matmul of the
weights runs twice, unless the layer keeps less: all but gate and up, which are two thirds of it and more, or nothing
but its input.

Axes: T tokens, N query heads, K key/value heads, H head dim, D model, E = 2 F gate and up, A = H / 2 rotary angles.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from qerl_jax.models.attention import rotary_angles, split_and_rotate
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.executor import RecordingExecutor
from qerl_jax.models.qwen2 import DecoderLayer, merge_layer
from qerl_jax.partition import axis_spec, on_devices, specs
from qerl_jax.programs import program
from qerl_jax.rl.flash_attention import Statistics
from qerl_jax.rl.micro_batches import Packed, PackShape
from qerl_jax.rl.segment_attention import segment_attention, segment_attention_backward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What a layer keeps for its backward pass, besides its input.

    Attributes:
      q, k, v: after the rotary embedding.
      attended: attention's output.
      statistics: statistics of its softmax.
      delta: what attention adds to the residual stream.
      gate_up: gate and up, side by side; None: computed again.
    """

    q: Float[Array, "T N H"]
    k: Float[Array, "T K H"]
    v: Float[Array, "T K H"]
    attended: Float[Array, "T N H"]
    statistics: Statistics
    delta: Float[Array, "T D"]
    gate_up: Float[Array, "T E"] | None

    def partition_specs(self) -> Kept:
        """Divided by heads and by gate and up of each device (`partition.specs`)."""
        names = (field.name for field in dataclasses.fields(self))
        spec_of = dict(zip(names, _KEPT, strict=True))
        return jax.tree_util.tree_map_with_path(lambda path, _: spec_of[path[0].name], self)


_KEPT = (*[axis_spec(1)] * 5, PartitionSpec(), axis_spec(1))  # of the attributes of `Kept`


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What a layer's programs are compiled for. Hashable: static under jit.

    Attributes:
      model: its shape.
      dtype: compute dtype, by name.
      pack: pack of the micro-batch.
    """

    model: ModelConfig
    dtype: str
    pack: PackShape


def _layer(shape: LayerShape, frozen: Any, trained: Any) -> DecoderLayer:
    """The layer; trained weights stand in the place of the frozen ones."""
    return merge_layer(shape.model, jnp.dtype(shape.dtype), frozen, trained["norms"], trained["lora"])


def _forward(
    shape: LayerShape, frozen: Any, trained: Any, x: Float32[Array, "T D"], packed: Packed
) -> tuple[Float32[Array, "T D"], tuple[Any, ...]]:
    """The residual stream after a layer, and the attributes of `Kept`: on one device, with its part of the layer."""
    model = shape.model.part

    def attention(qkv: Array, angles: Array, _: None) -> tuple[Array, tuple]:
        q, k, v = split_and_rotate(model, qkv, angles)
        attended, statistics = segment_attention(q, k, v, packed, shape.pack)
        return attended, (q, k, v, attended, statistics)

    executor, angles = RecordingExecutor(), rotary_angles(packed.positions, model)
    x, heads = _layer(shape, frozen, trained)(x, angles, attention, executor=executor)
    _, delta, gate_up, _ = executor.results
    return x, (*heads, delta, gate_up)


def _run(
    shape: LayerShape, frozen: Any, trained: Any, x: Float32[Array, "T D"], packed: Packed
) -> tuple[Float32[Array, "T D"], Kept]:
    function, results = functools.partial(_forward, shape), (PartitionSpec(), _KEPT)
    x, kept = on_devices(shape.model.tensor_parallel, function, frozen, trained, x, packed, results=results)
    return x, Kept(*kept)


@program(static_argnames="shape")
def forward(shape: LayerShape, frozen: Any, trained: Any, x: Float32[Array, "T D"], packed: Packed) -> Array:
    """The residual stream after a layer.

    Args:
      shape: static.
      frozen: the layer's frozen weights.
      trained: {"lora", "norms"} of the layer.
      x: the residual stream.
      packed: the micro-batch.
    """
    return _run(shape, frozen, trained, x, packed)[0]


@program(static_argnames="shape")
def forward_and_keep(
    shape: LayerShape, frozen: Any, trained: Any, x: Float32[Array, "T D"], packed: Packed
) -> tuple[Float32[Array, "T D"], Kept]:
    """`forward`, and what `backward` needs."""
    return _run(shape, frozen, trained, x, packed)


@program(static_argnames="shape", donate_argnames=("gradient", "d_x"))
def backward(
    shape: LayerShape,
    frozen: Any,
    trained: Any,
    gradient: Any,
    x: Float32[Array, "T D"],
    kept: Kept | None,
    d_x: Float32[Array, "T D"],
    packed: Packed,
) -> tuple[Any, Float32[Array, "T D"]]:
    """Gradient of a layer.

    Args:
      shape, frozen, trained, packed: as in `forward`.
      gradient: accumulated so far, of the trees that train. Donated.
      x: the layer's input.
      kept: from `forward_and_keep`; None: computed again.
      d_x: gradient of the layer's output. Donated.

    Returns:
      The gradient with this micro-batch's added, and that of x.
    """
    arguments, results = (frozen, trained, gradient, x, kept, d_x, packed), (specs(gradient), PartitionSpec())
    return on_devices(shape.model.tensor_parallel, functools.partial(_backward, shape), *arguments, results=results)


def _backward(shape, frozen, trained, gradient, x, kept, d_x, packed):
    """`backward` on one device, with its part of the layer."""
    model = shape.model.part
    kept = Kept(*_forward(shape, frozen, trained, x, packed)[1]) if kept is None else kept

    def qkv(layer: DecoderLayer, x: Array) -> Array:
        return layer.qkv(x)[1]

    def gate_up(layer: DecoderLayer, x: Array) -> Array:
        return layer.gate_up(x)[1]

    def pull(method: Any, value: Array, cotangent: Array, gradient: Any) -> tuple[Array, Any]:
        def of_trained(own: Any, value: Array) -> Array:
            return method(_layer(shape, frozen, trained | own), value)

        _, pullback = jax.vjp(of_trained, {name: trained[name] for name in gradient}, value)
        part, d_value = pullback(cotangent)
        return d_value, jax.tree.map(jnp.add, gradient, part)

    middle = x + kept.delta
    gated = gate_up(_layer(shape, frozen, trained), middle) if kept.gate_up is None else kept.gate_up
    d_gate_up, gradient = pull(DecoderLayer.down, gated, d_x.astype(gated.dtype), gradient)
    d_mlp, gradient = pull(gate_up, middle, d_gate_up, gradient)
    d_middle = d_x + d_mlp
    d_attended, gradient = pull(DecoderLayer.attention_out, kept.attended, d_middle.astype(kept.delta.dtype), gradient)
    # Else XLA moves the gradient of the MLP's weights behind attention, whose workspace then lies beside d_gate_up.
    d_attended, gradient = jax.lax.optimization_barrier((d_attended, gradient))
    d_heads = segment_attention_backward(
        kept.q, kept.k, kept.v, kept.attended, kept.statistics, d_attended, packed, shape.pack
    )
    features = sum(head.shape[1] for head in d_heads) * model.head_dim
    like = jax.ShapeDtypeStruct((x.shape[0], features), kept.q.dtype)
    angles = rotary_angles(packed.positions, model)
    # The rotary embedding is linear; its transpose needs no value of qkv.
    [d_qkv] = jax.linear_transpose(lambda qkv: split_and_rotate(model, qkv, angles), like)(d_heads)
    d_attention, gradient = pull(qkv, x, d_qkv, gradient)
    return gradient, d_middle + d_attention
