"""Kernels' instructions for all threads of a block on numpy: a stand-in for the module `lanes`.

A value is an array of one for each thread, a word an integer. Copies arrive as late as the program's waits allow, or at
once: so that what is read too early, or overwritten too early, is wrong. What is read outside an array, or before it
was written, or while another warp may write it, fails.
"""

from __future__ import annotations

import collections
import contextlib
import threading

import jax.numpy as jnp
import numpy as np

POISON = 0xFF  # fills unwritten memory: a NaN as bf16 and as fp32
WAIT_S = 60.0  # for other blocks, which have ended or wait themselves where this is not enough


def install(monkeypatch, machine, *modules) -> None:
    """`machine` in place of `lanes`, and of what the modules have of it by name."""
    for module in modules:
        monkeypatch.setattr(module, "lanes", machine)
        for name in {"add", "both", "div", "either", "less", "mul", "rem"} & set(vars(module)):
            monkeypatch.setattr(module, name, getattr(machine, name))


def laid_out(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each array of shared memory begins, and where the last one ends: each is a whole number of KiB."""
    *starts, end = map(int, np.cumsum([0, *(-(-size // 1024) * 1024 for size in sizes.values())]))
    return dict(zip(sizes, starts, strict=True)), end


class Cluster:
    """What its blocks send each other, each in a Python thread of its own or one after the other."""

    def __init__(self):
        self.boxes = collections.defaultdict(list)  # (block, barrier) -> (places, bytes) of each send
        self.ended, self.changed = set(), threading.Condition()

    def send(self, block: int, barrier: int, places: np.ndarray, data: np.ndarray) -> None:
        with self.changed:
            assert block not in self.ended, f"block {block} has ended"
            self.boxes[block, barrier].append((places, data))
            self.changed.notify_all()

    def receive(self, block: int, barrier: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """What has been sent, once it is `size` bytes; never more."""
        with self.changed:
            box = self.boxes[block, barrier]
            came = self.changed.wait_for(lambda: sum(data.size for _, data in box) >= size, WAIT_S)
            assert came, f"block {block} waits for ever"
            assert sum(data.size for _, data in box) == size
            return self.boxes.pop((block, barrier))

    def end(self, block: int) -> None:
        with self.changed:
            self.ended.add(block)


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


class Block:
    """One block: what kernels take from `lanes`."""

    def __init__(
        self, memory: Memory, threads: int, shared_bytes: int, part: int, cluster: Cluster, eager: bool = False
    ):
        self.memory, self.threads, self.part, self.cluster, self.eager = memory, threads, part, cluster, eager
        self.shared = np.full(shared_bytes, POISON, np.uint8)
        self.active = np.ones(threads, bool)
        # bytes of the sectors of global memory that each warp's access touches, and of those the bytes it asks for
        self.moved, self.used = 0, 0
        self.pending, self.group = [], np.zeros(threads, int)  # copies under way
        # since the last barrier of the block, for each byte: the warp that wrote it, and the warps that read it
        self.writer, self.readers = np.full(shared_bytes, -1), np.zeros(shared_bytes, np.uint64)
        # since the last barrier of the warp: the thread that wrote it, and the one that read it (any if several did)
        self.writing, self.reading = np.full(shared_bytes, -1), np.full(shared_bytes, -1)
        self.lane = np.arange(threads) % 32

    add = staticmethod(lambda a, b: np.asarray(a) + b)
    mul = staticmethod(lambda a, b: np.asarray(a) * b)
    div = staticmethod(lambda a, b: np.asarray(a) // b)
    rem = staticmethod(lambda a, b: np.asarray(a) % b)
    xor = staticmethod(lambda a, b: np.asarray(a) ^ b)
    both = staticmethod(lambda a, b: np.asarray(a) & b)
    less = staticmethod(lambda a, b: (np.asarray(a) < b).astype(int))
    smaller = staticmethod(np.minimum)
    either = staticmethod(lambda flag, a, b: np.where(np.asarray(flag) != 0, a, b))
    address = staticmethod(lambda base, offset: np.asarray(base) + offset)
    const = staticmethod(np.int64)
    fconst = staticmethod(np.float32)
    fadd = staticmethod(lambda a, b: np.float32(a + b))
    fmul = staticmethod(lambda a, b: np.float32(a * b))
    fma = staticmethod(lambda a, b, c: np.float32(np.float64(a) * b + c))
    total = staticmethod(lambda values: sum(values, np.float32(0)))
    as_float = staticmethod(lambda word: word.astype(np.uint32).view(np.float32))
    as_word = staticmethod(lambda value: np.asarray(value, np.float32).view(np.uint32).astype(np.int64))

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

    def half_of(self, word, high: bool):
        word = word.astype(np.uint32)
        return ((word & np.uint32(0xFFFF0000)) if high else (word << np.uint32(16))).view(np.float32)

    def pair(self, first, second, high: bool):
        low, top = ((np.asarray(word, np.int64) >> (16 * high)) & 0xFFFF for word in (first, second))
        return low | top << 16

    def to_bf16(self, low, high):
        halves = [np.asarray(jnp.asarray(v).astype(jnp.bfloat16)).view(np.uint16).astype(int) for v in (low, high)]
        return halves[0] | halves[1] << 16

    # ---- control ----

    def repeat(self, count, carry, body):
        outer, count = self.active, self.every(count)
        carry = [self.every(value) for value in carry]
        for i in range(max(count)):
            self.active = outer & (i < count)
            carry = [np.where(self.active, new, old) for new, old in zip(body(np.int64(i), carry), carry, strict=True)]
        self.active = outer
        return carry

    @contextlib.contextmanager
    def only(self, flag):
        outer, self.active = self.active, self.active & (self.every(flag) != 0)
        yield
        self.active = outer

    # ---- memory ----

    def load(self, at, words: int, flag, byte: int = 0):
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

    def store(self, at, words, flag, byte: int = 0):
        on = self.active & (self.every(flag) != 0)
        values = np.stack([self.every(word)[on] for word in words], 1).astype(np.uint32).view(np.uint8)
        self._write(self.every(at)[on] + byte, values, on)

    def _write(self, at, values, on):
        places = self._places(at, values.shape[1], on)
        np.add.at(self.memory.writes, places, 1)
        self.memory.bytes[places] = values

    def load_half(self, at, flag, byte: int = 0):
        on = self.active & (self.every(flag) != 0)
        found = np.zeros((self.threads, 2), np.uint8)
        found[on] = self.memory.bytes[self._places(self.every(at)[on] + byte, 2, on)]
        return found.view(np.uint16)[:, 0].astype(np.int64)

    def store_bf16(self, at, value, flag):
        on = self.active & (self.every(flag) != 0)
        halves = self.to_bf16(self.every(value), np.zeros(self.threads, np.float32))[on] & 0xFFFF
        self._write(self.every(at)[on], halves.astype(np.uint16)[:, None].view(np.uint8), on)

    def copy(self, to, source, offsets, flag):
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

    def end_group(self):
        self.group = self.group + self.active

    def wait_groups(self, pending: int):
        for _, _, thread, group, came in self.pending:
            came |= self.active[thread] & (group < self.group[thread] - pending)

    def warp_barrier(self):
        """What has come to a lane is seen by the others, and what has not is poison until then."""
        for of in (self.writing, self.reading):  # what a warp did that is here, or several did, which `readers` knows
            of[np.append(self.active, [True, True])[of]] = -1
        for places, data, thread, _, came in self.pending:
            if not self.eager:
                now = came & self.active[thread]
                self.shared[places[now]] = data[now]

    def shared_places(self, at, size: int, on) -> np.ndarray:
        assert not (at[on] % size).any() and (at[on] + size <= len(self.shared)).all()
        return at[on][:, None] + np.arange(size)

    def read_shared(self, at, words: int, byte: int = 0):
        at, found = self.every(at) + byte, np.full((self.threads, 4 * words), POISON, np.uint8)
        places = self.shared_places(at, 4 * words, self.active)
        self.read(places, np.flatnonzero(self.active))
        found[self.active] = self.shared[places]
        return list(found.view(np.uint32).astype(np.int64).T)

    def load_shared(self, at, words: int = 1, byte: int = 0):
        return [word.astype(np.uint32).view(np.float32) for word in self.read_shared(at, words, byte)]

    def store_shared(self, at, values, flag=None, byte: int = 0):
        on = self.active & (self.every(1 if flag is None else flag) != 0)
        data = np.stack([self.every(value) for value in values], 1).astype(np.float32).view(np.uint8)
        places = self.shared_places(self.every(at) + byte, data.shape[1], on)
        self.wrote(places, np.flatnonzero(on))
        self.shared[places] = data[on]

    def read_matrices(self, at, byte: int = 0, transposed: bool = False):
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

    def transposed(self, word):
        halves = np.stack([np.asarray(word, np.int64) >> (16 * e) & 0xFFFF for e in range(2)], 1)
        rows = halves.reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1, 2)
        return rows[:, 0] | rows[:, 1] << 16

    # ---- other blocks ----

    def block_of_cluster(self):
        return np.int64(self.part)

    def begin_exchange(self, barriers, thread):
        self.expected = {int(at): size for at, size in barriers}

    def all_began(self):
        pass

    def block_barrier(self):
        assert self.active.all()
        self.writer[:], self.readers[:] = -1, 0
        self.writing[:], self.reading[:] = -1, -1

    def send(self, at, block, values, arrived, flag):
        on = self.active & (self.every(flag) != 0)
        data = np.stack([self.every(value)[on] for value in values], 1).astype(np.float32).view(np.uint8)
        places, blocks = self.shared_places(self.every(at), data.shape[1], on), self.every(block)[on]
        for to in np.unique(blocks):
            self.cluster.send(int(to), int(arrived), places[blocks == to], data[blocks == to])

    def wait_for(self, barrier):
        if self.active.any():
            for places, data in self.cluster.receive(self.part, int(barrier), self.expected[int(barrier)]):
                assert (self.shared[places] == POISON).all()  # nobody else's
                self.shared[places] = data

    # ---- arithmetic ----

    def multiply(self, sums, a, b):
        warps = self.threads // 32
        elements = lambda word: [  # noqa: E731
            (self.every(word).astype(np.uint32) >> np.uint32(16 * e) << np.uint32(16)).view(np.float32).astype(float)
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

    def over_quad(self, value):
        for distance in (1, 2):
            value = np.float32(value + value[np.arange(self.threads) ^ distance])
        return value

    def add_halves(self, wide, word):
        sums = [self.as_float(self.every(x)) + self.half_of(self.every(word), i == 1) for i, x in enumerate(wide)]
        return [self.as_word(each) for each in sums]

    def add_square(self, sum_, wide):
        return self.fma(self.as_float(wide), self.as_float(wide), sum_)

    def weighted_bf16(self, wide, weights, factor):
        values = [self.as_float(self.every(x)) for x in wide]
        values = values if factor is None else [np.float32(value * factor) for value in values]
        weights = [self.as_float(self.every(w)) for w in weights]
        return self.to_bf16(*(np.float32(v * w) for v, w in zip(values, weights, strict=True)))

    def silu_bf16(self, gate, up):
        halves = [(self.half_of(gate, high), self.half_of(up, high)) for high in (False, True)]
        return self.to_bf16(*(np.float32(g / (1 + np.exp(-g.astype(float))) * u) for g, u in halves))

    def inverse_rms(self, sum_of_squares, count: int, eps: float):
        return np.float32(1 / np.sqrt(sum_of_squares.astype(float) / count + eps))
