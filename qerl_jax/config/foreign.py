"""Names of other programs for what a field here does, or the reason why there is
none: one table for the answers to flags, YAML files and arguments of `Config`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from qerl_jax.config.values import ConfigError, is_none


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A name of another program.

    Attributes:
      origin: the programs that have it.
      fields: fields of `Config` with its meaning; none where nothing here has it.
      note: how to convert it, or why there is none; without one the value means the same.
      held: the values, in lower case, that ask for what holds here anyway; "*": any; "-": none. Unless it is that, so
        do None and an empty list or mapping, and where there is no field false and 0.
    """

    origin: str
    fields: tuple[str, ...] = ()
    note: str = ""
    held: str = ""


def _names(origin: str, names: str, note: str = "", fields: tuple[str, ...] = (), held: str = "") -> dict[str, Foreign]:
    """Several names with one answer."""
    return dict.fromkeys(names.split(), Foreign(origin, fields, note, held))


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
_BATCH = "all completions of a rollout: those per device × accumulated batches × processes"
_ENGINE = "neither the built-in engine nor rollout_backend vllm has it"
_TRAINER = "a setting of transformers' Trainer, which nothing here has or needs"
_LORA = "plain and rank-stabilized LoRA only"
_ANY, _NOTHING = "*", "-"
_FIXED_REFERENCE = "the reference of the KL penalty is the model's checkpoint and stays fixed"
_OTHER_LOSS = "not built in; a token_loss of your own can have it"
_ENTROPY = "a token_loss of your own can have one (docs/research.md)"
_NO_IMAGES = "text models only"
_NO_TOOLS = "no tool calls in rollouts"
_METRICS = "metrics.jsonl has every step"
_COMPLETIONS = "completions/ has every completion of every step"
_OPTIMIZER = "AdamW in fp32; for another optimizer or schedule train(config, optimizer=…) (docs/research.md)"
_PARALLEL = "gradients are summed without PyTorch (docs/several-gpus.md)"
_CHECKPOINT = "a checkpoint holds all that resuming needs; the newest save_total_limit stay"
_PRECISION = "log-probabilities are always computed in fp32"

FOREIGN: dict[str, Foreign] = {
    name: Foreign("other programs", (), f"no {what}", "1" if name.endswith("_size") else "")
    for what, names in UNSUPPORTED.items()
    for name in names.split()
} | {
    **_names(
        "other programs",
        "num_gpus num_devices gpus num_processes nproc_per_node n_gpus_per_node data_parallel_size",
        "all GPUs of the machine are used; the flag --devices takes a number",
    ),
    **_names("other programs", "tensor_parallel_size", "the flag --tensor-parallel-size", held="1"),
    # arguments of a trainer
    **_names("TRL", "args training_args", "its settings are fields of Config (docs/migration.md has a script)"),
    **_names(
        "TRL",
        "peft_config lora_config",
        "LoRA is always on, also without one; its settings are fields of Config",
        ("lora_rank", "lora_alpha", "lora_target_modules"),
        _NOTHING,  # None trains all weights in TRL
    ),
    "quantization_config": Foreign("TRL", ("weight_format",), "nf4, for example"),
    **_names("TRL", "processing_class tokenizer", "the tokenizer is that of the model's directory"),
    "reward_processing_classes": Foreign("TRL", ("reward_funcs",), "rewards are functions, not models"),
    "callbacks": Foreign("TRL", (), "train(config, on_step=…) calls a function after each step"),
    "optimizers": Foreign("TRL", (), _OPTIMIZER),
    "train_dataset": Foreign("train(…)", ("dataset",), "records in memory go to train beside the config"),
    "sigma": Foreign("train(…)", ("sigma_start", "sigma_end"), "a function goes to train beside the config"),
    **_names(
        "train(…)",
        "problems perturb token_loss with_reference optimizer on_step console replicas dry_run",
        "in Python give it to train beside the config",
    ),
    # model
    "model_name_or_path": Foreign("TRL", ("model",)),
    "model_name": Foreign("Unsloth, QeRL", ("model",)),
    "pretrained_model_name_or_path": Foreign("transformers", ("model",)),
    **_names(
        "TRL, PEFT", "model_revision revision", "download another revision and name its directory", ("model",), "main"
    ),
    "trust_remote_code": Foreign("TRL", (), "no code of a checkpoint is ever run"),
    "model_init_kwargs": Foreign("TRL", ("dtype", "weight_format"), "each setting is a field"),
    **_names("TRL", "torch_dtype vllm_dtype", "bfloat16 or float32", ("dtype",)),
    "bf16": Foreign("TRL", ("dtype",), "bfloat16 is the default; for False float32", "true"),
    "fp16": Foreign("TRL", ("dtype",), "bfloat16 or float32", "false"),
    "load_in_4bit": Foreign("TRL, Unsloth, QeRL", ("weight_format",), "nf4, for example", "false"),
    "load_in_8bit": Foreign("TRL, Unsloth, QeRL", (), "no 8-bit format is implemented"),
    "bnb_4bit_quant_type": Foreign("TRL", ("weight_format",), "nf4, nvfp4 or mxfp4"),
    "bnb_4bit_quant_storage": Foreign("TRL", (), "codes are packed as bytes", "uint8"),
    "use_bnb_nested_quant": Foreign("TRL", (), "a double-quantized checkpoint loads; block maxima are fp32 in memory"),
    "use_quantization": Foreign("QeRL", ("weight_format",), "nvfp4, for example", "false"),
    "attn_implementation": Foreign("TRL", (), "attention is this package's own on every device"),
    "router_aux_loss_coef": Foreign("TRL", (), "no mixture of experts is implemented"),
    "disable_dropout": Foreign("TRL", held=_ANY),
    "cast_lm_head_to_fp32": Foreign("TRL", (), _PRECISION),
    # adapters
    "use_peft": Foreign("TRL", ("lora_rank",), "adapters are always trained, never all weights", "true"),
    "lora_r": Foreign("TRL", ("lora_rank",)),
    "r": Foreign("PEFT, Unsloth", ("lora_rank",)),
    "max_lora_rank": Foreign("Unsloth", ("lora_rank",)),
    "lora_dropout": Foreign("TRL, Unsloth", (), "there is no dropout, whose mask the ratio would measure"),
    "target_modules": Foreign("PEFT, Unsloth, QeRL", ("lora_target_modules",)),
    **_names(
        "PEFT, TRL", "exclude_modules layers_to_transform", "by projection, for all layers", ("lora_target_modules",)
    ),
    **_names(
        "PEFT, TRL",
        "modules_to_save lora_modules_to_save",
        "only the layer norms can be trained beside adapters",
        ("train_norms",),
    ),
    "ln": Foreign("QeRL", ("train_norms",), "", "false"),
    "bias": Foreign("PEFT, Unsloth", (), "biases are frozen"),
    **_names("PEFT, TRL", "task_type lora_task_type", "a causal language model is trained", held="causal_lm"),
    "base_model_name_or_path": Foreign("PEFT", ("model",)),
    "init_lora_weights": Foreign("PEFT", (), "A is random, B zero, as PEFT's default", "true"),
    **_names(
        "PEFT, TRL, Unsloth",
        "use_dora loftq_config peft_type auto_mapping peft_version inference_mode fan_in_fan_out "
        "layers_pattern rank_pattern alpha_pattern megatron_config megatron_core trainable_token_indices eva_config "
        "corda_config lora_ga_config velora_config alora_invocation_tokens use_qalora qalora_group_size "
        "monteclora_config layer_replication runtime_config lora_bias target_parameters lora_target_parameters "
        "use_bdlora arrow_config kasa_config ensure_weight_tying",
        _LORA,
        held="lora",
    ),
    # data
    "dataset_name": Foreign("TRL", ("dataset",), "a preset, PRESET:PATH or a file"),
    "datasets": Foreign("TRL", ("dataset",), "presets or files, with dataset_weights"),
    "dataset_prompt_column": Foreign("open-r1", ("prompt_column",)),
    "dataset_config": Foreign("TRL", ("dataset",), "a preset has its own; else name a file"),
    "dataset_train_split": Foreign("TRL", ("dataset",), "its split train is read; for another name a file", "train"),
    "dataset_test_split": Foreign("TRL", ("eval_dataset",), "its split test is read; for another name a file", "test"),
    "shuffle_dataset": Foreign("TRL", ("data_order",), "sequential for False", "true"),
    "remove_unused_columns": Foreign("TRL", ("reward_columns",), "name the columns that rewards need"),
    "chat_template_kwargs": Foreign(
        "TRL", (), "write them into the tokenizer's chat template: {%- set enable_thinking = false %} at its start"
    ),
    **_names("TRL", "pad_to_multiple_of group_by_length", "sequences are packed, not padded", held="auto"),
    "log_multimodal": Foreign("TRL", (), _NO_IMAGES, "true"),
    "max_tool_calling_iterations": Foreign("TRL", (), _NO_TOOLS),
    "max_seq_length": Foreign(
        "Unsloth, QeRL", ("max_prompt_length", "max_completion_length"), "without effect in QeRL"
    ),
    "reward_model_name_or_path": Foreign("TRL", ("reward_funcs",), "rewards are functions, not models"),
    # batch and steps
    **_names("TRL, QeRL", "per_device_train_batch_size gradient_accumulation_steps", _BATCH, ("batch_size",)),
    "generation_batch_size": Foreign("TRL", ("batch_size",), "the same number, if an update has the whole rollout"),
    "steps_per_generation": Foreign("TRL", (), _MINI_BATCHES),
    "per_device_eval_batch_size": Foreign("TRL", ("eval_batch_size",)),
    "num_generations_eval": Foreign("TRL", ("eval_num_generations",)),
    **_names(  # layers are recomputed where memory asks
        "TRL, Unsloth, QeRL",
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs "
        "use_gradient_checkpointing auto_find_batch_size",
        held=_ANY,
    ),
    "activation_offloading": Foreign(
        "TRL", ("update_memory_gb",), "leave it out: layers that do not fit are recomputed", "false"
    ),
    "unsloth_num_chunks": Foreign(
        "Unsloth", ("logprob_chunk_size",), "leave it out, or tokens, not a number of chunks"
    ),
    "lr": Foreign("other programs", ("learning_rate",)),
    "optim": Foreign("TRL, QeRL", (), _OPTIMIZER, "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused"),
    **_names("TRL", "optim_args optim_target_modules lr_scheduler_kwargs", _OPTIMIZER),
    "warmup_steps": Foreign("TRL", ("warmup_ratio",), "a share of all updates: steps / max_steps"),
    **_names(
        "TRL",
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "fsdp_config parallelism_config accelerator_config local_rank ds3_gather_for_generation ignore_bias_buffers",
        _PARALLEL,
        held="true -1",
    ),
    # run
    "run_name": Foreign("TRL, QeRL", ("output_dir",), "a directory, such as runs/NAME"),
    "resume_from_checkpoint": Foreign("TRL", ("resume",), '"auto": the newest checkpoint of output_dir', "false"),
    "overwrite_output_dir": Foreign("TRL", ("overwrite",), "", "false"),
    "save_strategy": Foreign(
        "TRL, QeRL",
        ("save_steps",),
        'a number of updates, for "no" more than all; one checkpoint more at the end',
        "steps",
    ),
    **_names(
        "TRL",
        "save_only_model save_on_each_node load_best_model_at_end metric_for_best_model greater_is_better "
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint save_safetensors",
        _CHECKPOINT,
    ),
    **_names("TRL, QeRL", "logging_steps logging_strategy logging_first_step log_completions", held=_ANY),
    **_names("TRL", "include_num_input_tokens_seen logging_dir", _METRICS),
    **_names("TRL", "use_cpu no_cuda", "without a GPU, or with JAX_PLATFORMS=cpu, it runs on the CPU"),
    "full_determinism": Foreign("TRL", ("deterministic",), "", "false"),
    **_names(
        "TRL",
        "dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_pin_memory dataloader_multiprocessing_context dataloader_in_order dataset_streaming streaming",
        "all problems are read before the first step",
    ),
    **_names(
        "TRL",
        "torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps tf32 use_liger_kernel "
        "liger_kernel_config use_liger_loss",
        "JAX, not PyTorch",
    ),
    **_names(
        "TRL",
        "eval_strategy evaluation_strategy eval_steps eval_on_start eval_delay do_eval test_split_size",
        "a dataset, evaluated before and after training",
        ("eval_dataset",),
        "no false 0",
    ),
    "random_state": Foreign("Unsloth, QeRL", ("seed",), "without effect in QeRL"),
    "data_seed": Foreign("TRL", ("seed",), "one seed for all"),
    **_names(
        "TRL",
        "num_completions_to_print log_unique_prompts log_completions_hub_repo wandb_log_unique_prompts",
        _COMPLETIONS,
    ),
    **_names(
        "TRL",
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision",
        "adapter/ is a PEFT adapter: upload it with huggingface_hub",
    ),
    **_names(
        "TRL",
        "project trackio_space_id trackio_bucket_id trackio_static_space_id wandb_project",
        "tensorboard or wandb, whose project is WANDB_PROJECT in the environment",
        ("report_to",),
    ),
    "do_train": Foreign("TRL", (), "python -m qerl_jax.evaluate evaluates without training", "true"),
    **_names(
        "TRL",
        "average_tokens_across_devices label_smoothing_factor bf16_full_eval fp16_full_eval use_cache "
        "neftune_noise_alpha log_on_each_node logging_nan_inf_filter log_level log_level_replica disable_tqdm "
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics label_names train_sampling_strategy length_column_name "
        "debug skip_memory_metrics do_predict",
        _TRAINER,
    ),
    # sampling
    "max_new_tokens": Foreign("transformers", ("max_completion_length",)),
    "generation_kwargs": Foreign("TRL", ("temperature", "top_k", "top_p", "min_p"), "each setting is a field"),
    "repetition_penalty": Foreign(
        "TRL", (), "log-probabilities would depend on the tokens before, in the trainer too", "1"
    ),
    "cache_implementation": Foreign("TRL", (), "one cache, sized before the first rollout"),
    "float8_kv_cache": Foreign("Unsloth", (), "keys and values are cached in `dtype`"),
    "gpu_memory_utilization": Foreign(
        "Unsloth, QeRL", ("vllm_gpu_memory_utilization",), "or rollout_memory_gb, GB of the KV cache"
    ),
    **_names(
        "TRL, Unsloth, QeRL",
        "use_vllm fast_inference",
        "vllm; left out, the trainer's own engine samples",
        ("rollout_backend",),
        "false",
    ),
    "vllm_mode": Foreign("TRL", (), "no server: rollout_backend vllm samples on the GPU that trains", "colocate"),
    "vllm_tensor_parallel_size": Foreign("TRL", (), "the flag --tensor-parallel-size, for the built-in engine", "1"),
    **_names(
        "TRL",
        "vllm_max_model_length vllm_max_model_len",
        "their sum",
        ("max_prompt_length", "max_completion_length"),
    ),
    **_names(
        "TRL, QeRL",
        "vllm_enable_sleep_mode vllm_sleep_enabled vllm_enable_prefix_caching vllm_model_impl vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port use_transformers_paged "
        "use_transformers_continuous_batching transformers_continuous_batching_config vllm_device",
        _ENGINE,
        held="vllm",
    ),
    **_names("TRL", "vllm_structured_outputs_regex vllm_guided_decoding_regex", "completions are not constrained"),
    # loss
    **_names("TRL", "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", _FIXED_REFERENCE),
    "use_bias_correction_kl": Foreign("TRL", ("beta",), "the k3 estimator, without an importance weight", "false"),
    "top_entropy_quantile": Foreign("TRL", (), "an update sees the entropies of one micro-batch at a time", "1"),
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
    "multi_objective_aggregation": Foreign(
        "TRL", ("reward_weights",), "rewards are summed, then normalized", "sum_then_normalize"
    ),
    "vllm_importance_sampling_correction": Foreign("TRL", ("importance_sampling_cap",), "None is False"),
    "vllm_importance_sampling_cap": Foreign("TRL", ("importance_sampling_cap",)),
    "vllm_importance_sampling_clip_max": Foreign("TRL", ("importance_sampling_cap",)),
    "vllm_importance_sampling_clip_min": Foreign("TRL", ("importance_sampling_floor",)),
    "vllm_importance_sampling_mode": Foreign("TRL", ("importance_sampling_mode",)),
    "off_policy_mask_threshold": Foreign("TRL", (), "no sequence is masked for its KL"),
    # noise
    "noise_scheduler": Foreign(
        "QeRL", ("sigma_start", "sigma_end"), "QeRL: 1e-2 and 5e-4; 0 and 0 (the default): no noise"
    ),
}
"""Names that are no fields here. A name that is a field here means the same, but where `docs/migration.md` says so."""


def is_off(name: str, value: Any) -> bool:
    """Whether a value, or the text of one, asks for what holds here anyway."""
    entry, text = FOREIGN[name], str(value.value if isinstance(value, enum.Enum) else value).lower()
    if entry.held == _NOTHING:
        return False
    with contextlib.suppress(ValueError):
        text = f"{float(text):g}"
    without_counterpart = not entry.fields and text in ("false", "0")
    return (
        is_none(text) or text in ("{}", "[]") or without_counterpart or entry.held == _ANY or text in entry.held.split()
    )


def without_foreign(values: Mapping[str, Any], prefix: str = "", separator: str = "_") -> dict[str, Any]:
    """Values by name, with `_` in it, without those of other programs' names that ask for what holds here anyway.

    Args:
      prefix: before each name in the error.
      separator: in place of `_` there.

    Raises ConfigError for the others, with the name here or the reason why there is none.
    """
    kept, said = {}, []
    for name, value in values.items():
        if name not in FOREIGN:
            kept[name] = value
        elif not is_off(name, value):
            entry = FOREIGN[name]
            fields = " and ".join(prefix + field.replace("_", separator) for field in entry.fields)
            note = f" ({entry.note})" if entry.note else ""
            answer = f": use {fields}{note}" if fields else f", no field here: {entry.note}"
            said.append(f"{prefix}{name.replace('_', separator)} is a name of {entry.origin}{answer}")
    if said:
        raise ConfigError("; ".join(said))
    return kept
