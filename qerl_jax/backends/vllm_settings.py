"""When vLLM can take the place of the trainer's own engine, and the settings it then gets."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from qerl_jax.checkpoint import hf_config
from qerl_jax.config import Config, ConfigError

VERSION = "0.22.1"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that max_lora_rank may have
MOST_SEQUENCES = 256  # decoded together


def check(config: Config, base: Path, devices: int = 1, command: str = "rollout_backend") -> None:
    """Raise ConfigError where vLLM is missing or another version, or would compute another policy than the trainer; and
    for several devices.

    Args:
      config: settings; `config.checks` has refused those that contradict each other.
      base: directory of the model.
      devices: of the run.
      command: name of the setting that asks for vLLM.
    """
    asked = f"{command} 'vllm'"
    if devices > 1:
        raise ConfigError(f"{asked} uses one GPU, this run has {devices}: --devices 1")
    refuse_version(next((found.version for found in importlib.metadata.distributions(name="vllm")), None), asked)
    stored = hf_config.stored_quantization(base)
    if stored is not None and stored.layout.name == "modelopt":
        raise ConfigError(
            f"{asked} cannot run {base}, NVFP4 by ModelOpt: vLLM would round activations as well where the GPU can"
        )
    if stored is None and config.weight_format not in (None, "bf16"):
        raise ConfigError(
            f"{asked} cannot run weight_format {config.weight_format!r}, quantized while loading: vLLM would compute "
            f"with the unquantized {base}; write the quantized model with python -m qerl_jax.quantize and name that"
        )


def refuse_version(found: str | None, asked: str) -> None:
    """Raise ConfigError for another version of vLLM than `VERSION`; None: there is none."""
    if found is None:
        install = "pip install 'qerl-jax[vllm]'"
        raise ConfigError(f"{asked} needs vLLM {VERSION}, which is not installed: {install}")
    if found.partition("+")[0] != VERSION:
        raise ConfigError(
            f"{asked} needs vLLM {VERSION}, and {found} is installed: the layer norms inside its model are written, "
            f"and each version has these elsewhere; pip install 'vllm=={VERSION}'"
        )


def engine_options(
    config: Config, base: Path, width: int, sequences: int, rank: int, memory_share: float
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`.

    Args:
      config: settings.
      base: directory of the model.
      width: most tokens of prompt and completion together.
      sequences: most completions that are asked for together.
      rank: LoRA rank of the adapter; 0: none.
      memory_share: share of the GPU's memory that vLLM takes.
    """
    if rank > RANKS[-1]:
        raise ConfigError(f"an adapter of rank {rank}: vLLM takes at most {RANKS[-1]}")
    options = {
        "model": str(base),
        "dtype": config.dtype,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # no sampling settings of the model's own
        "logprobs_mode": "processed_logprobs",  # after temperature and truncation
        "enable_prefix_caching": False,  # keys and values of another step's policy must not be found
        "max_model_len": width,
        "max_num_seqs": min(sequences, MOST_SEQUENCES),
        "gpu_memory_utilization": memory_share,
        "seed": config.seed,
        "disable_log_stats": True,
        "additional_config": {"layer_norms": "float32"},  # so that no program compiled for bf16 norms is loaded
    }
    if config.rollout_memory_gb is not None:
        options["kv_cache_memory_bytes"] = int(1e9 * config.rollout_memory_gb)
    if rank:
        options |= {"enable_lora": True, "max_lora_rank": next(r for r in RANKS if r >= rank), "max_loras": 1}
    return options
