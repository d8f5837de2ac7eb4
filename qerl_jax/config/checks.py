"""What a Config refuses: values out of range, and values that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qerl_jax.config.fields import Config
from qerl_jax.config.values import ConfigError

_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "be at least 1",
        lambda value: value >= 1,
        "max_prompt_length max_completion_length save_steps save_total_limit batch_size num_iterations "
        "logprob_chunk_size eval_samples eval_num_generations eval_batch_size lora_rank",
    ),
    ("be at least 2", lambda value: value >= 2, "num_generations"),
    (
        "be at least 0",
        lambda value: value >= 0,
        "reward_workers max_refill_rounds learning_rate weight_decay beta epsilon epsilon_high seed sigma_start "
        "sigma_end",
    ),
    (
        "be above 0",
        lambda value: value > 0,
        "num_train_epochs temperature max_grad_norm adam_epsilon rollout_memory_gb tokens_per_micro_batch "
        "update_memory_gb reward_timeout overlong_buffer importance_sampling_cap importance_sampling_floor delta "
        "lora_alpha",
    ),
    ("lie in [0, 1)", lambda value: 0 <= value < 1, "adam_beta1 adam_beta2 warmup_ratio"),
    ("lie in (0, 0.9]", lambda value: 0 < value <= 0.9, "vllm_gpu_memory_utilization"),
    ("be at least 1, or -1 for num_train_epochs", lambda value: value >= 1 or value == -1, "max_steps"),
)


def check(config: Config) -> None:
    """Raise ConfigError for a config that cannot be run, naming the field, and both values where two contradict."""
    for words, is_inside, names in _RANGES:
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not is_inside(value):
                raise ConfigError(f"{name} must {words}, got {value}")
    for contradictions in (_of_lists, _of_training, _of_noise, _of_vllm):
        if message := next(contradictions(config), None):
            raise ConfigError(message)
    try:
        _ = config.lora, config.sampling
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        _ = config.eval_sampling
    except ValueError as error:
        raise ConfigError(f"eval_{error}") from error  # it begins with the name of Sampling's field


def _of_lists(c: Config) -> Iterator[str]:
    for field in ("dataset", "reward_columns", "reward_funcs", "report_to", "lora_target_modules"):
        names = getattr(c, field) or ()
        for name in names:
            if names.count(name) > 1:
                yield f"{field} names {name!r} twice" + (": weigh it by dataset_weights" if field == "dataset" else "")
    if not c.dataset:
        yield "dataset is empty: name at least one, or leave it out where train(train_dataset=…) replaces it"
    if c.dataset_weights is not None:
        if len(c.dataset_weights) != len(c.dataset):
            yield f"{len(c.dataset)} dataset but {len(c.dataset_weights)} dataset_weights"
        for name, weight in zip(c.dataset, c.dataset_weights, strict=False):
            if weight <= 0:
                yield f"dataset_weights must be above 0, got {weight} for {name!r}: leave that dataset out"
    if c.prompt_format is not None and c.system_prompt is not None:
        yield f"prompt_format {c.prompt_format!r} and system_prompt {c.system_prompt[:40]!r}: give one of them"
    if c.reward_funcs == ():
        yield "reward_funcs is empty: there would be nothing to learn from"
    if None not in (c.reward_funcs, c.reward_weights) and len(c.reward_funcs) != len(c.reward_weights):
        counts = f"{len(c.reward_funcs)} reward_funcs but {len(c.reward_weights)} reward_weights"
        yield f"{counts}: give each one, or reward_weights None"
    if not c.lora_target_modules:
        yield "lora_target_modules is empty: name at least one projection"


def _of_training(c: Config) -> Iterator[str]:
    if not c.output_dir:
        yield "output_dir is empty: name the directory that the run writes to"
    if c.overwrite and c.resume != "never":
        yield f"overwrite deletes the run that resume {c.resume!r} would resume"
    if c.batch_size % c.num_generations:
        yield f"num_generations {c.num_generations} does not divide batch_size {c.batch_size}"
    if c.overlong_tokens > c.max_completion_length:
        yield f"overlong_buffer {c.overlong_buffer} exceeds max_completion_length {c.max_completion_length}"
    if c.loss_type == "cispo" and c.upper_clip < 1:
        yield (
            f"epsilon_high {c.epsilon_high} would cap the ratio of loss_type 'cispo', which starts at 1: set it to at "
            "least 1, or leave it out (5)"
        )
    if c.loss_type == "cispo" and c.delta is not None:
        yield f"delta {c.delta} has no meaning for loss_type 'cispo', whose ratio is capped by epsilon_high"
    if c.delta is not None and c.delta <= 1 + c.upper_clip:
        yield f"delta {c.delta} must exceed the upper clip 1 + {c.upper_clip}"
    floor, cap, mode = c.importance_sampling_floor, c.importance_sampling_cap, c.importance_sampling_mode
    if floor is not None and (cap is None or floor >= cap):
        yield f"importance_sampling_floor {floor} must be below importance_sampling_cap {cap}"
    if cap is None and mode != "token_truncate":
        yield f"importance_sampling_mode {mode!r} has no meaning without importance_sampling_cap"


def _of_noise(c: Config) -> Iterator[str]:
    if c.sigma_start == 0 and c.sigma_end > 0:
        yield f"sigma_start 0 with sigma_end {c.sigma_end}: the schedule decays; set both to 0 for no noise"
    if c.sigma_start > 0 and c.noise_schedule == "exponential" and c.sigma_end == 0:
        yield f"an exponential noise_schedule cannot end at sigma_end {c.sigma_end}: it must be above 0"
    fewest = 3 if c.noise_formula == "qerl" else 2
    if c.sigma_start > 0 and c.num_stages < fewest:
        yield f"num_stages {c.num_stages} is too few for noise_formula {c.noise_formula!r}: at least {fewest}"


def _of_vllm(c: Config) -> Iterator[str]:
    """What vLLM cannot do, or does in another way."""
    if c.rollout_backend != "vllm":
        if (share := c.vllm_gpu_memory_utilization) is not None:
            yield f"vllm_gpu_memory_utilization {share} has no meaning for rollout_backend {c.rollout_backend!r}"
        return
    for is_wrong, what, reason in (
        (c.dtype != "bfloat16", f"dtype {c.dtype!r}", "vLLM's attention computes in 16 bits"),
        (c.batch_invariant, "batch_invariant True", "its completions depend on their batch"),
        (c.deterministic, "deterministic True", "its kernels do not repeat bit for bit"),
        (0 < c.temperature < 0.01, f"temperature {c.temperature}", "it samples at 0.01 or above"),
        (0 < c.eval_temperature < 0.01, f"eval_temperature {c.eval_temperature}", "it samples at 0.01 or above"),
        (
            c.min_p > 0 and c.top_p < 1,
            f"min_p {c.min_p} with top_p {c.top_p}",
            "it applies min_p first, and the trainer top_p",
        ),
    ):
        if is_wrong:
            yield f"{what} contradicts rollout_backend 'vllm': {reason}"
