"""The process of one replica under SLURM: what it gets in each kind of exchange, as a line of JSON each."""

from __future__ import annotations

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import launch
from qerl_jax.parallel import ReplicaError, Replicas


def exchanges(replicas: Replicas) -> int:
    index = replicas.index
    small = replicas.gather({"texts": ["é" * index], "numbers": np.arange(index)})
    say([[part["texts"], part["numbers"].tolist()] for part in small])
    large = replicas.gather(np.arange(1_500_000 * index) * (index + 1))  # 0 and 12 MB: several chunks, unequal sizes
    say([[part.size, int(part.sum())] for part in large])
    tree = replicas.sum({"a": jnp.full((2, 3), 2.0**index), "b": [jnp.float32(0.1), jnp.arange(4.0) * index]})
    say(jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree))
    say(all(leaf.devices() == set(jax.local_devices()) for leaf in jax.tree.leaves(tree)))
    say(replicas.broadcast(f"from {index}"))
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


def say(value: object) -> None:
    print(json.dumps(value), file=sys.__stdout__, flush=True)  # `launch.run` silences all replicas but the first


if __name__ == "__main__":
    size = int(os.environ.get("DEVICES_OF_A_REPLICA", "1"))
    sys.exit(launch.run(launch.Devices(tensor_parallel_size=size), [], exchanges))
