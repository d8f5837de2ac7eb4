"""The schedule of the GEMM, followed by hand: every tile is one cluster's, every k-iteration of it one CTA's."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.schedule import Segments, TileGrid


@pytest.mark.parametrize(
    ("m_tiles", "widths", "tile_blocks", "clusters"),
    [(1, (7,), 1, 3), (1, (6,), 1, 3), (3, (9,), 2, 4), (1, (1,), 2, 1), (1, (3, 4, 2), 2, 4), (3, (7, 1, 1), 4, 2)],
)
def test_the_clusters_walk_over_every_tile_once(m_tiles, widths, tile_blocks, clusters):
    grid, walked = TileGrid(m_tiles, widths, tile_blocks, 4, clusters), []
    for cluster in map(jnp.int32, range(clusters)):
        walked += [tuple(map(int, grid.origin(cluster, jnp.int32(i)))) for i in range(int(grid.tile_count(cluster)))]
    n_tiles = sum(len(range(0, width, tile_blocks)) for width in widths)
    assert sorted(walked) == list(itertools.product(range(m_tiles), range(n_tiles)))


@pytest.mark.parametrize("tile_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("widths", [(5,), (1,), (5, 5), (7, 1, 1), (3, 4, 2), (4, 1, 8, 3)])
def test_a_tile_is_of_one_adapter(widths, tile_blocks):
    """The blocks of the tiles, up to the end of their adapter, are those of each adapter one after another."""
    grid, ends = TileGrid(1, widths, tile_blocks, 4, 1), np.cumsum(widths).tolist()
    found = [tuple(map(int, grid.blocks(jnp.int32(i)))) for i in range(grid.n_tiles)]
    expected = [
        (first, end) for width, end in zip(widths, ends, strict=True) for first in range(end - width, end, tile_blocks)
    ]
    assert found == expected
    covered = [block for first, end in found for block in range(first, min(first + tile_blocks, end))]
    assert covered == list(range(sum(widths)))


@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("ctas", [1, 2, 3, 4])
def test_the_segments_of_a_cluster_are_every_k_iteration_once(ctas, unroll, has_lora):
    """Whole tiles, as many for each CTA; then the others, in the same order for all, of which each has a run, as even
    as multiples of `unroll` can be. Each CTA uses the stages of its pipeline one after the other, with LoRA once more
    for each segment."""
    for tiles, together in itertools.product(range(1, 8), (ctas, ctas + 1, 2 * ctas + 1, 7)):
        k_iterations, walked, shared = unroll * together, [], []
        for rank in range(ctas):
            segments = Segments(jnp.int32(tiles), k_iterations, ctas, unroll, jnp.int32(rank), has_lora)
            assert (int(segments.whole), int(segments.count)) == (tiles // ctas, tiles // ctas + tiles % ctas)
            used, runs = [], []
            for s in range(int(segments.count)):
                span = segments.span(jnp.int32(s))
                tile, begin, end = int(span.tile), int(span.k_begin), int(span.k_end)
                assert bool(span.is_whole) == (s < tiles // ctas) and begin < end
                assert begin % unroll == end % unroll == 0
                assert not span.is_whole or (begin, end) == (0, k_iterations)
                walked += [(tile, k) for k in range(begin, end)]
                runs += [tile] * (not span.is_whole)
                used += segments.pipeline_index(jnp.int32(s), jnp.arange(begin, end + has_lora)).tolist()
                assert span.is_whole or (end - begin) // unroll - together // ctas in (0, 1)
            assert used == list(range(len(used)))
            shared.append(runs)
        assert sorted(walked) == list(itertools.product(range(tiles), range(k_iterations)))
        assert all(runs == shared[0] == sorted(set(runs)) for runs in shared)


@pytest.mark.parametrize("cluster", [1, 2, 3, 4])
def test_the_parts_of_a_tile(cluster):
    """Rows in order, each in one part; as even as multiples of 8 can be: a part larger by 8 would not be needed."""
    for tile_m in range(8, 257, 8):
        parts = GemmConfig(tile_m, cluster=cluster).parts
        assert [row for first, rows in parts for row in range(first, first + rows)] == list(range(tile_m))
        sizes = [rows for _, rows in parts]
        assert len(parts) <= cluster and all(rows > 0 and rows % 8 == 0 for rows in sizes)
        assert all(rows == sizes[0] for rows in sizes[:-1]) and sizes[-1] <= sizes[0]
        assert cluster * (sizes[0] - 8) < tile_m
