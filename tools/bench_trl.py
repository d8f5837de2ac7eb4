"""The same job by TRL's GRPOTrainer and by this project, one after the other on one GPU: seconds a step.

    python tools/bench_trl.py MODEL PROBLEMS.jsonl --out DIR [--formats nvfp4,bf16] [--steps 10] [--batch 256]
        [--length 512] [--micro-batch 32] [--checkpointing] [--no-vllm] [--coin SHARE]

MODEL is a directory of unquantized weights, PROBLEMS has `problem` and `answer`. Each side is a process of its own:
TRL samples with vLLM in the same process (`colocate`), or with transformers under `--no-vllm`; ours is
`tools/bench_run.py`. Both have the prompt of `SYSTEM`, `math_verify` as reward, LoRA on all projections, the DAPO loss
without a KL penalty, one update a rollout, no noise and no evaluation. `--coin` is for random weights, whose answers
are all wrong, so that ours would leave out the whole update: a completion wins or loses by its text's checksum, but all
win in a SHARE of the prompts, by theirs.
Rows of both go into run.json of --out, and into run.png.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import add_commit, write_rows

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
TRL_FLAG = "--trl-alone"
COIN = "COIN_SHARE"  # the environment's: rewards run in processes of their own
ENVIRONMENT = {  # vLLM within this process, nothing from the network
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", default="nvfp4,bf16", help="ours; empty: TRL alone")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="completions a step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256, help="ours; TRL has no limit")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a completion")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's sequences at a time")
    parser.add_argument("--checkpointing", action="store_true", help="TRL's gradient checkpointing")
    parser.add_argument("--vllm-memory", type=float, default=0.35, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--coin", type=float, metavar="SHARE", help="rewards by checksums; this share of groups equal")
    parser.add_argument(TRL_FLAG, action="store_true", help="no run of ours, in this process")
    add_commit(parser)
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    if args.coin is not None:
        os.environ[COIN] = str(args.coin)
    if args.trl_alone:
        write_rows(args.out / "run.json", [trl_row(args)], args.commit, versions())
        return
    commit = ["--commit", args.commit] if args.commit else []
    for stored in filter(None, args.formats.split(",")):
        tool = Path(__file__).with_name("bench_run.py")
        subprocess.run([sys.executable, tool, "--out", args.out, *commit, *ours(args, stored)], check=True)
    subprocess.run([sys.executable, __file__, *words, TRL_FLAG], check=True, env=ENVIRONMENT | os.environ)
    from bench_run import draw  # here: JAX takes the GPU's memory when it starts

    draw(args.out)
    for row in json.loads((args.out / "run.json").read_text())["rows"]:
        peak = f"{row['peak_bytes'] / 1e9:.1f} GB"
        print(f"{row['name']} {row['weight_format']}: {row['step_seconds']:.2f} s a step, {peak}")


def ours(args: argparse.Namespace, stored: str) -> list[str]:
    """Flags of `qerl_jax.train` for the job."""
    flags = {
        "model": args.model,
        "weight-format": stored,
        "dataset": args.problems,
        "prompt-column": "problem",
        "answer-column": "answer",
        "system-prompt": SYSTEM,
        "reward-funcs": f"{Path(__file__).resolve()}:coin" if args.coin is not None else "math_verify",
        "max-steps": args.steps,
        "batch-size": args.batch,
        "num-generations": args.group,
        "max-prompt-length": args.prompt_len,
        "max-completion-length": args.length,
        "lora-rank": args.rank,
        "lora-alpha": args.rank,
        "learning-rate": args.learning_rate,
        "sigma-start": 0,
        "sigma-end": 0,
    }
    return [str(part) for name, value in flags.items() for part in (f"--{name}", value)]


def coin(completions: Sequence[str], prompts: Sequence[Any], **_: object) -> list[float]:
    """1 for each completion of the share of prompts that `--coin` names, 1 or 0 by the completion's text for others."""
    share = float(os.environ[COIN])
    equal = [zlib.crc32(str(prompt).encode()) < share * 2**32 for prompt in prompts]
    return [float(same or zlib.crc32(text.encode()) % 2) for text, same in zip(completions, equal, strict=True)]


def trl_row(args: argparse.Namespace) -> dict[str, Any]:
    """TRL's run as a row of run.json."""
    import torch
    import transformers
    import trl
    from datasets import load_dataset
    from peft import LoraConfig
    from timing import since_start

    from qerl_jax.rewards.mathematics import math_verify

    def reward(completions: list, answer: list[str], prompts: list, **_: object) -> list[float]:
        texts = [c[0]["content"] for c in completions]
        values = (math_verify if args.coin is None else coin)(completions=texts, answer=answer, prompts=prompts)
        return [float(value or 0) for value in values]

    class Clock(transformers.TrainerCallback):
        """Seconds of each step, work on the device included."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(now() - self.began)

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return since_start()

    def asked(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["problem"]}]
        return {"prompt": messages, "answer": str(row["answer"])}

    clock, on_gpu = Clock(), torch.cuda.is_available()
    data = load_dataset("json", data_files=str(args.problems), split="train").map(asked)
    sampler = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": args.vllm_memory}
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            use_vllm=not args.no_vllm,
            **({} if args.no_vllm else sampler),
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.batch // args.micro_batch,
            num_generations=args.group,
            max_completion_length=args.length,
            learning_rate=args.learning_rate,
            loss_type="dapo",
            beta=0.0,
            max_steps=args.steps,
            gradient_checkpointing=args.checkpointing,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        )
        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(
                args.model, dtype=torch.bfloat16 if on_gpu else torch.float32
            ),
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=transformers.AutoTokenizer.from_pretrained(args.model),
            peft_config=LoraConfig(
                r=args.rank, lora_alpha=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[clock],
        )
        ready = now()
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    later = clock.seconds[1:] or clock.seconds
    run_s = {"start": ready, "step": sum(clock.seconds)}
    seconds = now()
    return {
        "name": f"TRL {trl.__version__}",
        "weight_format": "bf16",
        "random": False,
        "vllm": not args.no_vllm,
        "micro_batch": args.micro_batch,
        "checkpointing": args.checkpointing,
        "batch": args.batch,
        "group": args.group,
        "completion_len": args.length,
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        "steps": len(clock.seconds),
        "step_seconds": statistics.median(later),
        "first_step_seconds": ready + clock.seconds[0],
        "seconds": seconds,
        "run_seconds": run_s | {"rest": seconds - sum(run_s.values())},
        "tokens": statistics.median(entry["completions/mean_length"] for entry in logs[1:] or logs) * args.batch,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


def versions() -> dict[str, str]:
    """Versions of what TRL's side runs."""
    found = {}
    for name in ("trl", "vllm", "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
