"""What fits on GPUs of 24 to 180 GB, by the estimator behind `--dry-run`, as Markdown tables.

    python tools/what_fits.py [--prompt-len 256] [--completion-len 1024] [--batch 64] [--format nvfp4]

A cell says how the update is divided (tokens of a micro-batch, layers that are recomputed) and how many completions are
decoded at a time, by the kernels of Hopper. The second table is the README's: GPUs by name, the largest model with the
kernels that run on each. Nothing is loaded; no GPU is needed.
"""

from __future__ import annotations

import argparse
import dataclasses

import jax
from make_checkpoint import SIZES, hf_config
from qerl_kernels.gpu import H200, Gpu, gpu_of

from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.config import Config
from qerl_jax.partition import bytes_on_device
from qerl_jax.rl.plan import recomputation
from qerl_jax.rollout.shapes import decode_bytes, prefill_bytes
from qerl_jax.run.abstract import abstract_trees
from qerl_jax.run.memory import estimate_memory

GIGABYTES = (24, 48, 80, 141)
GPUS = {  # name -> (GB, the facts that decide its kernels)
    "RTX 3090": (24, gpu_of("NVIDIA GeForce RTX 3090", 86, 82)),
    "RTX 4090": (24, gpu_of("NVIDIA GeForce RTX 4090", 89, 128)),
    "RTX 5090": (32, gpu_of("NVIDIA GeForce RTX 5090", 120, 170)),
    "L40S": (48, gpu_of("NVIDIA L40S", 89, 142)),
    "A100": (80, gpu_of("NVIDIA A100-SXM4-80GB", 80, 108)),
    "H100": (80, gpu_of("NVIDIA H100 80GB HBM3", 90, 132)),
    "RTX PRO 6000": (96, gpu_of("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 188)),
    "H200": (141, H200),
    "B200": (180, gpu_of("NVIDIA B200", 100, 148)),
}
STEP_SECONDS = {"H100": 8.7, "H200": 8.1}  # of 7B, 64 × (256 + 1024) (tools/results/README.md, "Whole steps")
SHARE = 0.94  # share of a device for weights, state and caches


def cell(size: str, stored: str, gigabytes: int, args: argparse.Namespace, gpu: Gpu = H200) -> str:
    """How a run goes on a device; – where it does not."""
    config = Config(
        model=size,
        weight_format=stored,
        matmul_kernel="mosaic_gpu",
        batch_size=args.batch,
        max_prompt_length=args.prompt_len,
        max_completion_length=args.completion_len,
    )
    policy, state = abstract_trees(parse_config(hf_config(size), {}, size), stored, config, gpu=gpu)
    prefill = prefill_bytes(policy, config.num_prompts, args.prompt_len, config.batch_invariant, gpu)
    beside = bytes_on_device((policy.frozen, state)) + max(prefill, decode_bytes(policy.config, args.batch))
    free = SHARE * gigabytes * 1e9 - beside
    if free <= 0:
        return "–"
    try:
        config = dataclasses.replace(config, rollout_memory_gb=free / 1e9)
        memory = estimate_memory(policy, state, config, gigabytes * 1e9, gpu=gpu)
    except ValueError:
        return "–"
    plan = memory.update_plan
    if plan.lacking_bytes:
        return "–"
    keeps_all = plan.recomputed == plan.recomputed_gate_up == 0
    again = "" if keeps_all else f", {recomputation(plan)}"
    return f"{plan.pack.tokens} tokens{again}; {memory.rollout.sequences} decoded"


def row_of(name: str, args: argparse.Namespace) -> str:
    """A GPU's row of the README's table: memory, the largest model, which kernels run, how long a step takes."""
    gigabytes, gpu = GPUS[name]
    fitting = ((size, cell(size, args.format, gigabytes, args, gpu)) for size in reversed(SIZES))
    size, how = next((size, how) for size, how in fitting if how != "–")
    model = f"{size}, with recomputation" if "recomputed" in how else size
    runs = "decode, prefill, update" if gpu.tier == "wgmma" else "decode, prefill" if gpu.has_tcgen05 else "decode"
    step = f"{STEP_SECONDS[name]} s" if name in STEP_SECONDS else "compiled, not measured"
    return f"| {name} | {gigabytes} GB | {model} | {runs} | {step} |"


def parser_of() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--completion-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--format", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    return parser


def main() -> None:
    """Command line."""
    args = parser_of().parse_args()
    jax.config.update("jax_platforms", "cpu")
    print("| " + " | ".join(["", *(f"{gigabytes} GB" for gigabytes in GIGABYTES)]) + " |")
    print("|" + "---|" * (1 + len(GIGABYTES)))
    for size in args.sizes:
        cells = [cell(size, args.format, gigabytes, args) for gigabytes in GIGABYTES]
        print("| " + " | ".join([size, *cells]) + " |")
    print("\n| GPU | memory | largest model | 4-bit kernels for | a step of 7B |\n|---|---|---|---|---|")
    for name in GPUS:
        print(row_of(name, args), flush=True)


if __name__ == "__main__":
    main()
