"""The reduction of split-K partials of `x A` by three warps of the producer: their instructions, run for all threads on
numpy, against the sum."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy_machine import POISON, Cluster, Memory, NumpyMachine
from qerl_kernels.nvfp4_matmul.gemm import reduce_partials
from qerl_kernels.ptx.values import tree_sum


class ThreeWarps(NumpyMachine):
    """Counts the words that a thread has asked for before it uses any."""

    most, asked = 0, 0

    def __init__(self, memory, shared_bytes):
        super().__init__(reduce_partials.THREADS, shared_bytes, memory, 0, Cluster())

    def load_global(self, at, words, flag, byte=0):
        self.asked += words
        self.most = max(self.most, self.asked)
        return super().load_global(at, words, flag, byte)

    def asm(self, text, out, *inputs, effects=False):
        self.asked = 0
        return super().asm(text, out, *inputs, effects=effects)


@pytest.mark.parametrize(
    ("count", "m", "rows", "columns", "registers"),
    [
        (7, 64, 64, 32, 40), (7, 64, 64, 32, None), (3, 17, 32, 8, 24), (1, 1, 8, 64, None), (9, 40, 64, 24, 40),
        (16, 5, 8, 16, 24), (2, 63, 64, 48, None),
    ],
)  # fmt: skip
def test_against_numpy(count, m, rows, columns, registers):
    """Every byte of the rows is written once, and no other is; ranks and rows that are not there are zeros though
    memory there is poison; the order of the sum is that of the other kernel's."""
    given = np.random.default_rng(count).normal(size=(count, m, columns)).astype(np.float32)
    memory = Memory(given)
    machine = ThreeWarps(memory, rows * 128 + 1024)
    source = np.int64(memory.begins[0])
    reduce_partials.emit(machine, source, np.int64(0), np.arange(96), given.shape, rows, registers)
    assert (machine.shared[rows * 128 :] == POISON).all() and (machine.writer[: rows * 128] >= 0).all()
    chunks = machine.shared[: rows * 128].view(np.uint16).reshape(rows, 8, 8)
    row = np.arange(rows)[:, None]
    found = chunks[row, np.arange(8) ^ row % 8].reshape(rows, 64)  # chunk c of row r lies at c ^ (r % 8)
    expected = np.zeros((rows, 64), np.float32)
    expected[:m, :columns] = tree_sum(given)
    np.testing.assert_array_equal(found, np.asarray(jnp.asarray(expected, jnp.bfloat16)).view(np.uint16))
    assert machine.most == min(count, 8) * (2 if registers and 4 * min(count, 8) + 12 > registers else 4)
