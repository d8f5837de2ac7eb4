"""The kernels of tier "warp" compile for compute capabilities 8.0 to 12.1, without spills; what needs Hopper is refused
in Python, before LLVM, which may end the process. Needs no GPU, but jax 0.11 with its CUDA plugin and NVIDIA's compiler
packages."""

import pathlib
import re
import subprocess

import h200
import jax.numpy as jnp
import pytest
from qerl_kernels.gpu import gpu_of

# SMs of an A100, RTX 3090, 4090, B200, B300, 5090, and of Jetson Orin, Jetson Thor, DGX Spark
TARGETS = {80: 108, 86: 82, 89: 128, 100: 148, 103: 148, 120: 170, 87: 16, 110: 20, 121: 48}
KERNELS = {"nvfp4_dequantize": 1, "nvfp4_skinny": 3, "decode_prologue": 4, "decode_attention": 2, "rope_and_cache": 1}
nightly = pytest.mark.nightly
SAME = {arch: {80: [86, 89], 100: [103]}.get(arch, []) for arch in TARGETS}
ARCHS = [pytest.param(arch, marks=() if arch in (80, 100, 120) else nightly) for arch in TARGETS]
needs_compilers = pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))


def compiled(arch: int, *more: str) -> list[tuple[str, str, str]]:
    """(name, PTX, the assembler's report) of each kernel."""
    script = pathlib.Path(__file__).parent / "compile_for_targets.py"
    kernels = h200.kernels(h200.run(script, str(arch), str(TARGETS[arch]), *more))
    assert all(f"\n.target {target(arch)}\n" in ptx for ptx, _ in kernels)
    return [(re.search(r"\.entry (\w+)", ptx)[1], ptx, report) for ptx, report in kernels]


def target(arch: int) -> str:
    return f"sm_{arch}" + "a" * (arch >= 90)


def assembled(ptx: str, arch: int, tmp_path: pathlib.Path) -> str:
    """The assembler's report of a kernel for another GPU than it was compiled for."""
    source = tmp_path / "kernel.ptx"
    source.write_text(re.sub(r"^\.target \w+", f".target {target(arch)}", ptx, flags=re.M))
    command = [h200.cuda_dir() / "bin/ptxas", "-v", f"-arch={target(arch)}", source, "-o", tmp_path / "cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def check_spills(kernels: list[tuple[str, str, str]]) -> None:
    for name, _, report in kernels:
        assert "0 bytes spill stores, 0 bytes spill loads" in report, (name, report)


def of_tcgen05(ptx: str) -> None:
    """Four m128n128k16 a k-tile, bf16 with fp32 sums (PTX ISA, "Instruction descriptor"), A from tensor memory, to
    which 32 columns are stored; half of the tensor memory, given back."""
    descriptor = 1 << 4 | 1 << 7 | 1 << 10 | (128 // 8) << 17 | (128 // 16) << 24
    [register] = re.findall(rf"mov\.b32 \t(%r\d+), {descriptor};", ptx)
    mma = rf"tcgen05\.mma\.cta_group::1\.kind::f16 \[%r\d+\], \[a_desc\], b_desc, {register}, "
    assert len(re.findall(mma, ptx)) == ptx.count("tcgen05.mma.") == 4
    assert ptx.count("tcgen05.st.sync.aligned.16x128b.x8.b32") == 2
    columns = set(re.findall(r"mov\.b32 \t(%r\d+), 256;", ptx))
    found = [re.findall(rf"tcgen05\.{word}\.\S+ (?:\[%r\d+\]|%r\d+), (%r\d+);", ptx) for word in ("alloc", "dealloc")]
    assert all(len(registers) == 1 and columns.issuperset(registers) for registers in found)


@needs_compilers
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles(arch, tmp_path):
    """And its PTX assembles for the GPUs of the same code paths, whose other numbers compile nightly."""
    kernels = compiled(arch)
    for name, count in (KERNELS | {"nvfp4_tcgen05": arch in (100, 103)}).items():
        assert len([found for found, *_ in kernels if name in found]) == count, name
    check_spills(kernels)
    check_spills([(name, ptx, assembled(ptx, other, tmp_path)) for name, ptx, _ in kernels for other in SAME[arch]])
    for name, ptx, _ in kernels:
        if "tcgen05" in name:
            of_tcgen05(ptx)
            continue
        multiplies = any(word in name for word in ("skinny", "attention", "_lora"))
        assert ("mma.sync.aligned.m16n8k16" in ptx) == multiplies, name
        assert not re.search(r"wgmma|mapa|st\.async|cp\.async\.bulk|mbarrier\.|barrier\.cluster", ptx), name


@needs_compilers
@nightly
@pytest.mark.parametrize("arch", [80, 86, 120])
def test_every_config_of_the_table_compiles(arch):
    check_spills(compiled(arch, "all"))


@pytest.mark.parametrize("arch", TARGETS)
def test_what_takes_hopper_is_refused_before_the_compiler(arch):
    pytest.importorskip("jax", "0.11")
    from qerl_kernels.decode_attention import kernel as attention
    from qerl_kernels.decode_attention.config import AttentionConfig
    from qerl_kernels.nvfp4_matmul import cases, packing
    from qerl_kernels.nvfp4_matmul.gemm import kernel, transposed
    from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
    from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul
    from qerl_kernels.nvfp4_matmul.tcgen05 import kernel as tcgen05
    from qerl_kernels.nvfp4_matmul.tuning import PLAINEST
    from qerl_kernels.ptx.instructions import PtxMachine

    gpu, packed = (
        gpu_of("GPU A", arch, TARGETS[arch]),
        packing.pack(cases.random_weight(jnp.zeros(2, "uint32"), 128, 128)),
    )
    x = jnp.zeros((8, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"wgmma takes compute capability 9\.0, this is GPU A"):
        kernel.gemm(x, packed, PLAINEST, gpu=gpu)
    with pytest.raises(ValueError, match=r"wgmma takes compute capability 9\.0, this is GPU A"):
        transposed.gemm_dx(x, packed, PLAINEST, gpu=gpu)
    if arch not in (100, 103):
        with pytest.raises(ValueError, match=r"tcgen05 takes compute capability 10\.0 or 10\.3, this is GPU A"):
            tcgen05.gemm(x, packed, gpu=gpu)
    with pytest.raises(ValueError, match="does not fit an SM"):
        skinny_matmul(x, packed, SkinnyConfig(8, 2, 4, 2, 1), gpu=gpu)
    cache, lengths = jnp.zeros((8, 1, 8, 64), jnp.bfloat16), jnp.zeros(8, jnp.int32)
    args = x.reshape(8, 2, 64), cache, cache, lengths, lengths, cache, cache, lengths
    for config in (AttentionConfig(2, 4), AttentionConfig(1, 3)):
        with pytest.raises(ValueError, match="takes TMA and clusters, this is for GPU A"):
            attention.decode_attention(*args, scale=1.0, config=config, gpu=gpu)
    if arch < 90:
        with pytest.raises(ValueError, match=r"cluster_wait needs compute capability 9\.0, this is for 8"):
            PtxMachine(arch).cluster_wait()


def test_a_kernel_of_unstated_target_has_only_what_every_gpu_has():
    pytest.importorskip("jax", "0.11")
    from qerl_kernels.ptx.instructions import PtxMachine

    with pytest.raises(ValueError, match=r"fence_proxy_async needs compute capability 9\.0, this is for 8"):
        PtxMachine().fence_proxy_async()
