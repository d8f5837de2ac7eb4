"""Whole Mosaic GPU kernels on a CPU, by JAX's interpreter of them: private to jax 0.12, and this file alone knows it.

The interpreter runs all warpgroups of all CTAs, each as a thread: loops, copies by TMA, barriers, loads and stores. It
finds races between them. It has no inline PTX, no `wgmma` whose A lies in registers and no `pl.run_state` with an
accumulator. Stand-ins take their place: the kernel's own instructions on the numpy machine where they are written for
any machine (`on_numpy`), else the definition.

Not modelled, so that no error in it can show: what a CTA writes to another's memory; the asynchrony of `wgmma`, which
has ended where it is started; register layouts and swizzles of Mosaic's own loads and stores.
"""

import concurrent.futures
import contextlib
import faulthandler
import os
import types
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

if jax.__version_info__[:2] != (0, 12):  # that of 0.11 wants every phase of a barrier to be waited for
    pytest.skip(f"written for the interpreter of jax 0.12, this is {jax.__version__}", allow_module_level=True)

from jax._src import xla_bridge
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

assert not xla_bridge.backends_are_initialized()
os.environ["NPROC"] = "16"  # threads of XLA, in which the warpgroups of a cluster wait for each other
WAIT_S = 600  # where a barrier is never completed the interpreter waits for ever: the process is ended
# XLA flushes subnormals to zero in the threads that run callbacks, and threads inherit that. The numpy machine needs
# them: codes of weights are bf16 subnormals. So it runs in a thread that is started here.
_CLEAN = concurrent.futures.ThreadPoolExecutor(1)
_CLEAN.submit(int).result()


def on_numpy(function: Callable, out: jax.ShapeDtypeStruct | tuple, *arrays: jax.Array):
    """`function` of numpy arrays within a kernel; `out`: shapes and dtypes of its results."""

    def run(*values):
        return _CLEAN.submit(function, *map(np.asarray, values)).result()

    return jax.pure_callback(run, out, *arrays)


def load(ref: jax.Ref, layout: plgpu.Layout, transforms: tuple = ()) -> jax.Array:
    """`ptx.load.load`, without its layout."""
    return ref[...]


class Namespace(types.SimpleNamespace):
    """A module with some names replaced."""

    def __init__(self, module: types.ModuleType, **replaced):
        super().__init__(**replaced)
        self._module = module

    def __getattr__(self, name: str):
        return getattr(self._module, name)


# `total` plus what a function accumulates upon `plgpu.ACC.init(total)`.
ACCUMULATING = {
    "pl": Namespace(
        pl,
        run_state=lambda function: (
            lambda total: (
                total + pl.run_scoped(lambda acc: (function(acc), acc[...])[1], plgpu.ACC(total.shape, total.dtype))
            )
        ),
    ),
    "plgpu": Namespace(plgpu, ACC=types.SimpleNamespace(init=lambda total: total)),
}


@contextlib.contextmanager
def interpreting(monkeypatch: pytest.MonkeyPatch, stand_ins: dict[types.ModuleType, dict]) -> Iterator[None]:
    """Kernels that are called within run on the CPU, and none that was traced before or is called afterwards; by these
    stand-ins for names of the kernels' modules."""
    for module, names in {gpu_callbacks: {"wgmma": _wgmma}, **stand_ins}.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    jax.clear_caches()
    faulthandler.dump_traceback_later(WAIT_S, exit=True)
    try:
        with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        gpu_callbacks.reset_gpu_interpret_mode_state()
        jax.clear_caches()


_WGMMA_OF_REFS = gpu_callbacks.wgmma


@gpu_callbacks.fail_on_exception
def _wgmma(*, a_allocation_key_as_array, **rest):
    """The interpreter's `wgmma`, also where A is an array, in place of the key of a buffer."""
    if np.ndim(a_allocation_key_as_array) == 1:
        return _WGMMA_OF_REFS(a_allocation_key_as_array=a_allocation_key_as_array, **rest)
    memory = gpu_callbacks._get_shared_memory()
    where = gpu_callbacks.memory.GPULoggingInfo(rest["mesh_location"], rest["thread"], rest["source_info"])

    def content(name: str):
        key = gpu_callbacks.HostAllocationKey.from_array(rest[f"{name}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(rest[f"{name}_transforms"])
        access = memory.access(key, jax.tree.map(int, transforms))
        return key, access, memory.get_buffer_content(key, access, rest["thread"], logging_info=where)[0]

    *_, b = content("b")
    key, access, acc = content("acc")
    total = acc + np.asarray(a_allocation_key_as_array, np.float32) @ np.asarray(b, np.float32)
    memory.store_buffer_content(key, access, total, rest["thread"], logging_info=where)
    return rest["token"]


def shaped(shape: tuple[int, ...], dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a result of `on_numpy`."""
    return jax.ShapeDtypeStruct(shape, dtype)
