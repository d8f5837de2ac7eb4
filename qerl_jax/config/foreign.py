"""Names of other programs for what a field here does, or the reason why there is
none: one table for the answers to flags, YAML files and arguments of `Config`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from qerl_jax.config.values import ConfigError, is_none


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A name of another program.

    Attributes:
      origin: the programs that have it.
      fields: fields of `Config` with its meaning; none where nothing here has it.
      note: how to convert it, or why there is none.
    """

    origin: str
    fields: tuple[str, ...] = ()
    note: str = ""


def _names(origin: str, names: str, note: str, fields: tuple[str, ...] = ()) -> dict[str, Foreign]:
    """Several names with one answer."""
    return dict.fromkeys(names.split(), Foreign(origin, fields, note))


UNSUPPORTED = {
    "multi-turn rollouts": "rollout_func environment_factory env_name max_turns num_turns multi_turn",
    "tools": "tools tool_parser tool_call_parser max_tool_calls",
    "vision": "image_column min_pixels max_pixels limit_mm_per_prompt",
    "mixture-of-experts models": "num_experts expert_parallel_size enable_expert_parallel",
    "asynchronous rollouts": "async_rollout async_rollouts max_staleness num_rollout_workers",
    "pipeline parallelism and FSDP": "pipeline_parallel_size deepspeed fsdp",
    "models other than Qwen2.5, Qwen3 (dense) and Llama 3": "",
    "GGUF and GPTQ checkpoints": "gguf_file",
    "full fine-tuning": "full_finetuning",
}
"""README's list of what is not supported, and the names by which people ask for it."""

_MINI_BATCHES = (
    "an update uses the whole rollout; mini-batches would take a pass of their own for the old log-probabilities"
)
_BATCH = "all completions of a rollout"
_ENGINE = "neither the built-in engine nor rollout_backend vllm has it"
_FIXED_REFERENCE = "the reference of the KL penalty is the model's checkpoint and stays fixed"
_OTHER_LOSS = "not built in; a token_loss of your own can have it"
_ENTROPY = "a token_loss of your own can have one (docs/research.md)"
_NO_IMAGES = "text models only"
_NO_TOOLS = "no tool calls in rollouts"
_METRICS = "metrics.jsonl has every step"
_COMPLETIONS = "completions/ has every completion of every step"
_OPTIMIZER = "AdamW in fp32; for another optimizer or schedule train(config, optimizer=…)"
_CHECKPOINT = "a checkpoint holds all that resuming needs; the newest save_total_limit stay"
_PRECISION = "log-probabilities are always computed in fp32"

FOREIGN: dict[str, Foreign] = {
    name: Foreign("other programs", (), f"no {what}") for what, names in UNSUPPORTED.items() for name in names.split()
} | {
    **_names(
        "other programs",
        "num_gpus num_devices gpus num_processes nproc_per_node n_gpus_per_node data_parallel_size",
        "all GPUs of the machine are used; the flag --devices takes a number",
    ),
    **_names("other programs", "tensor_parallel_size", "it is no field, but the flag --tensor-parallel-size"),
    # model
    "model_name_or_path": Foreign("TRL", ("model",)),
    "model_name": Foreign("Unsloth, QeRL", ("model",)),
    "pretrained_model_name_or_path": Foreign("transformers", ("model",)),
    "model_revision": Foreign("TRL", ("model",), "download another revision and name its directory"),
    "trust_remote_code": Foreign("TRL", (), "no code of a checkpoint is ever run"),
    "model_init_kwargs": Foreign("TRL", ("dtype", "weight_format"), "each setting is a field"),
    "torch_dtype": Foreign("TRL", ("dtype",)),
    "bf16": Foreign("TRL", ("dtype",), "bfloat16 is the default; for False float32"),
    "fp16": Foreign("TRL", ("dtype",), "bfloat16 or float32"),
    "load_in_4bit": Foreign("TRL, Unsloth, QeRL", ("weight_format",), "nf4, for example; without effect in QeRL"),
    "load_in_8bit": Foreign("TRL, Unsloth, QeRL", (), "no 8-bit format is implemented"),
    "bnb_4bit_quant_type": Foreign("TRL", ("weight_format",)),
    "use_bnb_nested_quant": Foreign("TRL", (), "a double-quantized checkpoint loads; block maxima are fp32 in memory"),
    "use_quantization": Foreign("QeRL", ("weight_format",)),
    "attn_implementation": Foreign("TRL", ("matmul_kernel",), "attention is this package's own on every device"),
    "router_aux_loss_coef": Foreign("TRL", (), "no mixture of experts is implemented"),
    "disable_dropout": Foreign("TRL", (), "nothing here has dropout; an adapter with dropout is refused"),
    "cast_lm_head_to_fp32": Foreign("TRL", (), _PRECISION),
    # adapters
    "use_peft": Foreign("TRL", ("lora_rank",), "adapters are always trained, never all weights"),
    "lora_r": Foreign("TRL", ("lora_rank",)),
    "r": Foreign("PEFT, Unsloth", ("lora_rank",)),
    "max_lora_rank": Foreign("Unsloth", ("lora_rank",)),
    "lora_dropout": Foreign("TRL, Unsloth", (), "with dropout the ratio would measure the dropout mask"),
    "target_modules": Foreign("PEFT, Unsloth, QeRL", ("lora_target_modules",)),
    "modules_to_save": Foreign("PEFT, QeRL", ("train_norms",), "only the layer norms can be trained beside adapters"),
    "lora_modules_to_save": Foreign("TRL", ("train_norms",), "only the layer norms can be trained beside adapters"),
    "ln": Foreign("QeRL", ("train_norms",)),
    "use_dora": Foreign("TRL", (), "plain and rank-stabilized LoRA only"),
    "bias": Foreign("PEFT, Unsloth", (), "biases are frozen"),
    "loftq_config": Foreign("Unsloth", (), "plain and rank-stabilized LoRA only"),
    # data
    "dataset_name": Foreign("TRL", ("dataset",), "a preset, PRESET:PATH or a file"),
    "dataset_config": Foreign("TRL", ("dataset",), "the presets name their subset"),
    "dataset_train_split": Foreign("TRL", ("dataset",), "train"),
    "dataset_test_split": Foreign("TRL", ("eval_dataset",), "test"),
    "shuffle_dataset": Foreign("TRL", ("data_order",), "sequential for False, shuffled for True"),
    "remove_unused_columns": Foreign("TRL", ("reward_columns",), "name the columns that rewards need"),
    "chat_template_kwargs": Foreign("TRL", ("system_prompt",), "the tokenizer's chat template is used as it is"),
    "pad_to_multiple_of": Foreign("TRL", (), "sequences are packed, not padded"),
    "log_multimodal": Foreign("TRL", (), _NO_IMAGES),
    "max_tool_calling_iterations": Foreign("TRL", (), _NO_TOOLS),
    "max_seq_length": Foreign(
        "Unsloth, QeRL", ("max_prompt_length", "max_completion_length"), "without effect in QeRL"
    ),
    "reward_model_name_or_path": Foreign("TRL", ("reward_funcs",), "rewards are functions, not models"),
    # batch and steps
    "per_device_train_batch_size": Foreign("TRL, QeRL", ("batch_size",), _BATCH),
    "gradient_accumulation_steps": Foreign("TRL, QeRL", ("batch_size",), _BATCH),
    "generation_batch_size": Foreign("TRL", ("batch_size",), "the same number, if an update has the whole rollout"),
    "steps_per_generation": Foreign("TRL", (), _MINI_BATCHES),
    "per_device_eval_batch_size": Foreign("TRL", ("eval_batch_size",)),
    "num_generations_eval": Foreign("TRL", ("eval_num_generations",)),
    **_names(
        "TRL, QeRL",
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs",
        "leave it out: layers are recomputed where memory asks",
        ("update_memory_gb",),
    ),
    "use_gradient_checkpointing": Foreign("Unsloth, QeRL", ("update_memory_gb",), "as gradient_checkpointing"),
    "activation_offloading": Foreign(
        "TRL", ("update_memory_gb",), "leave it out: layers that do not fit are recomputed"
    ),
    "unsloth_num_chunks": Foreign(
        "Unsloth", ("logprob_chunk_size",), "leave it out, or tokens, not a number of chunks"
    ),
    "lr": Foreign("other programs", ("learning_rate",)),
    "optim": Foreign("TRL, QeRL", (), _OPTIMIZER),
    **_names("TRL", "optim_args optim_target_modules lr_scheduler_kwargs", _OPTIMIZER),
    "warmup_steps": Foreign("TRL", ("warmup_ratio",), "a share of all updates: steps / max_steps"),
    "ddp_find_unused_parameters": Foreign("TRL, QeRL", (), "one process"),
    "ds3_gather_for_generation": Foreign("TRL", (), "one process"),
    # run
    "run_name": Foreign("TRL, QeRL", ("output_dir",), "a directory, such as runs/NAME"),
    "resume_from_checkpoint": Foreign("TRL", ("resume",), '"auto": the newest checkpoint of output_dir'),
    "overwrite_output_dir": Foreign("TRL", ("overwrite",)),
    "save_strategy": Foreign(
        "TRL, QeRL", ("save_steps",), 'a number of updates, for "no" more than all; one checkpoint more at the end'
    ),
    **_names("TRL", "save_only_model save_on_each_node load_best_model_at_end", _CHECKPOINT),
    **_names("TRL, QeRL", "logging_steps logging_strategy logging_first_step include_num_input_tokens_seen", _METRICS),
    "use_cpu": Foreign("TRL", (), "without a GPU, or with JAX_PLATFORMS=cpu, it runs on the CPU"),
    **_names(
        "TRL",
        "dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor",
        "all problems are read before the first step",
    ),
    **_names(
        "TRL", "torch_compile torch_empty_cache_steps tf32 use_liger_kernel auto_find_batch_size", "JAX, not PyTorch"
    ),
    **_names(
        "TRL",
        "eval_strategy eval_steps eval_on_start",
        "a dataset, evaluated before and after training",
        ("eval_dataset",),
    ),
    "random_state": Foreign("Unsloth, QeRL", ("seed",), "without effect in QeRL"),
    "data_seed": Foreign("TRL", ("seed",)),
    **_names(
        "TRL", "log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo", _COMPLETIONS
    ),
    **_names(
        "TRL",
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo",
        "adapter/ is a PEFT adapter: upload it with huggingface_hub",
    ),
    # sampling
    "max_new_tokens": Foreign("transformers", ("max_completion_length",)),
    "generation_kwargs": Foreign("TRL", ("temperature", "top_k", "top_p", "min_p"), "each setting is a field"),
    "repetition_penalty": Foreign("TRL", (), "log-probabilities would depend on the tokens before, in the trainer too"),
    "cache_implementation": Foreign("TRL", (), "one cache, sized before the first rollout"),
    "float8_kv_cache": Foreign("Unsloth", (), "keys and values are cached in `dtype`"),
    "gpu_memory_utilization": Foreign(
        "Unsloth, QeRL", ("vllm_gpu_memory_utilization",), "or rollout_memory_gb, GB of the KV cache"
    ),
    "fast_inference": Foreign("Unsloth, QeRL", (), _ENGINE),
    "use_vllm": Foreign("TRL, QeRL", ("rollout_backend",), "vllm; left out, the trainer's own engine samples"),
    **_names("TRL, QeRL", "vllm_mode vllm_tensor_parallel_size vllm_enable_sleep_mode", _ENGINE),
    **_names(
        "TRL",
        "vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
        "vllm_max_model_length",
        _ENGINE,
    ),
    **_names("QeRL", "vllm_sleep_enabled vllm_enable_prefix_caching", _ENGINE),
    "vllm_structured_outputs_regex": Foreign("TRL", (), "completions are not constrained"),
    **_names(
        "TRL",
        "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config",
        _ENGINE,
    ),
    # loss
    **_names("TRL", "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", _FIXED_REFERENCE),
    "use_bias_correction_kl": Foreign("TRL", ("beta",), "the k3 estimator, without a weight"),
    "top_entropy_quantile": Foreign(
        "TRL",
        (),
        "an update sees the entropies of one micro-batch at a time",
    ),
    **_names(
        "TRL",
        "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        _ENTROPY,
    ),
    **_names(
        "TRL",
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
        _OTHER_LOSS,
    ),
    "multi_objective_aggregation": Foreign("TRL", ("reward_weights",), "rewards are summed, then normalized"),
    "vllm_importance_sampling_correction": Foreign("TRL", ("importance_sampling_cap",), "None is False"),
    "vllm_importance_sampling_cap": Foreign("TRL", ("importance_sampling_cap",), "the same number"),
    "vllm_importance_sampling_clip_max": Foreign("TRL", ("importance_sampling_cap",), "the same number"),
    "vllm_importance_sampling_clip_min": Foreign("TRL", ("importance_sampling_floor",), "the same number"),
    "vllm_importance_sampling_mode": Foreign(
        "TRL", ("importance_sampling_mode",), "token_truncate by default, TRL: sequence_mask"
    ),
    "off_policy_mask_threshold": Foreign("TRL", (), "no sequence is masked for its KL"),
    # noise
    "noise_scheduler": Foreign(
        "QeRL", ("sigma_start", "sigma_end"), "QeRL: 1e-2 and 5e-4; 0 and 0 (the default): no noise"
    ),
}
"""Names that are no fields here. A name that is a field here means the same, but where `docs/migration.md` says so."""


_OFF = {  # values that ask for what holds here anyway, besides None, and false, 0 and "none" of what has no counterpart
    "false": "activation_offloading activation_checkpointing eval_on_start fp16 load_in_4bit use_quantization "
    "ln gradient_checkpointing use_gradient_checkpointing use_vllm float8_kv_cache "
    "overwrite_output_dir resume_from_checkpoint use_bias_correction_kl",
    "1": "repetition_penalty top_entropy_quantile vllm_tensor_parallel_size tensor_parallel_size "
    "pipeline_parallel_size",
    "true": "use_peft bf16 gradient_checkpointing use_gradient_checkpointing log_completions logging_first_step",
    "no": "eval_strategy",
}
_ALWAYS = ("logging_steps", "logging_strategy")  # metrics.jsonl has more than any of their values asks for


def is_off(name: str, value: Any) -> bool:
    """Whether a value, or the text of one, asks for what holds here anyway."""
    text = str(value).lower()
    with contextlib.suppress(ValueError):
        text = f"{float(text):g}"
    without_counterpart = not FOREIGN[name].fields and text in ("false", "0")
    return is_none(value) or without_counterpart or name in (*_ALWAYS, *_OFF.get(text, "").split())


def without_foreign(values: Mapping[str, Any], prefix: str = "", separator: str = "_") -> dict[str, Any]:
    """Values by name, with `_` in it, without those of other programs' names that ask for what holds here anyway.

    Args:
      prefix: before each name in the error.
      separator: in place of `_` there.

    Raises ConfigError for the others, with the name here or the reason why there is none.
    """
    kept, said, more = {}, [], []
    for name, value in values.items():
        if name not in FOREIGN:
            kept[name] = value
        elif not is_off(name, value):
            entry = FOREIGN[name]
            more = ["docs/migration.md says more"] if entry.fields else more
            fields = " and ".join(prefix + field.replace("_", separator) for field in entry.fields)
            note = f" ({entry.note})" if entry.note else ""
            answer = f": use {fields}{note}" if fields else f", no field here: {entry.note}"
            said.append(f"{prefix}{name.replace('_', separator)} is a name of {entry.origin}{answer}")
    if said:
        raise ConfigError("; ".join(said + more))
    return kept
