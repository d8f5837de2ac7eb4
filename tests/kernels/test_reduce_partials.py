"""The reduction of split-K partials of `x A` by three warps of the producer: their instructions, run for all threads on
numpy, against the sum."""

import jax.numpy as jnp
import numpy as np
import pytest
from lanes_on_numpy import POISON, Block, Cluster, Memory, install
from qerl_kernels import lanes
from qerl_kernels.nvfp4_matmul.gemm import reduce_partials


class ThreeWarps(Block):
    """Adds in the order of the GPU, and counts the words that a thread has asked for before it adds."""

    most, asked = 0, 0

    def __init__(self, memory, shared_bytes):
        super().__init__(memory, reduce_partials.THREADS, shared_bytes, 0, Cluster())

    def load(self, at, words, flag, byte=0):
        self.asked += words
        self.most = max(self.most, self.asked)
        return super().load(at, words, flag, byte)

    def total(self, values):
        self.asked = 0
        return lanes.total(values)


@pytest.mark.parametrize("registers", [24, 40, None])
@pytest.mark.parametrize(
    ("count", "tokens", "rows", "columns"),
    [(7, 64, 64, 32), (3, 17, 32, 8), (1, 1, 8, 64), (9, 40, 64, 24), (16, 5, 8, 16), (2, 63, 64, 48)],
)
def test_against_numpy(monkeypatch, count, tokens, rows, columns, registers):
    """Every byte of the rows is written once, and no other is; ranks and tokens that are not there are zeros though
    memory there is poison; the order of the sum is that of the other kernel's."""
    given = np.random.default_rng(count).normal(size=(count, tokens, columns)).astype(np.float32)
    memory = Memory(given)
    machine = ThreeWarps(memory, rows * 128 + 1024)
    monkeypatch.setattr(lanes, "fadd", lambda a, b: np.float32(a + b))
    install(monkeypatch, machine, reduce_partials)
    reduce_partials.emit(np.int64(memory.begins[0]), np.int64(0), np.arange(96), given.shape, rows, registers)
    assert (machine.shared[rows * 128 :] == POISON).all() and (machine.writer[: rows * 128] >= 0).all()
    chunks = machine.shared[: rows * 128].view(np.uint16).reshape(rows, 8, 8)
    row = np.arange(rows)[:, None]
    found = chunks[row, np.arange(8) ^ row % 8].reshape(rows, 64)  # chunk c of row r lies at c ^ (r % 8)
    expected = np.zeros((rows, 64), np.float32)
    expected[:tokens, :columns] = lanes.total(given)
    np.testing.assert_array_equal(found, np.asarray(jnp.asarray(expected, jnp.bfloat16)).view(np.uint16))
    assert machine.most == min(count, 8) * (2 if registers and 4 * min(count, 8) + 12 > registers else 4)
