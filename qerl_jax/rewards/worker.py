"""A process that grades tasks for `pool.WorkerPool`, one at a time, until its connection closes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from qerl_jax.rewards.functions import call, load_reward
from qerl_jax.rewards.outcomes import Reward, RewardError, to_json

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
    """Load the rewards, report that they are loaded, then reply to every (task id, name, rows) received.

    Replies are JSON, because what a reward's process writes is not to be unpickled: [task id, "values", list] or
    [task id, "error", message]; "ready" with id -1 once the rewards are loaded. Ends when the connection closes; on
    Linux also, even while busy, when its parent process ends. Signals that ask a group of processes to stop are for the
    trainer, which finishes its step first.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    own = os.getpid()
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):

        def reply(task: int, kind: str, content: Any) -> None:
            if os.getpid() != own:  # a process that the reward forked and that came back
                os._exit(0)
            connection.send_bytes(json.dumps([task, kind, content]).encode())

        rewards: dict[str, Reward] = {}
        try:
            rewards = {name: load_reward(name) for name in names}
        except RewardError as error:
            reply(-1, "error", str(error))
            return
        reply(-1, "ready", None)
        while True:
            task, name, rows = connection.recv()
            try:
                values = call(name, rewards[name], rows)
            except RewardError as error:
                reply(task, "error", str(error))
            except KeyboardInterrupt as error:  # the reward's own: SIGINT is ignored here
                reply(task, "error", f"reward {name!r} raised {error!r}")
            else:
                reply(task, "values", [to_json(value) for value in values])


def _die_with(parent: int) -> None:
    """Linux: have the kernel kill this process when its parent ends (precisely: the thread that started it)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
