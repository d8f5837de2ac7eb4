"""Generated problems: their answers against an independent evaluation, and what is held out of training; the bundled
policy's tokenizer and record.
"""

import ast
import hashlib
import json
import operator

import pytest
from transformers import AutoTokenizer

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.data import arithmetic
from qerl_jax.data.arithmetic import (
    HELD_OUT_NUMBERS,
    HELD_OUT_TEMPLATES,
    TRAIN_TEMPLATES,
    arithmetic_problem,
    given_numbers,
    problems,
)

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@pytest.fixture(scope="module")
def train():
    return [arithmetic_problem("train", 0, index) for index in range(3000)]


@pytest.fixture(scope="module")
def heldout():
    return [arithmetic_problem("heldout", 0, index) for index in range(1000)]


def flat(templates: dict[str, dict[int, list[tuple[str, ...]]]]) -> set[tuple[str, ...]]:
    return {clauses for by_operations in templates.values() for part in by_operations.values() for clauses in part}


def evaluate(expression: str) -> float:
    node = ast.parse(expression, mode="eval").body
    return OPERATORS[type(node.op)](node.left.value, node.right.value)


@pytest.mark.parametrize("split", arithmetic.SPLITS)
def test_pure_function_of_split_seed_and_index(split):
    first = problems(split, 50, seed=3)
    assert first == problems(split, 80, seed=3)[:50]
    assert first != problems(split, 50, seed=4)
    assert first[7] == (arithmetic_problem(split, 3, 7).question, arithmetic_problem(split, 3, 7).answer)


def test_the_stream_stays_what_it_was():
    """Recorded accuracies are of these problems: a change of the generator has to be deliberate."""
    assert problems("train", 1)[0] == (
        "Eva plants 5 rows of 4 trees. Eva plants 2 more rows of 9 trees. How many trees are there now?",
        "38",
    )
    assert problems("heldout", 2)[1] == (
        "A bus has 95 riders. At a stop 83 riders get on. "
        "Then 2 groups of 7 riders get on. At a stop 58 riders get off. "
        "How many riders are on the bus now?",
        "134",
    )


def test_steps_are_true_and_end_in_the_answer(train, heldout):
    for problem in train + heldout:
        assert 2 <= len(problem.steps) <= 4, problem
        for step in problem.steps:
            left, right = str(step).split("=")
            assert evaluate(left) == int(right) and 0 < int(right) <= arithmetic.LARGEST, problem
        assert problem.answer == str(problem.steps[-1].result), problem


def test_operands_are_given_or_computed(train, heldout):
    """The story states every number that the solution uses and did not compute."""
    for problem in train + heldout:
        known = given_numbers(problem.question)
        for step in problem.steps:
            assert {step.left, step.right} <= known, problem
            known.add(step.result)


def test_templates_are_disjoint():
    train, held_out = flat(TRAIN_TEMPLATES), flat(HELD_OUT_TEMPLATES)
    assert len(train) >= 8 and len(held_out) >= 8 and not train & held_out
    assert {clause for clauses in held_out for clause in clauses} <= {clause for clauses in train for clause in clauses}


def test_training_never_states_a_held_out_number_or_template(train):
    assert {problem.template for problem in train} <= flat(TRAIN_TEMPLATES)
    assert not any(given_numbers(problem.question) & HELD_OUT_NUMBERS for problem in train)


def test_held_out_problems_are_of_both_kinds(train, heldout):
    by_number, by_template = heldout[0::2], heldout[1::2]
    assert all(given_numbers(problem.question) & HELD_OUT_NUMBERS for problem in by_number)
    assert not any(
        n >= 10 and n not in HELD_OUT_NUMBERS for problem in by_number for n in given_numbers(problem.question)
    )
    assert {problem.template for problem in by_number} <= flat(TRAIN_TEMPLATES)
    assert {problem.template for problem in by_template} <= flat(HELD_OUT_TEMPLATES)
    assert not {problem.question for problem in heldout} & {problem.question for problem in train}


def test_unknown_split():
    with pytest.raises(ValueError, match="test"):
        problems("test", 1)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(model_path("tiny")), local_files_only=True)


@pytest.mark.parametrize(
    "text", ["Grüße, 漢字\t1,234 🙂", "<think>4*9=36\n36-6=30</think><answer> 30 </answer>", " a  b\n\n"]
)
def test_any_text_encodes_and_decodes(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text  # the tags are text to a reader


def test_tokens_of_the_bundled_tokenizer(tokenizer):
    assert tokenizer.tokenize("4096") == list("4096")  # one digit each, as Qwen2.5
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    for tag in ("<|im_start|>", "<think>", "</think>", "<answer>", "</answer>"):
        assert tokenizer.tokenize(tag) == [tag]


def test_chat_template_asks_for_the_format(tokenizer):
    question = [{"role": "user", "content": "How many?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\n<think>steps</think><answer>number</answer><|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Hello"}, *question]
    assert tokenizer.apply_chat_template(own, tokenize=False).startswith("<|im_start|>system\nHello<|im_end|>")


def test_generated_prompts_fit_the_default_run(tokenizer, train, heldout):
    longest = max(len(tokenizer.encode(problem.question)) for problem in train + heldout)
    template = len(tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)))
    assert longest + template + 3 <= 80  # configs/tiny.yaml's max_prompt_length; 3: the assistant's header


def test_the_record_is_of_these_weights():
    record = json.loads((model_path("tiny") / "pretraining.json").read_text())
    weights = (model_path("tiny") / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record["sha256"] and len(weights) <= 8e6
    assert 0.25 <= record["heldout"]["nvfp4"]["pass_at_1"] <= 0.5
