"""The main module of a worker process of `pool`.

multiprocessing imports the trainer's main module in every process that it spawns, and unpickling a function of ours
imports `qerl_jax`: both import JAX, which takes seconds and 200 MB. A worker imports this file instead, which defines
`qerl_jax` as a bare package, until a reward asks for one of its names.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parents[1]


class _Bare(types.ModuleType):
    """A package whose own file is run at the first look for a name that is no submodule's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        self.__class__ = types.ModuleType
        self.__spec__ = importlib.util.spec_from_file_location(self.__name__, _PATH / "__init__.py")
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


if __name__ == "__mp_main__":
    package = sys.modules["qerl_jax"] = _Bare("qerl_jax")
    package.__path__ = [str(_PATH)]
