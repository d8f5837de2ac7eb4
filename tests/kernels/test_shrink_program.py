"""The fused kernels for decode, their instructions run for all threads of all blocks on numpy, against fp64."""

import concurrent.futures
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from lanes_on_numpy import Block, Cluster, Memory, install, laid_out
from qerl_kernels.lora_shrink import mosaic_gpu
from qerl_kernels.lora_shrink.plan import Plan, Task
from shrink_oracle import EPS, check, inputs_of, wide

FEATURES = 896  # 28 chunks: 7 for each of 4 blocks, 2 steps of 4 warps, the second of which lacks one


class OfThisThread(threading.local):
    """Stands for `lanes`: each block runs in a Python thread of its own."""

    block: Block | type[Block] = Block  # until it has one, for what needs none

    def __getattr__(self, name):
        return getattr(self.block, name)


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array


def run(monkeypatch, task: Task, how: Plan, inputs: list, a) -> list:
    """`mosaic_gpu.fused` on numpy, in place of the launch a loop over the clusters."""
    machine = OfThisThread()
    install(monkeypatch, machine, mosaic_gpu)
    arrays = [*inputs, *([] if a is None else [a])]
    out = mosaic_gpu.outputs(task, how)
    memory = Memory(*map(np.asarray, arrays), *(np.zeros(each.shape, each.dtype) for each in out))
    shared, shared_bytes = laid_out(mosaic_gpu.shared_bytes(task, how))

    blocks = []

    def block(cluster: Cluster, group: int, part: int) -> None:
        machine.block = Block(memory, 32 * how.warps, shared_bytes, part, cluster)
        blocks.append(machine.block)
        place = np.int64(group), np.int64(part), np.arange(32 * how.warps)
        mosaic_gpu._Program(task, how, place, list(memory.begins), shared).emit()
        cluster.end(part)

    with concurrent.futures.ThreadPoolExecutor(how.blocks) as pool:
        for group in range(how.clusters(task.tokens)):
            cluster = Cluster()
            for each in [pool.submit(block, cluster, group, part) for part in range(how.blocks)]:
                each.result()
            assert not cluster.boxes
    assert all(memory.written_once(len(arrays) + i) for i in range(len(out)))
    if task.kind == "norm" and task.columns % 32 == 0:  # whole sectors but for what becomes of t
        assert sum(block.used for block in blocks) > 0.94 * sum(block.moved for block in blocks)
    found = [memory.array(len(arrays) + i, each.dtype).reshape(each.shape) for i, each in enumerate(out)]
    return [jnp.asarray(each) for each in found]


def split(task: Task, out: list) -> tuple:
    """(s or None, y or None, t or None)."""
    t = out.pop() if task.columns else None
    s = out.pop(0) if task.residual else None
    return s, out.pop() if out else None, t


NORM = {"eps": EPS, "residual": True}


@pytest.mark.parametrize(
    "task, plans",
    [
        (Task("norm", 5, FEATURES, (32, 8, 64), **NORM), [Plan(4, 4, 1, 1), Plan(4, 4, 1, 2), Plan(8, 4, 1, 1)]),
        (Task("norm", 19, FEATURES, (32,) * 3, **NORM), [Plan(4, 4, 1, 1, shares=3), Plan(4, 4, 3, 2, shares=2)]),
        (Task("norm", 19, FEATURES, (64, 64), **NORM), [Plan(4, 4, 2, 1), Plan(4, 4, 1, 2, shares=8)]),
        (Task("norm", 9, FEATURES, (8,), **NORM), [Plan(4, 4, 1, 2), Plan(4, 4, 2, 1)]),
        (Task("norm", 9, FEATURES, **NORM), [Plan(4, 4, 1, 1), Plan(4, 4, 2, 1), Plan(4, 8, 1, 1)]),
        (Task("silu", 11, FEATURES, (16, 16), eps=EPS), [Plan(4, 4, 1, 2), Plan(4, 4, 2, 1, shares=2)]),
        (Task("silu", 3, FEATURES), [Plan(4, 4, 1, 1)]),
        (Task("plain", 17, FEATURES, (40,)), [Plan(4, 4, 1, 1), Plan(4, 4, 3, 2)]),
    ],
    ids=lambda value: f"{value.kind}{value.tokens}-{value.columns}" if isinstance(value, Task) else "",
)
def test_against_fp64(monkeypatch, task, plans):
    """Each byte of the results is written, and once; plans that have the same blocks and warps agree in every bit."""
    inputs, a = inputs_of(task.kind, task.tokens, task.features, task.columns, seed=task.tokens)
    a = a if task.columns else None
    before = {}
    for how in plans:
        found = split(task, run(monkeypatch, task, how, inputs, a))
        check(task.kind, inputs, a, task.ranks, found)
        for one, other in zip(found, before.setdefault((how.blocks, how.warps), found), strict=True):
            assert one is None or np.array_equal(bits(one), bits(other))


def test_without_a_residual(monkeypatch):
    """s of one call is x of the other: the same y and t."""
    task, how = Task("norm", 6, FEATURES, (32,), **NORM), Plan(4, 4, 1, 2)
    inputs, a = inputs_of("norm", task.tokens, task.features, task.columns)
    s, y, t = run(monkeypatch, task, how, inputs, a)
    alone = Task("norm", 6, FEATURES, (32,), eps=EPS)
    for one, other in zip(run(monkeypatch, alone, how, [s, inputs[2]], a), (y, t), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


@pytest.mark.parametrize("kind", ["silu", "plain"])
@pytest.mark.parametrize(("tokens", "how"), [(3, Plan(4, 4, 1, 1, parts=2)), (19, Plan(4, 4, 3, 1, parts=3))])
def test_in_parts(monkeypatch, kind, tokens, how):
    task = Task(kind, tokens, FEATURES, (16, 8), in_parts=True)
    [x], a = inputs_of(kind, tokens, FEATURES, task.columns)
    _, y, parts = split(task, run(monkeypatch, task, how, [x], a))
    if y is not None:
        check(kind, [x], a, task.ranks, (None, y, None))
    rows = wide(x if y is None else y)
    assert parts.shape == (how.parts, tokens, 24)
    bound = 4 * FEATURES**0.5 * 2.0**-24 * np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(wide(a), axis=0)
    assert np.all(np.abs(wide(parts).sum(0) - rows @ wide(a)) <= bound)
