"""Exchanges between replicas: in threads, and between two real processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replicas import on_replicas, under_slurm

from qerl_jax import parallel
from qerl_jax.parallel import ReplicaError, Replicas, in_order


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [0, 1, 3, 4, 7])
def test_shares_are_even_and_rejoin_in_order(count, number):
    shares = [list(Replicas(index, count).share(number)) for index in range(count)]
    assert in_order(shares) == list(range(number))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_values_arrive_by_index_whatever_their_size():
    def values(replicas):
        small = replicas.gather({"i": replicas.index, "array": np.arange(replicas.index)})
        large = replicas.gather(np.full(30_000 * replicas.index, replicas.index))  # 0, 0.24 and 0.48 MB
        return small, large, replicas.broadcast(10 + replicas.index)

    for small, large, first in on_replicas(3, values):
        assert [part["i"] for part in small] == [0, 1, 2]
        assert [part["array"].tolist() for part in small] == [[], [0], [0, 1]]
        assert [(part.size, part.min(initial=9), part.max(initial=0)) for part in large] == [
            (0, 9, 0),
            (30_000, 1, 1),
            (60_000, 2, 2),
        ]
        assert first == 10


@pytest.mark.parametrize("bucket", [10, 5])
def test_sums_are_those_of_numpy_in_buckets_too(monkeypatch, bucket):
    monkeypatch.setattr(parallel, "_BUCKET", bucket)  # arrays of 6, 6 and 1 elements: two buckets, or one for each
    rng = np.random.default_rng(0)
    trees = [{"a": rng.normal(size=(2, 3)), "b": [rng.normal(size=6), rng.normal(size=())]} for _ in range(4)]
    trees = jax.tree.map(np.float32, trees)
    expected = jax.tree.map(lambda *leaves: sum(leaves), *trees)
    for found in on_replicas(4, lambda replicas: replicas.sum(jax.tree.map(jnp.asarray, trees[replicas.index]))):
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), found, expected)
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)


def test_sums_refuse_what_is_not_fp32():
    found = on_replicas(2, lambda replicas: replicas.sum([jnp.ones(2), jnp.ones(2, jnp.bfloat16)]))
    assert [str(error) for error in found] == ["sums over replicas are in fp32, not ['bfloat16', 'float32']"] * 2


def test_one_process_alone_keeps_its_values():
    alone, value = Replicas(), object()
    assert alone.gather(value) == [value] and alone.broadcast(value) is value and alone.sum(value) is value
    assert list(alone.share(3)) == [0, 1, 2]
    alone.check_equal(value, "a value")


def test_a_failure_ends_all_with_its_reason():
    def fails(replicas):
        replicas.agree()
        if replicas.index == 1:
            raise KeyError("a reason")
        replicas.sum(jnp.ones(2))

    first, second, third = on_replicas(3, fails)
    assert isinstance(second, KeyError)
    for other in (first, third):
        assert isinstance(other, ReplicaError) and str(other) == "replica 1 failed: KeyError: 'a reason'"


def test_a_difference_is_an_error_that_names_the_values():
    same, other = (
        on_replicas(2, lambda replicas, step=step: replicas.check_equal(7 + step * replicas.index, "a number"))
        for step in (0, 1)
    )
    assert same == [None, None]
    assert [str(error) for error in other] == ["the replicas differ in a number: [7, 8]"] * 2


HANGS = """
import ctypes, os, signal, sys
from qerl_jax import cluster
replicas = cluster.join(sys.argv[1], int(sys.argv[2]), 2, heartbeat_seconds=2, hang_seconds=1)
replicas.link.before_end(lambda: print("saved", flush=True))
replicas.agree()
if replicas.index:
    os.kill(os.getpid(), signal.SIGKILL)
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex), lock(mutex)  # forever, and no Python runs in this thread
"""


def test_a_process_that_waits_for_a_dead_one_forever_saves_and_ends():
    with socket.socket() as some:
        some.bind(("localhost", 0))
        place = f"localhost:{some.getsockname()[1]}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", HANGS, place, str(index)], **pipes) for index in range(2)]
    (first, said), _ = (process.communicate(timeout=60) for process in both)
    assert [process.returncode for process in both] == [2, -signal.SIGKILL]
    assert first == "saved\n" and "error: replica 1 is dead" in said.splitlines()


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_two_processes_of_a_slurm_job_exchange_values_sums_and_errors(tmp_path, monkeypatch, devices):
    """Each with two devices over which its layers are divided, or with one, as the run of two in `test_launch`."""
    monkeypatch.setenv("DEVICES_OF_A_REPLICA", str(devices))
    words, outputs = under_slurm(2, Path(__file__).with_name("exchange.py"), tmp_path, "--model", "m")
    assert words == f"--kill-on-bad-exit=0 {sys.executable} -m qerl_jax.train --resume auto --model m\n"
    tenth = float(np.float32(0.1) + np.float32(0.1))
    for index, output in enumerate(outputs):
        small, large, tree, is_on_each, first, restored, error = map(json.loads, output.splitlines())
        assert small == [[[""], []], [["é"], [0]]]
        assert large == [[0, 0], [1_500_000, 1_500_000 * 1_499_999]]
        assert tree == {"a": [[3.0] * 3] * 2, "b": [tenth, [0.0, 1.0, 2.0, 3.0]]}
        assert is_on_each
        assert first == "from 0" and restored == [0.0, 1.0, 2.0]
        assert error == ["replica 1 failed: KeyError: 'a reason'", "raised"][index]
