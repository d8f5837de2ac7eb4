"""Compilation: the persistent cache, a counter of compiled programs, and the device to which arrays are committed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from qerl_kernels.kernel_programs import KERNEL_PROGRAM_NAME

from qerl_jax import partition

_COMPILED = "/jax/core/compile/backend_compile_duration"  # a program was compiled, or loaded from the persistent cache


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`JAX_COMPILATION_CACHE_DIR`, or a directory in the user's cache folder (`XDG_CACHE_HOME` or ~/.cache)."""
    if directory := environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(directory)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl-jax" / "compiled"


def use_compilation_cache(directory: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Have JAX keep every compiled program on disk, for later processes to load. Returns one line about it for people.

    By default JAX keeps only programs that took a second to compile; a rollout has several that take less.
    `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` in the environment overrides that. Kernels that were compiled beside
    their program are kept again on their own (0.5B: 43 files, 2 of 25 MB).

    Args:
      directory: where; None: `default_cache_dir(environ)`.
      environ: the environment.
    """
    if not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", None)
        return "compiled programs are not kept (no compilation cache)"
    path = default_cache_dir(environ) if directory is None else Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(path, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        jax.config.update("jax_compilation_cache_dir", None)
        return f"compiled programs are not kept: {path} is not writable (compilation_cache_dir)"
    if jax.config.jax_compilation_cache_dir != str(path):
        from jax.experimental.compilation_cache.compilation_cache import reset_cache

        reset_cache()  # JAX goes on with the first directory of a process
    jax.config.update("jax_compilation_cache_dir", str(path))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return f"compiled programs are kept in {path} (compilation_cache_dir)"


class CompilationCounter:
    """Counts the programs that this process compiles or loads from the persistent cache until `close`, but for those of
    single kernels.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **details: Any) -> None:
        name = str(details.get("fun_name", ""))
        if event == _COMPILED and name != f"jit({KERNEL_PROGRAM_NAME})":
            self._names.append(name)

    def take(self) -> list[str]:
        """Names of the programs compiled since the last call."""
        count = len(self._names)
        taken, self._names[:count] = self._names[:count], []
        return taken

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def __enter__(self) -> CompilationCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def committed(tree: Any, tensor_parallel: int = 1) -> Any:
    """Arrays, abstract or not, committed to the first device, as those restored from a checkpoint are; to the first
    `tensor_parallel` devices where the layers are divided over so many (`partition`).
    """
    if tensor_parallel > 1:
        return _commit(tree, partition.shardings(tree, partition.mesh_of(tensor_parallel)))
    return _commit(tree, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))


def as_committed(tree: Any, like: Any) -> Any:
    """Arrays, abstract or not, committed to the device, or whole to each of those, to which the leaves of `like` are
    committed, if they are.

    The results of a jitted function are committed where an argument is. State that takes part in both kinds of calls
    would otherwise have two programs for each function.
    """
    sharding = next((leaf.sharding for leaf in jax.tree.leaves(like) if is_committed(leaf)), None)
    return tree if sharding is None else _commit(tree, _whole(sharding))


def settled(tree: Any) -> Any:
    """The tree with all arrays, abstract or not, committed to one device, or whole to each of those of a mesh, if some
    are committed there.

    JAX compiles a program anew where one argument is committed that was not before, and the results of one committed
    argument all are.

    All stays as it is where some are committed to several devices.
    """
    leaves = jax.tree.leaves(tree)
    are_committed = [is_committed(leaf) for leaf in leaves]  # once for each: every update asks for thousands
    shardings = {leaf.sharding for leaf, stays in zip(leaves, are_committed, strict=True) if stays}
    shardings = {_whole(sharding) for sharding in shardings}
    if len(shardings) != 1 or all(are_committed):
        return tree
    [sharding] = shardings
    moved = iter(_commit([leaf for leaf, stays in zip(leaves, are_committed, strict=True) if not stays], sharding))
    staying = iter(are_committed)
    return jax.tree.map(lambda leaf: leaf if next(staying) else next(moved), tree)


def _whole(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """That of arrays that are whole on each device of a sharding's mesh."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _commit(tree: Any, shardings: Any) -> Any:
    """All arrays in one call, which takes a third of the host's time of a call for each. `shardings`: one, or one for
    each array.
    """
    leaves, structure = jax.tree.flatten(tree)
    each = [shardings] * len(leaves) if isinstance(shardings, jax.sharding.Sharding) else jax.tree.leaves(shardings)
    pairs = [pair for pair in zip(leaves, each, strict=True) if not isinstance(pair[0], jax.ShapeDtypeStruct)]
    arrays = iter(jax.device_put(*map(list, zip(*pairs, strict=True))) if pairs else ())

    def commit(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return next(arrays)

    return jax.tree.unflatten(structure, map(commit, leaves, each))


def is_committed(leaf: Any) -> bool:
    """Whether an array, abstract or not, is committed to a device (`jax.Array.committed`)."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None
    return not isinstance(leaf, jax.core.Tracer) and getattr(leaf, "committed", False)
