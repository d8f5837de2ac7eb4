"""Rollouts by vLLM of the published shapes with random weights: the rival of `bench_rollout.py`, timed as that is.

    python tools/bench_vllm.py 7B --format nvfp4 --batch 8 32 128 --out tools/results/nvidia-h200

It needs vLLM (0.22.1 was measured) and this project in one environment: `pip install vllm`, then `pip install --no-deps
.` and jax; or a folder with vLLM's packages on PYTHONPATH. vLLM runs as it does by itself, with torch.compile, CUDA
graphs for each batch size and its own choice of kernels, but in this process and with its native sampler. Prompts are
distinct, prefix caching is off, completions have a fixed length (no EOS), temperature 1, the sampled tokens'
log-probabilities on, one adapter of `--lora-rank` on all seven projections.

Weights are drawn on the GPU in place of a checkpoint's, with the statistics of `random_policy.py`: codes uniform,
scales 32 to 60, weights of standard deviation 0.02. (vLLM's own `dummy` weights give negative block scales.) The engine
is refused where its projections are not those of `--format`.

Decode milliseconds a step: the time of a long rollout less that of a 32-token one, over the difference in tokens;
medians of `--repeats` after a first run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from make_checkpoint import SIZES, hf_config
from record import add_commit, shell, write_rows

from qerl_jax.checkpoint import names
from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.checkpoint.layout_nvfp4 import NVFP4
from qerl_jax.checkpoint.peft_config import peft_config
from qerl_jax.checkpoint.safetensors import save
from qerl_jax.models.lora import PROJECTIONS, LoraConfig

SHORT = 32
LOAD_FORMAT = "qerl_random"
VOCABULARY = 151643  # below the special tokens
STD = 0.02  # initializer_range of the published models
PAGE = 16  # tokens of a block of the KV cache
LAYERS = {"nvfp4": "CompressedTensorsW4A16Fp4", "bf16": "UnquantizedLinearMethod"}  # classes for projections


def model_directory(size: str, weight_format: str, folder: Path) -> Path:
    """A checkpoint's config.json, without weights."""
    config = hf_config(size)
    if weight_format == "nvfp4":
        config["quantization_config"] = NVFP4.quantization_config(np.dtype(ml_dtypes.bfloat16), ())
    directory = folder / f"{size}-{weight_format}"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def adapter_directory(size: str, rank: int, folder: Path) -> Path:
    """A random LoRA of all projections as PEFT stores it."""
    config, rng = parse_config(hf_config(size), {}, size), np.random.default_rng(0)
    values = rng.standard_normal(1 << 24, np.float32).astype(ml_dtypes.bfloat16)

    def draw(*shape: int) -> np.ndarray:
        start = rng.integers(0, len(values) - np.prod(shape))
        return values[start : start + np.prod(shape)].reshape(shape) * ml_dtypes.bfloat16(STD)

    tensors = {}
    for layer in range(config.num_layers):
        for projection in PROJECTIONS:
            n, k = config.projection_shapes()[projection]
            module = f"base_model.model.{names.projection(layer, projection)}"
            tensors[f"{module}.lora_A.weight"] = draw(rank, k)
            tensors[f"{module}.lora_B.weight"] = draw(n, rank)
    directory = folder / f"{size}-lora-{rank}"
    directory.mkdir()
    save(directory / "adapter_model.safetensors", tensors)
    (directory / "adapter_config.json").write_text(json.dumps(peft_config(LoraConfig(rank=rank), size)))
    return directory


def fill(name: str, values) -> bool:
    """Random values of one parameter, a torch tensor, in place, in the layout of the checkpoint.

    False for a parameter that is none of a Qwen2.5 checkpoint's: it stays as vLLM made it, as with a real checkpoint.
    """
    import torch

    leaf = name.rpartition(".")[2]
    if leaf == "weight_packed":
        values.random_(0, 256)
    elif leaf == "weight_scale":  # bytes 0x60 to 0x67 are 32 to 60; codes have rms 3.0
        values.view(torch.uint8).random_(0x60, 0x68)
    elif leaf == "weight_global_scale":
        values.fill_(46 * 3.0 / STD)
    elif leaf == "weight" and values.dim() == 1:
        values.fill_(1)
    elif leaf in ("weight", "bias") and values.is_floating_point():
        values.normal_(0, STD)
    else:
        return False
    return True


def register_random_weights() -> None:
    """Makes vLLM's load format LOAD_FORMAT: `fill` for every parameter, before the kernels' own repacking."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(LOAD_FORMAT)
    class RandomWeights(DummyModelLoader):
        """Random weights in place of a checkpoint's."""

        def load_weights(self, model, model_config) -> None:
            left = {name for name, parameter in model.named_parameters() if not fill(name, parameter.data)}
            print(
                "left as vLLM made them:", *sorted({name.rpartition(".")[2] for name in left}) or ["none"], flush=True
            )


def layers_of(model) -> list[str]:
    """The class that computes a projection, for each projection of the first layer."""
    found = []
    for name, module in model.named_modules():
        layer = getattr(module, "base_layer", module)
        if ".layers.0." in f".{name}" and name.endswith("_proj") and hasattr(layer, "quant_method"):
            scheme = getattr(layer, "scheme", None)
            found.append(type(layer.quant_method if scheme is None else scheme).__name__)
    return found


def engine_options(args: argparse.Namespace, directory: Path) -> dict:
    """Arguments of `vllm.LLM`. The cache holds the largest batch at its longest, so that nothing is preempted."""
    config = parse_config(hf_config(args.size), {}, args.size)
    length = args.prompt_len + args.new_tokens
    tokens = max(args.batch) * -(-length // PAGE) * PAGE + 16 * PAGE
    token_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    options = {
        "model": str(directory),
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": length,
        "max_num_seqs": max(args.batch),
        "max_num_batched_tokens": 16384,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.01,  # not used: the next line says how large the cache is
        "kv_cache_memory_bytes": tokens * token_bytes,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": sorted(args.batch)},
    }
    adapters = {"enable_lora": True, "max_lora_rank": args.lora_rank, "max_loras": 1}
    return options | (adapters if args.lora_rank else {})


class Engine:
    """vLLM with one model and at most one adapter."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import vllm
        from vllm.lora.request import LoRARequest

        register_random_weights()
        self.args, self.sampling, self.random = args, vllm.SamplingParams, random.Random(0)
        self.llm = vllm.LLM(**engine_options(args, model_directory(args.size, args.format, folder)))
        self.lora = None
        if args.lora_rank:
            self.lora = LoRARequest("random", 1, str(adapter_directory(args.size, args.lora_rank, folder)))
        found = {layer for of_rank in self.llm.apply_model(layers_of) for layer in of_rank}
        if found != {LAYERS[args.format]}:
            raise SystemExit(f"vLLM's projections are {sorted(found)}, not {LAYERS[args.format]}")

    def seconds(self, batch: int, new_tokens: int) -> float:
        """Wall time of a rollout of new prompts.

        Raises SystemExit where a completion has another length, or a token no finite log-probability.
        """
        tokens = [self.random.choices(range(VOCABULARY), k=self.args.prompt_len) for _ in range(batch)]
        prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
        how = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
        sampling = self.sampling(max_tokens=new_tokens, **how)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=self.lora)
        elapsed = time.perf_counter() - start
        completions = [output.outputs[0] for output in outputs]
        if [len(completion.token_ids) for completion in completions] != [new_tokens] * batch:
            raise SystemExit(f"completions do not all have {new_tokens} tokens")
        for completion in completions:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            if not all(-1e4 < at[token].logprob <= 0 for token, at in pairs):
                raise SystemExit("a log-probability is not finite")
        return elapsed


def measure(engine: Engine, args: argparse.Namespace, batch: int) -> dict:
    """A row of results."""
    engine.seconds(batch, 4)
    long, short = (
        statistics.median(engine.seconds(batch, tokens) for _ in range(args.repeats))
        for tokens in (args.new_tokens, SHORT)
    )
    return {
        "model": args.size.lower(),
        "format": args.format,
        "impl": "vllm",
        "batch": batch,
        "prompt_len": args.prompt_len,
        "new_tokens": args.new_tokens,
        "lora_rank": args.lora_rank,
        "group": 1,
        "lengths": "fixed",
        "engine": "calling process",
        "sampler": "native",
        "projections": LAYERS[args.format],
        "tokens_per_s": batch * args.new_tokens / long,
        "decode_ms_per_step": 1e3 * (long - short) / (args.new_tokens - SHORT),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--format", choices=LAYERS, default="nvfp4")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256, help=f"more than {SHORT}")
    parser.add_argument("--lora-rank", type=int, default=32, help="0 for an engine without adapters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    add_commit(parser)
    args = parser.parse_args()
    if args.new_tokens <= SHORT:
        parser.error(f"--new-tokens must be more than {SHORT}")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `layers_of`, a function that the engine is given
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(args, Path(folder))
        for batch in args.batch:
            engine.seconds(batch, 4)  # loads the adapter, compiles its kernels and the sampler
        gc.collect()
        gc.freeze()  # as vLLM does in its own process
        import torch
        import vllm

        gpu = shell("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0]
        about = {"gpu": gpu, "vllm": vllm.__version__, "torch": torch.__version__}
        for batch in args.batch:
            row = measure(engine, args, batch)
            print(
                f"vLLM {args.size} {args.format} batch {batch:4d}: {row['tokens_per_s']:.0f} tokens/s, decode "
                f"{row['decode_ms_per_step']:.3f} ms a step",
                flush=True,
            )
            write_rows(args.out / "vllm.json", [row], args.commit, about)


if __name__ == "__main__":
    main()
