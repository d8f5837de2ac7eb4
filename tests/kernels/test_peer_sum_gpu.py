"""Sums over two GPUs by the kernel against XLA's: alone bit by bit, and in whole rollouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_oracle import needs_gpu
from jax.sharding import NamedSharding, PartitionSpec
from qerl_kernels.peer_sum import api
from random_policy import random_policy

from qerl_jax import Engine, LoraConfig, Prompts, Sampling, generate, keys, partition

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(
        jax.local_device_count() < 2, reason=f"needs two GPUs, this machine has {jax.local_device_count()}"
    ),
]
CALLS, MESH = 7, partition.mesh_of(2) if jax.local_device_count() > 1 else None


@functools.partial(jax.jit, static_argnames=("repeats", "sizes"))
def sums(x, mailbox, repeats, sizes):
    """`CALLS` sums of the first rows of x each repeat, one behind the other, [device, repeat, call, row, feature]: by
    the kernel, or by XLA without a mailbox.
    """

    def on_device(x, mailbox):
        def repeat(mailbox, i):
            found = []
            for call in range(CALLS):
                part = (x[0] * (1 + i * CALLS + call).astype(x.dtype))[: sizes[call % len(sizes)]]
                total, mailbox = (partition.leave(part), None) if mailbox is None else mailbox.leave(part)
                # `zeros.at[:n].set(psum)` crashes the compiler of jax 0.11.2.
                found.append(jnp.pad(total, ((0, x.shape[1] - len(total)), (0, 0))))
            return mailbox, jnp.stack(found)

        mailbox, found = jax.lax.scan(repeat, mailbox, jnp.arange(repeats))
        return found[None], mailbox

    by_device = PartitionSpec(partition.AXIS)
    mapped = jax.shard_map(on_device, mesh=MESH, in_specs=by_device, out_specs=by_device, check_vma=False)
    return mapped(x, mailbox)


@pytest.mark.parametrize("rows, features", [(1, 64), (5, 896), (8, 5120), (128, 8192)])
def test_bits(rows, features):
    """Of a thousand sums of different sizes on one mailbox; nothing else makes the GPUs wait for each other."""
    x = jax.random.normal(jax.random.key(rows), (2, rows, features), jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(MESH, PartitionSpec(partition.AXIS)))
    mailbox = partition.mailbox(rows, features, x.dtype, 2)
    mailbox = jax.block_until_ready(jax.device_put(mailbox, partition.shardings(mailbox, MESH)))
    sizes = rows, 1, -(-rows // 2)
    wanted, _ = sums(x, None, 50, sizes)
    for _ in range(3):
        found, mailbox = sums(x, mailbox, 50, sizes)
        assert (found.view(jnp.uint16) == wanted.view(jnp.uint16)).all()
    assert (mailbox.calls == 3 * 50 * CALLS).all()


def test_rollouts_are_those_with_sums_by_xla(monkeypatch):
    """Slots are filled again and compacted on the way, two rollouts in one process. Not by bits: XLA leaves out the
    rounding of the sum in front of the final norm. Where a token differs, the noise of the draw, which is the same, may
    well give equal ones behind it, of another context: a completion is compared up to there.
    """
    policy = random_policy("0.5B", "nvfp4", LoraConfig(rank=16), "mosaic_gpu", tensor_parallel=2)
    prompts = Prompts.from_lists(np.random.default_rng(0).integers(1000, size=(12, 20)).tolist())
    sampling, engine, limits = Sampling(64, num_generations=4), Engine(slots=32), [40, 7, 23, 64] * 12

    def rollouts():
        steps = [keys.for_step(0, keys.Purpose.SAMPLE, i) for i in range(2)]
        return [generate(policy, prompts, sampling, key, engine, limits) for key in steps]

    peer_sum, shapes = api.peer_sum, set()
    monkeypatch.setattr(api, "peer_sum", lambda x, *rest: shapes.add(x.shape) or peer_sum(x, *rest))
    ours = rollouts()
    assert (32, 896) in shapes and len(shapes) > 1
    monkeypatch.setattr(api, "missing", lambda *sums: "nothing")
    jax.clear_caches()
    for found, wanted in zip(ours, rollouts(), strict=True):
        equal = np.asarray(found.tokens == wanted.tokens)
        same = np.logical_and.accumulate(equal, axis=1)
        assert equal.mean() > 0.98 and same.mean() > 0.8
        np.testing.assert_allclose(np.where(same, found.logprobs, 0), np.where(same, wanted.logprobs, 0), atol=2e-2)
