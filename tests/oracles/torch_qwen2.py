"""Qwen2, Qwen3 and Llama by transformers in fp32, optionally with plain LoRA on their projections."""

from pathlib import Path

import numpy as np
import torch
import transformers

LLAMA_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def load(directory: Path) -> torch.nn.Module:
    """The directory's model in fp32 with eager attention."""
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def make(directory: Path, seed: int, scale: float = 0.1, kind: str = "Qwen2", **shape) -> torch.nn.Module:
    """A small random model with every parameter drawn, biases and norms included, saved to `directory`.

    `kind`: "Qwen2", "Qwen3" or "Llama".
    """
    defaults = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
        "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**defaults, **shape}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, scale)
            if "norm" in name:
                parameter.add_(1)
    model.save_pretrained(directory)
    return model


def logits(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """[B, T, V]; positions are the running count of the mask."""
    tokens = torch.as_tensor(np.asarray(tokens), dtype=torch.long)
    mask = torch.ones_like(tokens) if mask is None else torch.as_tensor(np.asarray(mask)).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits.float().numpy()


class LoraLinear(torch.nn.Module):
    """`base(x) + scale · B (A x)` with A [R, K] and B [N, R]."""

    def __init__(self, base: torch.nn.Linear, a: np.ndarray, b: np.ndarray, scale: float):
        super().__init__()
        self.base, self.scale = base, scale
        self.a = torch.nn.Parameter(torch.tensor(np.asarray(a)))
        self.b = torch.nn.Parameter(torch.tensor(np.asarray(b)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


PARENT = {p: "self_attn" for p in ("q_proj", "k_proj", "v_proj", "o_proj")} | {
    p: "mlp" for p in ("gate_proj", "up_proj", "down_proj")
}


def attach_lora(model: torch.nn.Module, adapters: dict[tuple[int, str], tuple[np.ndarray, np.ndarray, float]]) -> None:
    """Wrap projections: (layer, projection) -> (A [R, K], B [N, R], scale). Everything else is frozen."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for (layer, name), (a, b, scale) in adapters.items():
        parent = getattr(model.model.layers[layer], PARENT[name])
        setattr(parent, name, LoraLinear(getattr(parent, name), a, b, scale))
