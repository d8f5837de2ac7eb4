"""Batches and configs of updates that several tests share."""

import jax.numpy as jnp
import numpy as np

from qerl_jax.config import Config
from qerl_jax.types import Batch, FinishReason

PROMPT, LENGTH, ROWS = 4, 11, 4
COMPLETION = LENGTH - PROMPT


def make_config(**changes) -> Config:
    """One iteration of AdamW on `ROWS` sequences, without importance weights."""
    defaults = {
        "model": "x",
        "batch_size": ROWS,
        "lora_rank": 2,
        "num_generations": 2,
        "num_iterations": 1,
        "max_prompt_length": 512,
        "max_completion_length": COMPLETION,
        "max_steps": 10,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "weight_decay": 0.0,
        "adam_epsilon": 1e-3,  # a step then is no mere sign of the gradient, and fp32 noise in tiny entries stays noise
        "max_grad_norm": 1e9,
        "importance_sampling_cap": None,
        "sigma_start": 0.0,
        "sigma_end": 0.0,
        "logprob_chunk_size": 5,
    }
    return Config(**{**defaults, **changes})


def make_batch(vocab: int, seed: int = 0, rows: int = ROWS) -> Batch:
    """Random right-padded prompts and completions of different lengths, with arbitrary behaviour log-probabilities."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, LENGTH)).astype(np.int32)
    prompts = rng.integers(1, PROMPT + 1, rows)
    lengths = prompts + rng.integers(1, COMPLETION + 1, rows)
    columns = np.arange(LENGTH)
    mask = (columns >= prompts[:, None]) & (columns < lengths[:, None])
    return Batch(
        tokens=jnp.asarray(np.where(columns < lengths[:, None], tokens, 0)),
        logprobs=jnp.asarray(np.where(mask, -rng.gamma(8, 0.5, mask.shape), 0), jnp.float32),
        prompt_lengths=jnp.asarray(prompts, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        finish=jnp.full(rows, FinishReason.EOS, jnp.int8),
        prompt_index=jnp.asarray(np.arange(rows) // 2, jnp.int32),
        advantages=jnp.asarray(rng.normal(size=rows), jnp.float32),
        loss_mask=jnp.asarray(mask),
    )
