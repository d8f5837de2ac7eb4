"""QeRL in JAX: reinforcement learning of Qwen2.5 on a frozen NVFP4 base, with LoRA and adaptive quantization noise.

Nothing happens at import beyond the imports themselves: no device is started, no file is read.
"""

import sys
from types import ModuleType

from qerl_jax import aqn, keys
from qerl_jax.checkpoint.adapter import export_adapter, import_adapter
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.checkpoint.quantize import quantize_checkpoint
from qerl_jax.config import Config
from qerl_jax.data.problems import Problem, load_dataset
from qerl_jax.data.prompts import completion_texts, encode_problems, to_prompts
from qerl_jax.evaluation import evaluate
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.lora import Lora, LoraConfig
from qerl_jax.rewards.functions import load_reward, score
from qerl_jax.rl.adamw import learning_rate
from qerl_jax.rl.advantages import group_advantages, make_batch
from qerl_jax.rl.logprobs import hidden_states, policy_logits, token_logprobs
from qerl_jax.rl.loss import TokenLoss, built_in_loss
from qerl_jax.rl.plan import make_update_plan
from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import grpo_step
from qerl_jax.rollout.engine import Progress, generate
from qerl_jax.run.devices import device_bytes
from qerl_jax.types import Batch, Engine, FinishReason, Policy, Prompts, Rollout, Sampling, TrainState

__all__ = [
    "Batch",
    "Checkpointer",
    "Config",
    "Engine",
    "FinishReason",
    "Lora",
    "LoraConfig",
    "ModelConfig",
    "Policy",
    "Problem",
    "Progress",
    "Prompts",
    "Rollout",
    "Sampling",
    "TokenLoss",
    "TrainState",
    "aqn",
    "built_in_loss",
    "completion_texts",
    "device_bytes",
    "encode_problems",
    "evaluate",
    "export_adapter",
    "generate",
    "group_advantages",
    "grpo_step",
    "hidden_states",
    "import_adapter",
    "init_state",
    "keys",
    "learning_rate",
    "load_dataset",
    "load_policy",
    "load_reward",
    "make_batch",
    "make_update_plan",
    "policy_logits",
    "quantize_checkpoint",
    "score",
    "to_prompts",
    "token_logprobs",
]


class _Package(ModuleType):
    """An import of the command `qerl_jax.evaluate` would put that module in the place of the function `evaluate`."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "evaluate" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
