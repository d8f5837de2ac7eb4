"""Golden NVFP4 checkpoints of llm-compressor 0.14.0.1 (compressed-tensors 0.20.0 for AWQ's); `golden.json` has the
versions of the first. The program that made them is this file up to e6a12502.
"""

import hashlib
import json
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
