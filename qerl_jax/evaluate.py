"""`python -m qerl_jax.evaluate MODEL …`: the command line of `command_line.evaluate`."""

from __future__ import annotations

import sys

from qerl_jax.command_line.evaluate import main
from qerl_jax.evaluation import evaluate

if __name__ == "__main__":
    sys.exit(main())

# An import binds `qerl_jax.evaluate` to the entry of `sys.modules`: to the exported function, not to this module.
sys.modules[__name__] = evaluate
