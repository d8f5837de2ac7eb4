"""A model directory's tokenizer."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path
from typing import Any

from qerl_jax.checkpoint.safetensors import CheckpointError, read_json
from qerl_jax.data.prompts import apply_template
from qerl_jax.messages import one_line, shown

_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja"),
)
_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "chat_template.jinja")

_PROBE = "What is 17 times 23?"
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
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it advises to install PyTorch
    with _importing:  # a second thread would find a half of it
        kind = _class_of(path)

    try:
        tokenizer = kind.from_pretrained(str(path), local_files_only=True)
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


def _class_of(path: Path) -> Any:
    """transformers' class that reads the directory: `AutoTokenizer`, or, for Qwen, the class that it would choose.
    Importing `AutoTokenizer` imports PyTorch where it is installed, which takes longer than all the rest.
    """
    import transformers

    with contextlib.suppress(CheckpointError):
        config, own = _read(path, "config.json"), _read(path, "tokenizer_config.json")
        is_qwen = config.get("model_type") in ("qwen2", "qwen3") and "auto_map" not in own
        if is_qwen and own.get("tokenizer_class") in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
            return transformers.Qwen2Tokenizer
    return transformers.AutoTokenizer


def _read(directory: Path, name: str) -> dict[str, Any]:
    """A file's JSON object; an empty one where there is no such file."""
    return read_json(directory / name) if (directory / name).is_file() else {}


def eos_id(directory: Path) -> int | None:
    """Id of the tokenizer's `eos_token` as transformers finds it, from the JSON files alone: programs are compiled
    before transformers is imported. None where the files name none; what is wrong with them `load_tokenizer` says.
    """

    read = functools.partial(_read, directory)
    with contextlib.suppress(CheckpointError, AttributeError, KeyError, TypeError, ValueError):
        config = read("tokenizer_config.json")
        # Only a directory of the older form has its say in special_tokens_map.json, too.
        names = config if "added_tokens_decoder" in config else config | read("special_tokens_map.json")
        token = names.get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        ids = {entry["content"]: int(number) for number, entry in config.get("added_tokens_decoder", {}).items()}
        if token is None or token in ids:
            return ids.get(token)
        whole = read("tokenizer.json")
        ids = {entry["content"]: entry["id"] for entry in whole.get("added_tokens", [])} | read("added_tokens.json")
        return ids[token] if token in ids else {**read("vocab.json"), **whole["model"]["vocab"]}[token]
    return None


def _check_template(path: Path, tokenizer: Any) -> None:
    try:
        (text,) = apply_template(tokenizer, [[{"role": "user", "content": _PROBE}]])
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
