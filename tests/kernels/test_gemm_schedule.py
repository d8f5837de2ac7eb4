"""Every tile is computed once. Stream-K among the CTAs of a cluster: every sender has the place at which the owner
waits.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.nvfp4_matmul.gemm.schedule import Segments, StreamK, TileGrid


@pytest.mark.parametrize(("m_tiles", "n_tiles", "clusters"), [(1, 7, 3), (1, 6, 3), (3, 5, 4), (1, 1, 2)])
def test_the_clusters_walk_over_every_tile_once(m_tiles, n_tiles, clusters):
    grid, walked = TileGrid(m_tiles, n_tiles, 4, clusters), []
    for cluster in map(jnp.int32, range(clusters)):
        walked += [tuple(map(int, grid.origin(cluster, jnp.int32(i)))) for i in range(int(grid.tile_count(cluster)))]
    assert sorted(walked) == list(itertools.product(range(m_tiles), range(n_tiles)))


@pytest.mark.parametrize("has_lora", [False, True])
def test_the_segments_of_a_cluster_are_every_k_iteration_once(has_lora):
    """Three tiles of four among two CTAs, each of which uses its pipeline's stages one after the other."""
    stream_k, walked, owners = StreamK(jnp.int32(12), 4, 2, 1), [], []
    for rank in range(2):
        segments, used = Segments.of(stream_k, jnp.int32(rank), has_lora), []
        for s in map(jnp.int32, range(int(segments.count))):
            span = segments.span(s)
            begin, end, is_owner = int(span.k_begin), int(span.k_end), bool(span.is_owner)
            walked += [(int(span.tile), k) for k in range(begin, end)]
            owners += [(int(span.tile), rank)] * is_owner
            used += [int(segments.pipeline_index(s, k)) for k in range(begin, end + (has_lora and is_owner))]
        assert used == list(range(len(used)))
    assert walked == [(k // 4, k) for k in range(12)]
    assert owners == [(tile, int(stream_k.owner(jnp.int32(tile)))) for tile in range(3)]


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
