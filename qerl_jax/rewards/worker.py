"""A process that grades tasks for `pool.WorkerPool`, one at a time, until its connection closes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from multiprocessing.connection import Connection

from qerl_jax.rewards.functions import call, load_reward
from qerl_jax.rewards.outcomes import Reward, RewardError

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
# The program of `python -c`. It defines `qerl_jax` as a bare package: importing the real one would import JAX, which
# takes seconds and 200 MB in every worker.
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
    """Load the rewards, report that they are loaded, then reply to every (name, rows) received.

    Replies are ("ready", None), ("values", list) or ("error", message). Ends when the connection
    closes; on Linux also, even while busy, when its parent process ends.
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
    """Linux: have the kernel kill this process when its parent ends (precisely: the thread that started it)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
