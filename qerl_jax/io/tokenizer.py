"""A model directory's tokenizer."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl_jax.data.problems import MAX_CHARACTERS
from qerl_jax.data.prompts import TEMPLATE_SECONDS, apply_template
from qerl_jax.io.files import one_line
from qerl_jax.io.safetensors import CheckpointError
from qerl_jax.io.template_probe import refuse_endless
from qerl_jax.untrusted import require_regular, shown

_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja"),
)
_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "chat_template.jinja")

# Modules that warn of Mistral's pattern, in one or another version of transformers.
_WARNING_LOGGERS = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")
_PROBE = "What is 17 times 23?"
_without_torch = False
_importing = threading.Lock()


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Any:
    """The directory's tokenizer, or None where it has no file of one. Never asks a hub.

    Args:
      path: model directory.
      vocab_size: rows of the embedding, which every id of the tokenizer must have.

    Raises CheckpointError for files that make no tokenizer, a chat template that fails on a user's message or drops
    it, or ids beyond the embedding.
    """
    present = [name for name in _FILES if (path / name).exists()]
    if not present:
        return None
    if not any(all((path / name).is_file() for name in names) for names in _VOCABULARIES):
        raise CheckpointError(
            f"{path} holds {present} but neither tokenizer.json nor vocab.json with merges.txt: the tokenizer has no "
            "vocabulary"
        )
    for name in present:
        require_regular(path / name)
    try:
        with _quiet():
            tokenizer = _auto_tokenizer().from_pretrained(str(path), local_files_only=True)
        tokenizer(_PROBE)
        largest = max(tokenizer.get_vocab().values(), default=-1)
    except Exception as error:  # the tokenizers library raises bare Exceptions, transformers whatever it meets
        raise CheckpointError(f"{path}: the tokenizer files {present} cannot be read: {one_line(error)}") from error
    if tokenizer.chat_template:
        _check_template(path, tokenizer)
    if vocab_size is not None and largest >= vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer's ids reach {largest}, but the embedding has vocab_size {vocab_size} rows"
        )
    return tokenizer


def _check_template(path: Path, tokenizer: Any) -> None:
    user, system, assistant = ({"role": role, "content": _PROBE} for role in ("user", "system", "assistant"))
    conversations = [user], [system, user], [user, assistant, user]
    try:
        variables = tokenizer.special_tokens_map
        refuse_endless(tokenizer.get_chat_template(), conversations, variables, TEMPLATE_SECONDS)
        (text,) = apply_template(tokenizer, [[user]])
        tokenizer(text[:MAX_CHARACTERS], verbose=False)
    except Exception as error:  # a template is a program and may raise anything
        raise CheckpointError(f"{path}: the chat template fails on a user's message: {one_line(error)}") from error
    if _PROBE not in text:
        raise CheckpointError(
            f"{path}: the chat template loses the user's message; of {_PROBE!r} it makes {shown(text)}"
        )


def refuse_other_tokenizer(base: Path, adapter: Path) -> None:
    """Raise CheckpointError naming both directories if an adapter's directory has a tokenizer and it is not the base's:
    it would be one of two which the policy was trained with. Another padding token is none that a policy sees.
    """
    theirs = load_tokenizer(adapter)
    if theirs is None:
        return
    ours = load_tokenizer(base)
    if ours is None:
        raise CheckpointError(f"{adapter} has a tokenizer, {base} has none: put the policy's into the base's directory")
    ids = ours.get_vocab(), theirs.get_vocab()
    other = sorted(token for token in ids[0].keys() | ids[1].keys() if ids[0].get(token) != ids[1].get(token))
    compared = {f"the id of {token!r}": tuple(vocabulary.get(token) for vocabulary in ids) for token in other[:1]}
    for name in ("chat_template", "bos_token", "eos_token"):
        compared[name] = tuple(getattr(tokenizer, name) for tokenizer in (ours, theirs))
    compared[f"the encoding of {_PROBE!r}"] = tuple(tokenizer(_PROBE)["input_ids"] for tokenizer in (ours, theirs))
    for name, (here, there) in compared.items():
        if here != there:
            raise CheckpointError(
                f"{adapter}: the tokenizer is not the base's: {name} is {shown(there)}, in {base} it is "
                f"{shown(here)}; remove the one that the policy was not trained with"
            )


def leave_out_torch() -> None:
    """Have transformers imported as if PyTorch were not installed, for the rest of this process. Nothing here uses it,
    and importing it takes 3 to 10 s. Only for programs that run no code of the user's.
    """
    global _without_torch
    _without_torch = True


def _auto_tokenizer() -> Any:
    """transformers' AutoTokenizer, imported without its advice to install PyTorch: by one thread at a time, because a
    second one would find a half of it.
    """
    with _importing:
        return _import_auto_tokenizer()


def _import_auto_tokenizer() -> Any:
    name, modules = "TRANSFORMERS_NO_ADVISORY_WARNINGS", ("torch", "transformers")
    before = os.environ.get(name)
    hides_torch = _without_torch and not any(module in sys.modules for module in modules)
    os.environ[name] = "1"
    if hides_torch:
        sys.modules["torch"] = None  # what looks for it finds none
    try:
        from transformers import AutoTokenizer
    finally:
        if hides_torch:
            del sys.modules["torch"]
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
    return AutoTokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warning of "an incorrect regex pattern", which is meant for tokenizers of Mistral. Versions
    give it for any directory whose config.json does not say otherwise. Ids are those of the file's own pattern.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "fix_mistral_regex" not in record.getMessage()

    loggers = [logging.getLogger(name) for name in _WARNING_LOGGERS]
    for logger in loggers:
        logger.addFilter(is_other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_other)
