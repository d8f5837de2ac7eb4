"""The class that reads a tokenizer, and the EOS token, without transformers."""

import shutil
from pathlib import Path

import pytest
import small

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.checkpoint.safetensors import read_json
from qerl_jax.checkpoint.tokenizer import eos_id, load_tokenizer

DATA = Path(__file__).parents[1] / "data"
DECODER = {"1": {"content": "<|im_start|>", "special": True}, "2": {"content": "<|im_end|>", "special": True}}


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        ({}, {}, 2),
        ({"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, {}, 2),
        ({"eos_token": "a"}, {}, 71),
        ({}, {"eos_token": "<|im_start|>"}, 1),
        ({"added_tokens_decoder": DECODER}, {"eos_token": "<|im_start|>"}, 2),
        ({"eos_token": None}, {}, None),
    ],
)
def test_the_tokenizers_end_token_ends_a_completion(tmp_path, config, names, expected):
    """A config that names another one; what transformers reads is the oracle."""
    directory = small.bf16(tmp_path / "model", 1, eos_token_id=3)
    own = read_json(directory / "tokenizer_config.json")
    small.write_json(directory / "tokenizer_config.json", own | config)
    small.write_json(directory / "generation_config.json", {})
    small.write_json(directory / "vocab.json", {"a": 5})  # of a directory with tokenizer.json nobody reads it
    if names:
        small.write_json(directory / "special_tokens_map.json", names)
    assert eos_id(directory) == load_tokenizer(directory).eos_token_id == expected
    assert model_config(directory).eos_token_ids == ((3,) if expected is None else (3, expected))


def test_end_tokens_of_published_tokenizers(data):
    assert eos_id(data / "qwen2.5_tokenizer") == load_tokenizer(data / "qwen2.5_tokenizer").eos_token_id == 151645
    assert eos_id(model_path("tiny")) == 2 and eos_id(data / "stories260K-qwen2-hf") is None


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("qwen2", "Qwen2Tokenizer"), ("qwen3", "Qwen2TokenizerFast"), ("qwen2", "PreTrainedTokenizerFast"),
        ("llama", "Qwen2Tokenizer"), ("llama", "PreTrainedTokenizerFast"),
    ],
)  # fmt: skip
def test_a_tokenizer_is_the_one_that_transformers_would_choose(tmp_path, model_type, named):
    """The oracle is `AutoTokenizer`."""
    from transformers import AutoTokenizer

    directory = _directory(tmp_path / "model", model_type, named)
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert type(ours) is type(theirs)
    assert ours("a test, 12")["input_ids"] == theirs("a test, 12")["input_ids"]
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert repr(ours) == repr(theirs) and ours.chat_template == theirs.chat_template


def _directory(directory, model_type, named):
    """A model's directory with a small tokenizer of Qwen's kind, whose files name these."""
    shutil.copytree(DATA / "nvfp4" / "llm-compressor-awq", directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, own in (
        ("config.json", {"model_type": model_type}),
        ("tokenizer_config.json", {"tokenizer_class": named}),
    ):
        small.write_json(directory / name, read_json(directory / name) | own)
    return directory
