"""Models of the hub by name: which files are asked for, and one line where they cannot be had."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from qerl_jax import train
from qerl_jax.checkpoint import hub
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.evaluate import main as evaluate
from qerl_jax.quantize import main as quantize

SMALL = ["config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
INDEX, SHARDS = "model.safetensors.index.json", [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
OTHERS = [".gitattributes", "LICENSE", "README.md", "pytorch_model.bin", "onnx/config.json", "original/m.safetensors"]


@pytest.mark.parametrize(
    ("weights", "expected"), [(False, SMALL), (True, sorted([*SMALL, INDEX, *SHARDS]))], ids=["dry run", "run"]
)
def test_files_asked_of_the_hub(weights, expected, tmp_path, monkeypatch):
    """The hub's own filter applies the patterns to the files of a Qwen2.5 repository."""
    asked = {}

    def snapshot_download(repo_id: str, **patterns: list[str]) -> str:
        files = filter_repo_objects(sorted([*SMALL, INDEX, *SHARDS, *OTHERS]), **patterns)
        asked[repo_id] = list(files)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert model_path("Qwen/Qwen2.5-0.5B-Instruct", weights) == tmp_path
    assert asked == {"Qwen/Qwen2.5-0.5B-Instruct": expected}


def test_paths_are_never_asked_of_the_hub():
    here = next(path.name for path in Path().iterdir() if path.is_dir() and path.name.isalnum())
    for path in (f"{here}/qwen", "./a/b", "/a/b", "a/b/c", "Qwen2.5-7B-Instruct", "../b", "tiny"):
        assert not hub.is_hub_id(path), path
    assert hub.is_hub_id("Qwen/Qwen2.5-7B-Instruct")


def test_a_bare_name_that_is_no_directory_tells_of_the_hub(capfd):
    assert train.main(["--model", "Qwen2.5-7B-Instruct", "--dry-run"]) == 2
    words = "model directory Qwen2.5-7B-Instruct does not exist; a model of the hub is named ORGANIZATION/NAME"
    assert capfd.readouterr().err.strip() == f"error: {words}"


def test_offline_is_one_line_in_every_command(tmp_path, capfd):
    """The tests run with HF_HUB_OFFLINE=1 and an empty cache of this name."""
    name, words = "nobody/no-such-model", "model nobody/no-such-model is no directory here, and it cannot be downloaded"
    for main, arguments in (
        (train.main, ["--model", name, "--output-dir", str(tmp_path / "run")]),
        (train.main, ["--model", name, "--output-dir", str(tmp_path / "run"), "--dry-run"]),
        (evaluate, [name]),
        (quantize, [name, str(tmp_path / "out")]),
    ):
        assert main(arguments) == 2
        said = capfd.readouterr().err.strip()
        assert said.count("\n") == 0 and said.startswith(f"error: {words}") and "name a directory with" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (
            "Got: ConnectError: [Errno -2] Name or service not known\nAn error happened while trying to locate",
            "LocalEntryNotFoundError: Got: ConnectError: [Errno -2] Name or service not known",
        ),
        (
            "Cannot find a snapshot folder on the disk and traffic has been disabled. To enable look-ups, pass a flag.",
            "LocalEntryNotFoundError: Cannot find a snapshot folder on the disk and traffic has been disabled",
        ),
    ],
)
def test_of_the_librarys_error_the_first_sentence_is_shown(text, first):
    assert "then set HF_TOKEN" in hub._refusal("a/b", errors.GatedRepoError.__new__(errors.GatedRepoError))
    assert hub._refusal("a/b", errors.LocalEntryNotFoundError(text)) == (
        f"it cannot be downloaded ({first}); offline, name a directory with config.json, safetensors and tokenizer in "
        "its place (train: --model DIR)"
    )
