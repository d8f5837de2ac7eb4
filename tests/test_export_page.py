"""Two sections of docs/export.md as their readers go through them, command by command.

"From QeRL and back": a checkpoint that llm-compressor's AWQ wrote and an adapter that peft wrote come in, a recipe of
the release trains them on, and the result goes out in every form. "Serve what you trained": a run's policy in every
form, and in transformers and peft by the lines that the section shows.
"""

import dataclasses
import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from helpers import logits_of
from oracles import llm_compressor, torch_qwen2
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.numpy import load_file
from test_docs import ROOT, blocks
from transformers import AutoTokenizer

from qerl_jax import train
from qerl_jax.checkpoint import assets
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.config import load, to_mapping
from qerl_jax.config.foreign import FOREIGN
from qerl_jax.models.config import LAYER_NORMS
from qerl_jax.models.lora import PROJECTIONS
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.train import parse

pytestmark = pytest.mark.usefixtures("nothing_drawn")
MODEL, ADAPTER = "qwen-7b-NVFP4A16", "ckpt/checkpoint-100"
SCRIPTS = json.loads((ROOT / "tests/golden/release_scripts.json").read_text())["scripts"]
TOKENS = np.random.default_rng(0).integers(3, 512, (2, 24))
SHORT = ["--max-prompt-length", "256", "--max-completion-length", "16", "--dtype", "float32"]


def section(page: str, title: str) -> str:
    """A section of a page, up to the next of its level."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)[1]


def trained_by_peft(directory: Path, base: Path) -> None:
    """An adapter as the release's trainer leaves it: rank 16, layer norms as modules_to_save, the tokenizer with its
    padding side, and pickles of its own.
    """
    model = torch_qwen2.load(llm_compressor.SOURCES["bundled"])
    config = LoraConfig(r=16, lora_alpha=16, target_modules=list(PROJECTIONS), modules_to_save=list(LAYER_NORMS))
    model = get_peft_model(model, config)
    model.peft_config["default"].base_model_name_or_path = str(base)
    rng = np.random.default_rng(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = rng.normal(scale=0.01, size=tuple(parameter.shape)).astype(np.float32)
            parameter.data += parameter.new_tensor(noise)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(base, padding_side="left").save_pretrained(directory)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (directory / name).write_bytes(b"not to be read")


def commands_of(title: str) -> list[list[str]]:
    """The words of every command in a section of docs/export.md."""
    texts = [text for language, text in blocks(section("docs/export.md", title)) if language == "bash"]
    return [shlex.split(line) for text in texts for line in text.replace("\\\n", "").splitlines()]


def run(name: str, *flags: str) -> None:
    """`python -m NAME FLAGS`, in this process, because starting another costs seconds."""
    assert importlib.import_module(name).main(list(flags)) == 0, (name, flags)


@pytest.fixture
def moved(tmp_path, data, monkeypatch, capfd) -> int:
    """Every command of the section, run in one directory; training is two updates and short completions."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llm_compressor.AWQ, MODEL)
    trained_by_peft(Path(ADAPTER), Path(MODEL))
    gsm8k, commands = f"gsm8k:{data / 'presets/gsm8k'}", commands_of("From QeRL and back")
    for python, option, name, *words in commands:
        assert (python, option) == ("python", "-m")
        flags = [gsm8k if word == "gsm8k" else word for word in words]
        if name.endswith((".train", ".evaluate")):
            flags += SHORT
        if name.endswith(".evaluate"):  # in the programs of the training
            flags += ["--num-generations", "2", "--batch-size", "8", "--temperature", "1", "--top-p", "1"]
        if name.endswith(".train"):
            flags += ["--dataset", gsm8k, "--max-steps", "2", "--batch-size", "8"]
        run(name, *flags)
    return len(commands)


def test_the_way_over_and_back(moved, capfd, tmp_path):
    assert moved == 4
    said = capfd.readouterr().out  # of peft's adapter in evaluation and training, of ours in the export
    assert said.count("does not say on weights of which format it was trained, its base has them in NVFP4 here") == 2
    assert "the adapter was trained on" not in said
    recipe = to_mapping(load(assets.find_config("release-7b-nvfp4")))
    config = yaml.safe_load(Path("runs/moved/config.yaml").read_text())
    changed = {key for key, value in to_mapping(load(Path("runs/moved/config.yaml"))).items() if value != recipe[key]}
    ours = {"model", "adapter", "learning_rate", "output_dir", "dataset", "max_steps", "dtype", "max_completion_length"}
    ours |= {"batch_size"}
    assert changed == ours and config["adapter"] == ADAPTER and config["learning_rate"] == 5e-6
    assert [row["aqn/norms"] for row in read_metrics(Path("runs/moved"))] == [8, 8]

    before, after = (load_file(Path(place) / "adapter_model.safetensors") for place in (ADAPTER, "moved-peft"))
    assert before.keys() == after.keys() and any("input_layernorm" in name for name in after)
    distances = [float(np.abs(after[name].astype(np.float32) - before[name]).max()) for name in after]
    assert 0 < max(distances) < 1e-4  # two updates of 5e-6 away from it, and not from a fresh adapter

    policy = load_policy(MODEL, adapter="moved-peft", dtype=jnp.float32)
    expected = np.asarray(logits_of(policy, TOKENS))
    for kind in ("vllm", "merged"):
        run("qerl_jax.export", "runs/moved", kind, "--as", kind)
    assert not any("norm" in name for name in load_file("vllm/adapter/adapter_model.safetensors"))
    served = load_policy("vllm/base", adapter="vllm/adapter", dtype=jnp.float32)
    np.testing.assert_array_equal(logits_of(served, TOKENS), expected)
    merged = torch_qwen2.logits(torch_qwen2.load(Path("merged")), TOKENS)
    assert 0 < np.abs(merged - expected).max() < 0.3  # rounded to bf16


def test_a_scripts_flags_come_in(capfd):
    """Behind the recipe: those with another name here are answered in one line, but for those that ask for what holds;
    the others, with a learning rate of one's own, change that alone.
    """
    given = SCRIPTS["dapo_qwen2.5-7b_nvfp4_single_gpu.sh"] | {"learning-rate": "3e-5"}
    foreign = {flag for flag in given if flag.replace("-", "_") in FOREIGN}
    behind = ["--config", "release-7b-nvfp4"]
    assert train.main([*behind, *(word for flag, value in given.items() for word in (f"--{flag}", value))]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and len(foreign) == 12
    assert {flag for flag in foreign if f"--{flag} is a name of " not in said} == {"logging-steps", "save-strategy"}
    kept = {flag: value for flag, value in given.items() if flag not in foreign | {"vllm-gpu-memory-utilization"}}
    config = parse([*behind, *(word for flag, value in kept.items() for word in (f"--{flag}", value))])
    recipe = load(assets.find_config("release-7b-nvfp4"))
    assert config == dataclasses.replace(recipe, learning_rate=3e-5, output_dir=given["output-dir"])


@pytest.mark.nightly
def test_what_is_trained_is_served(tmp_path, monkeypatch, capfd):
    """Our four commands, the lines for transformers and peft, and vLLM's, as the exports print them."""
    monkeypatch.chdir(tmp_path)
    run("qerl_jax.train", "--max-steps", "2", "--batch-size", "16", "--eval-dataset", "None")
    ours = commands_of("Serve what you trained")
    assert [words[-1] for words in ours] == ["merged", "tiny-nvfp4", "vllm", "peft"]
    capfd.readouterr()
    for _, _, name, *flags in ours:
        run(name, *flags)
    printed = [line.strip() for line in capfd.readouterr().out.splitlines()]
    page = section("docs/export.md", "Serve what you trained")
    served = re.findall(r"`(vllm serve .*?)`", page.replace("\n", " "))
    assert len(served) == 2 and set(served) <= set(printed), printed
    served = [shlex.split(line) for line in served]
    assert all((Path(words[2]) / "config.json").is_file() for words in served), served
    (lora,) = [words for words in served if "--enable-lora" in words]
    name, place = lora[lora.index("--lora-modules") + 1].split("=")
    rank = json.loads((Path(place) / "adapter_config.json").read_text())["r"]
    assert name == "trained" and rank <= int(lora[lora.index("--max-lora-rank") + 1])
    (program,) = [text for language, text in blocks(page) if language == "python"]
    exec(program, {})
    prompt, _, completion = capfd.readouterr().out.partition("<|im_start|>assistant\n")
    assert "Ana has 15 shells." in prompt and completion.strip()
    line = re.search(r"`(AutoPeftModelForCausalLM\.from_pretrained\(.*?\))`", page.replace("\n", " "))[1]
    model = eval(line.replace("OUT", "tiny-peft"), {"AutoPeftModelForCausalLM": AutoPeftModelForCausalLM})
    stored = load_file("tiny-peft/adapter_model.safetensors")
    loaded = get_peft_model_state_dict(model)
    assert loaded.keys() == stored.keys() and all(np.array_equal(loaded[key].numpy(), stored[key]) for key in stored)
