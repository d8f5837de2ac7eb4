"""The fields of a training run: one flat frozen dataclass with TRL's names, checked when it is made.

Defaults are the paper's (QeRL, arXiv 2510.11696, §4 and appendix), but for noise, which is off, and learning rate;
`configs/` holds complete recipes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

from qerl_jax.config.foreign import without_foreign
from qerl_jax.config.values import ConfigError, coerce
from qerl_jax.data.presets import PROMPT_FORMATS
from qerl_jax.messages import did_you_mean, shown
from qerl_jax.models.formats import WEIGHT_FORMATS
from qerl_jax.models.lora import PROJECTIONS, LoraConfig
from qerl_jax.types import Engine, Sampling

PROMPT_LENGTH = 512
"""`max_prompt_length` where neither the user nor the model's positions set it."""


def _with_known_names(cls: type) -> type:
    """Have a dataclass answer names that are none of its fields, with `-` or `_`, by the nearest or by those of other
    programs, where Python raises a TypeError.
    """
    init, known = cls.__init__, [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(init)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        found: dict[str, Any] = {}
        for key, value in named.items():
            name = key.replace("-", "_")
            if name in found:
                raise ConfigError(f"{name} is given twice, as {shown(found[name])} and as {shown(value)}")
            found[name] = value
        found = without_foreign(found)
        _refuse_unknown("field", found, known)
        init(self, *values, **found)

    cls.__init__ = checked
    return cls


def _refuse_unknown(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first name that is not known, with the nearest one."""
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"unknown {kind} {shown(unknown[0])}{did_you_mean(unknown[0], known)}")


def answering(function: Callable) -> Callable:
    """Have a function whose first argument is a Config answer another one, and names of other programs and of fields,
    where Python raises a TypeError.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*values: Any, **named: Any) -> Any:
        config = values[0] if values else named.get("config", Config())
        if not isinstance(config, Config):
            kind = type(config).__name__
            raise ConfigError(f"config is a {kind}, not a qerl_jax.Config: docs/migration.md moves a script of TRL")
        theirs = without_foreign({name: value for name, value in named.items() if name not in known})
        if fields := [name for name in theirs if name in descriptions()]:
            raise ConfigError(f"{' and '.join(fields)}: fields of Config, the first argument: train(Config(…), …)")
        _refuse_unknown("argument", theirs, known)
        return function(*values, **{name: value for name, value in named.items() if name in known})

    return checked


@_with_known_names
@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a training run."""

    model: str = ""
    """Hugging Face directory (config.json, bf16, NVFP4, MXFP4 or NF4 safetensors, tokenizer), a model of the hub as
    ORGANIZATION/NAME, which is downloaded, or "tiny", the bundled policy."""
    adapter: str | None = None
    """PEFT adapter directory to start from; its rank and targets must be those asked for here."""
    weight_format: Literal[*WEIGHT_FORMATS] | None = None
    """Quantize an unquantized checkpoint to this format while loading. None keeps what is stored."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of the model."""
    matmul_kernel: Literal["auto", "xla", "mosaic_gpu"] = "auto"
    """GEMM with 4-bit weights: "xla"; "mosaic_gpu", the Pallas kernels (NVIDIA GPU from 8.0 on, bf16, jax 0.11);
    "auto": the kernels where they can run, else XLA."""

    dataset: tuple[str, ...] = ("gsm8k",)
    """One or more of: gsm8k, bigmath, bigmath_hard, dapomath, miromind, math, codeforces (all from the hub),
    PRESET:PATH (a local copy of one of these), arithmetic (bundled), or a .jsonl, .json or .parquet file or a
    directory of them."""
    dataset_weights: tuple[float, ...] | None = None
    """Sampling weight of each dataset. None: one concatenated dataset. The flag --dataset replaces those of a file."""
    prompt_column: str = "question"
    """Problem column of a file without a preset: text, or a list of {role, content}, each content a text or a list of
    {type: "text", text}."""
    answer_column: str = "answer"
    """Answer column of such a file; only the text after the last "####" counts, as in GSM8K. "": none, where rewards of
    your own need no answer."""
    reward_columns: tuple[str, ...] = ()
    """Further columns passed to the rewards, each as a list of that name. "answer": functions of your own get that
    column as the dataset has it, as in TRL, not the text of the gold answer."""
    data_order: str = "shuffled"
    """Order of the training problems: "shuffled", anew in each epoch by the seed; "sequential", that of the dataset; or
    the name of a column by which they are sorted, smallest first (curriculum; texts as in a dictionary, "10" before
    "2"); rewards get it, too. With dataset_weights it is the order within each dataset."""
    prompt_format: Literal["boxed", "think_answer"] | None = None
    """System message of every prompt by the form of the answer that it asks for: "boxed", a `\\boxed{}`, or
    "think_answer", QeRL's <think> and <answer>. None: that of the dataset, "boxed" for mathematics, unless the
    model's chat template asks for a form."""
    system_prompt: str | None = None
    """System message of every prompt, replacing any other. None: that of prompt_format, the prompt or the dataset; "":
    that of the prompt alone."""
    max_prompt_length: int | None = None
    """Longest prompt in tokens, chat template included. None: 512, at most what max_completion_length leaves of
    the model's positions."""
    overlong_prompts: Literal["drop", "truncate_left", "error"] = "drop"
    """Treatment of longer prompts: skipped and counted, cut to their last max_prompt_length tokens, or an error."""

    output_dir: str = "runs/qerl"
    """Directory for all output of the run."""
    resume: Literal["never", "auto"] = "never"
    """"never" refuses a used output_dir, "auto" resumes the run there."""
    overwrite: bool = False
    """Delete what an existing run in output_dir made, and start from scratch."""
    allow_changed_inputs: bool = False
    """Resume although model, dataset or reward file are not what they were when the checkpoint was saved."""
    save_steps: int = 50
    """Optimizer updates between checkpoints, which are saved after a rollout's last update; one more at the end."""
    save_total_limit: int | None = 3
    """Number of newest checkpoints kept; None: all."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send metrics to TensorBoard files or Weights & Biases; metrics.jsonl is always written."""
    compilation_cache_dir: str | None = None
    """Directory of compiled programs, which later runs load. None: JAX_COMPILATION_CACHE_DIR, or else a directory in
    the user's cache folder. JAX_ENABLE_COMPILATION_CACHE=0 in the environment: compile in every run."""
    seed: int = 0
    """Random seed: adapter initialization, data order, noise, sampling."""

    max_steps: int = -1
    """Number of optimizer updates, `num_iterations` for each rollout; the last rollout gets all of its updates. -1:
    num_train_epochs counts."""
    num_train_epochs: float = 1.0
    """Passes over the dataset, where max_steps is -1; a pass is problems // (batch_size / num_generations) rollouts.
    The resolved config has the max_steps that follows. As a flag it replaces a file's max_steps."""
    batch_size: int = 256
    """Completions per step, of `batch_size / num_generations` prompts."""
    num_iterations: int = 1
    """Optimizer updates per rollout, each over the whole batch."""
    learning_rate: float = 1e-4
    """Peak learning rate. The paper's, for models from 3B on, are 1e-5 and 5e-6; for one of 0.5B 1.5e-4 was best."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up: cosine to zero, linear to zero, or none."""
    warmup_ratio: float = 0.1
    """Fraction of all updates, rounded up, over which the learning rate rises linearly from zero."""
    weight_decay: float = 0.1
    """Decoupled weight decay of AdamW on the trained matrices; norms and biases do not decay."""
    adam_beta1: float = 0.9
    """Decay rate of AdamW's first moment."""
    adam_beta2: float = 0.99
    """Decay rate of AdamW's second moment."""
    adam_epsilon: float = 1e-8
    """Epsilon in AdamW's denominator."""
    max_grad_norm: float = 0.2
    """Gradient clipping threshold (global norm)."""

    lora_rank: int = 32
    """Rank of the LoRA adapters."""
    lora_alpha: float | None = None
    """LoRA alpha: the scale is alpha / rank. None: alpha = rank, a scale of 1."""
    use_rslora: bool = False
    """Rank-stabilized LoRA: scale alpha / sqrt(rank)."""
    lora_target_modules: tuple[str, ...] = PROJECTIONS
    """Projections with an adapter; "all-linear", as in PEFT: all seven."""
    train_norms: bool = False
    """Also train the 2 L layer norms, as QeRL's scripts do (--ln True); the paper and the recipes do not."""

    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"] = "dapo"
    """Loss aggregation: grpo: mean of per-sequence means; bnpo, dapo: token mean; dr_grpo: sum divided
    by sequences × max_completion_length; cispo: token mean with capped ratios. Sequences out of the loss count in the
    denominators of grpo and dr_grpo."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the ratio exp(logp - old_logp), which epsilon clips: per token, or per sequence (GSPO)."""
    epsilon: float = 0.2
    """Lower clip of the ratio: 1 - epsilon."""
    epsilon_high: float | None = None
    """Upper clip of the ratio: 1 + epsilon_high. For cispo, the cap of the ratio itself, at least 1. None: that of the
    loss, 5 for cispo (as TRL recommends), else 0.28 (DAPO)."""
    delta: float | None = None
    """Upper bound of the unclipped ratio (two-sided clipping, INTELLECT-2); None: no bound."""
    beta: float = 0.0
    """Coefficient of the KL penalty (k3 estimator) against the model's checkpoint: no adapters, its own norms."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """Importance weight for the mismatch between rollout and trainer, exp(old_logp - behaviour_logp) of each token or
    of its whole sequence: clipped to [floor, cap] (truncate), or 0 outside of it (mask)."""
    importance_sampling_cap: float | None = 2.0
    """Upper bound of that weight; None: no correction, and the rollout needs no behaviour log-probabilities."""
    importance_sampling_floor: float | None = None
    """Lower bound of that weight; None: 0."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide centered rewards by the standard deviation of the group, of the batch, or not at all."""
    mask_truncated_completions: bool = False
    """Exclude completions truncated at max_completion_length from the loss."""
    num_generations: int = 8
    """Completions per prompt (group size)."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of fresh prompts (DAPO), as many as the share of useful
    groups asks for."""
    max_refill_rounds: int = 4
    """Most resampling rounds of dynamic sampling per step; equal groups that remain are kept."""
    reward_funcs: tuple[str, ...] | None = None
    """Rewards: "answer", "math_verify", "dapo", "code", "soft_format", "strict_format", "overlong", or
    "file.py:function"; `train(config, reward_funcs=[…])` also takes functions. None: those of the dataset."""
    reward_weights: tuple[float, ...] | None = None
    """Weights of reward_funcs. None: 1 each, or those of the dataset. The flag --reward-funcs replaces those of a
    file."""
    reward_workers: int = 4
    """Processes that grade math_verify, code and functions of files; 0: the trainer itself, without a time limit."""
    reward_timeout: float = 20.0
    """Time limit of a worker in seconds, per completion (function of a file: per prompt; code: for all tests). Grading
    beyond it is stopped and the completion left out of the update (code: the remaining tests count as failed)."""
    overlong_buffer: int | None = None
    """Tokens before max_completion_length over which "overlong" falls from 0 to -1; None: a fifth of it, as in DAPO."""
    allow_code_execution: bool = False
    """Let the reward "code" execute generated programs, each in bubblewrap (Linux)."""

    max_completion_length: int = 1024
    """Longest completion in tokens; QeRL's recipes have 4096. The report says how many were cut off."""
    temperature: float = 1.0
    """Sampling temperature of rollouts, also applied to the trainer's log-probabilities."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: all. The trainer renormalizes over its own k most likely."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens of this total probability; 1: all. The trainer renormalizes likewise."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely; 0: none. The trainer renormalizes likewise."""
    rollout_backend: Literal["jax", "vllm"] = "jax"
    """Engine of rollouts and evaluations: the trainer's own, which reads the trainer's weights, or vLLM 0.22.1 with a
    copy of the base, in a process of its own (docs/vllm.md)."""
    vllm_gpu_memory_utilization: float | None = None
    """Share of the GPU's memory that vLLM takes; JAX then takes 0.94 less this. None: 0.4, and 0.85 where JAX only
    evaluates."""
    rollout_memory_gb: float | None = None
    """Limit of the KV cache in 1e9 bytes; completions beyond it wait for a free slot. None: all are decoded together,
    or an error if they do not fit."""
    deterministic: bool = False
    """No autotuning and no nondeterministic operations on a GPU: runs repeat bit for bit, but are slower. CPU runs
    always repeat."""
    batch_invariant: bool = False
    """Completions do not depend, to the bit, on their batch or the schedule of the rollout; slower."""

    sigma_start: float = 0.0
    """Standard deviation of the noise in the first noisy stage; the paper's is 1e-2. 0 (with sigma_end 0): no noise."""
    sigma_end: float = 0.0
    """Standard deviation of the noise in the last stage; the paper's is 5e-4."""
    num_stages: int = 10
    """Number of stages of the noise schedule; the first has no noise."""
    noise_schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = "exponential"
    """Decay of the standard deviation from stage to stage."""
    noise_formula: Literal["qerl", "paper"] = "qerl"
    """"qerl" reaches sigma_end in the last stage, as the released code; "paper" is equation 11."""

    tokens_per_micro_batch: int | None = None
    """Tokens per micro-batch of the update; the gradient is that of the whole batch. A smaller value is raised to
    max_prompt_length + max_completion_length. None: the number that is fastest by estimate in the memory there is."""
    update_memory_gb: float | None = None
    """Memory for activations of the update, in GB (1e9 bytes): micro-batches shrink to it (unless
    tokens_per_micro_batch is set), and layers recompute gate and up, or all of their forward pass. None: what the
    device has free."""
    logprob_chunk_size: int = 512
    """Tokens whose logits exist at one time in the update."""

    eval_dataset: str | None = None
    """Dataset evaluated before and after training: gsm8k, math, math500, aime24, aime25, amc23, arithmetic,
    PRESET:PATH or a file. None: no evaluation."""
    eval_samples: int = 200
    """Number of problems evaluated, from the start of eval_dataset."""
    eval_num_generations: int = 1
    """Completions per evaluation problem."""
    eval_temperature: float = 0.6
    """Sampling temperature of evaluations; 0 is greedy."""
    eval_top_p: float = 0.95
    """Nucleus sampling probability of evaluations."""
    eval_batch_size: int = 64
    """Completions decoded together in evaluations."""

    def __post_init__(self):
        from qerl_jax.config.checks import check  # which reads this class

        for name, hint in typing.get_type_hints(type(self)).items():
            object.__setattr__(self, name, coerce(name, getattr(self, name), hint))
        if self.lora_target_modules == ("all-linear",):
            object.__setattr__(self, "lora_target_modules", PROJECTIONS)
        check(self)

    @property
    def num_prompts(self) -> int:
        """Prompts per step, P."""
        return self.batch_size // self.num_generations

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the run, i.e. its training steps: max_steps / num_iterations, rounded up. Raises ConfigError
        where max_steps is -1.
        """
        if self.max_steps == -1:
            raise ConfigError(
                f"max_steps is -1, and num_train_epochs {self.num_train_epochs} needs the number of problems: set "
                "max_steps, or take config.with_max_steps(problems)"
            )
        return -(-self.max_steps // self.num_iterations)

    def with_max_steps(self, problems: int) -> Config:
        """The config with the `max_steps` that `num_train_epochs` over so many problems makes; itself where `max_steps`
        is given. Raises ConfigError for fewer problems than a rollout takes.
        """
        if self.max_steps != -1:
            return self
        if problems < self.num_prompts:
            raise ConfigError(
                f"num_train_epochs {self.num_train_epochs}: {problems} problems are fewer than the {self.num_prompts} "
                "of one rollout; set max_steps, or a smaller batch_size"
            )
        updates = problems // self.num_prompts * self.num_iterations
        return dataclasses.replace(self, max_steps=math.ceil(self.num_train_epochs * updates))

    def with_max_prompt_length(self, positions: int) -> Config:
        """The config with `max_prompt_length` for a model of so many positions; itself where it is given."""
        if self.max_prompt_length is not None:
            return self
        room = max(1, positions - self.max_completion_length)
        return dataclasses.replace(self, max_prompt_length=min(PROMPT_LENGTH, room))

    @property
    def order_column(self) -> str | None:
        """The column of `data_order`, if it names one."""
        return None if self.data_order in ("shuffled", "sequential") else self.data_order

    @property
    def read_columns(self) -> tuple[str, ...]:
        """`reward_columns`, and the column of `data_order`."""
        return tuple(dict.fromkeys((*self.reward_columns, *filter(None, [self.order_column]))))

    @property
    def resampling_rounds(self) -> int:
        """Rounds of dynamic sampling after the first; 0 without `dynamic_sampling`."""
        return self.max_refill_rounds if self.dynamic_sampling else 0

    @property
    def system_message(self) -> str | None:
        """`system_prompt`, or that of `prompt_format`; None: the datasets' own."""
        return PROMPT_FORMATS.get(self.prompt_format) if self.system_prompt is None else self.system_prompt

    @property
    def lora(self) -> LoraConfig:
        """Shape of the adapters."""
        return LoraConfig(self.lora_rank, self.lora_alpha, self.use_rslora, self.lora_target_modules)

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of training rollouts."""
        return Sampling(
            self.max_completion_length, self.temperature, self.top_k, self.top_p, self.min_p, self.num_generations
        )

    @property
    def eval_sampling(self) -> Sampling:
        """Sampling settings of evaluations."""
        return Sampling(
            self.max_completion_length,
            temperature=self.eval_temperature,
            top_p=self.eval_top_p,
            num_generations=self.eval_num_generations,
        )

    @property
    def engine(self) -> Engine:
        """Execution settings of training rollouts."""
        return Engine(memory_gb=self.rollout_memory_gb, batch_invariant=self.batch_invariant)

    @property
    def eval_engine(self) -> Engine:
        """Execution settings of evaluations: those of training rollouts, with `eval_batch_size` slots."""
        return dataclasses.replace(self.engine, slots=self.eval_batch_size)

    @property
    def vllm_share(self) -> float:
        """Share of the GPU's memory that vLLM takes beside training; 0 without it."""
        if self.rollout_backend == "jax":
            return 0.0
        return 0.4 if self.vllm_gpu_memory_utilization is None else self.vllm_gpu_memory_utilization

    @property
    def overlong_tokens(self) -> int:
        """`overlong_buffer`, or a fifth of `max_completion_length` where it is None; at least 1."""
        return max(self.max_completion_length // 5, 1) if self.overlong_buffer is None else self.overlong_buffer

    @property
    def upper_clip(self) -> float:
        """`epsilon_high`, or that of the loss where it is None."""
        if self.epsilon_high is None:
            return 5.0 if self.loss_type == "cispo" else 0.28
        return self.epsilon_high


@functools.cache  # reads the source
def descriptions() -> dict[str, str]:
    """Field -> the text below it in `Config`, its help on a command line."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(Config)).body)
    pairs = [(field, text) for field, text in itertools.pairwise(body) if isinstance(field, ast.AnnAssign)]
    return {field.target.id: inspect.cleandoc(text.value.value) for field, text in pairs}
