"""Compares the PTX of every kernel between two commits, for an H200 and on a machine without a GPU.

    python tools/compare_ptx.py record BEFORE --checkout PATH_OF_ONE_COMMIT
    python tools/compare_ptx.py record AFTER
    python tools/compare_ptx.py compare BEFORE AFTER

`record` compiles all configs of the tuning table and the other kernels' cases to PTX and writes a folder: digests.json,
{case: {"ptx": digest, "launch": grid, cluster and block dimensions and shared memory}}, and each PTX by its digest.
The PTX is normalized: symbol and file names, line numbers, comments, scopes and white space are removed. A case is
named by shapes and by the values of its config in their order, so that names survive a change of layout; "The kernels
of a checkout" below is all that knows the layout. No ptxas runs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import difflib
import functools
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h200
import jax
import jax.numpy as jnp

Program = tuple[Callable, list]  # a function and its arguments as shapes


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Attributes:
      kernel: "gemm", "skinny", "prologue", "attention" or "rope".
      shape: its sizes, and "dx" or a kind where there are several.
      config: values of its config in their order; empty where the kernel chooses its own.
      lora: form of the LoRA input ("none", "whole", "partials", "own"), the rank, the widths of the adapters, and the
        number of partials.
      bias: dtype of the bias, or of the caches.
    """

    kernel: str
    shape: tuple
    config: tuple = ()
    lora: tuple = ()
    bias: str = ""

    def __str__(self) -> str:
        fields = [self.kernel, *self.shape, *map(str, self.config), *map(str, self.lora), self.bias]
        return " ".join(str(field).replace(" ", "") for field in fields if field != "")


# ---- The kernels of a checkout ----


def tuning_rows() -> Iterator[tuple[str, str, int, int, int, tuple]]:
    """(kernel, direction, m, n, k, config values) of each row of the tuning table."""
    from qerl_kernels.nvfp4_matmul import tuning
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig

    for row in tuning.table():
        kernel = "gemm" if isinstance(row.config, GemmConfig) else "skinny"
        yield kernel, row.direction, row.m, row.n, row.k, dataclasses.astuple(row.config)


def gemm_config(*values: Any) -> Any:
    from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig

    return GemmConfig(*values)


def skinny_config(*values: Any) -> Any:
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig

    return SkinnyConfig(*values)


def takes_adapters(kernel: str, m: int, n: int, k: int, config: tuple, lora: tuple) -> bool:
    """Whether a kernel can take this LoRA input within itself."""
    from qerl_kernels.gpu import H200
    from qerl_kernels.nvfp4_matmul.lora_input import can_fuse

    form, rank, widths, _ = lora
    shapes = [(rank, width) for width in widths]
    if kernel == "skinny":
        is_own = form == "own"
        how = dataclasses.replace(skinny_config(*config), computes_lora_x=is_own)
        return how.fits(n, k, rank) and can_fuse(n, shapes, how.tile_n if is_own else 16)
    how = gemm_config(*config)
    partials = form == "partials"
    if partials and (len(widths) > 1 or m > min(how.tile_m, 64) or how.smem_bytes(True, True) > H200.smem_bytes):
        return False
    return form in ("whole", "partials") and how.fits(has_lora=True) and how.can_fuse_lora(n, shapes)


def matmul_program(case: Case) -> Program:
    from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm
    from qerl_kernels.nvfp4_matmul.gemm.transposed import gemm_dx
    from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul

    direction, m, n, k = case.shape
    form, rank, widths, partials = case.lora or ("none", 0, (), 0)
    config = (skinny_config if case.kernel == "skinny" else gemm_config)(*case.config)
    args = [array(m, n if direction == "dx" else k), packed_weight(n, k)]
    terms = []
    if case.bias:
        args.append(array(n, dtype=case.bias))
        terms.append("bias")
    if widths:
        columns = rank * len(widths)
        shape = {
            "own": (k, columns),
            "partials": (partials, m, columns),
            "whole": (m, rank if len(widths) == 1 else 64 * len(widths)),
        }[form]
        args += [array(*shape, dtype="float32" if form == "partials" else "bfloat16")]
        args += [array(rank, width) for width in widths]
        terms += ["lora_a" if form == "own" else "lora_x"]

    def call(x, weight, *rest):
        given, b = dict(zip(terms, rest, strict=False)), rest[len(terms) :]
        if case.kernel == "skinny":
            return skinny_matmul(x, weight, config, lora_b=b, scale=2.0, **given)
        if direction == "dx":
            return gemm_dx(x, weight, config)
        return gemm(x, weight, config, bias=given.get("bias"), lora_x=given.get("lora_x"), lora_b=b, scale=2.0)

    return call, args


def packed_weight(n: int, k: int) -> Any:
    from qerl_kernels.formats import PackedNvfp4

    n_tiles, k_tiles = -(-n // 64), -(-k // 64)
    words = array(n_tiles, k_tiles, 4, 128, dtype="uint32")
    scales = array(n_tiles, k_tiles, 64, dtype="uint32")
    multiplier = array(n_tiles * 64, dtype="float32")
    return PackedNvfp4(words, scales, multiplier, array(n, dtype="float32"), (n, k), True, 16, True)


def prologue_program(case: Case) -> Program:
    from qerl_kernels.decode_prologue import config, kernel

    kind, m, k = case.shape
    form, *ranks = case.lora or ("none",)
    residual = kind == "norm"
    options = {"eps": 1e-6, "residual": residual} if kind.startswith("norm") else {"partials": form == "partials"}
    spec = config.PrologueSpec(kind.split("-")[0], m, k, tuple(ranks), **options)
    args = [array(m, k * (2 if kind == "silu" else 1))]
    if residual:
        args.insert(0, array(m, k, dtype="float32"))
    if kind.startswith("norm"):
        args = [array(m, k, dtype="float32"), *args[1:], array(k, dtype="float32")]
    a = [array(k, sum(ranks))] if ranks else []
    inputs = len(args)
    chosen = config.best_config(spec)
    return lambda *x: kernel.fused_prologue(spec, chosen, x[:inputs], x[-1] if a else None), args + a


def attention_program(case: Case) -> Program:
    from qerl_kernels.decode_attention import kernel

    rows, heads, kv_heads, width, prompt_slots, own_slots = case.shape
    prompt = array(3, kv_heads, prompt_slots, width, dtype=case.bias)
    own = array(rows, kv_heads, own_slots, width, dtype=case.bias)
    lengths = array(rows, dtype="int32")
    args = [array(rows, heads, width), prompt, prompt, lengths, lengths, own, own, lengths]
    return functools.partial(kernel.decode_attention, scale=0.1), args


def rope_program(case: Case) -> Program:
    from qerl_kernels.rope_cache import kernel

    rows, heads, kv_heads, width = case.shape
    cache = array(rows, kv_heads, 256, width, dtype=case.bias)
    angles, slots = array(rows, width // 2, dtype="float32"), array(rows, dtype="int32")
    qkv = array(rows, (heads + 2 * kv_heads) * width)
    return kernel.rope_and_cache, [qkv, angles, angles, slots, cache, cache]


# ---- The cases ----

PROGRAMS = {
    "gemm": matmul_program,
    "skinny": matmul_program,
    "prologue": prologue_program,
    "attention": attention_program,
    "rope": rope_program,
}
# Configs that the table does not hold, with what they are for: operands made ahead with stages shared by two consumers
# or not; x A in parts with one to nine of them; and skinny ones with every number of m16 tiles, warps and CTAs.
GEMM = [
    ("forward", 8, 4608, 3584, (8, 1, 2, 2, 4, 3, 2, True))
] + [
    (direction, m, 4608, 3584, (m, rows, 1, 1, depth, stages, 1, ahead))
    for ahead in (False, True)
    for m, rows, depth, stages in ((64, 4, 1, 7), (128, 3, 2, 3), (256, 2, 1, 4))
    for direction in ("forward", "dx")
] + [
    ("forward", m, 3584, 18944, values)
    for m, values in (
        (17, (32, 1, 4, 2, 2, 3, 1, False)), (63, (64, 1, 2, 2, 2, 4, 1, False)),
        (64, (64, 2, 1, 2, 1, 6, 1, True)), (40, (64, 4, 1, 1, 2, 4, 1, False)),
        (32, (32, 3, 2, 1, 1, 2, 1, False)), (8, (8, 7, 1, 1, 1, 4, 1, False)),
        (30, (32, 1, 2, 1, 1, 3, 2, False)), (200, (64, 2, 2, 1, 1, 4, 1, False)),
        (30, (64, 1, 1, 1, 1, 4, 1, False)),
    )
]  # fmt: skip
SKINNY = [
    (8, 3584, 3584, (8, 2, 16, 1, 4)),
    (3, 3584, 3584, (8, 4, 8, 2, 4)),
    (8, 4608, 3584, (8, 1, 8, 1, 7)),
    (8, 3584, 18944, (8, 4, 4, 7, 4)),
    (8, 5120, 27648, (8, 8, 16, 3, 2)),
    (5, 3584, 3584, (8, 2, 24, 1, 2)),
    (16, 4608, 3584, (16, 8, 4, 7, 2)),
    (13, 37888, 3584, (16, 4, 4, 1, 3)),
    (32, 4608, 3584, (32, 4, 8, 4, 2)),
    (24, 4608, 3584, (24, 8, 4, 2, 2)),
    (16, 3584, 18944, (16, 4, 16, 2, 1)),
    (8, 3584, 3584, (8, 8, 8, 4, 2)),
    (3, 3584, 3584, (8, 1, 4, 1, 3)),
    (16, 4608, 3584, (16, 8, 8, 4, 2)),
    (13, 3584, 18944, (16, 4, 8, 4, 2)),
    (8, 5120, 27648, (8, 8, 12, 3, 1)),
    (16, 5120, 5120, (16, 2, 16, 2, 1)),
    (24, 5120, 5120, (24, 4, 4, 4, 3)),
    (32, 3584, 3584, (32, 4, 4, 4, 3)),
]
PROLOGUES = [  # kind, K, ranks
    ("norm", 3584, 3), ("plain", 3584, 1), ("norm", 3584, 2), ("silu", 18944, 1), ("norm", 896, 3), ("silu", 4864, 1),
    ("norm", 5120, 3), ("silu", 13824, 1), ("silu", 27648, 1), ("norm", 8192, 2), ("silu", 29568, 1),
]  # fmt: skip
MODELS = [(14, 2, 64), (12, 2, 128), (16, 2, 128), (28, 4, 128), (40, 8, 128), (64, 8, 128)]  # heads and width


def all_cases() -> list[Case]:
    """Every distinct config of the table and of the lists above with every form of LoRA input that it takes, and the
    other kernels with every model."""
    found = {}
    for kernel, direction, m, n, k, config in tuning_rows():
        found.setdefault((kernel, direction, config), (min(m, 512), n, k))
    for direction, m, n, k, config in GEMM:
        found.setdefault(("gemm", direction, config), (m, n, k))
    for m, n, k, config in SKINNY:
        found.setdefault(("skinny", "forward", (*config, False)), (m, n, k))
    cases = []
    for (kernel, direction, config), (m, n, k) in found.items():
        loras = [
            ("whole", 32, (n // 2, n // 2), 0),
            ("whole", 40, (n,), 0),
            ("partials", 32, (n,), 7),
            *([("partials", 24, (n // 2, n // 2), 3), ("own", 32, (n,), 0)] if kernel == "skinny" else ()),
            *([("own", 48, (n // 2, n // 2), 0)] if kernel == "skinny" else ()),
        ]
        plain = (*config[:-1], False) if kernel == "skinny" else config
        cases.append(Case(kernel, (direction, m, n, k), plain))
        if direction == "dx":
            continue
        for i, lora in enumerate(loras):
            if takes_adapters(kernel, m, n, k, config, lora):
                values = (*config[:-1], lora[0] == "own") if kernel == "skinny" else config
                bias = ("bfloat16", "float32", "")[i % 3]
                cases.append(Case(kernel, (direction, m, n, k), values, lora, bias))
    for kind, k, adapters in PROLOGUES:
        cases += [Case("prologue", (kind, m, k), lora=("whole", *[32] * adapters)) for m in (1, 8, 17, 32, 64, 128)]
        cases += [Case("prologue", (kind, 8, k), lora=("whole", *[16] * adapters))]
        if kind != "norm":
            cases += [Case("prologue", (kind, m, k), lora=("partials", *[32] * adapters)) for m in (8, 13, 32)]
    cases += [
        Case("prologue", ("norm", 128, 8192), lora=("whole", 64, 64)),
        Case("prologue", ("norm", 19, 896), lora=("whole", 8, 24, 64)),
        Case("prologue", ("norm", 8, 896)),
        Case("prologue", ("norm-alone", 8, 3584), lora=("whole", 32)),
        Case("prologue", ("silu", 8, 4864)),
        Case("prologue", ("silu", 128, 29568), lora=("whole", 64)),
        Case("prologue", ("plain", 9, 896), lora=("whole", 40)),
    ]
    cases += [
        Case("attention", (rows, *heads, 256, 1024), bias="bfloat16") for heads in MODELS for rows in (2, 8, 32, 128)
    ]
    cases += [Case("rope", (rows, *heads), bias="bfloat16") for heads in MODELS for rows in (1, 8, 128)]
    return list(dict.fromkeys(cases))


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# ---- Recording ----


def start(log: str) -> None:
    """A worker: what its compiler prints goes to a file."""
    os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
    h200.use_compilers_to_ptx()
    os.dup2(os.open(f"{log}/{os.getpid()}", os.O_RDWR | os.O_CREAT), 1)


def dumped(case: Case) -> str:
    """Everything the compiler prints of a case."""
    os.lseek(1, 0, os.SEEK_SET)
    os.ftruncate(1, 0)
    function, args = PROGRAMS[case.kernel](case)
    jax.clear_caches()
    h200.lower(jax.jit(function), args).compile()
    size = os.lseek(1, 0, os.SEEK_END)
    return os.pread(1, size, 0).decode()


def normalized(printed: str) -> str:
    """One kernel's PTX, a statement a line, without names, source lines, comments, debug sections and scope braces."""
    [start] = [found.start() for found in re.finditer(r"^\.version ", printed, flags=re.M)]
    ptx = printed[start:]
    name = re.search(r"\.entry (\w+)", ptx)[1]
    ptx = ptx[: ptx.index("$L__func_end0:")]
    ptx = re.sub(r"//[^\n]*", "", ptx.replace(name, "kernel"))
    ptx = re.sub(r"^\s*\.(loc|file)\s[^\n]*", "", ptx, flags=re.M)
    ptx = re.sub(r"^\$L__(tmp|func_begin)\d+:", "", ptx, flags=re.M)
    statements = re.sub(r"; ?", ";\n", " ".join(ptx.split()))
    # Braces stand before, between and behind the labels of a statement.
    return re.sub(r"^(?:[{}] ?|[\w$]+: )+", lambda prefix: re.sub(r"[{}] ?", "", prefix[0]), statements, flags=re.M)


def record_case(case: Case) -> tuple[str, list[int]]:
    """(normalized PTX, arguments of the launch: grid, cluster and block dimensions, bytes of shared memory)."""
    printed = dumped(case)
    of_jax_11, of_jax_12 = "i32 @mosaic_gpu_launch_kernel", "void @mosaic_gpu_build_kernel_spec"
    [launch] = re.findall(rf"call (?:{of_jax_11}|{of_jax_12})\(([^)]*)\)", printed)
    return normalized(printed), [int(value) for value in re.findall(r"i32 (\d+)", launch)]


def record(out: Path, only: str, jobs: int) -> None:
    cases = [case for case in all_cases() if re.search(only, str(case))]
    (out / "ptx").mkdir(parents=True, exist_ok=True)
    digests, refused = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(jobs, spawn, start, (folder,))
        with pool:
            tasks = {pool.submit(record_case, case): case for case in cases}
            for done, task in enumerate(concurrent.futures.as_completed(tasks), 1):
                case = tasks[task]
                if task.exception() is not None:
                    refused[str(case)] = f"{task.exception()!r}"[:500]
                    continue
                ptx, launch = task.result()
                digest = hashlib.sha256(ptx.encode()).hexdigest()[:24]
                (out / "ptx" / f"{digest}.gz").write_bytes(gzip.compress(ptx.encode(), mtime=0))
                digests[str(case)] = {"ptx": digest, "launch": launch}
                if done % 100 == 0:
                    print(f"{done} of {len(cases)}", file=sys.stderr)
    (out / "digests.json").write_text(json.dumps(dict(sorted(digests.items())), indent=0) + "\n")
    print(f"{len(digests)} cases, {len({d['ptx'] for d in digests.values()})} kernels in {out}", file=sys.stderr)
    for name, error in refused.items():
        print(f"refused: {name}: {error}", file=sys.stderr)
    if refused:
        sys.exit(1)


def stored_lines(folder: Path, found: dict) -> list[str]:
    """Lines of a recorded PTX. `[r + 0]` reads `[r]`: some inline PTX spells a zero offset, with the same meaning."""
    text = gzip.decompress((folder / "ptx" / f"{found['ptx']}.gz").read_bytes()).decode()
    return re.sub(r" ?\+ ?0\]", "]", text).splitlines()


def compare(before: Path, after: Path, only: str, lines: int) -> None:
    one, two = (json.loads((folder / "digests.json").read_text()) for folder in (before, after))
    names = [name for name in sorted({*one, *two}) if re.search(only, name)]
    lacking = [name for name in names if name not in one or name not in two]
    differ = {}
    for name in names:
        if name not in lacking and one[name] != two[name]:
            texts = [stored_lines(folder, found[name]) for folder, found in ((before, one), (after, two))]
            if texts[0] != texts[1] or one[name]["launch"] != two[name]["launch"]:
                differ[name] = texts
    for name in lacking:
        print(f"only in {before if name in one else after}: {name}")
    for name, texts in differ.items():
        print(f"differs: {name}: {one[name]['launch']} {two[name]['launch']}")
        for line in list(difflib.unified_diff(*texts, "before", "after", lineterm="", n=1))[:lines]:
            print(f"    {line}")
    print(f"{len(names) - len(lacking) - len(differ)} of {len(names)} cases identical")
    sys.exit(bool(lacking or differ))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write the PTX of every case to a folder")
    recording.add_argument("out", type=Path)
    recording.add_argument("--checkout", type=Path, help="whose kernels; default: this one")
    recording.add_argument("--jobs", type=int, default=1, help="processes")
    comparing = commands.add_parser("compare", help="compare two folders; exits with 1 where they differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--lines", type=int, default=12, help="lines of each difference to print")
    for each in (recording, comparing):
        each.add_argument("--only", default="", metavar="REGEX", help="cases whose name this finds")
    args = parser.parse_args()
    if args.command == "compare":
        compare(args.before, args.after, args.only, args.lines)
    checkout = (args.checkout or Path(__file__).parent.parent).resolve()
    packages = [str(checkout), str(checkout / "kernels")]
    sys.path[:0] = packages
    os.environ["PYTHONPATH"] = os.pathsep.join([*packages, str(Path(__file__).parent)])
    if missing := h200.missing():
        sys.exit(missing)
    if args.checkout and shutil.which("git"):
        commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True)
        print(f"kernels of {commit.stdout.strip()}", file=sys.stderr)
    record(args.out, args.only, args.jobs)


if __name__ == "__main__":
    main()
