"""The main module of a worker process of `pool`.

multiprocessing imports the trainer's main module in every process that it spawns, and unpickling a function of ours
imports `qerl_jax`: both import JAX, which takes seconds and 200 MB. A worker imports this file instead, which defines
`qerl_jax` as a bare package.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

if __name__ == "__mp_main__":
    package = sys.modules["qerl_jax"] = types.ModuleType("qerl_jax")
    package.__path__ = [str(Path(__file__).parents[1])]
