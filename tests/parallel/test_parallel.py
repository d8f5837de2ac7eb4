"""Exchanges between replicas: in threads, and between two real processes."""

import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replicas import on_replicas, under_slurm

from qerl_jax.cluster import Cluster, join
from qerl_jax.compilation import committed
from qerl_jax.launch import free_port
from qerl_jax.parallel import ReplicaError, Replicas, in_order
from qerl_jax.programs import record


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


def test_sums_are_those_of_numpy():
    values = np.float32(np.random.default_rng(0).normal(size=(4, 7)))
    for found in on_replicas(4, lambda replicas: replicas.sum(jnp.asarray(values[replicas.index]))):
        np.testing.assert_allclose(found, values.sum(axis=0), rtol=1e-6)


def test_what_the_first_never_promises_is_not_waited_for():
    def second(replicas):
        return replicas.index and replicas.after_first("never", lambda: 7, (0.2, 120.0))

    began = time.monotonic()
    assert on_replicas(2, second) == [0, 7]
    assert 0.2 < time.monotonic() - began < 120


def test_what_the_first_has_promised_is_waited_for_longer():
    def action(replicas):
        if replicas.is_first:
            replicas.promise("slow")
            time.sleep(0.3)
        return replicas.after_first("slow", time.monotonic, (0.1, 60.0))

    first, second = on_replicas(2, action)
    assert first < second


def test_one_process_alone_keeps_its_values():
    alone, value = Replicas(), object()
    assert alone.gather(value) == [value] and alone.broadcast(value) is value
    assert list(alone.share(3)) == [0, 1, 2]
    alone.check_equal(value, "a value")


@pytest.mark.parametrize(
    ("error", "said"), [(KeyError("a reason"), "KeyError: 'a reason'"), (MemoryError(), "MemoryError")]
)
def test_a_failure_ends_all_with_its_reason(error, said):
    def fails(replicas):
        replicas.agree()
        if replicas.index == 1:
            raise error
        replicas.sum(jnp.ones(2))

    first, second, third = on_replicas(3, fails)
    assert second is error
    for other in (first, third):
        assert isinstance(other, ReplicaError) and str(other) == f"replica 1 failed: {said}"


def test_the_shapes_of_a_sum_are_known_without_a_link():
    """To a process that records the programs of another one."""
    shape, found = committed(jax.ShapeDtypeStruct((7,), "float32")), []
    [summed] = record(lambda: found.append(link_of({}, 1, 2).all_reduce(shape)))
    assert summed.function.__name__ == "_reduced" and Replicas(1, 2).sum(shape) == found[0] == shape


def test_a_difference_is_an_error_that_names_the_values():
    same, other = (
        on_replicas(2, lambda replicas, step=step: replicas.check_equal(7 + step * replicas.index, "a number"))
        for step in (0, 1)
    )
    assert same == [None, None]
    assert [str(error) for error in other] == ["the replicas differ in a number: [7, 8]"] * 2


class KeyValues:
    """As much of `jax.distributed`'s client as a link uses: a store that several share, and who is alive."""

    def __init__(self, store: dict[str, bytes]):
        self.store, self.deadlines = store, 0

    def key_value_set_bytes(self, key, value):
        if key in self.store:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.store[key] = value

    def blocking_key_value_get_bytes(self, key, milliseconds):
        if self.deadlines:
            self.deadlines -= 1
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED after {milliseconds} ms")
        if key not in self.store:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: socket closed")
        return self.store[key]

    def key_value_try_get_bytes(self, key):
        if key not in self.store:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.store[key]

    def key_value_delete(self, directory):
        for key in [key for key in self.store if key.startswith(f"{directory}/")]:
            del self.store[key]


def link_of(store: dict[str, bytes], index: int, count: int) -> Cluster:
    """Of a process without a watcher."""
    link = object.__new__(Cluster)
    link._client, link._index, link._count, link._number = KeyValues(store), index, count, 0
    link._is_over, link._is_told = threading.Event(), threading.Event()
    link.is_beside_first = True
    link._watcher, link._failure = threading.Thread(target=str), "replica 1 is dead"
    link._watcher.start()
    return link


def test_an_exchange_takes_the_messages_of_its_number_and_old_ones_are_deleted():
    """Of 200 exchanges the store keeps those from number 192 on. A look that ends without a message is repeated."""
    store: dict[str, bytes] = {}
    links = [link_of(store, index, 2) for index in range(2)]
    for number in range(200):
        other = f"qerl_jax/1/{number // 64}/{number}"
        store.setdefault(other, b"b%d" % number)  # the other process is there first
        links[0]._client.deadlines = 2
        assert links[0].exchange(b"a%d" % number) == [b"a%d" % number, b"b%d" % number]
        del store[other]
        assert links[1].exchange(b"b%d" % number) == [b"a%d" % number, b"b%d" % number]
    assert sorted(store) == [f"qerl_jax/{index}/3/{number}" for index in range(2) for number in range(192, 200)]
    with pytest.raises(ReplicaError, match="the other replicas are out of reach: UNAVAILABLE: socket closed"):
        links[0].exchange(b"")
    assert not links[1].hears("a word", 60.0)  # nor is that an error: nobody asked for more than a while's patience
    links[0].tell("a word")
    links[1]._client.deadlines = 1
    assert links[1].hears("a word", 60.0) and not links[1].hears("a word", 0.0)


@pytest.mark.parametrize(
    ("store", "alive", "said"),
    [
        ({}, [0, 1, 2], None),
        ({}, [0, 2], "replica 1 is dead"),
        ({}, [0, 1], "replica 2 is dead"),
        ({"qerl_jax/left/1": b""}, [0, 2], None),
        ({"qerl_jax/left/1": b""}, [0], "replica 2 is dead"),
        ({"qerl_jax/failed": pickle.dumps("replica 2 failed: no")}, [0, 1], "replica 2 failed: no"),
    ],
)
def test_what_a_watcher_says_of_the_others(store, alive, said):
    """A message before a death, which follows it; one that has left is not dead."""
    assert link_of(store, 0, 3)._failure_of_others(alive) == said


def test_a_process_that_has_left_is_not_waited_for():
    """What it sent before is read, and why it failed is said."""
    link = link_of(store := {"qerl_jax/left/1": b"", "qerl_jax/1/0/0": b"last"}, 0, 2)
    link._client.deadlines = 1
    assert link.exchange(b"") == [b"", b"last"]
    for said in ("replica 1 left the run before this exchange; its own output may say why", "replica 1 failed: no"):
        link._client.deadlines = 1
        with pytest.raises(ReplicaError, match=said):
            link.exchange(b"")
        store["qerl_jax/failed"] = pickle.dumps("replica 1 failed: no")


def test_the_first_failure_stays_and_its_process_says_no_other():
    link = link_of(store := {}, 1, 2)
    for reason in ("first", "second"):
        link.announce(pickle.dumps(reason))
    assert store == {"qerl_jax/failed": pickle.dumps("first")} and link._is_over.is_set()


def test_the_main_thread_takes_notice_once():
    """Of the failure of another process, unless this one has failed itself. The watcher, which would end it, knows."""
    link = link_of({}, 0, 2)
    with pytest.raises(ReplicaError, match="replica 1 is dead"):
        link._raise()
    assert link._is_told.is_set() and link._is_over.is_set()
    with pytest.raises(ReplicaError, match="is dead"):
        link.exchange(b"")  # a reward that catches all errors caught the first
    link._is_told.clear()
    link._raise()
    assert link._is_told.is_set()


@pytest.mark.parametrize("index", [0, 1])
def test_the_process_with_the_store_leaves_last(index):
    """All say that they have left; it waits until they are no longer there, less long where one has failed."""
    alive, ended = [[0, 1, 2], [0, 2], [0]], []
    link = link_of(store := {}, index, 3)
    given = (60, 0), lambda: ended.append(list(alive))
    link._client.get_live_nodes = lambda nodes: alive.pop(0) if nodes == [0, 1, 2] else []
    link.leave(*given)
    assert ended == [[] if index == 0 else [[0, 1, 2], [0, 2], [0]]] and link._is_over.is_set()
    assert store == {f"qerl_jax/left/{index}": b""}
    link._client.get_live_nodes = lambda nodes: nodes
    link._is_told.set()
    began = time.monotonic()
    link.leave(*given)
    assert time.monotonic() - began < 30
    link._client.get_live_nodes = lambda nodes: []  # ends the thread that waits


@pytest.mark.parametrize(
    "coordinator",
    ["host0", "host0:", ":9876", "http://host0:9876", "::1:9876", " a:80", "host0:http", "host0:0", "host0:98765", ""],
)
def test_a_coordinator_of_another_form(coordinator):
    with pytest.raises(ValueError, match=f"coordinator must be HOST:PORT, .*, got '{coordinator}'"):
        join(coordinator, 0, 2)


def test_a_port_that_another_process_has_is_named():
    with socket.create_server(("", 0)) as taken:
        place = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"process 0 cannot listen at coordinator {place}: Address already in use"):
            join(place, 0, 2)


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


@pytest.mark.nightly
def test_a_process_that_waits_for_a_dead_one_forever_saves_and_ends():
    place = f"localhost:{free_port()}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", HANGS, place, str(index)], **pipes) for index in range(2)]
    (first, said), _ = (process.communicate(timeout=60) for process in both)
    assert [process.returncode for process in both] == [2, -signal.SIGKILL]
    assert first == "saved\n" and "error: replica 1 is dead" in said.splitlines()


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_two_processes_of_a_slurm_job_exchange_values_sums_and_errors(tmp_path, devices):
    """Each with two devices over which its layers are divided, or with one, as the run of two in `test_launch`."""
    own = {"DEVICES_OF_A_REPLICA": str(devices)}
    words, outputs = under_slurm(2, Path(__file__).with_name("exchange.py"), tmp_path, "--model", "m", **own)
    assert words == f"--kill-on-bad-exit=0 {sys.executable} -m qerl_jax.train --resume auto --model m\n"
    tenth = float(np.float32(0.1) + np.float32(0.1))
    for index, output in enumerate(outputs):
        small, large, summed, is_on_each, first, restored, lowered, is_in_turn, error, processes = map(
            json.loads, output.splitlines()
        )
        assert small == [[[""], []], [["é"], [0]]]
        assert large == [[0, 0], [1_500_000, 1_500_000 * 1_499_999]]
        assert summed == [tenth, 0.0, 1.0, 2.0, 3.0]
        assert is_on_each
        assert first == "from 0" and restored == [0.0, 1.0, 2.0]
        assert lowered == ["checksum"]  # once, for both
        assert is_in_turn
        assert error == ["replica 1 failed: KeyError: 'a reason'", "raised"][index]
        assert processes == [2, 3, 3]  # of a command that wants three: the cluster's; its own in a step of one process
