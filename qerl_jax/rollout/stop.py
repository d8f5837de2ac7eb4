"""`stop` strings: found on the host, in text.

Axes: B sequences, T tokens.
"""

from __future__ import annotations

import bisect
from typing import Any

import jax.numpy as jnp
import numpy as np

from qerl_jax.types import FinishReason, Rollout, completion_ids


class StopWatch:
    """Sees early which completions have reached a stop string, so that no more is decoded for them. `cut_at_stop` later
    says exactly where.

    Args:
      strings: the stop strings; none: nothing ever stops.
      tokenizer: of the policy.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Any) -> None:
        self.strings, self.tokenizer = strings, tokenizer
        # A string of c bytes lies within c tokens that show; those that show nothing only delay what is found.
        self._reach = max((len(string.encode()) for string in strings), default=0)
        self._ids: dict[int, list[int]] = {}

    def reached(self, row: int, new: list[int]) -> bool:
        """Whether the completion `row` has reached a stop string with the tokens `new`, in the order they come."""
        if not self.strings:
            return False
        ids = self._ids.setdefault(row, [])
        ids += new
        text = self.tokenizer.decode(ids[-(len(new) + self._reach) :])
        return any(string in text for string in self.strings)


def cut_at_stop(rollout: Rollout, stop: tuple[str, ...], tokenizer: Any, pad: int) -> Rollout:
    """End each completion with the token that completes the first stop string in its text; on the host."""
    tokens, logprobs, lengths, finish = (
        np.array(x) for x in (rollout.tokens, rollout.logprobs, rollout.lengths, rollout.finish)
    )
    for row, ids in enumerate(completion_ids(rollout)):
        if not any(string in tokenizer.decode(ids) for string in stop):
            continue
        # A text that holds a stop string holds it however it goes on, so the first such length is found by halving.
        kept = 1 + bisect.bisect_left(
            range(1, len(ids)), True, key=lambda n, ids=ids: any(s in tokenizer.decode(ids[:n]) for s in stop)
        )
        lengths[row] = int(rollout.prompt_lengths[row]) + kept
        tokens[row, lengths[row] :], logprobs[row, lengths[row] :], finish[row] = pad, 0, FinishReason.STOP
    return rollout.replace(
        tokens=jnp.asarray(tokens),
        logprobs=jnp.asarray(logprobs),
        lengths=jnp.asarray(lengths),
        finish=jnp.asarray(finish),
    )
