"""The process of one replica under SLURM: what it gets in each kind of exchange, as a line of JSON each."""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import launch
from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.config import Config
from qerl_jax.lowered import LoweredPrograms, environment
from qerl_jax.parallel import ReplicaError, Replicas
from qerl_jax.programs import record
from qerl_jax.rl.adamw import AdamW
from qerl_jax.rl.reduction import checksum
from qerl_jax.types import TrainState


def exchanges(replicas: Replicas) -> int:
    index = replicas.index
    small = replicas.gather({"texts": ["é" * index], "numbers": np.arange(index)})
    say([[part["texts"], part["numbers"].tolist()] for part in small])
    large = replicas.gather(np.arange(1_500_000 * index) * (index + 1))  # 0 and 12 MB: several chunks, unequal sizes
    say([[part.size, int(part.sum())] for part in large])
    summed = replicas.sum(jnp.concatenate([jnp.full(1, jnp.float32(0.1)), jnp.arange(4.0) * index]))
    say(np.asarray(summed).tolist())
    say(summed.devices() == set(jax.local_devices()))
    say(replicas.broadcast(f"from {index}"))
    say(restored(replicas))
    say(lowered(replicas))
    say(in_turn(replicas))
    try:
        with replicas:
            if index == 1:
                raise KeyError("a reason")
            replicas.sum(jnp.ones(2))
    except ReplicaError as error:
        say(str(error))
    except KeyError:
        say("raised")
    return 0


def restored(replicas: Replicas) -> list[float]:
    """What each replica reads of the checkpoint that the first wrote; its own state has other values."""
    config = Config("m", max_steps=2)
    own = {"layers": {0: {"norm": {"weight": jnp.arange(3.0) + 10 * replicas.index}}}}
    state = TrainState(jnp.int32(1), jnp.int32(8), own, {}, {}, None, None, config, AdamW.of(config))
    if replicas.is_first:
        checkpoints = Checkpointer(os.environ["PLACE"], 1)
        checkpoints.save(state)
    replicas.agree()
    found = Checkpointer(os.environ["PLACE"], None).restore(state)
    return np.asarray(found.norms["layers"][0]["norm"]["weight"]).tolist()


def lowered(replicas: Replicas) -> list[str]:
    """Programs in a folder in which each process has lowered one, on a machine where each has a GPU of its own."""
    jax.config.update("jax_cuda_visible_devices", str(replicas.index))
    kept = LoweredPrograms(Path(os.environ["PLACE"]) / "lowered", environment([]))
    record(checksum, jnp.arange(3.0), kept=kept)
    replicas.agree()
    return [file.name.split("-")[0] for file in kept.directory.iterdir()]


def in_turn(replicas: Replicas) -> bool:
    """Whether the second process, which comes first, waits for the end of what the first one does."""

    def action() -> tuple[float, float]:
        began = time.monotonic()
        time.sleep(0.3)
        return began, time.monotonic()

    if replicas.is_first:
        time.sleep(0.3)
        replicas.promise("action")
    (_, ended), (began, _) = replicas.gather(replicas.after_first("action", action))
    return ended <= began


def say(value: object) -> None:
    print(json.dumps(value), file=sys.__stdout__, flush=True)  # `launch.run` silences all replicas but the first


if __name__ == "__main__":
    size = int(os.environ.get("DEVICES_OF_A_REPLICA", "1"))
    counts = [launch.count(launch.Devices(devices="3"))]
    code = launch.run(launch.Devices(tensor_parallel_size=size), [], exchanges)
    os.environ["SLURM_STEP_NUM_TASKS"] = "1"  # a step of one process is no cluster, nor is a job of one
    counts.append(launch.count(launch.Devices(devices="3")))
    del os.environ["SLURM_STEP_NUM_TASKS"]
    os.environ["SLURM_NTASKS"] = "1"
    os.environ["KUBERNETES_SERVICE_HOST"] = "x"  # nor a pod of no indexed job
    say([*counts, launch.count(launch.Devices(devices="3"))])
    sys.exit(code)
