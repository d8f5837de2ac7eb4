"""Golden NVFP4 checkpoints of llm-compressor, and the program that made them.

`python tests/oracles/llm_compressor.py` rewrites `tests/data/nvfp4/llm-compressor/`, and with the argument `awq`
`tests/data/nvfp4/llm-compressor-awq/`. It needs an environment of its own (Python 3.11, no jax): `pip install
llmcompressor==0.14.0.1`, which brings compressed-tensors 0.19.0 (0.20.0 made the second folder); `golden.json` names
the versions that made the first. The tests import `stress_checkpoint`, `SOURCES` and `AWQ` from here and need neither.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/data/nvfp4/llm-compressor"
AWQ = GOLDEN.with_name("llm-compressor-awq")  # the bundled policy, a whole directory as the tool leaves it
SOURCES = {  # checkpoints whose quantized tensors are kept as SHA-256
    "bundled": ROOT / "qerl_jax/assets/tiny-qwen2",
    "tiny-random": ROOT / "tests/data/tiny-random-qwen2-hf",
}
STRESS = ("bfloat16", "float32")  # checkpoints of `stress_checkpoint`, kept whole
HIDDEN, FFN, HEADS, VOCAB, LAYERS = 48, 80, 3, 32, 3  # 3 and 5 blocks a row


def stress_checkpoint(directory: Path, dtype: str) -> Path:
    """A Qwen2 checkpoint (untied head, biases) whose weights sit where rounding decides.

    Layer 0: random bits over sixteen binades, another scale for each of q, k, v, gate and up; blocks of zeros, of -0,
    and blocks too small for a block scale. Layer 1: multiples of 1/4 below 6, so that in fp32 every code is a value or
    a tie. Layer 2: nothing but zeros, -0 and one tiny value.
    """
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(17)

    def random_bits(shape: tuple[int, ...], exponent: int) -> np.ndarray:
        mantissa = 1 + rng.integers(0, 1 << 23, shape) / (1 << 23)
        sign = 1 - 2 * rng.integers(0, 2, shape)
        return sign * mantissa * 2.0 ** (exponent - rng.integers(0, 16, shape))

    def projection(layer: int, index: int, shape: tuple[int, int]) -> np.ndarray:
        if layer == 0:
            weight = random_bits(shape, -3 - index % 3)
            weight[1, :16], weight[2, 16:32], weight[3] = 0.0, -0.0, weight[3] * 2.0**-14
            weight[4, 5:9] = -0.0
        elif layer == 1:
            weight = rng.integers(-24, 25, shape) / 4 * 2.0 ** -(5 + index % 2)
            weight[:, ::16] = 6 * 2.0 ** -(5 + index % 2)
        else:
            weight = np.zeros(shape)
            weight[::2] = -0.0
            weight[5, 7] = -(2.0**-120) if index % 2 else 0.0
        return weight

    kv = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": random_bits((VOCAB, HIDDEN), -2)}
    for layer in range(LAYERS):
        for index, (name, shape) in enumerate(shapes.items()):
            tensors[f"model.layers.{layer}.{name}.weight"] = projection(layer, index, shape)
            if name[-6] in "qkv" and "attn" in name:
                tensors[f"model.layers.{layer}.{name}.bias"] = random_bits(shape[:1], -1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.abs(random_bits((HIDDEN,), 0))
    tensors |= {"model.norm.weight": np.ones(HIDDEN), "lm_head.weight": random_bits((VOCAB, HIDDEN), -2)}
    save_file({n: t.astype(kind) for n, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": dtype, "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def digest(array: np.ndarray) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _oneshot(source: Path, out: Path) -> dict:
    """The quantized tensors (name -> torch tensor) as the documentation of llm-compressor has people make them."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from safetensors.torch import load_file

    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
    oneshot(model=str(source), recipe=recipe, output_dir=str(out))
    tensors = {}
    for file in out.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: tensor for name, tensor in tensors.items() if "_proj.weight" in name}


def awq(source: Path, texts: list[str], out: Path) -> None:
    """A model as llm-compressor's AWQ quantizes it and its users save it."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.Tensor.pin_memory = lambda self, *_: self  # it asks for a GPU
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    rows = [dict(tokenizer(text, truncation=True, max_length=128)) for text in texts]
    recipe = AWQModifier(scheme="NVFP4A16", targets=["Linear"], ignore=["lm_head"])
    sizes = {"max_seq_length": 128, "num_calibration_samples": len(rows)}
    oneshot(model=model, dataset=Dataset.from_list(rows), recipe=[recipe], **sizes)
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Write the goldens."""
    if sys.argv[1:] == ["awq"]:
        rows = map(json.loads, (ROOT / "tests/data/gsm8k/train.jsonl").read_text().splitlines())
        return awq(SOURCES["bundled"], [f"{row['question']}\n{row['answer']}" for row in rows], AWQ)
    from importlib.metadata import version

    import torch
    from safetensors.torch import save_file

    GOLDEN.mkdir(parents=True, exist_ok=True)
    record = {
        "made_by": "tests/oracles/llm_compressor.py",
        "versions": {p: version(p) for p in ("llmcompressor", "compressed-tensors", "torch", "transformers")},
        "recipe": 'QuantizationModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])',
        "device": "cpu",
        "sha256": {},
    }
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for dtype in STRESS:
            tensors = _oneshot(stress_checkpoint(work / f"source-{dtype}", dtype), work / dtype)
            save_file(tensors, GOLDEN / f"stress-{dtype}.safetensors")
        for model, source in SOURCES.items():
            tensors = _oneshot(source, work / model)
            record["sha256"][model] = {n: digest(t.view(torch.uint8).numpy()) for n, t in sorted(tensors.items())}
        record["quantization_config"] = json.loads((work / "bundled/config.json").read_text())["quantization_config"]
    (GOLDEN / "golden.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
