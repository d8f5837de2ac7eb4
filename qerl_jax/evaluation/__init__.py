"""The evaluation harness: accuracy of a noise-free policy on problems with known answers."""

from qerl_jax.evaluation.harness import evaluate, sampled_items
from qerl_jax.evaluation.summary import Evaluation, summarize

__all__ = ["Evaluation", "evaluate", "sampled_items", "summarize"]
