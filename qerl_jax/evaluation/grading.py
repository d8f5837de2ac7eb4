"""Verdicts on completions, and votes among them.

Axes: P problems, n completions of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qerl_jax.rewards.outcomes import FLAGS, Reward
from qerl_jax.rewards.statements import stated_answer

CORRECT, WRONG, NO_GOLD = "correct", "wrong", "no gold"
STATED = ("answer", "math_verify", "dapo")
"""Rewards that compare the stated answer with the gold answer."""
_VERDICT_OF = {"parse_failure": "unreadable", "timeout": "timeout", "crash": "crash"}
UNREADABLE, TIMEOUT, CRASH = _VERDICT_OF.values()


@dataclasses.dataclass(frozen=True)
class Grader:
    """How completions are judged.

    Attributes:
      reward: gives a correct completion more than 0, and None where it cannot read the gold answer.
      votes: it compares the answer that a completion states, so that equal ones can vote.
    """

    reward: Reward
    votes: bool = False

    def verdicts(
        self, prompts: Sequence[str], golds: Sequence[str], completions: Sequence[str], prompt_index: Sequence[int]
    ) -> list[str]:
        """One verdict for each completion: "correct", "wrong", "unreadable" (it states no answer), "timeout" or "crash"
        of its grading, or "no gold" (the gold answer cannot be read).
        """
        values = self.reward(
            prompts=list(prompts), completions=list(completions), answer=list(golds), prompt_index=list(prompt_index)
        )
        return [_verdict(value) for value in values]

    def extract(self, completion: str) -> str | None:
        """The answer that a completion states, as a text; None where there is none or no vote is taken."""
        return stated_answer(completion) if self.votes else None

    def majority(self, answers: Sequence[str | None]) -> tuple[int | None, bool]:
        """Index of the first completion with the answer that most of them give, and whether others have as many votes;
        None without any answer. Equivalent answers vote together; among answers with as many votes the one given first
        wins.

        A text joins the first group whose first text it equals by the reward, in the order of the completions.
        """
        group_of: dict[str, int] = {}
        firsts: list[int] = []  # index of each group's first completion
        votes: list[int] = []
        for index, text in enumerate(answers):
            if text is None:
                continue
            if text not in group_of:
                group_of[text] = self._group(text, [answers[first] for first in firsts])
                if group_of[text] == len(firsts):
                    firsts.append(index)
                    votes.append(0)
            votes[group_of[text]] += 1
        if not votes:
            return None, False
        return firsts[votes.index(max(votes))], votes.count(max(votes)) > 1

    def _group(self, text: str, representatives: list[str]) -> int:
        """The first group that a text belongs to; their number where it begins a new one."""
        if not representatives:
            return 0
        count = len(representatives)
        pairs = [(text, other) for other in representatives] + [(other, text) for other in representatives]
        values = self.reward(  # either way round: of 3,5 and 3.5 only one is right where the other is the answer
            prompts=[""] * len(pairs),
            completions=[f"<answer>{stated}</answer>" for stated, _ in pairs],
            answer=[answer for _, answer in pairs],
            prompt_index=list(range(len(pairs))),
        )
        return next((i % count for i, value in enumerate(values) if _verdict(value) == CORRECT), count)


def grader_of(name: str, reward: Reward) -> Grader:
    """The grader of a reward by its name in `rewards.functions.BUILT_IN`."""
    return Grader(reward, votes=name in STATED)


def _verdict(value: float | None) -> str:
    if value is None:
        return NO_GOLD
    for flag, kind in FLAGS.items():
        if isinstance(value, kind) and not value > 0:
            return _VERDICT_OF[flag]
    return CORRECT if value > 0 else WRONG
