"""`python -m qerl_jax.export`: runs, interrupted or not, and adapters; and bad input, which ends in one line that names
file, key and both values, and leaves nothing behind.

`OUT`, `MODEL` and `ADAPTER` in a message stand for the directories of the test.
"""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest
import runs
import small
import yaml
from command_lines import assert_says, error_of
from helpers import randomized, with_norm_offsets

from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.adapter_reader import AdapterReader
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.of_run import Source
from qerl_jax.checkpoint.orbax import Checkpointer, model_input
from qerl_jax.checkpoint.safetensors import model_fingerprint
from qerl_jax.config import Config
from qerl_jax.data.presets import ANSWER_LINE_SYSTEM_PROMPT, PROGRAM_SYSTEM_PROMPT
from qerl_jax.evaluate import parse as parse_evaluation
from qerl_jax.export import _commands, _system_message, main
from qerl_jax.models.lora import LoraConfig
from qerl_jax.rl.state import init_state
from qerl_jax.run import directory as run_directory
from qerl_jax.run.lifecycle import export_trained

LORA = LoraConfig(4)


def make_run(
    place: Path, imports_norms: bool = False, shape: Mapping[str, int] = MappingProxyType({}), **changes: object
) -> tuple[Path, Config]:
    """A run with two checkpoints and no adapter yet, and beside it the adapter that it would write. `imports_norms`: it
    began with an adapter that has norms. `shape`: of the model, where it is another.
    """
    model, run = small.bf16(place / "model", shards=1, **shape), place / "run"
    options = {"model": str(model), "dtype": "float32", "train_norms": True, "max_steps": 4, **changes}
    config = runs.config(run, **options)
    policy = load_policy(model, config.weight_format, config.lora, jnp.float32)
    run_directory.write_config(run, config)
    checkpoints = Checkpointer(run, 2, {model_input(config): model_fingerprint(model)})
    for step in (1, 2):
        moved = randomized(policy, step)
        if config.train_norms or imports_norms:
            moved = with_norm_offsets(moved, step).replace(base_norms=policy.norms if imports_norms else None)
        state = init_state(moved, config)
        checkpoints.save(state.replace(step=jnp.int32(step)))
    export_trained(moved, state, place / "exported")
    return run, config


OWN_PROBLEMS = {
    "eval_dataset": "my rows.jsonl", "eval_samples": 5, "prompt_column": "problem", "answer_column": "solution",
    "system_prompt": "--- It's \\boxed{5}.", "overlong_prompts": "truncate_left", "eval_temperature": 0.0,
    "eval_top_p": 1.0, "eval_num_generations": 2, "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dataset": "train_dataset", "answer_column": ""},
            "--dataset FILE LENGTHS --answer-column COLUMN --adapter A  # FILE: problems with "
            "answers, in place of the run's records in memory; COLUMN: the column of the answers, as the run had none",
        ),
        ({"eval_dataset": "eval_dataset"}, "--dataset gsm8k LENGTHS --adapter A"),
        ({"dataset": "bigmath"}, "--dataset bigmath --split train LENGTHS --adapter A"),
        ({"dataset": "ROWS"}, "--dataset ROWS --split train LENGTHS --adapter A"),
        (
            {"dataset": "codeforces"},
            "--dataset FILE LENGTHS --adapter A  # FILE: problems with answers, in place of codeforces, which has none",
        ),
        (
            {"dataset": "train_dataset", "eval_dataset": "gsm8k", "prompt_format": "think_answer"},
            "--dataset gsm8k --samples 200 LENGTHS --prompt-format think_answer --adapter A",
        ),
    ],
)
def test_the_command_behind_an_adapter(changes, words, tmp_path):
    """Where problems or answers were in memory alone, it says so. ROWS is a directory of a training set alone."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/train.jsonl").touch()
    changes = {name: str(tmp_path / "rows") if value == "ROWS" else value for name, value in changes.items()}
    lengths = "--max-prompt-length 512 --max-completion-length 1024"  # which evaluations have another default of
    words = words.replace("ROWS", str(tmp_path / "rows")).replace("LENGTHS", lengths)
    base = small.bf16(tmp_path / "model", shards=1)
    source = Source(tmp_path, base, "B", None, tmp_path, Config("B", max_prompt_length=512, **changes))
    assert _commands("peft", source, None, Path("A")) == [f"python -m qerl_jax.evaluate B {words}"]


@pytest.mark.parametrize(("rank", "most"), [(1, 8), (8, 8), (9, 16), (200, 256), (300, 320), (512, 512)])
def test_the_command_behind_an_export_for_vllm(rank, most, tmp_path):
    """Its `max_lora_rank` is one of vLLM's, the smallest that holds the adapter's rank."""
    source = Source(tmp_path, small.bf16(tmp_path / "model", shards=1), "B", None, tmp_path)
    lora = f"--enable-lora --max-lora-rank {most} --lora-modules trained=A/adapter"
    assert _commands("vllm", source, reader_of(rank), Path("A")) == [f"vllm serve B {lora}"]


@pytest.mark.parametrize(
    ("datasets", "asked"),
    [
        (("miromind",), ANSWER_LINE_SYSTEM_PROMPT),
        (("codeforces:rows.jsonl", "miromind"), PROGRAM_SYSTEM_PROMPT),
        (("gsm8k", "miromind"), ""),
    ],
)
def test_requests_need_the_system_message_of_the_first_dataset(datasets, asked, tmp_path):
    """Not that for a box, in whose place the model's own template asks."""
    base = small.bf16(tmp_path / "model", shards=1)
    assert _system_message(Source(tmp_path, base, "B", None, tmp_path, Config("B", dataset=datasets))) == asked


def reader_of(rank: int, has_norms: bool = False) -> AdapterReader:
    """Of a file that nobody needs."""
    reader = object.__new__(AdapterReader)
    reader.config, reader._norms = LoraConfig(rank), {"norm": np.ones(1)} if has_norms else {}
    return reader


LORA_OF = "--enable-lora --max-lora-rank 8 --lora-modules trained='my out'/adapter"


@pytest.mark.parametrize(
    ("kind", "reader", "weight_format", "commands"),
    [
        ("vllm", reader_of(8), "nf4", [f"vllm serve 'my out'/base {LORA_OF}"]),
        ("vllm", reader_of(8, has_norms=True), None, [f"vllm serve 'my out'/base {LORA_OF}"]),
        ("vllm", reader_of(8), "bf16", [f"vllm serve 'the base' {LORA_OF}"]),
        ("merged", None, "nf4", ["vllm serve 'my out'", "python -m qerl_jax.quantize 'my out' 'my out-nvfp4'"]),
        *(
            ("peft", reader_of(8), stored, [f"python -m qerl_jax.evaluate 'the base'{more} --adapter 'my out'"])
            for stored, more in (("nf4", " --weight-format nf4"), ("bf16", ""))
        ),
    ],
)
def test_commands_name_what_was_written(kind, reader, weight_format, commands, tmp_path):
    """The base beside the adapter where it has other norms or weights than the original, and its format."""
    base = small.bf16(tmp_path / "model", shards=1)
    source = Source(tmp_path, base, "the base", weight_format, tmp_path)
    assert _commands(kind, source, reader, Path("my out")) == commands


@pytest.mark.parametrize(("train_norms", "imports_norms"), [(True, False), (False, False), (False, True)])
def test_an_interrupted_run_is_exported_from_its_newest_checkpoint(tmp_path, capsys, train_norms, imports_norms):
    """The same bytes as the adapter that the run writes at its end, and it says where they come from."""
    changes = {"dtype": "float32"} if train_norms else {"beta": 0.0, **OWN_PROBLEMS}
    run, config = make_run(tmp_path, imports_norms, train_norms=train_norms, **changes)
    assert main([str(run), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"exporting the newest checkpoint of {run}, of step 2" in said
    (command,) = [line for line in said.splitlines() if "qerl_jax.evaluate" in line]
    arguments, same = parse_evaluation(shlex.split(command)[3:])
    assert (arguments.dataset, arguments.samples) == (
        config.eval_dataset or config.dataset[0],
        config.eval_dataset and 5,
    )
    assert (same.model, same.adapter) == (str(tmp_path / "model"), str(tmp_path / "out"))
    for field in ("weight_format", "dtype", "max_prompt_length", "max_completion_length", *OWN_PROBLEMS):
        if field not in ("eval_dataset", "eval_samples"):
            assert getattr(same, field) == getattr(config, field), field
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes()
    shutil.move(tmp_path / "exported", run / "adapter")
    assert main([str(run), str(tmp_path / "whole")]) == 0
    assert "checkpoint" not in capsys.readouterr().out


def test_a_run_is_exported_for_another_place_of_its_model(tmp_path, capsys):
    """Its adapter names that as its base, and as the files that it was trained on the model's of the run, which differ
    here."""
    run, _ = make_run(tmp_path)
    trained_on, moved = model_fingerprint(tmp_path / "model"), tmp_path / "moved"
    shutil.move(tmp_path / "model", moved)
    small.change_json(moved / "generation_config.json", temperature=0.5)
    assert main([str(run), str(tmp_path / "out"), "--base", str(moved)]) == 0
    said = capsys.readouterr().out
    assert f"the files of {moved} are not those that the adapter was trained on" in said
    assert f"python -m qerl_jax.evaluate {moved} " in said
    card = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---")[1])
    assert (card["base_model"], card["base_fingerprint"]) == (str(moved), trained_on)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(moved)


@pytest.mark.parametrize("kind", ["nvfp4", "nf4"])
def test_an_exported_adapter_says_on_which_weights_it_was_trained(tmp_path, capsys, kind):
    """In its card and on the terminal, from a checkpoint and from the adapter alone, whose base is then loaded so. What
    vLLM serves names the format of the base beside it: NVFP4, or the values of another format in bf16.
    """
    shape, asked = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}, {"system_prompt": "Be brief."}
    run, _ = make_run(tmp_path, shape=shape, weight_format=kind, **asked if kind == "nf4" else {})
    base = str(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("the base's")

    def card(directory: str) -> dict:
        return yaml.safe_load((tmp_path / directory / "README.md").read_text().split("---")[1])

    for source, out in (([run], "out"), ([tmp_path / "out", "--base", base], "again")):
        assert main([*map(str, source[:1]), str(tmp_path / out), *source[1:]]) == 0
        said = capsys.readouterr().out
        assert (
            "trained on" not in said and "requests need" not in said and f"not on those in {kind.upper()}: vllm" in said
        )
        trained_on = {"weight_format": kind, "base_fingerprint": model_fingerprint(tmp_path / "model")}
        assert card(out) == {"base_model": base, "library_name": "peft", **trained_on}
    assert main([str(tmp_path / "again"), str(tmp_path / "other"), "--base", base, "--weight-format", "bf16"]) == 0
    line = f"the adapter was trained on weights in {kind.upper()}, its base has them in BF16 here"
    assert line in capsys.readouterr().out
    said = "requests need the system message of the training: 'Be brief.'\n"  # the model's own template asks otherwise
    for form, model in (("merged", "whole"), ("vllm", "served/base")):
        assert main([str(run), str(tmp_path / model.split("/")[0]), "--as", form]) == 0
        assert ("requests need" in (told := capsys.readouterr().out)) == (kind == "nf4") == (said in told)
        assert not (tmp_path / model / "README.md").exists()
    assert main([str(tmp_path / "again"), str(tmp_path / "twice"), "--base", str(tmp_path / "whole")]) == 0
    said = f"the files of {tmp_path}/whole are not those that the adapter was trained on: where it is merged into them"
    assert said in capsys.readouterr().out
    found = card("served/adapter")
    assert found["base_fingerprint"] == model_fingerprint(tmp_path / "served/base")
    assert found["base_model"] == str(tmp_path / "served/base")
    assert found["weight_format"] == ("nvfp4" if kind == "nvfp4" else "bf16")
    text = (tmp_path / "served/adapter/README.md").read_text()
    assert f"trained this adapter on {base}." in text  # the base beside it is a copy


def test_overwrite_replaces_exports_and_nothing_else(tmp_path, capsys):
    run, _ = make_run(tmp_path)
    shutil.copytree(tmp_path / "exported", run / "adapter")
    out, papers = tmp_path / "out", tmp_path / "papers"
    papers.mkdir()
    (papers / "thesis").write_text("x")
    for kind in ("peft", "vllm", "merged", "peft"):
        assert main([str(run), str(out), "--as", kind, "--overwrite"]) == 0
    served = tmp_path / "served"
    assert main([str(run), str(served), "--as", "vllm"]) == 0
    beside = shutil.copytree(served, tmp_path / "beside")
    (beside / "thesis").write_text("x")
    (served / "adapter" / "mine").mkdir()
    (out / "notes").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    for dst, said in (
        *((source, "is or holds the source") for source in (tmp_path / "model", run, run / "adapter", tmp_path)),
        (papers, "is no model directory"),
        (out, "also holds the directory 'notes'"),
        (served, "adapter also holds the directory 'mine'"),
        (beside, "beside is no model directory"),
    ):
        assert main([str(run), str(dst), "--overwrite"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert main([str(run), str(papers)]) == 2
    assert f"{papers} already exists; --overwrite replaces it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def put_model_and_adapter(place: Path) -> None:
    """A quantized model and an adapter of it."""
    model = small.nvfp4(place / "model")
    policy = with_norm_offsets(randomized(load_policy(model, lora=LORA, dtype=jnp.float32), 1), 2)
    export_adapter(policy, place / "adapter")


@pytest.fixture
def place(tmp_path) -> Path:
    put_model_and_adapter(tmp_path)
    return tmp_path


def other_base(**shape: int) -> Callable[[Path], None]:
    def replace(place: Path) -> None:
        shutil.rmtree(place / "model")
        small.bf16(place / "model", shards=1, **shape)

    return replace


def half_quantized(place: Path) -> None:
    plain = st.open_checkpoint(place / "model-bf16")[f"{Q}.weight"]

    def change(tensors: dict) -> None:
        for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
            del tensors[f"{Q}.{suffix}"]
        tensors[f"{Q}.weight"] = np.array(plain)

    small.change_tensors(place / "model", change)


def other_tokenizer(change: Callable[[dict], None], name: str = "tokenizer.json") -> Callable[[Path], None]:
    def copy(place: Path) -> None:
        for file in small.TOKENIZER:
            shutil.copyfile(place / "model" / file, place / "adapter" / file)
        path = place / "adapter" / name
        value = json.loads(path.read_text()) if name.endswith(".json") else {"text": path.read_text()}
        change(value)
        path.write_text(json.dumps(value) if name.endswith(".json") else value["text"])

    return copy


def swap_ids(tokenizer: dict) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


Q = "model.layers.1.self_attn.q_proj"
FILE = "MODEL/model.safetensors"
TENSORS, A = "ADAPTER/adapter_model.safetensors", "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
# what is wrong: (damage, message)
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter for a wider base": (
        other_base(intermediate_size=64),
        f"{TENSORS}: '{A.replace('down', 'gate').replace('_A', '_B')}' has shape [32, 4], the config asks for [64, 4]",
    ),
    "another vocabulary": (
        other_tokenizer(swap_ids),
        "ADAPTER: the tokenizer is not the base's: the id of '…' is …, in MODEL it is …; remove the one that the "
        "policy was not trained with",
    ),
    "a token more": (
        other_tokenizer(
            lambda value: value["added_tokens"].append({**value["added_tokens"][-1], "id": 512, "content": "<x>"})
        ),
        "ADAPTER: the tokenizer is not the base's: the id of '<x>' is 512, in MODEL it is …",
    ),
    "another chat template": (
        other_tokenizer(lambda value: value.update(text="Q: " + value["text"]), "chat_template.jinja"),
        "ADAPTER: the tokenizer is not the base's: chat_template is …, in MODEL it is …",
    ),
    "half-quantized base": (
        half_quantized,
        f"{FILE}: '{Q}' is not quantized (weight is bfloat16), but config.json says NVFP4",
    ),
    "a base with a tensor more": (
        lambda place: small.change_tensors(
            place / "model", lambda all_: all_.update({"model.router": np.ones(2, "f4")})
        ),
        f"{FILE}: 1 tensors have no place in the model, first 'model.router'",
    ),
    "an adapter that is not finite": (
        lambda place: small.change_tensors(
            place / "adapter", lambda all_: all_[A].__setitem__((0, 0), np.nan), "adapter_model.safetensors"
        ),
        f"{TENSORS}: '{A}' holds a value that is not finite",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, place, capfd):
    damage, message = BAD[case]
    damage(place)
    before = sorted(path.name for path in place.iterdir())
    for kind in ("merged", "peft"):
        arguments = [str(place / "adapter"), str(place / "out"), "--base", str(place / "model"), "--as", kind]
        said = error_of(main, arguments, place, capfd).replace(str(place / "adapter"), "ADAPTER")
        assert_says(said, message)
    assert sorted(path.name for path in place.iterdir()) == before


def test_an_adapter_with_the_bases_own_tokenizer_is_exported(place):
    other_tokenizer(lambda value: None)(place)
    assert main([str(place / "adapter"), str(place / "out"), "--base", str(place / "model")]) == 0


def test_nothing_to_export(place, capfd):
    run, config = make_run(place / "of-a-run")
    shutil.copytree(run, place / "run")

    def said(*arguments: str) -> str:
        return error_of(main, [*arguments], place, capfd).replace(str(place), "HERE")

    out = str(place / "out")
    assert_says(
        said(str(place / "adapter"), out),
        "HERE/adapter is an adapter: name its base with --base (its adapter_config.json has 'MODEL')",
    )
    assert_says(
        said(str(place / "model"), out),
        "MODEL is neither a run with config.yaml nor an adapter with adapter_config.json",
    )
    assert_says(said(str(place / "nothing"), out), "HERE/nothing is no directory: name a run or an adapter")
    assert_says(
        said(str(place / "adapter"), out, "--base", str(place / "model"), "--weight-format", "nf4"),
        "MODEL holds NVFP4 weights (compressed-tensors); weight_format 'nf4' would need the unquantized checkpoint",
    )
    contradiction = (
        "--weight-format 'nf4' is not what the run was trained with: OUT/config.yaml has weight_format 'nvfp4'"
    )
    assert_says(said(str(place / "run"), out, "--weight-format", "nf4"), contradiction)
    shutil.rmtree(place / "run/checkpoints")
    nothing = "OUT holds neither adapter/ nor a complete checkpoint: nothing to export yet"
    assert_says(said(str(place / "run"), out), nothing)
    moved = dataclasses.replace(config, model="moved/away/model")
    run_directory.write_config(place / "run", moved)
    shutil.copytree(place / "of-a-run/exported", place / "run/adapter")
    assert "model directory moved/away/model does not exist" in said(str(place / "run"), out)
    assert main([str(place / "run"), out, "--base", config.model]) == 0
