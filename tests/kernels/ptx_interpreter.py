"""Inline PTX on numpy: the instructions that compute, for all threads at once; memory and barriers are the machine's.

A register is an array of one 32-bit word for each thread.
"""

import functools
import re

import jax.numpy as jnp
import numpy as np

U32 = np.uint32
TYPES = ("b16", "b32", "b64", "f32", "pred")


def interpret(text: str, out: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs of inline PTX: `$0` is the first of them, the inputs follow. `out`: a letter for each, "r" or "f"."""
    registers = {f"${len(out) + i}": as_bits(value) for i, value in enumerate(inputs)}
    with np.errstate(all="ignore"):  # infinities are values
        for guard, name, parts in statements(text):
            _step(registers, guard, name, parts)
    found = [registers[f"${i}"] for i in range(len(out))]
    return [as_f32(bits) if letter == "f" else bits.astype(np.int64) for bits, letter in zip(found, out, strict=True)]


@functools.cache
def statements(text: str) -> list[tuple[str, str, list[str]]]:
    """(register of the predicate or "", instruction, its operands) of each statement."""
    found = []
    for statement in text.split(";"):
        statement, guard = statement.strip().lstrip("{").strip(), ""
        if statement.startswith("@"):
            guard, statement = statement[1:].split(None, 1)
        if statement in ("", "}") or statement.startswith(".reg"):
            continue
        name, rest = statement.split(None, 1)
        found.append((guard, name, [part.strip() for part in re.split(r",\s*(?![^{]*\})", rest)]))
    return found


def as_bits(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value)
    return value.view(U32) if value.dtype == np.float32 else value.astype(np.int64).astype(U32)


def as_f32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(U32).view(np.float32)


def bf16_of(register: np.ndarray, half: int) -> np.ndarray:
    """One bf16 of a register in fp64; a bf16 subnormal stays one."""
    return (register >> U32(16 * half) << U32(16)).view(np.float32).astype(np.float64)


def rounded_bf16(value: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(value).astype(jnp.bfloat16)).view(np.uint16).astype(U32)


def _step(registers: dict, guard: str, name: str, parts: list[str]) -> None:
    threads = next(iter(registers.values())).shape

    def value(i: int) -> np.ndarray:
        if parts[i] in registers:
            return registers[parts[i]]
        number = int(parts[i][2:], 16) if parts[i].startswith("0f") else int(parts[i], 0)
        return np.full(threads, number & 0xFFFFFFFF, U32)

    def wide(i: int) -> np.ndarray:
        return as_f32(value(i)).astype(np.float64)

    def named(i: int) -> list[str]:
        return [part.strip() for part in parts[i].strip("{}").split(",")]

    match name:
        case "mov.b32" if parts[0].startswith("{"):
            low, high = named(0)
            registers[low], registers[high] = value(1) & U32(0xFFFF), value(1) >> U32(16)
            return
        case "and.b32":
            found = value(1) & value(2)
        case "or.b32":
            found = value(1) | value(2)
        case "xor.b32":
            found = value(1) ^ value(2)
        case "add.u32":
            found = value(1) + value(2)
        case "shl.b32":
            found = value(1) << value(2)
        case "shr.b32":
            found = value(1) >> value(2)
        case "bfe.u32":
            found = (value(1) >> value(2)) & ((U32(1) << value(3)) - U32(1))
        case "shf.r.wrap.b32":
            found = (value(1) >> value(3)) | (value(2) << (U32(32) - value(3)))
        case "lop3.b32":
            assert parts[4] == "0xEA"
            found = (value(1) & value(2)) | value(3)
        case "setp.ne.u32" | "setp.ne.b32":
            found = value(1) != value(2)
        case "setp.gt.s32":
            found = value(1).view(np.int32) > value(2).view(np.int32)
        case "selp.b32":
            found = np.where(registers[parts[3]], value(1), value(2))
        case "prmt.b32":
            source = np.stack([v >> U32(8 * i) & U32(255) for v in (value(1), value(2)) for i in range(4)])
            thread = np.arange(len(source[0]))
            picked = [source[value(3) >> U32(4 * i) & U32(7), thread] << U32(8 * i) for i in range(4)]
            found = picked[0] | picked[1] | picked[2] | picked[3]
        case "mov.b32" if parts[1].startswith("{"):
            low, high = named(1)
            found = registers[low] | registers[high] << U32(16)
        case "mov.b32" | "mov.b16":
            found = value(1)
        case "mul.rn.bf16x2" | "fma.rn.bf16x2":
            assert name[0] == "m" or (value(3) == U32(0x80008000)).all()  # of −0.0, which changes no product
            product = [bf16_of(value(1), half) * bf16_of(value(2), half) for half in range(2)]
            bits = [p.astype(np.float32).view(U32) for p in product]
            assert not any((b & U32(0xFFFF)).any() for b in bits)  # exact
            found = bits[0] >> U32(16) | bits[1]
        case "add.rn.f32":
            found = (as_f32(value(1)) + as_f32(value(2))).view(U32)
        case "sub.rn.f32":
            found = (as_f32(value(1)) - as_f32(value(2))).view(U32)
        case "mul.rn.f32":
            found = (as_f32(value(1)) * as_f32(value(2))).view(U32)
        case "fma.rn.f32":
            found = (wide(1) * wide(2) + wide(3)).astype(np.float32).view(U32)
        case "ex2.approx.ftz.f32":
            found = np.exp2(wide(1)).astype(np.float32).view(U32)
        case "rcp.approx.ftz.f32":
            found = (1 / wide(1)).astype(np.float32).view(U32)
        case "rsqrt.approx.f32":
            found = (1 / np.sqrt(wide(1))).astype(np.float32).view(U32)
        case "cvt.rn.bf16x2.f32":
            found = rounded_bf16(as_f32(value(1))) << U32(16) | rounded_bf16(as_f32(value(2)))
        case "shfl.sync.bfly.b32":
            found = value(1)[np.arange(len(value(1))) ^ int(parts[2])]
        case _:
            raise NotImplementedError(name)
    registers[parts[0]] = np.where(registers[guard], found, registers[parts[0]]) if guard else found
