"""Stream-K among the CTAs of a cluster: every sender has the place at which the owner waits."""

import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.nvfp4_matmul.gemm.schedule import StreamK


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("cluster", [2, 3, 4])
def test_owners_wait_for_those_who_send(cluster, unroll):
    """Against following every k-iteration by hand, for few and many k-iterations: CTAs may have nothing to do."""
    idle = 0
    for tiles in (1, 3, 5):
        for k_iterations in (unroll, 2 * unroll, 6, 10):
            stream_k = StreamK(jnp.int32(tiles * k_iterations), k_iterations, cluster, unroll)
            begins = [int(stream_k.begin(jnp.int32(rank))) for rank in range(cluster + 1)]
            assert begins[0] == 0 and begins[-1] == tiles * k_iterations and begins == sorted(begins)
            assert all(begin % unroll == 0 for begin in begins)
            rank_of = np.repeat(np.arange(cluster), np.diff(begins))
            idle += cluster - len(set(rank_of))
            for tile in range(tiles):
                workers = list(dict.fromkeys(rank_of[tile * k_iterations : (tile + 1) * k_iterations].tolist()))
                owner, *senders = workers
                assert int(stream_k.owner(jnp.int32(tile))) == owner
                places = [int(stream_k.senders_before(jnp.int32(tile), rank)) for rank in senders]
                assert places == list(range(int(stream_k.senders_before(jnp.int32(tile), cluster))))
    assert idle, "CTAs without work are among the cases"
