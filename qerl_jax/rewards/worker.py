"""A process that grades completions for `workers.Workers`, one task after another, until its connection closes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from multiprocessing.connection import Connection

from qerl_jax.rewards.functions import call, load_reward
from qerl_jax.rewards.outcomes import Reward, RewardError

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
# What `python -c` runs. Here `qerl_jax` is a bare package: its modules can be imported, its API is not, because that
# would import JAX, which takes seconds and 200 MB in every worker.
BOOT = """
import json, sys, types
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
package = sys.modules["qerl_jax"] = types.ModuleType("qerl_jax")
package.__path__ = [order["package"]]
from qerl_jax.rewards.worker import serve
serve(order["descriptor"], order["rewards"], order["parent"])
"""


def serve(descriptor: int, names: list[str], parent: int) -> None:
    """Load the rewards, say so, then answer every (name, rows) that arrives.

    Replies are ("ready", None), ("values", list) or ("error", message). Ends when the other side closes; on Linux also
    at once when the process that started it is gone, however busy it is.
    """
    _die_with(parent)
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        rewards: dict[str, Reward] = {}
        try:
            rewards = {name: load_reward(name) for name in names}
        except RewardError as error:
            connection.send(("error", str(error)))
            return
        connection.send(("ready", None))
        while True:
            name, rows = connection.recv()
            try:
                reply = ("values", call(name, rewards[name], rows))
            except RewardError as error:
                reply = ("error", str(error))
            connection.send(reply)


def _die_with(parent: int) -> None:
    """Linux: be killed when the parent ends (to be exact, the thread of it that started this process)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
