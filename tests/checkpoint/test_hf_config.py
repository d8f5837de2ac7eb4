"""Published configurations against transformers' own reading of them, and refusals that name file, key and value."""

import json

import pytest
import torch
import transformers

from qerl_jax.checkpoint.hf_config import model_config, parse_config, read_json, stored_quantization
from qerl_jax.checkpoint.layouts import LAYOUTS, Quantization, quantization_of
from qerl_jax.checkpoint.safetensors import CheckpointError

# size -> config file, published parameter count in billions, [hidden, ffn, layers, heads, kv heads, vocab], tied, eps
# (FACTS: Qwen2.5 report, table 1)
PUBLISHED = {
    "0.5B": ("Qwen2.5-0.5B-Instruct/config.resaved.json", 0.49, (896, 4864, 24, 14, 2, 151936), True, 1e-6),
    "1.5B": ("Qwen2.5-1.5B/config.json", 1.54, (1536, 8960, 28, 12, 2, 151936), True, 1e-6),
    "3B": ("Qwen2.5-3B/config.json", 3.09, (2048, 11008, 36, 16, 2, 151936), True, 1e-6),
    "7B": ("Qwen2.5-7B/config.json", 7.61, (3584, 18944, 28, 28, 4, 152064), False, 1e-6),
    "14B": ("Qwen2.5-14B/config.json", 14.7, (5120, 13824, 48, 40, 8, 152064), False, 1e-5),
    "32B": ("Qwen2.5-32B/config.json", 32.5, (5120, 27648, 64, 40, 8, 152064), False, 1e-5),
    "32B-Instruct": ("Qwen2.5-32B-Instruct/config.json", 32.5, (5120, 27648, 64, 40, 8, 152064), False, 1e-6),
    "72B": ("Qwen2.5-72B/config.json", 72.7, (8192, 29568, 80, 64, 8, 152064), False, 1e-5),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_config(data, size):
    file, billions, shape, tied, eps = PUBLISHED[size]
    raw = read_json(data / "qwen2.5_configs" / file)
    config = parse_config(raw, {}, file)
    fields = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
    assert tuple(getattr(config, field) for field in fields) == shape
    assert (config.tie_word_embeddings, config.rms_norm_eps, config.rope_theta) == (tied, eps, 1e6)
    assert config.head_dim == (64 if size == "0.5B" else 128)

    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**{k: v for k, v in raw.items() if k != "_name_or_path"})
        )
    assert config.parameter_count() == sum(p.numel() for p in model.parameters())
    assert config.parameter_count() / 1e9 == pytest.approx(billions, rel=0.01)
    for name, projection in (
        ("q_proj", model.model.layers[0].self_attn.q_proj),
        ("down_proj", model.model.layers[0].mlp.down_proj),
    ):
        assert config.projection_shapes()[name] == tuple(projection.weight.shape)


MINIMAL = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
    "eos_token_id": 1,
}  # fmt: skip


def test_ids_of_generation_config_come_first():
    """Those that sampling goes by."""
    generation = {"eos_token_id": [2, 1], "pad_token_id": 7}
    for given, eos, pad in ((generation, (2, 1), 7), ({"eos_token_id": 2}, (2, 1), 5), ({}, (1,), 5)):
        parsed = parse_config(MINIMAL | {"pad_token_id": 5}, given, "x")
        assert (parsed.eos_token_ids, parsed.pad_token_id) == (eos, pad)
    assert parse_config(MINIMAL, {"eos_token_id": 2}, "x").pad_token_id == 2  # without one, the first that ends
    for own, eos in ((0, (1, 0)), (1, (1,)), (63, (1, 63)), (64, (1,)), (-1, (1,)), (None, (1,))):
        assert parse_config(MINIMAL, {}, "x", tokenizer_eos=own).eos_token_ids == eos  # the tokenizer's, of 64 ids


def test_head_dim_is_the_configs_own_where_it_states_one():
    assert parse_config(MINIMAL, {}, "x").head_dim == 8
    assert parse_config({**MINIMAL, "head_dim": 12}, {}, "x").head_dim == 12
    assert parse_config({**MINIMAL, "head_dim": None}, {}, "x").head_dim == 8


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SPELLINGS = [
    {},
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": 2e4, "rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 1e6}},
    {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    {"rope_theta": 5e5, "rope_parameters": {**LLAMA3, "rope_theta": 3e5}},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
    {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
    {"rope_scaling": {}, "rope_parameters": {"rope_theta": 7e5}},
    {"num_key_value_heads": None},
    {"head_dim": 12},
    {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    {"tie_word_embeddings": True, "rms_norm_eps": 3e-6},
]
CONFIGS = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("changes", SPELLINGS, ids=str)
def test_every_field_is_the_one_that_transformers_reads(kind, changes):
    raw = {**MINIMAL, **changes, "model_type": kind}
    ours = parse_config(json.loads(json.dumps(raw)), {}, "x")
    theirs = CONFIGS[kind].from_dict(json.loads(json.dumps(raw)))
    theirs.standardize_rope_params()  # as every model of theirs does when it is made
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    if rope["rope_type"] == "default":
        assert ours.rope_scaling is None
    else:
        assert vars(ours.rope_scaling) == {key: rope[key] for key in vars(ours.rope_scaling)}
    assert ours.num_kv_heads == theirs.num_key_value_heads
    if "head_dim" in changes or kind != "qwen2":  # a Qwen2 computes it in the model
        assert ours.head_dim == theirs.head_dim
    assert (ours.rms_norm_eps, ours.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert set(getattr(theirs, "layer_types", ["full_attention"])) == {"full_attention"}


def test_key_value_heads_of_a_config_without_them_are_those_of_transformers():
    raw = {key: value for key, value in MINIMAL.items() if key != "num_key_value_heads"} | {
        "num_attention_heads": 64,
        "hidden_size": 128,
    }
    for kind, config in CONFIGS.items():
        ours = parse_config({**raw, "model_type": kind}, {}, "x")
        assert ours.num_kv_heads == config.from_dict({**raw, "model_type": kind}).num_key_value_heads


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, ("model_type", "gpt2")),
        ({"use_sliding_window": True, "max_window_layers": 1}, ("use_sliding_window", "true", "1 of 2 layers")),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ("rope_parameters", "'full_attention'")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("rope_scaling", "yarn")),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, ("low_freq_factor 4, high_freq_factor 4",)),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64.5}}, ("embeddings 64.5: the",)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, ("rope_parameters", "linear")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"num_attention_heads": 5, "head_dim": 8}, ("num_attention_heads", "5", "2")),
        ({"vocab_size": "64"}, ("vocab_size", "'64'")),
        ({"num_hidden_layers": -1}, ("num_hidden_layers", "-1")),
        ({"num_hidden_layers": 1001}, ("num_hidden_layers must be a whole number from 1 to 1,000", "1001")),
        ({"intermediate_size": 48.5}, ("intermediate_size", "48.5")),
        ({"head_dim": 7}, ("head_dim", "7")),
        ({"hidden_size": 30}, ("hidden_size", "30", "4")),
        ({"rms_norm_eps": "1e-6x"}, ("rms_norm_eps", "1e-6x")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"rope_theta": 0}, ("rope_theta", "0")),
        ({"rope_theta": [1e6]}, ("rope_theta", "[1000000.0]")),
        ({"rope_scaling": "yarn"}, ("rope_scaling", "'yarn'", "object")),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types", "sliding_attention")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "'yes'")),
        ({"eos_token_id": 64}, ("eos_token_id", "64", "vocab_size 64")),
        ({"eos_token_id": [1, "2"]}, ("eos_token_id", "'2'")),
        ({"pad_token_id": -1}, ("pad_token_id", "-1")),
        ({"model_type": "llama", "attention_bias": True}, ("attention_bias", "True")),
        ({"rope_scaling": {**LLAMA3, "factor": -1}}, ("rope_scaling.factor", "-1")),
    ],
)
def test_refusals_name_file_key_and_value(tmp_path, changes, named):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MINIMAL, **changes}))
    with pytest.raises(CheckpointError) as error:
        model_config(tmp_path)
    for word in (str(path), *named):
        assert word in str(error.value)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        model_config(tmp_path)
    twice = json.dumps(MINIMAL)[:-1] + ', "vocab_size": 65}'
    for text, why in (("{", ""), ("[1]", ""), ("\x00", ""), (twice, ".*the key 'vocab_size' is given twice")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"config\.json{why}"):
            model_config(tmp_path)


def test_quantization_sections_of_published_checkpoints(data):
    folder = data / "nvfp4"
    for name in ("compressed-tensors", "modelopt"):
        assert stored_quantization(folder / f"fixture-{name}-tiny-qwen2") == Quantization(LAYOUTS[name], ("lm_head",))
    mixed = read_json(folder / "nvidia--Qwen3.6-27B-NVFP4_config.json")
    with pytest.raises(CheckpointError, match=r"here\.json.*MIXED_PRECISION"):
        quantization_of(mixed["quantization_config"], "here.json")
    for name in ("nvidia--Qwen3.6-27B-NVFP4_config.json", "nvidia--Qwen3-235B-A22B-NVFP4_config.json"):
        with pytest.raises(CheckpointError, match=r"here\.json.*qwen3"):
            parse_config(read_json(folder / name), {}, "here.json")


NESTED = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": {"quant_algo": "NVFP4"}}


@pytest.mark.parametrize(
    ("section", "beside", "expected"),
    [
        (None, None, None),
        ({}, None, None),
        (None, NESTED, "modelopt"),
        (NESTED, None, "modelopt"),
        ({"quant_method": "modelopt", **NESTED}, NESTED, "modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, "modelopt"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, None, "modelopt"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, NESTED, "bitsandbytes"),
    ],
)
def test_where_a_quantization_is_described(tmp_path, section, beside, expected):
    """In config.json or, of ModelOpt, in hf_quant_config.json alone; flat or nested."""
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, "quantization_config": section}))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = stored_quantization(tmp_path)
    assert found == (expected and Quantization(LAYOUTS[expected]))


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({"producer": {"name": "modelopt"}, "quant_algo": "FP8"}, "FP8"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "FP8"),
    ],
)
def test_other_quantizations_are_refused(section, named):
    with pytest.raises(CheckpointError, match=f"here.json.*{named}"):
        quantization_of(section, "here.json")
