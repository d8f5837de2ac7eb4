"""One context of MLIR for the programs that a thread calls, where JAX makes a new one for each.

A context registers some thousand operations, a fifth of the time of a program of one operation, of which the tests have
thousands. What is compiled ahead of its call, by other threads than the one that lowers it, keeps a context of its own.
"""

import threading

from jax._src import pjit
from jax._src.interpreters import mlir

PROGRAMS = 500  # of one context, which keeps their constants

_call, _new_context = pjit._pjit_call_impl_python, mlir.make_ir_context
_thread = threading.local()


def install() -> None:
    pjit._pjit_call_impl_python, mlir.make_ir_context = _calling, _context


def _calling(*args, **kwargs):
    outer, _thread.calls = getattr(_thread, "calls", False), True
    try:
        return _call(*args, **kwargs)
    finally:
        _thread.calls = outer


def _context():
    if not getattr(_thread, "calls", False):
        return _new_context()
    _thread.programs = getattr(_thread, "programs", 0) + 1
    if _thread.programs % PROGRAMS == 1:
        _thread.context = _new_context()
    return _thread.context
