"""Our grader beside math-verify and the extraction of lm-evaluation-harness, on real gold answers with known verdicts.

    python tools/compare_graders.py [--solutions example_model_solutions.jsonl] [--out FILE.json]

The cases are those of `tests/data/grading`: pairs of a gold answer and an answer, judged by hand, and completions of
published models on GSM8K, judged by their authors. Each is put into whole completions of several forms. `--solutions`
adds all 5,276 completions of that file (openai/grade-school-math, MIT). Prints how often each grader is right and every
case where one of them is not; `--out` also writes them.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.metadata
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path

import record

from qerl_jax.evaluation.grading import CORRECT, Grader, grader_of
from qerl_jax.rewards.functions import load_reward

CASES = Path(__file__).resolve().parent.parent / "tests" / "data" / "grading"
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")

# Whole completions around an answer, by form; the forms of GSM8K and those of the sets with formulas.
NUMBER_FORMS = {
    "tags": "<think>{thought}</think>\n<answer>{answer}</answer>",
    "solution": "{thought}\n#### {answer}",
    "chain of thought": "{thought} The answer is {answer}.",
}
FORMULA_FORMS = {
    "tags": "<think>{thought}</think>\n<answer>{answer}</answer>",
    "boxed": "{thought} So the answer is $\\boxed{{{answer}}}$.",
    "minerva": "{thought}\nFinal Answer: The final answer is ${answer}$. I hope it is correct.",
}
THOUGHT = "First we add 2 and 7, which makes 9. Then we are done."

# lm-evaluation-harness 0.4.13 (MIT), `filter_list` of lm_eval/tasks/gsm8k/gsm8k.yaml (strict-match of "solution", and
# flexible-extract) and gsm8k-cot.yaml (strict-match of "chain of thought"); `regexes_to_ignore` of both.
STRICT = {
    "solution": re.compile(r"#### (\-?[0-9\.\,]+)"),
    "chain of thought": re.compile(r"The answer is (\-?[0-9\.\,]+)."),
}
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A completion with its verdict.

    Attributes:
      dataset, problem: where the gold answer is from.
      gold: the gold answer.
      answer: what the completion answers; "" where it breaks off.
      form: form of the completion, a key of `NUMBER_FORMS` or `FORMULA_FORMS`.
      completion: the whole text.
      correct: the verdict.
    """

    dataset: str
    problem: str
    gold: str
    answer: str
    form: str
    completion: str
    correct: bool


def hand_cases() -> Iterator[Case]:
    """The pairs judged by hand, each in every form of its dataset."""
    with (CASES / "answers.tsv").open() as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            forms = NUMBER_FORMS if row["dataset"] == "gsm8k" else FORMULA_FORMS
            for form, text in forms.items():
                completion = text.format(thought=THOUGHT, answer=row["given"])
                known = (row["dataset"], row["problem"], row["gold"], row["given"], form, completion)
                yield Case(*known, row["correct"] == "1")


def model_cases(rows: Iterable[dict]) -> Iterator[Case]:
    """Completions of models whose last line is "A: …", which each form's statement replaces; one that breaks off
    before that line states nothing in any form.
    """
    for row in rows:
        thought, _, last = row["completion"].rpartition("\n")
        for form, text in NUMBER_FORMS.items():
            stated = last.removeprefix("A: ") if last.startswith("A: ") else ""
            completion = text.format(thought=thought, answer=stated) if stated else row["completion"]
            yield Case("gsm8k", row["problem"], row["gold"], stated, form, completion, row["correct"])


def stored_completions() -> list[dict]:
    """The completions in the repository."""
    return [json.loads(line) for line in (CASES / "gsm8k_completions.jsonl").read_text().splitlines()]


def published_completions(path: Path) -> Iterator[dict]:
    """All completions of `example_model_solutions.jsonl`."""
    for index, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        gold = row["ground_truth"].rpartition("A: ")[2]
        for model in MODELS:
            found = {"completion": row[model]["solution"], "correct": row[model]["is_correct"]}
            yield {"problem": f"test/{index}", "model": model, "gold": gold, **found}


def ours(dataset: str) -> Grader:
    """The grader of the harness: the dataset's reward."""
    name = "answer" if dataset == "gsm8k" else "math_verify"
    return grader_of(name, load_reward(name))


def is_correct(grader: Grader, case: Case) -> bool:
    """Our verdict."""
    return grader.verdicts([""], [case.gold], [case.completion], [0]) == [CORRECT]


def by_math_verify(case: Case) -> bool:
    """math-verify with its own settings on the whole completion."""
    from math_verify import parse, verify

    gold = parse(f"${case.gold}$", parsing_timeout=None)
    return verify(gold, parse(case.completion, parsing_timeout=None), timeout_seconds=None)


def by_lm_eval(case: Case, pattern: re.Pattern, which: int) -> bool:
    """Match number `which` of a pattern, compared as `exact_match` does; of several groups the first that matched."""
    found = pattern.findall(case.completion)
    match = found[which] if found else "[invalid]"
    match = match if isinstance(match, str) else next(part for part in match if part)
    return _exact(match.strip()) == _exact(case.gold)


def _exact(text: str) -> str:
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def graders_of(case: Case) -> dict[str, Callable[[Case], bool]]:
    """The other graders that know the case's form."""
    found: dict[str, Callable[[Case], bool]] = {"math-verify": by_math_verify}
    if case.dataset == "gsm8k":
        found["lm-eval flexible-extract"] = lambda case: by_lm_eval(case, FLEXIBLE, -1)
        if case.form in STRICT:
            found["lm-eval strict-match"] = lambda case: by_lm_eval(case, STRICT[case.form], 0)
    return found


def compare(cases: Iterable[Case]) -> list[dict]:
    """A row for each case: its fields but the completion, and the verdict of every grader."""
    graders = {"gsm8k": ours("gsm8k"), "formula": ours("formula")}
    rows = []
    for case in cases:
        row = {key: value for key, value in dataclasses.asdict(case).items() if key != "completion"}
        row["verdicts"] = {"ours": is_correct(graders["gsm8k" if case.dataset == "gsm8k" else "formula"], case)}
        row["verdicts"] |= {name: bool(judge(case)) for name, judge in graders_of(case).items()}
        rows.append(row)
    return rows


def summary(source: str, rows: list[dict]) -> list[dict]:
    """For each dataset, form and grader: cases, those that it judges right, wrongly accepts and wrongly rejects, and
    those where it agrees with ours.
    """
    counts: dict[tuple[str, str, str], Counter] = {}
    for row in rows:
        for name, verdict in row["verdicts"].items():
            count = counts.setdefault((row["dataset"], row["form"], name), Counter())
            count["cases"] += 1
            count["right"] += verdict == row["correct"]
            count["wrongly_accepted"] += verdict and not row["correct"]
            count["wrongly_rejected"] += row["correct"] and not verdict
            count["agrees_with_ours"] += verdict == row["verdicts"]["ours"]
    names = ("dataset", "form", "grader")
    fields = ("cases", "right", "wrongly_accepted", "wrongly_rejected", "agrees_with_ours")
    return [
        {"source": source, **dict(zip(names, key, strict=True)), **{name: count[name] for name in fields}}
        for key, count in counts.items()
    ]


def disagreements(source: str, rows: list[dict]) -> list[dict]:
    """The cases that not all graders judge right, with who does."""
    found = []
    for row in rows:
        wrong = [name for name, verdict in row["verdicts"].items() if verdict != row["correct"]]
        if wrong:
            case = {key: row[key] for key in ("dataset", "problem", "gold", "answer", "form", "correct")}
            right = [name for name in row["verdicts"] if name not in wrong]
            found.append({"source": source, **case, "right": right, "wrong": wrong})
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solutions", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    sources = {"by hand": list(hand_cases()), "models, stored": list(model_cases(stored_completions()))}
    if arguments.solutions:
        sources["models, all"] = list(model_cases(published_completions(arguments.solutions)))
    tables, cases = [], []
    for source, found in sources.items():
        rows = compare(found)
        tables += summary(source, rows)
        cases += disagreements(source, rows)
    for row in tables:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    for case in cases:
        print(f"{case['form']}: {case['answer']!r} for {case['gold']!r} is {case['correct']}; wrong: {case['wrong']}")
    if arguments.out:
        command = " ".join(["python", "tools/compare_graders.py", *(["--solutions …"] if arguments.solutions else [])])
        versions = {name: importlib.metadata.version(name) for name in ("math-verify", "sympy")}
        meta = {"date": date.today().isoformat(), "commit": record.commit_of(None)[0], "command": command, **versions}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"meta": meta, "rows": tables, "disagreements": cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
