"""The bundled problems, policy, tokenizer and its record."""

import hashlib
import json
import re

import pytest
from transformers import AutoTokenizer

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.data.problems import load_dataset

SPLITS = ("train", "test")
HELD_OUT = {n for n in range(10, 100) if (n // 10 + 3 * (n % 10)) % 7 == 2}  # numbers that training never states


PROBLEMS = {split: load_dataset("arithmetic", split).problems for split in SPLITS}


def test_the_problems_stay_what_they_were():
    """Recorded accuracies are of these, and so is what is held out: a number in every other one of the test."""
    texts = "".join(f"{one.prompt} {one.answer}\n" for split in SPLITS for one in PROBLEMS[split])
    assert hashlib.sha256(texts.encode()).hexdigest()[:32] == "22b941dd3921d8f075bfd443e0876630"
    train, test = (
        [not HELD_OUT.isdisjoint(map(int, re.findall(r"\d+", one.prompt))) for one in PROBLEMS[split]]
        for split in SPLITS
    )
    assert not any(train) and all(test[::2]) and not any(test[1::2])


def test_the_columns_of_other_files_of_a_run_are_not_those_of_the_bundled_problems():
    assert load_dataset("arithmetic", "test", "problem", "", limit=1).problems == PROBLEMS["test"][:1]


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


def test_prompts_fit_the_default_run(tokenizer):
    longest = max(len(tokenizer.encode(one.prompt)) for split in SPLITS for one in PROBLEMS[split])
    template = len(tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)))
    assert longest + template + 3 <= 80  # configs/tiny.yaml's max_prompt_length; 3: the assistant's header


def test_the_record_is_of_these_weights():
    record = json.loads(model_path("tiny").with_name("tiny-qwen2-pretraining.json").read_text())
    weights = (model_path("tiny") / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record["sha256"] and len(weights) <= 8e6
    assert 0.25 <= record["heldout"]["nvfp4"]["pass_at_1"] <= 0.5
