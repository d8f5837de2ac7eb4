"""Times vLLM's NVFP4 GEMM (Marlin) and cuBLAS's bf16 GEMM on the projections of Qwen2.5, with PyTorch.

    python tools/time_rivals.py _C.abi3.so --version 0.22.1 [--cases qkv_7b ...] [--tokens 1 8 ...] [--out FILE.json]

The library is that of vLLM 0.22 for the installed PyTorch, `vllm/_C.abi3.so` of its wheel; `--version` names it in the
result. Calls are captured in a CUDA graph and timed in bursts of replays, as `bench_matmul.py` times ours (`bursts`).
Rows are those of `bench_matmul.py` with `impl` "marlin" or "cublas_bf16"; `layer_set_7b`, timed where all four cases of
7B are, is 28 times qkv, o, gate_up and down in one graph. Marlin's weights are random words, and its output is not
checked.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
from collections.abc import Callable

import bursts
import torch
from qerl_kernels.nvfp4_matmul import cases
from record import add_commit, meta

LAYERS = 28
# vLLM's number of a scalar type: 8 bits exponent, 8 mantissa, sign, 32 bias, finite only, kind of NaN
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
GLOBAL_SCALE_LOG2 = 126 - 7  # Marlin's own bias of exponents for bf16, less what its scales carry
SHAPES = {**{case: cases.SHAPES[case] for case in cases.TIMED}, "qkv_32b": (7168, 5120), "o_32b": (5120, 5120)}


class Marlin:
    """The library's GEMM."""

    def __init__(self, library: pathlib.Path) -> None:
        torch.ops.load_library(str(library.resolve()))
        self.ops = torch.ops._C
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self.workspace = torch.zeros(count, dtype=torch.int, device="cuda")
        self.world = torch.tensor([2.0**GLOBAL_SCALE_LOG2], device="cuda")

    def weight(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random words and scales in the order of the library."""
        words = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda").view(torch.int32).T.contiguous()
        none = torch.empty(0, dtype=torch.int, device="cuda")
        return self.ops.gptq_marlin_repack(words, none, k, n, 4, False), marlin_scales(n, k, "cuda")

    def gemm(self, x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor], n: int, k: int) -> torch.Tensor:
        """x [M, k] · W."""
        words, scales = weight
        return self.ops.marlin_gemm(
            x, None, words, None, scales, None, self.world, None, None, None, self.workspace, E2M1, x.shape[0], n, k,
            True, False, True, False,
        )  # fmt: skip


def marlin_scales(n: int, k: int, device: str) -> torch.Tensor:
    """Random e4m3 scales [k/16, n] as Marlin keeps them: columns permuted, as the upper byte of an f16 × 2^7 without
    its sign."""
    scales = (torch.rand(n, k // 16, device=device) * 4 + 0.25).to(torch.float8_e4m3fn)
    by_column = torch.tensor([i + 8 * j for i, j in itertools.product(range(8), range(8))], device=device)
    halves = scales.T.to(torch.half).reshape(-1, 64)[:, by_column].reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, n)
    return ((halves * 2**7).view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()


def microseconds(calls: list[Callable], turns: int, rounds: int) -> float:
    """Time of all calls in sequence, from `rounds` replays of a graph of `turns` times all calls. One replay comes
    first and is not timed, because the GPU waits for its launch."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * turns:
            call()

    def burst() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    [us] = bursts.medians([burst])
    return us / rounds / turns


def row(case: str, m: int, impl: str, us: float) -> dict:
    """A row of the result file."""
    n, k = SHAPES.get(case, (0, 0))
    return {"case": case, "m": m, "n": n, "k": k, "direction": "forward", "lora_rank": 0, "impl": impl,
            "us": round(us, 2)}  # fmt: skip


def gemms(marlin: Marlin, case: str, tokens: list[int]) -> list[dict]:
    """Rows of one projection."""
    n, k = SHAPES[case]
    kinds = (
        ("marlin", n * k * 0.5625, lambda: marlin.weight(n, k), lambda x, w: marlin.gemm(x, w, n, k)),
        ("cublas_bf16", n * k * 2, lambda: torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T, torch.matmul),
    )
    rows = []
    for impl, weight_bytes, weight, gemm in kinds:
        of_m = {m: bursts.burst_of(m, n, k, weight_bytes) for m in tokens}
        weights = [weight() for _ in range(max(burst.weights for burst in of_m.values()))]
        for m, burst in of_m.items():
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            calls = [functools.partial(gemm, x, one) for one in weights[: burst.weights]]
            rows.append(row(case, m, impl, microseconds(calls, burst.turns, burst.rounds) / len(calls)))
        del weights
    print(case, " ".join(f"{r['impl']} {r['m']}: {r['us']:.1f}" for r in rows), flush=True)
    return rows


def layers(marlin: Marlin, m: int) -> dict:
    """The row of all projections of 7B."""
    x = {k: torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for k in (3584, 18944)}
    shapes = [SHAPES[case] for case in cases.LAYER_7B] * LAYERS
    calls = [functools.partial(marlin.gemm, x[k], marlin.weight(n, k), n, k) for n, k in shapes]
    _, turns, rounds = bursts.burst_of_step(LAYERS)
    return row("layer_set_7b", m, "marlin", microseconds(calls, turns, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--cases", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(cases.TOKENS))
    parser.add_argument("--version", required=True, help="the library's version of vLLM")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tools/results/nvidia-h200/rivals.json"))
    add_commit(parser)
    args = parser.parse_args()
    marlin = Marlin(args.library)
    rows = [one for case in args.cases for one in gemms(marlin, case, args.tokens)]
    if set(cases.LAYER_7B) <= set(args.cases):
        rows += [layers(marlin, m) for m in args.tokens if m <= 64]
    about = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "vllm": args.version}
    args.out.write_text(json.dumps({"meta": meta(args.commit, about), "rows": rows}, indent=0) + "\n")


if __name__ == "__main__":
    main()
