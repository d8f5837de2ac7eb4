"""How a cluster's blocks share its tiles: everyone who sends has the place at which the owner waits."""

import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.nvfp4_matmul.cuts import Cuts


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("cluster", [2, 3, 4, 8])
def test_owners_wait_for_those_who_send(cluster, turn):
    """Against following every pass by hand, for few and many passes: blocks may have nothing to do."""
    idle = 0
    for tiles in (1, 2, 3, 5):
        for steps in range(turn, 14, turn):
            cuts = Cuts(jnp.int32(tiles * steps), steps, cluster, turn)
            begins = [int(cuts.begin(jnp.int32(block))) for block in range(cluster + 1)]
            assert begins[0] == 0 and begins[-1] == tiles * steps and begins == sorted(begins)
            assert all(begin % turn == 0 for begin in begins)
            block_of = np.repeat(np.arange(cluster), np.diff(begins))
            idle += cluster - len(set(block_of))
            for tile in range(tiles):
                workers = list(dict.fromkeys(block_of[tile * steps : (tile + 1) * steps].tolist()))
                owner, *senders = workers
                assert int(cuts.owner(jnp.int32(tile))) == owner
                places = [int(cuts.senders_before(jnp.int32(tile), block)) for block in senders]
                assert places == list(range(int(cuts.senders_before(jnp.int32(tile), cluster))))
    assert idle, "blocks without work are among the cases"
