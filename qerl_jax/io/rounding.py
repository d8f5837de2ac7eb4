"""Distance of two models' next-token distributions."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Float64


def kl_divergence(reference: Float32[np.ndarray, "B T V"], other: Float32[np.ndarray, "B T V"]) -> np.ndarray:
    """KL(reference ‖ other) of the next token at each position [B, T], in nats."""
    rows = zip(reference, other, strict=True)  # one by one: fp64 copies of all would be twice both
    return np.stack([_kl(_log_softmax(p), _log_softmax(q)) for p, q in rows])


def _kl(p: Float64[np.ndarray, "T V"], q: Float64[np.ndarray, "T V"]) -> Float64[np.ndarray, " T"]:
    return (np.exp(p) * (p - q)).sum(-1)


def _log_softmax(logits: Float32[np.ndarray, "T V"]) -> Float64[np.ndarray, "T V"]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
