"""Shapes that are tested and timed: the prologues of Qwen2.5's projections, every projection with an adapter."""

from __future__ import annotations

# case -> (kind, input features, adapters)
SHAPES = {
    "qkv_7b": ("norm", 3584, 3),
    "o_7b": ("plain", 3584, 1),
    "gate_up_7b": ("norm", 3584, 2),
    "down_7b": ("silu", 18944, 1),
    "qkv_0.5b": ("norm", 896, 3),
    "o_0.5b": ("plain", 896, 1),
    "gate_up_0.5b": ("norm", 896, 2),
    "down_0.5b": ("silu", 4864, 1),
    "qkv_1.5b": ("norm", 1536, 3),
    "o_1.5b": ("plain", 1536, 1),
    "gate_up_1.5b": ("norm", 1536, 2),
    "down_1.5b": ("silu", 8960, 1),
    "qkv_14b": ("norm", 5120, 3),
    "down_14b": ("silu", 13824, 1),
    "down_32b": ("silu", 27648, 1),
    "gate_up_72b": ("norm", 8192, 2),
    "down_72b": ("silu", 29568, 1),
}
LAYER_7B = ("qkv_7b", "o_7b", "gate_up_7b", "down_7b")
TOKENS = (1, 3, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256)
