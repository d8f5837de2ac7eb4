"""vLLM's Marlin NVFP4 GEMM on the projections of 7B, in a process of its own: PyTorch and the library, no JAX.

    python tools/bench_marlin.py PATH/_C.abi3.so N,K,M [N,K,M …]

The library is that of vLLM 0.22 and wants the PyTorch it was built for (2.11). Weights are random and rotate over at
least 512 MiB, so that no cache holds them. Prints a JSON list: microseconds of a call, the median of 15 replays of a
CUDA graph of one call a weight.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence

import torch

ROTATED_BYTES = 512 << 20
REPLAYS = 15


def e2m1_id() -> int:
    """vLLM's number of the type: exponent 2, mantissa 1, signed, bias 0, finite values only, no NaN."""
    number = offset = 0
    for field, bits in ((2, 8), (1, 8), (1, 1), (0, 32), (1, 1), (0, 8)):
        number |= field << offset
        offset += bits
    return number


def random_weight(ops, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of a weight [n, k], both as Marlin orders them."""
    words = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda").view(torch.int32).T.contiguous()
    codes = ops.gptq_marlin_repack(words, torch.empty(0, dtype=torch.int, device="cuda"), k, n, 4, False)
    scales = (
        (torch.rand(n, k // 16, device="cuda") * 4 + 0.25).to(torch.float8_e4m3fn).T.contiguous().to(torch.bfloat16)
    )
    order = [i + 8 * j for i in range(8) for j in range(8)]
    scales = scales.to(torch.bfloat16).reshape(-1, 64)[:, order].reshape(-1, n).contiguous().to(torch.half)
    scales = scales.view(-1, 4)[:, [0, 2, 1, 3]].reshape(scales.size(0), -1) * 2**7
    return codes, (scales.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()


def microseconds(calls: Sequence[Callable]) -> float:
    """Median time of a call, all of them one after another in a CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("gemms", nargs="+", metavar="N,K,M")
    args = parser.parse_args()
    torch.ops.load_library(args.library)
    ops = torch.ops._C
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = torch.zeros(sms, dtype=torch.int, device="cuda")
    of_all = torch.tensor([2.0 ** (126 - 7)], device="cuda")  # the global scale
    found = []
    for gemm in args.gemms:
        n, k, m = map(int, gemm.split(","))
        weights = [random_weight(ops, n, k) for _ in range(math.ceil(ROTATED_BYTES / (n * k * 0.5625)))]
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

        def multiply(codes, scales, x=x, m=m, n=n, k=k):
            terms = None, scales, None, of_all, None, None, None, workspace
            ops.marlin_gemm(x, None, codes, *terms, e2m1_id(), m, n, k, True, False, True, False)

        calls = [lambda weight=weight, multiply=multiply: multiply(*weight) for weight in weights]
        found.append(round(microseconds(calls), 2))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
