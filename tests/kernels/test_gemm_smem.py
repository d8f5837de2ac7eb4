"""Shared memory of the GEMM: the bytes that a config is chosen by are those that its kernel declares."""

import itertools
import math

import jax.numpy as jnp
from qerl_kernels.nvfp4_matmul import tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.operand import FORWARD
from qerl_kernels.nvfp4_matmul.gemm.smem import declare_smem
from qerl_kernels.nvfp4_matmul.gemm.terms import Terms
from qerl_kernels.nvfp4_matmul.gemm.transposed import TRANSPOSED
from test_lora_partials_gpu import PARTIALS_CONFIGS

BARRIER_BYTES = 512
CONFIGS = {(row.direction, row.config) for row in tuning.table() if isinstance(row.config, GemmConfig)}
TERMS = {
    "plain": Terms(has_bias=True),
    "whole": Terms(lora_widths=(64, 128)),
    "partials": Terms(lora_widths=(64,), has_partials=True),
}


def declared_bytes(config: GemmConfig, terms: Terms, operand, words: tuple[int, int]) -> int:
    """Bytes of the kernel's scratch, each array from a whole KiB on (the swizzle of 128 bytes repeats there)."""
    tiles = operand.place(config.warpgroups_n, config.stage_k_tiles)
    smem = declare_smem(config, terms, tiles, words, operand.word_transforms())
    refs = [ref for ref in vars(smem).values() if ref is not None]
    return sum(-(-math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize // 1024) * 1024 for ref in refs)


def test_smem_bytes_of_the_table_and_of_every_part():
    """Besides the table's, small configs in which each array is there, alone and with the others."""
    assert len(CONFIGS) > 50
    small = {
        ("forward", GemmConfig(16, warpgroups_n=n, warpgroups_k=k, cluster=cluster, k_tiles=k_tiles, stages=3))
        for n, k, cluster, k_tiles in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4), (1, 2))
    }
    directions = {"forward": (FORWARD, (4, 128)), "dx": (TRANSPOSED, (16, 32))}
    for direction, config in CONFIGS | small:
        for terms in TERMS.values() if direction == "forward" else [TERMS["plain"]]:
            counted = config.smem_bytes(terms.has_lora, terms.has_partials)
            assert counted == declared_bytes(config, terms, *directions[direction]) + BARRIER_BYTES, (direction, config)


def test_the_configs_of_a_gpu_test_can_run():
    """Which no machine without a GPU would say: two went stale."""
    for fields in PARTIALS_CONFIGS:
        config = GemmConfig(*fields)
        assert config.fits(has_lora=True) and config.can_fuse_lora(704, [(8, 704)]), fields
