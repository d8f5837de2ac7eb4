"""`python -m qerl_jax.compare MODEL [--adapter DIR]`: a model here and in transformers, layer by layer.

Both compute the same prompts in fp32, transformers on the CPU with eager attention; peft loads the adapter, norms
included. Compared are the residual stream behind every layer (transformers' `output_hidden_states`, whose normalized
last entry is replaced by the input of the final norm), the logits, and the log-probabilities of the prompts' tokens.

The relative deviation of a state is the largest over the tokens of `‖ours − reference‖ / s`, s the largest norm of the
reference's residual stream up to this layer: what an earlier, larger state was rounded by stays in the sum. Logits
count relative to their norm times `s / ‖last state‖`, log-probabilities relative to their own magnitude plus the rms of
the token's logits times the same factor.

The bound behind layer l = 1, 2, …: `4 √(13 l) (1 + √K) 2^-24`. Each of 13 operations in a row (norm,
projections, rotary embedding, scores, softmax, … residual addition) rounds once, and sums up to K terms, K the longest
sum of the model; a sum that is rounded after every addition is off by about √K roundings, and errors of independent
sign add up as a square root; with 4 in front, such a sum exceeds the bound with probability 2 exp(-4²/2) = 7e-4 (Higham
and Mary, 2019, https://doi.org/10.1137/18M1226312). The embedding is the same numbers: 0. The head counts as one more
layer. A log-probability is a logit minus a mean of logits: twice the bound. Libraries sum in blocks and are off by
less: a random model of 0.5B shapes stays 45 to 110 times below the bound.

The policy runs on JAX's default device. transformers reads NVFP4 through compressed-tensors where that is installed and
the file has its layout. Since it rounds the weights to bf16, those that agree with our loader's up to that rounding are
replaced by the unrounded ones. Other quantized weights are dequantized by our loader alone, and the comparison then
says nothing of them.

Memory holds one of the models at a time, and the logits of all prompts.

Axes: D features.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from rich.console import Console

from qerl_jax import command
from qerl_jax.checkpoint import hf_config
from qerl_jax.checkpoint.adapter_reader import AdapterReader
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.load import accepted_quantization, load_policy
from qerl_jax.checkpoint.tokenizer import load_tokenizer, refuse_other_tokenizer
from qerl_jax.checkpoint.torch_reference import Outputs, missing_packages, reference_outputs
from qerl_jax.config import ConfigError, flags
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.formats import WEIGHT_FORMATS
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.console import say
from qerl_jax.rl.logprobs import hidden_states, policy_logits, token_logprobs
from qerl_jax.types import Policy

_OPERATIONS, _CONFIDENCE, _FP32_UNIT = 13, 4.0, 2.0**-24
_TEXTS = (
    "What is 17 times 23? Think step by step, then give the answer as a number in <answer> tags, please.",
    "A train leaves at 9:40 and arrives at 13:05. How many minutes does the journey take in total, without stops?",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "The capital of France is Paris, and the river that flows through it is called the Seine. In winter it rises.",
)
_TOKENS = 32  # most tokens of such a text


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Compare a model, with or without an adapter, with transformers on the CPU, layer by layer. Exit code 1 if a
    deviation is beyond the bound that follows from rounding.
    """

    model: str
    """Hugging Face directory, ORGANIZATION/NAME on the hub, or "tiny" for the bundled policy."""
    adapter: str | None = None
    """PEFT directory, norms included."""
    weight_format: Literal[*WEIGHT_FORMATS] | None = None
    """Format into which an unquantized model is quantized while loading. None: the stored one."""


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far one state, the logits or the log-probabilities are from the reference over all prompts.

    Attributes:
      name: "embedding", "layer 0", …, "logits", "log-probabilities".
      largest: maximum of the absolute differences.
      mean: their mean.
      relative: as the module defines it; what is bounded.
    """

    name: str
    largest: float
    mean: float
    relative: float


def main(argv: list[str] | None = None, load: Callable[..., Policy] = load_policy) -> int:
    """Command line. Exit code 1 beyond the bound, 2 with a one-line error message for bad input.

    `load` has the signature of `load_policy`, for another implementation of what is compared.
    """
    return command.run(lambda: _run(sys.argv[1:] if argv is None else argv, load))


def _run(argv: Sequence[str], load: Callable[..., Policy]) -> int:
    arguments = flags.parse(_Arguments, argv, "python -m qerl_jax.compare", inspect.getdoc(_Arguments))
    if missing := missing_packages(arguments.adapter is not None):
        raise ConfigError(f"the comparison needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    console = Console(stderr=True)
    path, adapter = model_path(arguments.model), None if arguments.adapter is None else Path(arguments.adapter)
    config = hf_config.model_config(path)
    accepted_quantization(path, arguments.weight_format)
    if adapter is not None:  # before hours of work
        AdapterReader(adapter, config)
        refuse_other_tokenizer(path, adapter)
    prompts = prompts_of(path, config)
    with console.status("computing here"):
        lora = LoraConfig(0) if adapter is None else None
        found = our_outputs(load(path, arguments.weight_format, lora, jnp.float32, adapter), prompts)
    with console.status("computing in PyTorch"):
        wanted, reference = reference_outputs(path, adapter, arguments.weight_format, prompts)
    print(f"{arguments.model} in float32, {len(prompts)} prompts; reference: {reference}")
    return _show(deviations(found, wanted), rounding_bounds(config, len(prompts[0])))


def prompts_of(base: Path, model: ModelConfig) -> list[list[int]]:
    """Token ids of four texts cut to one length, or random ids without a tokenizer."""
    length = min(_TOKENS, model.max_position_embeddings)
    tokenizer = load_tokenizer(base, model.vocab_size)
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, model.vocab_size, (len(_TEXTS), length), np.int32).tolist()
    encoded = [tokenizer(text)["input_ids"] for text in _TEXTS]
    return [ids[: min(length, *map(len, encoded))] for ids in encoded]


@jax.jit
def _outputs(policy: Policy, tokens: jax.Array) -> list[jax.Array]:
    """One program for the three, whose layers XLA then computes, and compiles, once."""
    return [function(policy, tokens) for function in (hidden_states, policy_logits, token_logprobs)]


def our_outputs(policy: Policy, prompts: Sequence[Sequence[int]]) -> list[Outputs]:
    """The policy on each prompt; all have one length, so that everything is compiled once."""
    found = []
    for ids in prompts:
        states, logits, logprobs = map(np.asarray, _outputs(policy, np.array([ids], np.int32)))
        found.append(Outputs(states[:, 0], logits[0], logprobs[0]))
    return found


def deviations(found: Sequence[Outputs], wanted: Sequence[Outputs]) -> list[Deviation]:
    """The deviation of every state, the logits and the log-probabilities, the prompts taken together."""
    layers = len(wanted[0].states) - 1
    labels = ["embedding", *(f"layer {layer}" for layer in range(layers)), "logits", "log-probabilities"]
    columns = zip(*(_differences(*pair) for pair in zip(found, wanted, strict=True)), strict=True)
    rows = []
    for label, parts in zip(labels, columns, strict=True):
        difference, relative = (np.concatenate([part[i].ravel() for part in parts]) for i in range(2))
        rows.append(Deviation(label, float(difference.max()), float(difference.mean()), float(relative.max())))
    return rows


def _differences(found: Outputs, wanted: Outputs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Absolute differences and each token's relative deviation, for every row of the table."""

    def norms(values: Float[np.ndarray, "*B D"]) -> Float[np.ndarray, "*B"]:
        return np.linalg.norm(values.astype(np.float64), axis=-1)

    lengths = np.maximum(norms(wanted.states), np.finfo(np.float64).tiny)  # a token's embedding may be all zeros
    largest = np.maximum.accumulate(lengths)
    for ours, theirs, scale in zip(found.states, wanted.states, largest, strict=True):
        yield np.abs(ours - theirs), norms(ours - theirs) / scale
    size = norms(wanted.logits) * largest[-1] / lengths[-1]
    yield np.abs(found.logits - wanted.logits), norms(found.logits - wanted.logits) / size
    difference = np.abs(found.logprobs - wanted.logprobs)
    rms = size[:-1] / math.sqrt(wanted.logits.shape[1])
    yield difference, difference / (rms + np.abs(wanted.logprobs))


def rounding_bounds(config: ModelConfig, length: int) -> list[float]:
    """The bound of each row, as derived above, for prompts of at most `length` tokens."""
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim, length)
    unit = _CONFIDENCE * (1 + math.sqrt(max(widths))) * _FP32_UNIT
    bounds = [unit * math.sqrt(_OPERATIONS * layer) for layer in range(config.num_layers + 2)]
    return [*bounds, 2 * bounds[-1]]


def _show(rows: Sequence[Deviation], bounds: Sequence[float]) -> int:
    """Print the table; 1 if a deviation is beyond its bound, or is no number."""
    from rich.table import Table

    table = Table("", "max", "mean", "relative", "bound")
    for column in table.columns[1:]:
        column.justify = "right"
    beyond = []
    for row, bound in zip(rows, bounds, strict=True):
        is_within = row.relative <= bound
        figures = [f"{figure:.3g}" for figure in (row.largest, row.mean, row.relative, bound)]
        table.add_row(row.name, *figures, style=None if is_within else "bold red")
        if not is_within:
            beyond.append(f"{row.name}: {figures[2]}, bound {figures[3]}")
    console = Console(highlight=False)
    console.print(table)
    verdict = f"first beyond the bound: {beyond[0]}" if beyond else "all within the bound"
    say(console, verdict)
    return 1 if beyond else 0


if __name__ == "__main__":
    command.end(main)
