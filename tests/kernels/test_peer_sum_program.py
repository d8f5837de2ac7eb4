"""The kernel that sums over GPUs, its instructions run for all threads of all devices on numpy machines that share
memory, bit by bit against fp32 sums in the order of the devices; and where it does not run.
"""

import concurrent.futures
import functools
import itertools
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_machine import Memory, NumpyMachine
from qerl_kernels import dispatch
from qerl_kernels.gpu import H200, gpu_of
from qerl_kernels.peer_sum import api, kernel

from qerl_jax import partition

ROWS = 4  # of the mailbox
FEATURES = 1028
CTAS = 4  # whose threads have two packets each, and four of them three


class Device(NumpyMachine):
    """A CTA that counts a call once all of its threads have read the number of the last one."""

    synchronized = late = False

    def cta_sync(self):
        super().cta_sync()
        self.synchronized = True

    def store_global(self, at, words, flag, byte=0):
        assert self.synchronized
        super().store_global(at, words, flag, byte)

    def receive_packet(self, *operands):
        time.sleep(0.02 * self.late)  # long after the others have sent
        return super().receive_packet(*operands)


def device_memory(x: np.ndarray, devices: int) -> tuple[Memory, list[np.ndarray]]:
    """Memory of all devices in one, and where each one's arrays begin."""
    packets, _ = api.shapes(ROWS * FEATURES, devices)
    empty = np.zeros(packets[1:], np.uint32), np.zeros(CTAS, np.int32)
    own = [[*x[:, device], *empty, *np.zeros_like(x[:, device])] for device in range(devices)]
    memory = Memory(*itertools.chain(*own))
    return memory, np.split(np.asarray(memory.begins), devices)


def together(functions: Sequence[Callable[[], None]]) -> None:
    """Calls each in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        for each in [pool.submit(function) for function in functions]:
            each.result()


def summed(x: np.ndarray, sizes: list[int]) -> np.ndarray:
    """[call, device, value]: what each device makes of the first values of each call, the last device reading late."""
    number, devices, _ = x.shape
    memory, begins = device_memory(x, devices)
    room = api.shapes(ROWS * FEATURES, devices)[0][3]

    def run(device: int, i: int, cta: int) -> None:
        own, *others = (begins[(device + step) % devices] for step in range(devices))
        arrays = own[[i, number, number + 1, number + 2 + i]]
        machine = Device(kernel.THREADS, memory=memory)
        machine.late = device == devices - 1
        pointers = kernel.Pointers(*arrays, [peer[number] for peer in others])
        kernel.emit(machine, np.int64(cta), np.int64(device), pointers, size=sizes[i], room=room, ctas=CTAS)

    def calls(device: int) -> None:
        for i in range(number):
            together([functools.partial(run, device, i, cta) for cta in range(CTAS)])

    together([functools.partial(calls, device) for device in range(devices)])
    for (i, size), own in itertools.product(enumerate(sizes), begins):
        writes = memory.writes[own[number + 2 + i] :][: x[0, 0].nbytes]
        np.testing.assert_array_equal(writes, np.arange(len(writes)) < x.itemsize * size)  # each byte once
    each = 2 * number + 2
    return np.stack([
        [memory.array(device * each + number + 2 + i, x.dtype).reshape(-1) for device in range(devices)]
        for i in range(number)
    ])  # fmt: skip


@pytest.mark.parametrize("devices", [2, 4])
def test_bits(devices):
    """Five calls on one mailbox, of different sizes, with words of values that look like the marks of later calls."""
    rng, sizes = np.random.default_rng(devices), [ROWS * FEATURES, FEATURES, 4, 2 * FEATURES, ROWS * FEATURES]
    x = rng.normal(size=(len(sizes), devices, ROWS * FEATURES)) * 2.0 ** rng.integers(-12, 12, size=ROWS * FEATURES)
    x = np.array(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16))
    marks = x.view(np.uint32).reshape(len(sizes), devices, -1)
    marks[..., ::3] = rng.integers(0, 8, marks[..., ::3].shape)  # two bf16: a subnormal, and zero
    found = summed(x, sizes)
    total = x[:, 0].astype(np.float32)
    for device in range(1, devices):
        total = total + x[:, device].astype(np.float32)
    wanted = np.asarray(jnp.asarray(total).astype(jnp.bfloat16))
    for i, size in enumerate(sizes):
        for device in range(devices):
            np.testing.assert_array_equal(found[i, device, :size].view(np.uint16), wanted[i, :size].view(np.uint16))
            assert not found[i, device, size:].view(np.uint16).any()


def test_a_mailbox_has_room_for_all_rows_and_a_thread_for_each_packet():
    assert api.shapes(8 * 5120, 2) == ((2, 2, 2, 10240, 4), (2, 80))
    assert api.shapes(128 * 8192, 4) == ((4, 2, 4, 262144, 4), (4, 228))


def test_where_sums_are_left_to_xla(monkeypatch):
    missing = functools.partial(dispatch.missing_for_mosaic_gpu, version="0.11.2")
    monkeypatch.setattr(dispatch, "missing_for_mosaic_gpu", missing)
    monkeypatch.setattr(api, "missing", functools.partial(api.missing, version="0.11.2"))

    def found(rows: int = 8, features: int = 5120, dtype: Any = jnp.bfloat16, devices: int = 2):
        with dispatch.lowering_for(H200):
            return partition.mailbox(rows, features, dtype, devices)

    mailbox = found()
    assert (mailbox.packets.shape, mailbox.calls.shape) == api.shapes(8 * 5120, 2)
    assert not mailbox.packets.any() and not mailbox.calls.any()
    assert found(devices=1) is None
    assert found(dtype=jnp.float32) is None
    assert found(features=897) is None
    most = [api.room(found(rows=1000, features=8192, devices=devices).packets) // 8192 for devices in (2, 4)]
    assert most == [128, 42]  # as many as the kernel takes
    with dispatch.lowering_for(gpu_of("GPU A", 80, 108)):
        assert api.missing(64, jnp.bfloat16, 2) == "a Hopper GPU, as it ran on no other (this is GPU A)"
    for name, value in (("NCCL_P2P_DISABLE", "1"), ("XLA_FLAGS", "--xla_gpu_experimental_enable_nvshmem")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert found() is None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert found() is None
    with dispatch.lowering_for(H200):
        assert api.missing(64, jnp.bfloat16, 2, version="0.11.1") == "jax 0.11.2 or later (this is 0.11.1)"


def test_a_sum_of_more_rows_than_the_mailbox_has_room_for_is_left_to_xla(monkeypatch):
    """The mailbox is as it was."""
    monkeypatch.setattr(api, "peer_sum", lambda x, packets, calls, axis: (0 * x, packets + 1, calls + 1))
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in zip(api.shapes(2 * 8, 2), ("uint32", "int32"), strict=True)]
    for rows, total, calls in ((2, 0, 1), (3, 2, 0)):
        x = jnp.ones((2, rows, 8))
        run = jax.vmap(lambda x, *box: partition.Mailbox(*box).leave(x), axis_name=partition.AXIS)
        y, box = run(x, *(each[:, None] for each in arrays))
        assert (y == total).all() and (box.packets == calls).all() and (box.calls == calls).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what holds without a GPU")
def test_without_a_gpu_there_is_no_mailbox():
    assert partition.mailbox(8, 5120, jnp.bfloat16, 2) is None


@pytest.mark.parametrize(
    ("answers", "are_peers"), [([(0, 1), (0, 1)], True), ([(0, 1), (0, 0)], False), ([(101, 1)], False)]
)
def test_gpus_are_asked_whether_they_reach_each_other(answers, are_peers):
    """Each of each, by the numbers of CUDA; an error counts as no."""
    asked, given = [], iter(answers)

    def ask(answer, device, peer):
        asked.append((device, peer))
        error, answer._obj.value = next(given)
        return error

    devices = [types.SimpleNamespace(local_hardware_id=number) for number in (3, 5)]
    assert api.reach_each_other(devices, types.SimpleNamespace(cuDeviceCanAccessPeer=ask)) is are_peers
    assert asked == [(3, 5), (5, 3)][: len(answers)]
