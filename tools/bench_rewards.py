"""Cost of grading: `python tools/bench_rewards.py DATASET` prints milliseconds for 1,000 completions, by reward.

DATASET has formulas as answers and is written as for `--dataset` (`math500:PATH`). A completion is a problem's text
repeated to a length, with the correct answer or, every second time, its neighbour's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from qerl_jax.data.problems import load_dataset
from qerl_jax.rewards import functions
from qerl_jax.rewards.load import load_rewards

COUNT = 1_000
INLINE = ("answer", "soft_format", "strict_format", "dapo", "xml_count", "overlong", "qerl_exact")
COPY = "from qerl_jax.rewards.functions import answer\n\ndef copy(**rows):\n    return answer(**rows)\n"


def rows_of(dataset: str, characters: int) -> dict[str, list]:
    """Columns of `COUNT` completions of about `characters` characters."""
    problems = load_dataset(dataset, "test").problems
    chosen = [problems[i % len(problems)] for i in range(COUNT)]
    given = [problems[(i + i % 2) % len(problems)].answer for i in range(COUNT)]
    thoughts = [(p.prompt * (characters // len(p.prompt) + 1))[:characters] for p in chosen]
    texts = [
        f"<think>{thought}</think>\n<answer>{given_answer}</answer>\nAnswer: {given_answer}"
        for thought, given_answer in zip(thoughts, given, strict=True)
    ]
    return {
        "prompts": [p.prompt for p in chosen],
        "completions": texts,
        "answer": [p.answer for p in chosen],
        "completion_lengths": [100] * COUNT,
        "max_completion_length": [120] * COUNT,
        "overlong_buffer": [40] * COUNT,
        "reward_timeout": [60.0] * COUNT,
    }


def milliseconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    for characters in (2_000, 12_000):
        rows = rows_of(arguments.dataset, characters)
        for name in INLINE:
            reward = functions.load_reward(name)
            print(f"{characters} characters, {name}: {milliseconds(lambda r=reward: r(**rows)):.1f} ms")  # noqa: B023
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "copied.py"
            file.write_text(COPY)
            names = ("math_verify", f"{file}:copy")
            started = time.perf_counter()
            with load_rewards(names, arguments.workers, 60.0) as rewards:
                print(f"start of {arguments.workers} workers: {1e3 * (time.perf_counter() - started):.0f} ms")
                for name, reward in rewards.items():
                    label = name if name == "math_verify" else "answer as a file's function, one task a completion"
                    spent = milliseconds(lambda r=reward: r(**rows))  # noqa: B023
                    print(f"{characters} characters, {label}: {spent:.0f} ms in {arguments.workers} workers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
