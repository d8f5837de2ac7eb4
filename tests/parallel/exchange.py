"""The process of one replica: what it gets in each kind of exchange, as a line of JSON each."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.cluster import join, leave
from qerl_jax.parallel import ReplicaError


def main(coordinator: str, index: int, count: int) -> None:
    replicas = join(coordinator, index, count)
    small = replicas.gather({"texts": ["é" * index], "numbers": np.arange(index)})
    say([[part["texts"], part["numbers"].tolist()] for part in small])
    large = replicas.gather(np.arange(1_500_000 * index) * (index + 1))  # 0 and 12 MB: several chunks, unequal sizes
    say([[part.size, int(part.sum())] for part in large])
    tree = replicas.sum({"a": jnp.full((2, 3), 2.0**index), "b": [jnp.float32(0.1), jnp.arange(4.0) * index]})
    say(jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree))
    say(
        sorted({device.id for leaf in jax.tree.leaves(tree) for device in leaf.devices()} - {jax.local_devices()[0].id})
    )
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
    leave(replicas)


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
