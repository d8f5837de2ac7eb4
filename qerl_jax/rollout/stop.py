"""`stop` strings, found in text on the host.

Axes: B sequences, T tokens.
"""

from __future__ import annotations

import bisect
from typing import Any

import jax
import numpy as np

from qerl_jax.types import FinishReason, Rollout, completion_ids


class StopStrings:
    """Detects stop strings while completions are decoded, so that decoding ends early. `truncate_at_stop` then finds
    the exact token.

    Args:
      strings: stop strings; without any, nothing is detected.
      tokenizer: tokenizer of the policy.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Any) -> None:
        self.strings, self.tokenizer = strings, tokenizer
        # A string of c bytes spans at most c tokens with text; tokens without text only delay detection.
        self._window = max((len(string.encode()) for string in strings), default=0)

    def is_reached(self, ids: list[int], new: int) -> bool:
        """Whether the text of a sequence contains a stop string since its last `new` tokens."""
        if not self.strings:
            return False
        text = self.tokenizer.decode(ids[-(new + self._window) :])
        return any(string in text for string in self.strings)


def truncate_at_stop(rollout: Rollout, stop: tuple[str, ...], tokenizer: Any, pad: int) -> Rollout:
    """Cut each completion behind the token that completes its first stop string. Runs on the host."""
    prompt_lengths = np.asarray(rollout.prompt_lengths)
    tokens, logprobs, lengths, finish = (
        np.array(x) for x in (rollout.tokens, rollout.logprobs, rollout.lengths, rollout.finish)
    )
    entropies = None if rollout.entropies is None else np.array(rollout.entropies)
    for row, ids in enumerate(completion_ids(rollout)):
        if not any(string in tokenizer.decode(ids) for string in stop):
            continue
        # Appending tokens never removes a stop string, so binary search finds the shortest prefix that contains one.
        kept = 1 + bisect.bisect_left(
            range(1, len(ids)), True, key=lambda n, ids=ids: any(s in tokenizer.decode(ids[:n]) for s in stop)
        )
        lengths[row] = int(prompt_lengths[row]) + kept
        tokens[row, lengths[row] :], finish[row] = pad, FinishReason.STOP
        logprobs[row, lengths[row] :] = 0
        if entropies is not None:
            entropies[row, lengths[row] :] = 0
    return rollout.replace(
        tokens=jax.device_put(tokens),
        logprobs=jax.device_put(logprobs),
        entropies=None if entropies is None else jax.device_put(entropies),
        lengths=jax.device_put(lengths),
        finish=jax.device_put(finish),
    )
