"""PEFT adapters: ours load in `peft` on a torch model, its own load here, and other kinds than LoRA are refused."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import small
from helpers import assert_trees_equal, fp32_policy, logits_of, randomized, with_norm_offsets
from oracles import torch_qwen2

from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint.adapter import export_adapter, import_adapter, write_adapter
from qerl_jax.checkpoint.adapter_reader import AdapterReader, trained_base, trained_format
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.peft_config import adapter_config
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.models.lora import PROJECTIONS, LoraConfig
from qerl_jax.types import Policy

TOKENS, FILE = np.random.default_rng(0).integers(0, 64, (2, 9)), "adapter_model.safetensors"


def trained(directory: Path, lora: LoraConfig) -> Policy:
    """Random A and B and moved norms."""
    policy = load_policy(directory, lora=lora, dtype=jnp.float32)
    return with_norm_offsets(randomized(policy, 1, 0.3), 2)


CONFIGS = [
    LoraConfig(3),
    LoraConfig(4, 10.0, use_rslora=True, dropout=0.25),
    LoraConfig(2, 3.0, target_modules=("q_proj", "v_proj")),
    LoraConfig(2, 1.0, target_modules=("k_proj", "o_proj", "up_proj", "down_proj")),
]


@pytest.mark.parametrize(
    ("lora", "norms"), [*zip(CONFIGS, (True, False, True, False), strict=True)], ids=["all", "rs", "q-v", "rest"]
)
def test_export_loads_in_peft_and_gives_the_same_logits(micro_dir, tmp_path, lora, norms):
    policy = trained(micro_dir, lora)
    if not norms:
        policy = policy.replace(norms=fp32_policy(micro_dir).norms)
    export_adapter(policy, tmp_path / "out", norms=norms, base_model=str(micro_dir))
    model = peft.PeftModel.from_pretrained(torch_qwen2.load(micro_dir), tmp_path / "out").eval()
    theirs = torch_qwen2.logits(model, TOKENS)
    ours = np.asarray(logits_of(policy, TOKENS))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert np.abs(theirs - torch_qwen2.logits(torch_qwen2.load(micro_dir), TOKENS)).max() > 0.05


def test_an_export_names_its_base_model(micro_dir, tmp_path):
    """And its fingerprint: by default the directory's, which may have changed since a run began on it."""
    policy, own, given = trained(micro_dir, CONFIGS[2]), st.model_fingerprint(micro_dir), ("Qwen/Qwen2.5-7B", "0a1b")
    for base, fingerprint in ((None, None), given):
        export_adapter(policy, tmp_path / "out", base_model=base, fingerprint=fingerprint)
        config = json.loads((tmp_path / "out/adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == (base or str(micro_dir))
        assert trained_base(tmp_path / "out") == (fingerprint or own)
    with pytest.raises(ValueError, match="base_model"):
        export_adapter(policy.replace(source=None), tmp_path / "other")


@pytest.mark.parametrize(
    ("head", "text", "found"),
    [
        ("weight_format: nvfp4\nlicense: mit\n", "", "nvfp4"),
        ("license: mit\nweight_format: nf4\n", "weight_format: nvfp4\n", "nf4"),
        ("license: mit\n", "weight_format: nvfp4\n", None),
        ("weight_format: gptq\n", "", None),
    ],
)
def test_the_format_of_the_weights_is_read_of_the_cards_head_alone(tmp_path, head, text, found):
    (tmp_path / "README.md").write_text(f"---\n{head}---\nAn adapter.\n{text}")
    assert trained_format(tmp_path) == found


@pytest.mark.parametrize("lora", CONFIGS[1:3], ids=["rs", "q-v"])
def test_export_and_import_are_inverse_bit_for_bit(micro_dir, tmp_path, lora):
    policy = trained(micro_dir, lora)
    export_adapter(policy, tmp_path / "a")
    back = load_policy(micro_dir, dtype=jnp.float32, adapter=tmp_path / "a")
    assert_trees_equal((back.lora, back.norms), (policy.lora, policy.norms))
    assert_trees_equal(back.base_norms, load_policy(micro_dir, dtype=jnp.float32).norms)
    assert back.lora_config == dataclasses.replace(lora, alpha=lora.effective_alpha)
    again = import_adapter(back, str(tmp_path / "a"))  # whose norms are no longer the checkpoint's
    assert_trees_equal((again.lora, again.norms, again.base_norms), (back.lora, back.norms, back.base_norms))
    export_adapter(back, tmp_path / "b")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    "modules",
    [
        ["q_proj", "down_proj"],
        r".*\.(self_attn\.q_proj|mlp\.down_proj)",
        ["self_attn.q_proj", *(f"model.layers.{layer}.mlp.down_proj" for layer in range(2))],
    ],
)
def test_an_adapter_that_peft_wrote_is_read(modules, micro_dir, tmp_path):
    """peft draws A and, with init_lora_weights=False, B; its logits are ours after the import. Targets by a name, by a
    regular expression or by a full name.
    """
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(torch_qwen2.load(micro_dir), config).eval()
    model.save_pretrained(tmp_path / "theirs")
    policy = load_policy(micro_dir, dtype=jnp.float32, adapter=tmp_path / "theirs")
    np.testing.assert_allclose(np.asarray(logits_of(policy, TOKENS)), torch_qwen2.logits(model, TOKENS), atol=1e-4)


def test_export_replaces_an_adapter_and_nothing_else(micro_dir, tmp_path):
    """An export with norms, then one without in its place; a file of somebody's stays, a directory of others too."""
    policy, out = trained(micro_dir, CONFIGS[2]), tmp_path / "out"
    export_adapter(policy, out)
    (out / "README.md").write_text("mine")
    export_adapter(policy, out, norms=False)
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert (out / "README.md").read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/thesis").write_text("x")
    with pytest.raises(FileExistsError, match="but no adapter_config"):
        export_adapter(policy, tmp_path / "papers")
    assert (tmp_path / "papers/thesis").read_text() == "x"


def test_an_adapter_that_is_not_finite_is_not_exported(micro_dir, tmp_path):
    policy = trained(micro_dir, CONFIGS[2])
    for part in ("lora", "norms"):
        broken = jax.tree.map(lambda leaf: leaf.at[..., 0].set(jnp.nan), getattr(policy, part))
        with pytest.raises(ValueError, match="holds a value that is not finite"):
            export_adapter(policy.replace(**{part: broken}), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_policy_without_adapters_has_nothing_to_export(micro_dir, tmp_path):
    with pytest.raises(ValueError, match="lora_rank 0"):
        export_adapter(load_policy(micro_dir, lora=LoraConfig(0), dtype=jnp.float32), tmp_path / "out")


@pytest.fixture
def exported(micro_dir, tmp_path) -> Path:
    export_adapter(trained(micro_dir, LoraConfig(2, target_modules=["q_proj", "v_proj"])), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_every_key_that_peft_writes_for_a_plain_lora_is_known(exported):
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"]).to_dict()
    config |= {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"], "a_key_of_tomorrow": None}
    (exported / "adapter_config.json").write_text(json.dumps(config))
    assert adapter_config(exported).rank == 2


def test_norms_that_are_named_and_missing_are_refused(micro_dir, exported):
    path, lora = exported / "adapter_config.json", LoraConfig(2, target_modules=("v_proj", "q_proj"))  # in any order
    gone = next(name for name in st.open_files([exported / FILE]) if name.endswith("input_layernorm.weight"))
    small.change_tensors(exported, lambda tensors: tensors.pop(gone), FILE)
    with pytest.raises(CheckpointError, match=f"tensor '{re.escape(gone)}' is missing"):
        load_policy(micro_dir, lora=lora, dtype=jnp.float32, adapter=exported)
    others = [name for name in st.open_files([exported / FILE]) if "lora" not in name]
    small.change_tensors(exported, lambda tensors: [tensors.pop(name) for name in others], FILE)
    path.write_text(json.dumps({**json.loads(path.read_text()), "modules_to_save": None, "lora_dropout": 0.1}))
    policy = load_policy(micro_dir, lora=lora, dtype=jnp.float32, adapter=exported)
    assert policy.lora_config.dropout == 0.1  # which a run refuses
    assert policy.base_norms is None  # they are the model's own


def test_an_adapter_with_one_kind_of_norm_is_written_with_that_alone(micro_dir, exported, tmp_path):
    """As peft writes one with `modules_to_save=["input_layernorm"]`."""
    path = exported / "adapter_config.json"
    others = [name for name in st.open_files([exported / FILE]) if "post_attention_layernorm" in name]
    small.change_tensors(exported, lambda tensors: [tensors.pop(name) for name in others], FILE)
    path.write_text(json.dumps({**json.loads(path.read_text()), "modules_to_save": ["input_layernorm"]}))
    reader, again = AdapterReader(exported, model_config(micro_dir)), tmp_path / "again"
    again.mkdir()
    write_adapter(again, reader.config, reader.lora_tensors(), reader.norm_tensors(), "base", None)
    assert json.loads((again / "adapter_config.json").read_text())["modules_to_save"] == ["input_layernorm"]
    assert (again / FILE).read_bytes() == (exported / FILE).read_bytes()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "LOHA"}, ("peft_type", "LOHA")),
        ({"bias": "all"}, ("bias", "all")),
        ({"a_key_of_tomorrow": 3}, ("a_key_of_tomorrow", "3")),
        ({"layers_to_transform": 0}, ("layers_to_transform", "0")),  # the first layer alone
        ({"init_lora_weights": "pissa_niter_16"}, ("init_lora_weights", "pissa_niter_16")),
        ({"init_lora_weights": "OLoRA"}, ("init_lora_weights", "OLoRA")),
        ({"target_modules": ["q_proj", "lm_head"]}, ("target_modules", "lm_head")),
        ({"modules_to_save": ["embed_tokens"]}, ("modules_to_save", "embed_tokens")),
        ({"r": "8"}, ("r ", "'8'")),
        ({"r": 0}, ("r is 0", "above 0")),
        ({"lora_alpha": float("inf")}, ("lora_alpha", "inf")),
        ({"lora_dropout": 1.0}, ("lora_dropout is 1.0", "[0, 1)")),
        ({"target_modules": "q_proj|v_proj"}, ("target_modules", "'q_proj|v_proj'")),
        ({"target_modules": ".*_proj|lm_head"}, ("target_modules", "'lm_head'")),
        ({"target_modules": ".*self_attn"}, ("'.*self_attn' go beyond the projections",)),  # of whole names, as in peft
        ({"target_modules": "(q_proj"}, ("'(q_proj' is no regular expression",)),
        ({"target_modules": ["model.layers.0.mlp.q_proj"]}, ("model.layers.0.mlp.q_proj",)),
        ({"target_modules": [3]}, ("[3]", "a list of names or a regular expression")),
    ],
)
def test_adapters_that_are_no_plain_lora_are_refused(exported, changes, named):
    path = exported / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError) as error:
        adapter_config(exported)
    for word in (str(path), *named):
        assert word in str(error.value)


A = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(A), (A, "missing")),
        (lambda t: t.update({A: np.ones((2, 31), np.float32)}), (A, "[2, 31]", "[2, 32]")),
        (lambda t: t.update({A: np.full((2, 32), np.nan, np.float32)}), (A, "not finite")),
        (lambda t: t.update({A: np.full((2, 32), 1e300)}), (A, "not finite")),  # finite in float64 alone
        (lambda t: t.update({A.replace("v_proj", "k_proj"): t[A]}), ("k_proj.lora_A", "no place")),
    ],
)
def test_broken_adapters_are_named(exported, micro_dir, change, named):
    small.change_tensors(exported, change, FILE)
    with pytest.raises(CheckpointError) as error:
        load_policy(micro_dir, dtype=jnp.float32, adapter=exported)
    for word in (str(exported / "adapter_model.safetensors"), *named):
        assert word in str(error.value)


def test_an_adapter_of_another_shape_than_asked_for(exported, micro_dir):
    parts = ("q_proj", "v_proj")
    for lora, differs in (
        (LoraConfig(3, target_modules=parts[::-1]), "lora_rank 2, not 3; lora_alpha 2, not 3"),  # in any order
        (LoraConfig(2), f"lora_target_modules q_proj v_proj, not {' '.join(PROJECTIONS)}"),
        (LoraConfig(2, 7.0, target_modules=parts), "lora_alpha 2, not 7"),
        (LoraConfig(2, use_rslora=True, target_modules=parts), "use_rslora False, not True"),
    ):
        with pytest.raises(ValueError, match=rf"adapter_config\.json has {differs}: set it as the adapter has it"):
            load_policy(micro_dir, dtype=jnp.float32, lora=lora, adapter=exported)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        load_policy(micro_dir, adapter=exported.parent)
    (exported / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors"):
        load_policy(micro_dir, adapter=exported)


def test_what_to_name_in_the_place_of_no_adapter_and_no_model(tmp_path, exported, micro_dir):
    """The adapter of a finished run, or how to get that of one that was stopped."""
    run = tmp_path / "my run"
    (run / "checkpoints" / "3").mkdir(parents=True)
    for look, said in ((adapter_config, "an adapter is a PEFT directory"), (model_config, "a model is a Hugging Face")):
        with pytest.raises(FileNotFoundError, match=f"does not exist: {said}"):  # checkpoints of another program
            look(run)
    (run / "config.yaml").touch()
    for named in (run, run / "adapter"):
        with pytest.raises(
            FileNotFoundError, match=rf"adapter_config\.json does not exist: .*export '{run}' OUT --as peft"
        ):
            adapter_config(named)
    with pytest.raises(FileNotFoundError, match=rf"{run} is a run, not a model: `.*export '{run}' OUT` writes its"):
        model_config(run)
    exported.rename(run / "adapter")
    with pytest.raises(FileNotFoundError, match=rf"does not exist: name {run}/adapter$"):
        adapter_config(run)
    for named in (run, run / "adapter"):
        said = f"{named} is no model: give its base, '{micro_dir}', as the model and {run}/adapter as the adapter"
        with pytest.raises(FileNotFoundError, match=re.escape(said)):
            model_config(named)


def test_an_adapter_in_float64_is_read(exported, micro_dir):
    before, tensors = load_policy(micro_dir, adapter=exported), st.open_files([exported / FILE])
    st.save(exported / FILE, {name: np.float64(tensors[name]) for name in tensors})
    after = load_policy(micro_dir, adapter=exported)
    assert_trees_equal((after.lora, after.norms), (before.lora, before.norms))


def test_no_leaf_of_an_import_shares_its_memory_with_the_file(exported, micro_dir):
    """The file may be replaced while the policy lives."""
    policy = load_policy(micro_dir, dtype=jnp.float32, adapter=exported)
    before = [np.array(leaf) for leaf in jax.tree.leaves(policy.lora)]
    path = exported / "adapter_model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\0" * (size // 2))
    for a, b in zip(before, jax.tree.leaves(policy.lora), strict=True):
        np.testing.assert_array_equal(a, b)
