"""`python -m qerl_jax.evaluate MODEL …`: the command line of `command_line.evaluate`."""

from __future__ import annotations

import sys

from qerl_jax.command_line.evaluate import command, main
from qerl_jax.evaluation import evaluate

if __name__ == "__main__":
    command()

# An import binds `qerl_jax.evaluate` to the entry of `sys.modules`. That is the exported function, not this module, so
# that the command line does not shadow the function; `from qerl_jax.evaluate import main` works as well.
evaluate.main = main
sys.modules[__name__] = evaluate
