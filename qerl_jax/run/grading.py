"""Grading of a rollout, which begins while it is sampled.

Axes: B completions = P prompts · G group, row = p · G + g.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from qerl_jax.data.prompts import EncodedProblem, Remembering, completion_text, completion_texts
from qerl_jax.rewards.functions import as_rows, score
from qerl_jax.rl.experience import Experience
from qerl_jax.rollout.engine import Progress
from qerl_jax.run.choose_rewards import reward_rows
from qerl_jax.run.prepare import Run
from qerl_jax.types import FinishReason, Rollout


class Grading:
    """Scores the completions of P problems, or of this replica's share of them.

    Args:
      run: the run.
      problems: P, of all replicas.
    """

    def __init__(self, run: Run, problems: Sequence[EncodedProblem]):
        self._run, self._problems = run, problems
        self._tokenizer = Remembering(run.policy.tokenizer)
        self._ended: dict[int, tuple[str, int]] = {}  # text and tokens of completions, by row
        self._rows = functools.partial(reward_rows, run.config, [item.problem for item in problems])

    def begin(self, progress: Progress) -> None:
        """Decode the texts of the completions that have just ended, and have the rewards begin with them and with the
        prompts that are complete with them (`Rewards.begin`). `finish` asks for the same again, which is then there;
        the completions that end last are left to it, because the device has nothing to do beside them.
        """
        if len(self._ended) + len(progress.completions) == progress.rows:
            return
        own, group = self._run.replicas.share(len(self._problems)), self._run.config.num_generations
        eos_ids = self._run.policy.config.eos_token_ids
        for row, ids in progress.completions.items():
            prompt, has_eos = self._problems[own[row // group]].tokens, bool(ids) and ids[-1] in eos_ids
            text = completion_text(prompt, np.asarray(ids, np.int32), has_eos, self._tokenizer)
            self._ended[row] = text, len(ids)
        prompts = [range(p * group, (p + 1) * group) for p in sorted({row // group for row in progress.completions})]
        whole = [row for rows in prompts if self._ended.keys() >= set(rows) for row in rows]
        for chosen, is_whole in ((list(progress.completions), False), (whole, True)):
            ended = [self._ended[row] for row in chosen]
            places = [own[row // group] for row in chosen]
            rows, columns = self._rows(places, [text for text, _ in ended], [length for _, length in ended])
            self._run.rewards.begin(as_rows(*rows, **columns), is_whole)

    def finish(self, rollout: Rollout) -> Experience:
        """Score the whole rollout. The reward of a completion whose largest logit was not finite is NaN: it counts in
        no mean of its group and leaves the loss.
        """
        completions = completion_texts(rollout, self._tokenizer)
        ends, starts, index, finish = jax.device_get(
            (rollout.lengths, rollout.prompt_lengths, rollout.prompt_index, rollout.finish)
        )
        lengths = ends - starts
        rows, columns = self._rows(index.tolist(), completions, lengths.tolist())
        rewards, parts = score(self._run.rewards, self._run.config.reward_weights, *rows, **columns)
        return Experience(
            problems=list(self._problems),
            rollout=rollout,
            completions=completions,
            rewards=np.where(finish == FinishReason.FAILED, np.nan, rewards).astype(np.float32),
            reward_parts={name: np.asarray(values, np.float32) for name, values in parts.items()},
            drawn=len(self._problems),
            sampled=int(lengths.sum()),
        )
