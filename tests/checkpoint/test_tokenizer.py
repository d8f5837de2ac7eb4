"""The EOS token, without transformers."""

from __future__ import annotations

import pytest
import small

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.checkpoint.safetensors import read_json
from qerl_jax.checkpoint.tokenizer import eos_id, load_tokenizer

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
    if names:
        small.write_json(directory / "special_tokens_map.json", names)
    assert eos_id(directory) == load_tokenizer(directory).eos_token_id == expected
    assert model_config(directory).eos_token_ids == ((3,) if expected is None else (3, expected))


def test_end_tokens_of_published_tokenizers(data):
    assert eos_id(data / "qwen2.5_tokenizer") == load_tokenizer(data / "qwen2.5_tokenizer").eos_token_id == 151645
    assert eos_id(model_path("tiny")) == 2 and eos_id(data / "stories260K-qwen2-hf") is None
