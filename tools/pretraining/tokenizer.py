"""Tokenizer and chat template of the policies that are pretrained here: Qwen2.5's form with a small vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END, "<think>", "</think>", "<answer>", "</answer>")
# Qwen2.5's own pattern: every digit is a token of its own.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYSTEM = "<think>steps</think><answer>number</answer>"
CHAT_TEMPLATE = """{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\n<think>steps</think><answer>number</answer><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tokenizer(
    out: Path, texts: Iterable[str], vocabulary: int, longest: int
) -> transformers.PreTrainedTokenizerBase:
    """Train and write a byte-level BPE tokenizer, digits one by one as in Qwen2.5; any text encodes.

    Args:
      out: directory to write.
      texts: what the merges are learned from.
      vocabulary: number of tokens.
      longest: `model_max_length`.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chat_words = ["system\nuser\nassistant\nsteps<number"] * 500
    tokenizer.train_from_iterator([*texts, *chat_words], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    # The tags are single tokens but not special ones, as in Qwen3: decoding without special tokens keeps them.
    for name, change in (("tokenizer.json", _tags_are_text), ("tokenizer_config.json", _portable_class)):
        content = json.loads((out / name).read_text())
        change(content)
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return transformers.AutoTokenizer.from_pretrained(out)


def _tags_are_text(tokenizer: dict) -> None:
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"] in (END_OF_TEXT, IM_START, IM_END)


def _portable_class(config: dict) -> None:
    config["tokenizer_class"] = "PreTrainedTokenizerFast"


def prompt_text(question: str) -> str:
    """The chat template applied to a question, because rendering jinja a million times takes longer than training."""
    system = f"{IM_START}system\n{SYSTEM}{IM_END}\n"
    return f"{system}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"
