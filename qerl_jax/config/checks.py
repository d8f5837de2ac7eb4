"""What a Config refuses: values out of range, and values that contradict each other."""

from __future__ import annotations

import dataclasses
import typing

from qerl_jax import aqn
from qerl_jax.config.fields import Config
from qerl_jax.config.values import ConfigError
from qerl_jax.models.formats import WEIGHT_FORMATS
from qerl_jax.models.lora import LoraConfig

_AT_LEAST: dict[str, float] = {
    "max_prompt_length": 1,
    "max_completion_length": 1,
    "save_steps": 1,
    "save_total_limit": 1,
    "batch_size": 1,
    "num_iterations": 1,
    "num_generations": 2,
    "reward_workers": 0,
    "max_refill_rounds": 0,
    "logprob_chunk_size": 1,
    "eval_samples": 1,
    "eval_num_generations": 1,
    "eval_batch_size": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "lora_rank": 0,
    "beta": 0,
    "epsilon": 0,
    "epsilon_high": 0,
    "seed": 0,
}
_AT_MOST: dict[str, float] = {
    "batch_size": 1e6,  # completions, whose tokens are held at once; compilers take minutes and more beyond
    "eval_batch_size": 1e6,
    "max_refill_rounds": 100,  # a step whose rewards stay equal takes all of them
    "reward_workers": 1024,  # processes, started at once
    "reward_timeout": 1e6,  # seconds; the system's calls that wait take little more
}
_ABOVE_ZERO = (
    "num_train_epochs",
    "temperature",
    "max_grad_norm",
    "adam_epsilon",
    "rollout_memory_gb",
    "tokens_per_micro_batch",
    "update_memory_gb",
    "reward_timeout",
    "overlong_buffer",
    "importance_sampling_cap",
    "importance_sampling_floor",
    "delta",
    "lora_alpha",
)


def check(config: Config) -> None:
    """Raise ConfigError for a config that cannot be run, naming the field, and both values where two contradict."""
    _check_ranges(config)
    _check_contradictions(config)


def _check_ranges(config: Config) -> None:
    for name, low in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{name} must be at least {low}, got {value}")
    for name, high in _AT_MOST.items():
        value = getattr(config, name)
        if value is not None and value > high:
            raise ConfigError(f"{name} must be at most {high:,.0f}, got {value:g}")
    for name in _ABOVE_ZERO:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} must be above 0, got {value}")
    if config.max_steps < 1 and config.max_steps != -1:
        raise ConfigError(f"max_steps must be at least 1, or -1 for num_train_epochs, got {config.max_steps}")
    for name in ("adam_beta1", "adam_beta2", "warmup_ratio"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name} must lie in [0, 1), got {getattr(config, name)}")


def _check_contradictions(config: Config) -> None:
    def divides(part: str, whole: str) -> None:
        if getattr(config, whole) % getattr(config, part):
            raise ConfigError(f"{part} {getattr(config, part)} does not divide {whole} {getattr(config, whole)}")

    divides("num_generations", "batch_size")
    _check_doubles(config)
    _check_full(config)
    _check_datasets(config)
    _check_rewards(config)
    _check_vllm(config)
    if not config.output_dir:
        raise ConfigError("output_dir is empty: name the directory that the run writes to")
    if config.lora_rank and not config.lora_target_modules:
        raise ConfigError(
            f"lora_rank {config.lora_rank}, but lora_target_modules is empty: name at least one projection"
        )
    if config.lora_rank == 0 and not config.trains_norms:
        raise ConfigError("lora_rank 0 without train_norms: there would be nothing to train")
    if config.lora_rank == 0 and config.noise_target == "lora":
        raise ConfigError("noise_target 'lora' contradicts lora_rank 0: there are no adapters that could get noise")
    if config.overwrite and config.resume != "never":
        raise ConfigError(f"overwrite deletes the run that resume {config.resume!r} would resume")
    if config.loss_type == "cispo" and config.upper_clip < 1:
        raise ConfigError(
            f"epsilon_high {config.epsilon_high} would cap the ratio of loss_type 'cispo', which starts at 1: "
            "set it to at least 1, or leave it out (5)"
        )
    if config.delta is not None and config.loss_type == "cispo":
        raise ConfigError(
            f"delta {config.delta} has no meaning for loss_type 'cispo', whose ratio is capped by epsilon_high"
        )
    if config.delta is not None and config.delta <= 1 + config.upper_clip:
        raise ConfigError(f"delta {config.delta} must exceed the upper clip 1 + {config.upper_clip}")
    floor, cap = config.importance_sampling_floor, config.importance_sampling_cap
    if floor is not None and (cap is None or floor >= cap):
        raise ConfigError(f"importance_sampling_floor {floor} must be below importance_sampling_cap {cap}")
    if cap is None and config.importance_sampling_mode != "token_truncate":
        raise ConfigError(
            f"importance_sampling_mode {config.importance_sampling_mode!r} has no meaning without "
            "importance_sampling_cap"
        )
    try:
        aqn.check_schedule(config)
        LoraConfig(config.lora_rank, config.lora_alpha, config.use_rslora, config.lora_target_modules)
        _ = config.sampling
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        _ = config.eval_sampling
    except ValueError as error:
        raise ConfigError(f"eval_{error}") from error  # it begins with the name of Sampling's field
    formats = typing.get_args(typing.get_type_hints(Config)["weight_format"].__args__[0])
    assert {*WEIGHT_FORMATS, "full"} == set(formats)


def _check_full(config: Config) -> None:
    """Settings of adapters, which full fine-tuning would leave without effect, and vLLM, which takes adapters only."""
    if not config.is_full:
        return
    if config.rollout_backend == "vllm":
        raise ConfigError(
            "rollout_backend 'vllm' contradicts weight_format 'full': it loads the checkpoint once and then takes "
            "adapters only"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    for name in ("adapter", "lora_rank", "lora_alpha", "use_rslora", "lora_target_modules", "noise_target"):
        value = getattr(config, name)
        if value != defaults[name] and (name, value) != ("lora_rank", 0):
            value = list(value) if isinstance(value, tuple) else value
            raise ConfigError(
                f"{name} {value!r} contradicts weight_format 'full', which trains all weights and has no adapters: "
                f"leave {name} out"
            )


def _check_doubles(config: Config) -> None:
    for field in ("dataset", "reward_columns", "report_to", "lora_target_modules"):
        names = getattr(config, field)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            instead = ": give it more weight by dataset_weights" if field == "dataset" else ""
            raise ConfigError(f"{field} names {twice[0]!r} twice{instead}")


def _check_vllm(config: Config) -> None:
    """What vLLM cannot do, or does in another way."""
    share = config.vllm_gpu_memory_utilization
    if config.rollout_backend != "vllm":
        if share is not None:
            raise ConfigError(
                f"vllm_gpu_memory_utilization {share} has no meaning for rollout_backend {config.rollout_backend!r}"
            )
        return
    if share is not None and not 0 < share <= 0.9:
        raise ConfigError(f"vllm_gpu_memory_utilization must lie in (0, 0.9], got {share}")
    reasons = {
        "dtype": ("bfloat16", "vLLM's attention computes in 16 bits"),
        "kv_cache_dtype": ("auto", "its FP8 cache has scales of its own"),
        "batch_invariant": (False, "its completions depend on their batch"),
        "deterministic": (False, "its kernels do not repeat bit for bit"),
    }
    for name, (value, reason) in reasons.items():
        if getattr(config, name) != value:
            raise ConfigError(f"{name} {getattr(config, name)!r} contradicts rollout_backend 'vllm': {reason}")
    if config.min_p > 0 and config.top_p < 1:
        raise ConfigError(
            f"min_p {config.min_p} with top_p {config.top_p} contradicts rollout_backend 'vllm': it applies min_p "
            "first, and the trainer top_p"
        )
    for name in ("temperature", "eval_temperature"):
        if 0 < getattr(config, name) < 0.01:
            raise ConfigError(
                f"{name} {getattr(config, name)} contradicts rollout_backend 'vllm', which samples at 0.01 or above"
            )


def _check_datasets(config: Config) -> None:
    if not config.dataset:
        raise ConfigError("dataset is empty: name at least one")
    if config.dataset_weights is None:
        return
    if len(config.dataset_weights) != len(config.dataset):
        raise ConfigError(f"{len(config.dataset)} dataset but {len(config.dataset_weights)} dataset_weights")
    for name, weight in zip(config.dataset, config.dataset_weights, strict=True):
        if weight <= 0:
            raise ConfigError(f"dataset_weights must be above 0, got {weight} for {name!r}: leave that dataset out")


def _check_rewards(config: Config) -> None:
    if config.overlong_tokens > config.max_completion_length:
        raise ConfigError(
            f"overlong_buffer {config.overlong_buffer} exceeds max_completion_length {config.max_completion_length}"
        )
    if config.reward_funcs is None:
        if config.reward_weights is not None:
            raise ConfigError(f"reward_weights {list(config.reward_weights)} without reward_funcs")
        return
    if not config.reward_funcs:
        raise ConfigError("reward_funcs is empty: there would be nothing to learn from")
    if config.reward_weights is not None and len(config.reward_funcs) != len(config.reward_weights):
        raise ConfigError(f"{len(config.reward_funcs)} reward_funcs but {len(config.reward_weights)} reward_weights")
    if len(set(config.reward_funcs)) != len(config.reward_funcs):
        raise ConfigError(f"reward_funcs {list(config.reward_funcs)} names a reward twice")
