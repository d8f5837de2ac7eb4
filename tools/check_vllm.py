"""Runs everything that needs vLLM on a GPU: evaluation, comparison, training and serving, each in its own process.

    python tools/check_vllm.py --vllm-archive vllm-0.22.1-sm90.tar.xz --out DIR [--stages tiny 0.5B 7B train serve]

- tiny: trains the bundled policy (74 s on CPU cores), exports it by `--as vllm`, evaluates that by vLLM and by our
  engine, and compares both by `compare_vllm.py`.
- 0.5B, 7B: `compare_vllm.py` on an NVFP4 checkpoint of that shape with random weights, and a random adapter.
- train: two steps of the 0.5B shape with `--rollout-backend vllm`, norms trained, and `compare_vllm.py` on the adapter.
- serve: greedy answers of stock vLLM (`vllm.LLM`, as `vllm serve` would load them) with the exports `merged`,
  `merged-nvfp4` and `vllm` of the bundled policy.

Checkpoints stay in `--work` for further calls. `--out` gets the reports, a log of each command and `summary.json`. The
exit code is 1 if a command failed; the others run all the same.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from record import add_commit

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
STAGES = ("tiny", "0.5B", "7B", "train", "serve")
QUESTION = "Ana has 15 shells. Ana then gets 2 times as many. Ana sells all shells for 4 dollars each. "
QUESTION += "How many dollars does Ana get?"
LONGEST_S = 540.0  # limit of a command
RANK = 16


class Checks:
    """The commands, their logs and their results.

    Args:
      args: command line.
      site: folder of vLLM's packages; None: they are installed.
    """

    def __init__(self, args: argparse.Namespace, site: Path | None) -> None:
        self.out, self.work, self.results = args.out, args.work, []
        self.commit = ["--commit", args.commit] if args.commit else []
        folders = [site, ROOT, ROOT / "kernels", TOOLS, os.environ.get("PYTHONPATH")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder),
            "VLLM_CACHE_ROOT": str(args.work / "vllm-cache"),
            "TMPDIR": str(args.work / "tmp"),
        }
        (args.work / "tmp").mkdir(exist_ok=True)
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def run(self, name: str, *command: str | Path, cpu: bool = False) -> bool:
        """Run a Python command to its end; True if it succeeded. Its output goes to a log, the end of it is printed."""
        log, start = self.out / f"{name}.log", time.monotonic()
        environment = self.environment | ({"JAX_PLATFORMS": "cpu"} if cpu else {})
        with log.open("w") as file:
            try:
                words = [sys.executable, *map(str, command)]
                output = {"stdout": file, "stderr": subprocess.STDOUT}
                code = subprocess.run(words, env=environment, cwd=ROOT, timeout=LONGEST_S, **output).returncode
            except subprocess.TimeoutExpired:
                code = 124
        seconds = time.monotonic() - start
        for left in (self.work / "tmp").glob("*/vllm.log"):  # logs of failures
            shutil.move(left, self.out / f"{name}-vllm.log")
        self.results.append({"name": name, "code": code, "seconds": seconds})
        (self.out / "summary.json").write_text(json.dumps(self.results, indent=1) + "\n")
        print(f"== {name}: exit code {code} after {seconds:.0f} s", flush=True)
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-(40 if code else 14) :]), flush=True)
        return code == 0

    def bundled(self) -> None:
        """The bundled policy trained and exported, once in `work`; a run that lies there as `tiny` is taken."""
        run = self.work / "tiny"
        if not (run / "adapter").exists():
            self.run("tiny-train", "-m", "qerl_jax.train", "--output-dir", run, "--overwrite", cpu=True)
        for kind in ("vllm", "merged", "merged-nvfp4"):
            if not (self.work / f"tiny-{kind}").exists():
                out = self.work / f"tiny-{kind}"
                self.run(f"tiny-export-{kind}", "-m", "qerl_jax.export", run, out, "--as", kind, cpu=True)

    def shape(self, size: str) -> tuple[Path, Path]:
        """A random NVFP4 checkpoint of a published shape, with Qwen2.5's tokenizer, and a random adapter; once."""
        from bench_vllm import adapter_directory

        tokenizer, model, adapter = self.work / "tokenizer", self.work / size, self.work / f"{size}-lora-{RANK}"
        if not tokenizer.exists():
            shutil.copytree(ROOT / "tests" / "data" / "qwen2.5_tokenizer", tokenizer)
            for packed in tokenizer.glob("*.xz"):
                packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
        if not model.exists():
            options = ("--format", "nvfp4", "--tokenizer", tokenizer)
            self.run(f"{size}-make", TOOLS / "make_checkpoint.py", size, model, *options, cpu=True)
        if not adapter.exists():
            adapter_directory(size, RANK, self.work)
        return model, adapter

    def compare(self, name: str, model: Path, adapter: Path, *options: str) -> None:
        """`compare_vllm.py`."""
        out = ("--name", name, "--out", self.out, *self.commit)
        self.run(f"{name}-compare", TOOLS / "compare_vllm.py", model, "--adapter", adapter, *out, *options)

    def tiny(self) -> None:
        """Stage `tiny`."""
        self.bundled()
        base, adapter = (self.work / "tiny-vllm" / part for part in ("base", "adapter"))
        sampling = ("--temperature", "1", "--top-p", "1", "--max-completion-length", "52", "--num-generations", "8")
        self.compare("tiny", base, adapter, "--new-tokens", "52", "--samples", "128")
        for backend in ("jax", "vllm"):
            files = ("--output", self.out / f"tiny-{backend}.json", "--batch-size", "256", "--backend", backend)
            problems = ("--dataset", "arithmetic", "--samples", "200")
            flags = (base, "--adapter", adapter, *problems, *sampling, *files)
            self.run(f"tiny-evaluate-{backend}", "-m", "qerl_jax.evaluate", *flags)

    def train(self) -> None:
        """Stage `train`."""
        model, _ = self.shape("0.5B")
        run = self.work / "train"
        flags = {
            **{"--model": model, "--dataset": "arithmetic", "--output-dir": run, "--rollout-backend": "vllm"},
            **{"--max-steps": 2, "--batch-size": 32, "--num-generations": 8, "--lora-rank": RANK, "--num-stages": 3},
            **{"--max-prompt-length": 256, "--max-completion-length": 128, "--learning-rate": "1e-3"},
            **{"--warmup-ratio": 0, "--save-steps": 1, "--eval-dataset": "arithmetic", "--eval-samples": 16},
        }
        words = [str(word) for pair in flags.items() for word in pair]
        done = self.run("0.5B-train", "-m", "qerl_jax.train", *words, "--train-norms", "--overwrite")
        if (run / "metrics.jsonl").exists():
            shutil.copy(run / "metrics.jsonl", self.out / "train-metrics.jsonl")
        if done:
            self.compare("0.5B-trained", model, run / "adapter")

    def serve(self) -> None:
        """Stage `serve`."""
        self.bundled()
        base, adapter = (self.work / "tiny-vllm" / part for part in ("base", "adapter"))
        for kind in ("merged", "merged-nvfp4"):
            self.run(f"serve-{kind}", TOOLS / "check_vllm.py", "--answer", self.work / f"tiny-{kind}")
        self.run("serve-vllm", TOOLS / "check_vllm.py", "--answer", base, "--adapter", adapter)


def answer(model: Path, adapter: Path | None) -> None:
    """Print the greedy answer of stock vLLM to `QUESTION`, as the README has it from transformers."""
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    network = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in {**defaults, **network, "VLLM_NO_USAGE_STATS": "1"}.items():
        os.environ.setdefault(name, value)
    import vllm
    from transformers import AutoTokenizer
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": RANK} if adapter else {}
    llm = vllm.LLM(model=str(model), skip_tokenizer_init=True, gpu_memory_utilization=0.3, max_num_seqs=8, **lora)
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": QUESTION}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    sampling = vllm.SamplingParams(temperature=0, max_tokens=52, detokenize=False)
    request = LoRARequest("trained", 1, str(adapter)) if adapter else None
    outputs = llm.generate([{"prompt_token_ids": list(tokens)}], sampling, use_tqdm=False, lora_request=request)
    print(f"vLLM {vllm.__version__}, {model.name}: {tokenizer.decode(outputs[0].outputs[0].token_ids)}", flush=True)


def unpack(archive: Path, work: Path) -> Path:
    """The folder of an archive's packages, once in `work`."""
    site = work / "site"
    if not (site / "vllm").exists():
        with tarfile.open(archive) as packed:
            packed.extractall(site, filter="data")
    return site


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-archive", type=Path, help="vLLM's packages; without it they are installed")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    folder = Path(tempfile.gettempdir()) / "check-vllm"
    parser.add_argument("--work", type=Path, default=folder, help="folder of checkpoints")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--adapter", type=Path, help=argparse.SUPPRESS)
    add_commit(parser)
    args = parser.parse_args()
    if args.answer is not None:
        answer(args.answer, args.adapter)
        return 0
    if args.out is None:
        parser.error("--out is required")
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    checks = Checks(args, args.vllm_archive and unpack(args.vllm_archive, args.work))
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # for `adapter_directory`
    for stage in args.stages:
        if stage in ("0.5B", "7B"):
            checks.compare(f"{stage}-nvfp4", *checks.shape(stage))
        else:
            getattr(checks, stage)()
    print("\n".join(f"{row['name']}: exit code {row['code']}, {row['seconds']:.0f} s" for row in checks.results))
    return int(any(row["code"] for row in checks.results))


if __name__ == "__main__":
    sys.exit(main())
