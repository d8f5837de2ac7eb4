"""Tensor parallelism: the layers of one replica divided over T devices of its process (Megatron-LM, arXiv 1909.08053).

q, k, v, gate and up are column-parallel: a device has a T-th of their output features, whole heads. o and down are
row-parallel: a device has the input features that it computed itself, and its part of the sum. So a layer needs two
all-reduces forward, of what attention and the MLP add to the residual stream, and two backward, of the gradients of
their inputs. An adapter's factor at the divided side is divided with the weight, A of row-parallel and B of
column-parallel projections; the other factor is whole on each device, as are norms, embedding, head and all that
surrounds the layers.

Arrays lie on a mesh of the process's first T devices. Those of adapters are whole arrays to everything outside of the
layers. A fused weight is the parts of the devices one behind the other (q₀ k₀ v₀ q₁ k₁ v₁), in the form that each
device's kernels read, and the static fields of weights and adapters (`PackedNvfp4.shape`, `Lora.offset`) are those of
one device's part.

Decode sums a few rows at a time, for which NCCL takes twice as long as a kernel of this project (`Mailbox`).

Axes: T devices, K input features, N output features.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, UInt32
from qerl_kernels import dispatch
from qerl_kernels.peer_sum import api as peers

T = TypeVar("T")
AXIS = "model"
_KINDS = (AxisType.Auto,)


class Division(enum.Enum):
    """Which features of a projection are divided."""

    OUTPUTS = "column-parallel"
    INPUTS = "row-parallel"

    def axis(self, ndim: int) -> int | None:
        """The divided axis of an array of a weight [N, K], or of a vector [N] that belongs to one; None: it is whole on
        each device.
        """
        if self is Division.OUTPUTS:
            return 0
        return 1 if ndim > 1 else None


DIVISIONS = {
    "qkv_proj": Division.OUTPUTS,
    "o_proj": Division.INPUTS,
    "gate_up_proj": Division.OUTPUTS,
    "down_proj": Division.INPUTS,
}
"""Of the (fused) projections, by name."""


def division_of(path: Sequence[Any]) -> Division | None:
    """That of an array, by the names on the path to it; None: it is whole on each device."""
    return next((DIVISIONS[name] for name in path if name in DIVISIONS), None)


def axis_spec(axis: int | None) -> PartitionSpec:
    """That of an array divided along one axis; None: along none."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)


def specs(tree: Any) -> Any:
    """A `PartitionSpec` for each array of a tree: of a policy, a state, a gradient, or of what a program makes of them.
    Arrays of projections are known by the projection's name in their path; a node with a method `partition_specs` knows
    its own.
    """

    def knows(node: Any) -> bool:
        return hasattr(node, "partition_specs")

    def one(path: tuple, node: Any) -> Any:
        return node.partition_specs() if knows(node) else _spec(path, node)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=knows)


def _spec(path: tuple, leaf: Any) -> PartitionSpec:
    names = [getattr(entry, "key", getattr(entry, "name", None)) for entry in path]
    division = division_of(names)
    if division is None:
        return PartitionSpec()
    if "lora" not in names:
        return axis_spec(division.axis(leaf.ndim))
    if leaf.ndim != 2:  # of an optimizer that keeps sums over rows or columns
        return PartitionSpec()
    if division is Division.OUTPUTS:
        return axis_spec(1 if names[-1] == "b" else None)
    return axis_spec(0 if names[-1] == "a" else None)


def mesh_of(count: int) -> Mesh:
    """The first `count` devices of this process. Raises ValueError where there are fewer."""
    devices = jax.local_devices()
    if count > len(devices):
        raise ValueError(f"tensor_parallel_size {count} needs as many devices, this process has {len(devices)}")
    return Mesh(np.array(devices[:count]), (AXIS,), axis_types=_KINDS)


def shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A `NamedSharding` for each array of a tree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree))


def bytes_on_device(tree: Any, count: int = 1) -> int:
    """Bytes of a tree's arrays, real or abstract, on each of `count` devices."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    if count == 1:
        return sum(sizes)
    each = zip(sizes, jax.tree.leaves(specs(tree)), strict=True)
    return sum(size // (count if AXIS in spec else 1) for size, spec in each)


def devices_of(tree: Any) -> int:
    """Devices of the mesh on which a tree's arrays lie, T; 1 where they lie on none."""
    return 1 if jax.local_device_count() == 1 else _devices_of_mesh(tree)


def _devices_of_mesh(tree: Any) -> int:
    found = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree) if not isinstance(leaf, jax.core.Tracer))
    meshes = (sharding.mesh for sharding in found if isinstance(sharding, NamedSharding))
    return next((mesh.size for mesh in meshes if mesh.axis_names == (AXIS,)), 1)


def pinned(tree: Any, count: int) -> Any:
    """The results of a jitted function on `count` devices, divided as `specs` says."""
    return jax.lax.with_sharding_constraint(tree, shardings(tree, _mesh(count)))


def on_devices(count: int, function: Callable[..., T], *arguments: Any, results: Any) -> T:
    """`function(*arguments)`, on each of `count` devices with its part of the arrays; inside jit.

    Args:
      count: T; with 1 it is a plain call.
      function: of the parts. It sums over devices by `enter` and `leave` alone.
      arguments: divided as `specs` says.
      results: `PartitionSpec` of the results, a tree or a prefix of it.
    """
    if count == 1:
        return function(*arguments)
    # Not `check_vma`: kernels do not say along which axes their results vary.
    mapped = jax.shard_map(function, mesh=_mesh(count), in_specs=specs(arguments), out_specs=results, check_vma=False)
    return mapped(*arguments)


def _mesh(count: int) -> Mesh | AbstractMesh:
    """That of `jax.set_mesh` within it. Else that of this process's first devices, whose numbers `peers.peer_sum`
    needs; but one without devices, for those of the arguments, where other processes have some, or shapes alone are
    traced for more devices than there are.
    """
    here = jax.sharding.get_abstract_mesh()
    if AXIS in here.axis_names:
        return here
    if jax.process_count() == 1 and jax.local_device_count() >= count:
        return mesh_of(count)
    return AbstractMesh((count,), (AXIS,), axis_types=_KINDS)


def _summed(x: Float[Array, "*M N"]) -> Float[Array, "*M N"]:
    """The sum over devices, in fp32, rounded once."""
    return jax.lax.psum(x.astype(jnp.float32), AXIS).astype(x.dtype)


@jax.custom_vjp
def enter(x: Float[Array, "*M K"]) -> Float[Array, "*M K"]:
    """x itself, whole on each device, in front of what each computes of its own; its gradient is the sum of theirs.

    With `leave` it makes a pair: `jax.vjp` of a bare `psum` would sum a gradient that each device has whole already.
    """
    return x


@jax.custom_vjp
def leave(x: Float[Array, "*M N"]) -> Float[Array, "*M N"]:
    """The sum of the devices' x, in fp32, rounded once; its gradient is that of each x."""
    return _summed(x)


enter.defvjp(lambda x: (x, None), lambda _, d_x: (_summed(d_x),))
leave.defvjp(lambda x: (_summed(x), None), lambda _, d_x: (d_x,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mailbox:
    """Where the devices write to each other in `peers.peer_sum`, each with a slice of both arrays.

    Attributes:
      packets, calls: as `peers.peer_sum` takes them.
    """

    packets: UInt32[Array, "_ 2 T C 4"]
    calls: Int32[Array, "_ G"]

    def partition_specs(self) -> Mailbox:
        """One for each device (`specs`)."""
        return jax.tree.map(lambda _: axis_spec(0), self)

    def leave(self, x: Float[Array, "*M N"]) -> tuple[Float[Array, "*M N"], Mailbox]:
        """`partition.leave` without a gradient, and the mailbox for the next sum. One that was used is consumed."""
        if x.size > peers.room(self.packets):
            return leave(x), self
        x, packets, calls = peers.peer_sum(x, self.packets, self.calls, AXIS)
        return x, Mailbox(packets, calls)


def mailbox(rows: int, features: int, dtype: jax.typing.DTypeLike, count: int) -> Mailbox | None:
    """An empty one for sums of `rows` rows, or of as many as the kernel takes; inside jit. None where that does not
    run (said once on a GPU), or a device is alone.

    All devices must have theirs before one sends to another: sums by XLA, as those of a prefill, stand between.
    """
    if count == 1:
        return None
    if missing := peers.missing(features, dtype, count):
        if dispatch.is_for_gpu():
            dispatch.say_once(f"decode sums over GPUs by NCCL: the kernel for it needs {missing}")
        return None
    packets, calls = peers.shapes(min(rows, peers.most_rows(features, count)) * features, count)
    return Mailbox(jnp.zeros(packets, jnp.uint32), jnp.zeros(calls, jnp.int32))


def parts_of(value: Any, division: Division, rows: Sequence[int], count: int) -> list[Any]:
    """The parts of a weight, or of a bias, for each of `count` devices, as slices: exact in any format.

    Args:
      value: arrays [N, …] or [N], a row for each output feature, on the host or on a device.
      division: of its projection.
      rows: output features of each part of a fused projection.
      count: devices.

    Raises ValueError for features, or blocks of a format, that cannot be divided.
    """

    def of_device(device: int, array: Any) -> Any:
        if division is Division.INPUTS:
            return array if array.ndim == 1 else array[:, _slice(array.shape[1], device, count)]
        ends = np.cumsum([0, *rows])
        pieces = [array[start:end] for start, end in itertools.pairwise(ends)]
        pieces = [piece[_slice(len(piece), device, count)] for piece in pieces]
        return pieces[0] if len(pieces) == 1 else (np if isinstance(array, np.ndarray) else jnp).concatenate(pieces)

    return [jax.tree.map(functools.partial(of_device, device), value) for device in range(count)]


def _slice(size: int, device: int, count: int) -> slice:
    if size % count:
        raise ValueError(f"{size} features, or blocks of them, cannot be divided by {count} (tensor_parallel_size)")
    return slice(size // count * device, size // count * (device + 1))


def joined(parts: Sequence[T], division: Division, mesh: Mesh | None = None) -> T:
    """The arrays of a weight from the parts that lie on the mesh's devices, in their order. Without a mesh, whole
    arrays from parts on one device.
    """

    def one(*leaves: Any) -> Any:
        axis = division.axis(leaves[0].ndim)
        if mesh is None:
            return leaves[0] if axis is None else jnp.concatenate(leaves, axis)
        shape = [size * (len(leaves) if i == axis else 1) for i, size in enumerate(leaves[0].shape)]
        sharding = NamedSharding(mesh, axis_spec(axis))
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(leaves))

    return jax.tree.map(one, *parts)
