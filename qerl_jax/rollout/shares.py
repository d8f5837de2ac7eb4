"""A replica's part of a rollout: whole groups."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from qerl_jax.parallel import Replicas
from qerl_jax.types import Prompts, Rollout


def generate_share(replicas: Replicas, prompts: Prompts, sample: Callable[[Prompts], Rollout]) -> Rollout | None:
    """The completions of this replica's prompts, the samples that one process would draw beside the others; None where
    it has no prompt.

    Args:
      replicas: those that share the prompts.
      prompts: of all.
      sample: from prompts to their completions, as `engine.generate`.

    Returns:
      Rows with the `prompt_index` of all prompts.
    """
    own = np.asarray(replicas.share(len(prompts.lengths)), np.int32)
    if replicas.count == 1 or not own.size:
        return sample(prompts) if own.size else None
    rollout = sample(prompts.part(own))
    return rollout.replace(prompt_index=jax.device_put(own[np.asarray(rollout.prompt_index)]))
