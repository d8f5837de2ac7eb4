"""The numpy machine: a second backend of `ptx`, which computes kernels' instructions for all threads of a CTA.

A value is an array of one element for each thread, a word an integer, a flag a boolean. Copies arrive as late as the
program's waits allow, or at once: so that data read too early, or overwritten too early, is wrong. An instruction that
the target lacks, a read outside an array, or of memory that nobody has written or another warp may be writing, fails.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from ptx_interpreter import interpret
from qerl_kernels.gpu import H200
from qerl_kernels.ptx.instructions import require
from qerl_kernels.ptx.launch import Position

POISON = 0xFF  # fills unwritten memory: a NaN as bf16 and as fp32
WAIT_S = 60.0  # for other CTAs: they have ended or wait themselves where this is not enough


class NumpyLaunch:
    """`ptx.launch.launch` on numpy: one call runs every cluster, its CTAs in threads of their own.

    Attributes:
      eager: copies arrive at once, not as late as the waits allow.
      ctas: the machines of all CTAs, after the call.
    """

    def __init__(self, eager: bool = False):
        self.eager, self.ctas = eager, []

    def __call__(self, emit, inputs, out, *, name, clusters, ctas, warps, shared_bytes, gpu=H200):
        """Runs `emit` and returns the outputs; each of their bytes is written, and once."""
        del name
        shapes, structure = jax.tree.flatten(out)
        memory = Memory(*map(np.asarray, inputs), *(np.zeros(each.shape, each.dtype) for each in shapes))
        shared, size = laid_out(shared_bytes)
        assert size <= gpu.smem_bytes

        def run(cluster: Cluster, index: int, rank: int) -> None:
            machine = NumpyMachine(32 * warps, size, memory, rank, cluster, self.eager, gpu.arch)
            self.ctas.append(machine)
            position = Position(np.int64(index), np.int64(rank), np.arange(32 * warps))
            emit(machine, position, list(memory.begins), shared)
            cluster.end(rank)

        with concurrent.futures.ThreadPoolExecutor(ctas) as pool:
            for index in range(clusters):
                cluster = Cluster()
                for each in [pool.submit(run, cluster, index, rank) for rank in range(ctas)]:
                    each.result()
                assert not cluster.boxes
        arrays = range(len(inputs), len(inputs) + len(shapes))
        assert all(map(memory.written_once, arrays))
        found = [memory.array(i, s.dtype).reshape(s.shape) for i, s in zip(arrays, shapes, strict=True)]
        return jax.tree.unflatten(structure, [jnp.asarray(each) for each in found])


def laid_out(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each array of shared memory begins, and where the last one ends: each is a whole number of KiB."""
    *starts, end = map(int, np.cumsum([0, *(-(-size // 1024) * 1024 for size in sizes.values())]))
    return dict(zip(sizes, starts, strict=True)), end


class Cluster:
    """Messages between the CTAs of a cluster, each in a Python thread of its own or one after the other."""

    def __init__(self):
        self.boxes = collections.defaultdict(list)  # (rank, mbarrier) -> (places, bytes) of each send
        self.ended, self.changed = set(), threading.Condition()

    def send(self, rank: int, barrier: int, places: np.ndarray, data: np.ndarray) -> None:
        with self.changed:
            assert rank not in self.ended, f"CTA {rank} has ended"
            self.boxes[rank, barrier].append((places, data))
            self.changed.notify_all()

    def receive(self, rank: int, barrier: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Everything that was sent, once it is `size` bytes; never more."""
        with self.changed:
            box = self.boxes[rank, barrier]
            came = self.changed.wait_for(lambda: sum(data.size for _, data in box) >= size, WAIT_S)
            assert came, f"CTA {rank} waits forever"
            assert sum(data.size for _, data in box) == size
            return self.boxes.pop((rank, barrier))

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)


@dataclasses.dataclass
class Mbarrier:
    """An mbarrier that counts arrivals and bytes.

    Attributes:
      count: arrivals of a phase.
      missing: arrivals that the phase under way still lacks.
      expected: bytes of that phase.
      phase: its number modulo two.
    """

    count: int
    missing: int
    expected: int
    phase: int = 0


class Memory:
    """Global memory: arrays with gaps between them, in which nothing may be read or written."""

    def __init__(self, *arrays: np.ndarray):
        size = sum(array.nbytes for array in arrays) + 8192 * (len(arrays) + 1)
        self.bytes, self.begins, self.ends, at = np.full(size, POISON, np.uint8), [], [], 4096
        self.writes = np.zeros(size, np.uint8)  # writes to each byte
        for array in arrays:
            raw = np.ascontiguousarray(array).view(np.uint8).ravel()
            self.bytes[at : at + raw.size] = raw
            self.begins.append(at)
            self.ends.append(at + raw.size)
            at = -(-self.ends[-1] // 4096) * 4096 + 4096

    def array(self, i: int, dtype) -> np.ndarray:
        return self.bytes[self.begins[i] : self.ends[i]].view(dtype)

    def written_once(self, i: int) -> bool:
        """Whether each byte of an array was."""
        return (self.writes[self.begins[i] : self.ends[i]] == 1).all()

    def places(self, at: np.ndarray, size: int) -> np.ndarray:
        for place in at:
            array = np.searchsorted(self.begins, place, "right") - 1
            assert self.begins[array] <= place and place + size <= self.ends[array], (place, size)
        assert not (at % size).any()
        return at[:, None] + np.arange(size)


class NumpyMachine:
    """One CTA with the instructions of `ptx.instructions.PtxMachine`."""

    i32 = staticmethod(np.int64)
    f32 = staticmethod(np.float32)
    minimum = staticmethod(np.minimum)

    def __init__(
        self,
        threads: int,
        shared_bytes: int = 0,
        memory: Memory | None = None,
        rank: int = 0,
        cluster: Cluster | None = None,
        eager: bool = False,
        arch: int = H200.arch,
    ):
        self.arch = arch
        self.memory, self.threads, self.rank, self.cluster, self.eager = memory, threads, rank, cluster, eager
        self.shared = np.full(shared_bytes, POISON, np.uint8)
        self.active = np.ones(threads, bool)
        # bytes of the sectors of global memory that each warp's access touches, and of those the bytes it asks for
        self.moved, self.used = 0, 0
        self.mbarriers = {}  # those that are prepared
        self.pending, self.group = [], np.zeros(threads, int)  # copies in flight
        # since the last CTA barrier, for each byte: the warp that wrote it, and the warps that read it
        self.writer, self.readers = np.full(shared_bytes, -1), np.zeros(shared_bytes, np.uint64)
        # since the last warp barrier: the thread that wrote it, and the one that read it (any if several did)
        self.writing, self.reading = np.full(shared_bytes, -1), np.full(shared_bytes, -1)
        self.lane = np.arange(threads) % 32

    def select(self, flag, a, b):
        return np.where(np.asarray(flag) != 0, a, b)

    def asm(self, text: str, out: str, *inputs, effects: bool = False):
        del effects
        if "mul.rn.bf16x2" in text:
            require(self.arch, "mul_bf16")
        return interpret(text, out, [self.every(value) for value in inputs])

    def wrote(self, places: np.ndarray, thread: np.ndarray) -> None:
        """Nobody else has written there or read there since the last barrier."""
        thread = np.broadcast_to(thread[:, None], places.shape)
        warp = thread // 32
        assert ((self.writer[places] == -1) | (self.writer[places] == warp)).all()
        assert not (self.readers[places] & ~(np.uint64(1) << warp.astype(np.uint64))).any()
        assert all(((of[places] == -1) | (of[places] == thread)).all() for of in (self.writing, self.reading))
        self.writer[places], self.writing[places] = warp, thread

    def read(self, places: np.ndarray, thread: np.ndarray) -> None:
        """Nobody else has written there since the last barrier."""
        thread = np.broadcast_to(thread[:, None], places.shape)
        warp = thread // 32
        assert ((self.writer[places] == -1) | (self.writer[places] == warp)).all()
        assert ((self.writing[places] == -1) | (self.writing[places] == thread)).all()
        np.bitwise_or.at(self.readers, places, np.uint64(1) << warp.astype(np.uint64))
        several = (self.reading[places] != -1) & (self.reading[places] != thread)
        self.reading[places] = np.where(several, self.threads, thread)

    def every(self, value) -> np.ndarray:
        return np.broadcast_to(np.asarray(value), (self.threads,))

    # ---- control and special registers ----

    def thread_index(self):
        return np.arange(self.threads)

    def warp_index(self):
        return np.arange(self.threads) // 32

    def fori(self, count, carry, body):
        outer, count = self.active, self.every(count)
        carry = [self.every(value) for value in carry]
        for i in range(max(count)):
            self.active = outer & (i < count)
            carry = [np.where(self.active, new, old) for new, old in zip(body(np.int64(i), carry), carry, strict=True)]
        self.active = outer
        return carry

    @contextlib.contextmanager
    def when(self, flag):
        outer, self.active = self.active, self.active & (self.every(flag) != 0)
        yield
        self.active = outer

    # ---- memory ----

    def mad_wide(self, base, *terms):
        return base + sum((np.asarray(index, np.int64) & 0xFFFFFFFF) * stride for index, stride in terms)

    def load_global(self, at, words: int, flag, byte: int = 0):
        on = self.active & (self.every(flag) != 0)
        found = np.zeros((self.threads, 4 * words), np.uint8)
        found[on] = self.memory.bytes[self._places(self.every(at)[on] + byte, 4 * words, on)]
        return list(found.view(np.uint32).astype(np.int64).T)

    def _places(self, at, size: int, on) -> np.ndarray:
        places, warps = self.memory.places(at, size), np.flatnonzero(on) // 32
        for warp in np.unique(warps):
            used = np.unique(places[warps == warp])
            self.moved, self.used = self.moved + 32 * len(np.unique(used // 32)), self.used + len(used)
        return places

    def store_global(self, at, words, flag, byte: int = 0):
        on = self.active & (self.every(flag) != 0)
        values = np.stack([self.every(word)[on] for word in words], 1).astype(np.uint32).view(np.uint8)
        self._write(self.every(at)[on] + byte, values, on)

    def _write(self, at, values, on):
        places = self._places(at, values.shape[1], on)
        np.add.at(self.memory.writes, places, 1)
        self.memory.bytes[places] = values

    def load_global_half(self, at, flag, byte: int = 0):
        on = self.active & (self.every(flag) != 0)
        found = np.zeros((self.threads, 2), np.uint8)
        found[on] = self.memory.bytes[self._places(self.every(at)[on] + byte, 2, on)]
        return found.view(np.uint16)[:, 0].astype(np.int64)

    def store_global_bf16(self, at, value, flag):
        on = self.active & (self.every(flag) != 0)
        halves = np.asarray(jnp.asarray(self.every(value)[on]).astype(jnp.bfloat16)).view(np.uint16)
        self._write(self.every(at)[on], halves[:, None].view(np.uint8), on)

    def send_packet(self, at, words, mark, flag):
        self.store_global(at, [words[0], mark, words[1], mark], flag)

    def receive_packet(self, at, otherwise, mark, flag):
        on, mark = self.active & (self.every(flag) != 0), self.every(mark)
        end = time.monotonic() + WAIT_S
        while True:
            first, one, second, two = self.load_global(at, 4, on)
            if ((one == mark) & (two == mark))[on].all():
                return [np.where(on, word, own) for word, own in zip((first, second), otherwise, strict=True)]
            assert time.monotonic() < end, "a packet does not come"
            time.sleep(1e-4)

    def cp_async(self, to, source, offsets, flag):
        on = np.flatnonzero(self.active & (self.every(flag) != 0))
        for there, here in offsets:
            places, sources = self.every(to)[on] + there, self.every(source)[on] + here
            assert not (places % 16).any() and places.max(initial=0) + 16 <= len(self.shared)
            data = self.memory.bytes[self.memory.places(sources, 16)]
            copied = [places[:, None] + np.arange(16), data, on, self.group[on], np.zeros(len(on), bool)]
            self.pending.append(copied)
            self.wrote(copied[0], on)
            if self.eager:
                self.shared[copied[0]] = data

    def commit_group(self):
        self.group = self.group + self.active

    def wait_group(self, pending: int):
        for _, _, thread, group, came in self.pending:
            came |= self.active[thread] & (group < self.group[thread] - pending)

    def warp_sync(self):
        """Data that has come to a lane is visible to the others; data in flight is poison until then."""
        for of in (self.writing, self.reading):  # accesses of the warps here, or of several threads (see `readers`)
            of[np.append(self.active, [True, True])[of]] = -1
        for places, data, thread, _, came in self.pending:
            if not self.eager:
                now = came & self.active[thread]
                self.shared[places[now]] = data[now]

    def shared_address(self, at):
        return at

    def shared_places(self, at, size: int, on) -> np.ndarray:
        assert not (at[on] % size).any() and (at[on] + size <= len(self.shared)).all()
        return at[on][:, None] + np.arange(size)

    def load_shared_words(self, at, words: int, byte: int = 0):
        at, found = self.every(at) + byte, np.full((self.threads, 4 * words), POISON, np.uint8)
        places = self.shared_places(at, 4 * words, self.active)
        self.read(places, np.flatnonzero(self.active))
        found[self.active] = self.shared[places]
        return list(found.view(np.uint32).astype(np.int64).T)

    def load_shared(self, at, words: int = 1, byte: int = 0):
        return [word.astype(np.uint32).view(np.float32) for word in self.load_shared_words(at, words, byte)]

    def store_shared_words(self, at, words, byte: int = 0):
        values = [self.every(word).astype(np.uint32).view(np.float32) for word in words]
        self.store_shared(at, values, byte=byte)

    def store_shared(self, at, values, flag=None, byte: int = 0):
        on = self.active & (self.every(1 if flag is None else flag) != 0)
        data = np.stack([self.every(value) for value in values], 1).astype(np.float32).view(np.uint8)
        places = self.shared_places(self.every(at) + byte, data.shape[1], on)
        self.wrote(places, np.flatnonzero(on))
        self.shared[places] = data[on]

    def ldmatrix(self, at, byte: int = 0, transposed: bool = False):
        at = self.every(at) + byte
        places = self.shared_places(at, 16, self.active)
        self.read(places, np.flatnonzero(self.active))
        banks = (at[self.active] // 16 % 8).reshape(-1, 8)
        assert all(len(set(row)) == 8 for row in banks)  # no two rows of a matrix in the same banks
        rows = np.full((self.threads, 16), POISON, np.uint8)
        rows[self.active] = self.shared[places]
        rows = rows.view(np.uint16).reshape(-1, 4, 8, 8).astype(np.int64)  # warp, matrix, row, element
        warp, g, q = np.arange(self.threads) // 32, self.lane // 4, self.lane % 4
        two = [(2 * q + e, g) if transposed else (g, 2 * q + e) for e in range(2)]
        low, high = ([rows[warp, i, row, element] for i in range(4)] for row, element in two)
        return [a | b << 16 for a, b in zip(low, high, strict=True)]

    def movmatrix(self, word):
        halves = np.stack([np.asarray(word, np.int64) >> (16 * e) & 0xFFFF for e in range(2)], 1)
        rows = halves.reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1, 2)
        return rows[:, 0] | rows[:, 1] << 16

    # ---- barriers and the cluster ----

    def cluster_rank(self):
        require(self.arch, "cluster_rank")
        return np.int64(self.rank)

    def init_mbarriers(self, barriers, thread):
        require(self.arch, "init_mbarriers")
        self.mbarriers |= {int(at): Mbarrier(1, 0, size) for at, size in barriers}

    def cluster_wait(self):
        require(self.arch, "cluster_wait")

    def cta_sync(self):
        assert self.active.all()
        self.writer[:], self.readers[:] = -1, 0
        self.writing[:], self.reading[:] = -1, -1

    def st_async(self, at, rank, values, barrier, flag=None, byte: int = 0):
        require(self.arch, "st_async")
        on = self.active & (self.every(1 if flag is None else flag) != 0)
        data = np.stack([self.every(value)[on] for value in values], 1).astype(np.float32).view(np.uint8)
        places, ranks = self.shared_places(self.every(at) + byte, data.shape[1], on), self.every(rank)[on]
        for to in np.unique(ranks):
            self.cluster.send(int(to), int(barrier), places[ranks == to], data[ranks == to])

    def mbarrier_init(self, barrier, flag):
        require(self.arch, "mbarrier_init")
        assert self.every(flag).sum() == 1
        self.mbarriers[int(barrier)] = Mbarrier(128, 128, 0)

    def mbarrier_expect(self, barrier, size):
        require(self.arch, "mbarrier_expect")
        mbarrier, arrived = self.mbarriers[int(barrier)], int(self.active.sum())
        mbarrier.missing, mbarrier.expected = mbarrier.missing - arrived, mbarrier.expected + size * arrived

    def mbarrier_wait(self, barrier, phase=0):
        """Returns at once where another phase than this one is under way."""
        require(self.arch, "mbarrier_wait")
        mbarrier = self.mbarriers[int(barrier)]
        if self.active.any() and mbarrier.phase == phase:
            assert mbarrier.missing == 0, "a thread has not arrived"
            for places, data in self.cluster.receive(self.rank, int(barrier), mbarrier.expected):
                assert (self.shared[places] == POISON).all()  # nobody else's
                self.shared[places] = data
            mbarrier.phase, mbarrier.missing, mbarrier.expected = 1 - phase, mbarrier.count, 0

    # ---- tensor cores ----

    def mma(self, sums, a, b):
        warps = self.threads // 32
        elements = lambda word: [  # noqa: E731
            (self.every(word).astype(np.uint32) >> np.uint32(16 * e)).astype(np.uint16).view(jnp.bfloat16).astype(float)
            for e in range(2)
        ]
        warp, g, q = np.arange(self.threads) // 32, self.lane // 4, self.lane % 4
        left, right, out = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8), np.float32)
        for i, word in enumerate(a):
            for e, value in enumerate(elements(word)):
                left[warp, g + 8 * (i % 2), 2 * q + 8 * (i // 2) + e] = value
        for i, word in enumerate(b):
            for e, value in enumerate(elements(word)):
                right[warp, 2 * q + 8 * i + e, g] = value
        for i, value in enumerate(sums):
            out[warp, g + 8 * (i // 2), 2 * q + i % 2] = value
        out = (out + left @ right).astype(np.float32)
        return [out[warp, g + 8 * (i // 2), 2 * q + i % 2] for i in range(4)]
