"""The exchange of sums between the CTAs of a cluster: its instructions, run for a warpgroup of each CTA on the numpy
machine, against fp32 sums on numpy."""

import threading

import numpy as np
import pytest
from numpy_machine import POISON, WAIT_S, NumpyLaunch
from qerl_kernels.nvfp4_matmul.gemm import exchange
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig

ROUNDS = 3


@pytest.mark.parametrize("tile_m", [8, 16, 40, 64, 128])
@pytest.mark.parametrize("ctas", [2, 3, 4])
def test_against_numpy(ctas, tile_m):
    """A CTA that finishes a part has its own sums and then, in the order of their ranks, those of the others, bit for
    bit, round after round in the same places; one that finishes none is sent nothing. Every CTA begins with the one
    after it."""
    parts = GemmConfig(tile_m, cluster=ctas).parts
    counts, size = [rows // 2 for _, rows in parts], 4 * int(np.prod(exchange.places(ctas, parts[0][1])))
    rng = np.random.default_rng(tile_m + ctas)
    sums = [rng.normal(size=(ROUNDS, ctas, count, 128)).astype(np.float32) for count in counts]
    found, sent, meet = {}, {}, threading.Barrier(ctas)

    def emit(machine, position, pointers, shared):
        del pointers
        rank, thread, to, barrier = int(position.rank), position.thread, shared["sums_s"], shared["full_s"]
        original, sent[rank] = machine.st_async, []

        def st_async(at, to_rank, values, *others, **more):
            if machine.active.any():
                assert rank != to_rank and machine.active.all() and len(values) == 4
                sent[rank].append(int(to_rank))
            original(at, to_rank, values, *others, **more)

        machine.st_async = st_async
        machine.mbarrier_init(barrier, thread == 0)
        for phase in range(ROUNDS):
            meet.wait(WAIT_S)
            values = [list(part[phase, rank]) for part in sums]
            exchange.emit_send(machine, values, ctas, position.rank, thread, to, barrier)
            if rank < len(parts):
                own, place, count = values[rank], size // (ctas - 1), np.int64(phase)
                found[rank, phase] = exchange.emit_receive(machine, own, ctas - 1, place, thread, to, barrier, count)
                machine.shared[to : to + size] = POISON  # the machine writes to nothing else

    sizes = {"sums_s": size, "full_s": 8}
    NumpyLaunch()(emit, [], [], name="exchange", clusters=1, ctas=ctas, warps=4, shared_bytes=sizes)
    assert found.keys() == {(rank, phase) for rank in range(len(parts)) for phase in range(ROUNDS)}
    for (rank, phase), total in found.items():
        given = sums[rank][phase]
        expected = given[rank]
        for other in range(ctas):
            expected = expected if other == rank else expected + given[other]
        assert expected.dtype == np.float32 and np.array_equal(np.stack(total), expected)
    for rank, order in sent.items():
        assert list(dict.fromkeys(order)) == [to for to in np.roll(range(ctas), -rank)[1:] if to < len(parts)]
