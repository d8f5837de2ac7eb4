"""Few-shot prompts: the published ones to the letter, drawn ones, and what a completion in their form is graded as."""

from __future__ import annotations

import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
import runs

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.data.few_shot import PUBLISHED, few_shot, with_examples
from qerl_jax.data.files import DataError
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import encode
from qerl_jax.evaluate import main
from qerl_jax.types import FinishReason, Rollout

# SHA-256 of the prompt for "What is 1 + 1?", put together from the tables of lm-evaluation-harness 0.4.13 by
# "Q: …\nA: …\n\n" (tasks/gsm8k/gsm8k-cot.yaml) and "Problem:\n…\n\nSolution:\n…\n\n" (tasks/minerva_math/utils.py).
LM_EVAL = {
    "wei": "3eae2a776476b73ceb410c9d2223c594055981fa275e2f4ba9252882cd0a11d3",
    "minerva": "7d556d233c64db3984c5ba1c9f8dccee2bf880b1423c798c4fedbde2970dc1f6",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_prompts_are_those_of_lm_eval(name):
    shots = PUBLISHED[name]
    prompt = shots.prompt("What is 1 + 1?")
    assert hashlib.sha256(prompt.encode()).hexdigest() == LM_EVAL[name]
    assert len(shots.examples) == {"wei": 8, "minerva": 4}[name]
    assert prompt.endswith({"wei": "Q: What is 1 + 1?\nA:", "minerva": "Problem:\nWhat is 1 + 1?\n\nSolution:"}[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_example_states_its_answer(name):
    answers = {
        "wei": ["6", "5", "39", "8", "9", "29", "33", "8"],
        "minerva": ["$[2,5)$", "$24$", "$16$", "$-\\frac{2}{3}$"],
    }
    shots = PUBLISHED[name]
    continued = [f" {answer}\n\n{shots.stop} and so on. The answer is 7." for _, answer in shots.examples]
    assert [shots.extract_before_stop(text) for text in continued] == answers[name]


def test_examples_are_drawn_from_the_train_split_by_seed(data):
    name = f"gsm8k:{data / 'gsm8k'}"
    rows = [json.loads(line) for line in (data / "gsm8k" / "train.jsonl").read_text().splitlines()]
    worked = {(row["question"], row["answer"]) for row in rows}
    draws = [few_shot("3", name, "test", seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    for shots in draws:
        assert len(set(shots.examples)) == 3 and set(shots.examples) <= worked
        first, answer = shots.examples[0]
        assert shots.prompt("Why?").startswith(f"Question: {first}\nAnswer: {answer}\n\nQuestion: ")
        assert shots.prompt("Why?").endswith("\n\nQuestion: Why?\nAnswer:")
        assert shots.extract_before_stop(f" {answer}\n\nQuestion: a #### 9") == answer.rpartition("#### ")[2]
        assert shots.extract_before_stop(" I do not know.\n\nQuestion: a #### 9") is None
    with pytest.raises(DataError, match=r"few_shot 9: the train split of .* has 8 worked solutions"):
        few_shot("9", name, "test", 0)
    with pytest.raises(DataError, match="draws examples from the train split, which is what is evaluated"):
        few_shot("3", name, "train", 0)
    with pytest.raises(DataError, match=r"has no worked solutions, only \['gsm8k', 'math'\] have"):
        few_shot("3", str(data / "gsm8k"), "test", 0)


def test_a_few_shot_prompt_has_no_template_and_its_control_tokens_are_text():
    tokenizer = load_tokenizer(model_path("tiny"))
    [problem] = with_examples([Problem(0, "Why <|im_end|>?", "1")], PUBLISHED["wei"])
    [ids] = encode([problem], tokenizer, "", use_template=False)
    assert tokenizer.decode(ids) == PUBLISHED["wei"].prompt("Why <|im_end|>?")
    assert not set(ids) & {0, 1, 2}  # the ids of the control tokens
    [templated] = encode([problem], tokenizer, "")
    assert templated != ids and {1, 2} <= set(templated)


def test_the_command_line_reads_the_examples_form(data, tmp_path):
    """Completions written here: the answer after "####", before a question that is made up; tags are not the form."""
    tokenizer = load_tokenizer(model_path("tiny"))
    seen = {}

    def generate(policy, prompts, sampling, key, engine):
        texts = [
            " So it is.\n#### 36 eggs\n\nQuestion: more?\nAnswer: #### 5",
            "<answer>1,200</answer>",
            " #### $-4.",
            " I do not know.\n\nQuestion: more?\nAnswer: #### 3",
        ]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        starts = np.asarray(prompts.lengths)
        rows = [[*np.asarray(prompts.tokens)[p, : starts[p]], *ids[p]] for p in range(4)]
        width = max(map(len, rows))
        tokens = jnp.asarray([[*row, *[0] * (width - len(row))] for row in rows], jnp.int32)
        finish = jnp.full(4, FinishReason.STOP, jnp.int8)
        seen.update(stop=sampling.stop, prompts=[tokenizer.decode(row[: starts[p]]) for p, row in enumerate(rows)])
        lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
        index = jnp.arange(4, dtype=jnp.int32)
        return Rollout(tokens, jnp.zeros(tokens.shape, jnp.float32), prompts.lengths, lengths, finish, index)

    rows = [{"question": f"{n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text((data / "presets" / "gsm8k" / "train.jsonl").read_text())
    name = f"gsm8k:{tmp_path}"
    drawn, others = (few_shot("1", name, "test", seed).prompt("") for seed in (5, 0))
    assert drawn != others
    flags = ["--dataset", name, "--few-shot", "1", "--seed", "5", "--records", str(tmp_path / "records.jsonl")]
    assert main(["tiny", *flags, "--output", str(tmp_path / "result.json"), "--dtype", "float32"], generate) == 0
    assert seen["stop"] == ("Question:",)
    assert all(text.startswith(drawn.removesuffix("\nAnswer:")) for text in seen["prompts"])
    _, *items = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [item["gold"] for item in items] == ["36", "1,200", "-4", "3"]
    assert [item["answers"] for item in items] == [["36 eggs"], [None], ["$-4."], [None]]
    assert [item["verdicts"] for item in items] == [["correct"], ["unreadable"], ["correct"], ["unreadable"]]
    assert items[0]["prompt"] == json.loads((tmp_path / "test.jsonl").read_text().splitlines()[0])["question"]
    result = runs.read_json(tmp_path / "result.json")
    assert (result["accuracy"], result["unreadable"]) == (0.5, 0.5)
