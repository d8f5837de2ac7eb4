"""A trained policy, exported and checked: the body of `python -m qerl_jax.export`.

Axes: B sequences, T tokens.
"""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from qerl_jax.backends.vllm_settings import RANKS
from qerl_jax.config import Config, ConfigError
from qerl_jax.config import load as load_config
from qerl_jax.evaluation import Evaluation
from qerl_jax.io import assets, hf_config, names
from qerl_jax.io.adapter_reader import AdapterReader
from qerl_jax.io.checkpoint import latest_step
from qerl_jax.io.export import Kind, Progress, StoredPolicy, Written, write
from qerl_jax.io.files import atomic_directory, write_text
from qerl_jax.io.hub import is_hub_id
from qerl_jax.io.load import stored_scheme
from qerl_jax.io.peft_config import CONFIG_FILE as ADAPTER_CONFIG
from qerl_jax.io.rewrite import ADAPTER_PART, BASE_PART, CARD_FILE, check_output
from qerl_jax.io.rounding import Distance, Perturbed, kl_divergence, weight_errors
from qerl_jax.io.run_files import ADAPTER_DIR, CONFIG_FILE
from qerl_jax.io.safetensors import open_checkpoint
from qerl_jax.io.streamed import streamed_logits
from qerl_jax.io.tensor_names import check_names
from qerl_jax.io.tokenizer import load_tokenizer, refuse_other_tokenizer
from qerl_jax.io.trained import adapter_from_checkpoint, weights_from_checkpoint
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.card import Card, render_card
from qerl_jax.reporting.metrics import EvaluationResults
from qerl_jax.untrusted import shown

_PROMPTS = (
    "What is 17 times 23? Think step by step, then give the answer as a number in <answer> tags, please.",
    "A train leaves at 9:40 and arrives at 13:05. How many minutes does the journey take in total, without stops?",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "The capital of France is Paris, and the river that flows through it is called the Seine. In winter it rises.",
)
_TOKENS = 32  # most tokens of a prompt


@dataclasses.dataclass(frozen=True)
class Source:
    """What is exported.

    Attributes:
      directory: run or adapter.
      policy: its base and adapter; the adapter None where only a checkpoint holds it, or all weights were trained.
      base_model: name of the base: hub id, or absolute path.
      config: the run's; None for an adapter.
      step: step of the newest checkpoint, where the run has no adapter, or has not ended.
    """

    directory: Path
    policy: StoredPolicy
    base_model: str
    config: Config | None = None
    step: int | None = None


def find_source(directory: Path, base: str | None, weight_format: str | None) -> Source:
    """The policy in a run's directory, or of an adapter and its base.

    Raises ConfigError where neither is there, where an adapter's base is not named, or for a `weight_format` that is
    not the run's.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory: name a run or an adapter")
    config_file, is_adapter = directory / CONFIG_FILE, (directory / ADAPTER_CONFIG).exists()
    if is_adapter and base is None:
        named = hf_config.read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise ConfigError(
            f"{directory} is an adapter: name its base with --base (its {ADAPTER_CONFIG} has {shown(named)})"
        )
    if is_adapter:
        policy = StoredPolicy(assets.model_path(base), weight_format, directory)
        return Source(directory, policy, _name(base))
    if not config_file.exists():
        raise ConfigError(f"{directory} is neither a run with {CONFIG_FILE} nor an adapter with {ADAPTER_CONFIG}")
    config = load_config(config_file)
    if weight_format is not None and weight_format != config.weight_format:
        raise ConfigError(
            f"--weight-format {weight_format!r} is not what the run was trained with: {config_file} has weight_format "
            f"{config.weight_format!r}"
        )
    base = base or config.model
    policy = StoredPolicy(assets.model_path(base), config.loaded_format, directory / ADAPTER_DIR)
    if not config.is_full and (directory / ADAPTER_DIR).is_dir():
        return Source(directory, policy, _name(base), config)
    step = latest_step(directory)
    if step is None:
        nothing = "no complete checkpoint" if config.is_full else f"neither {ADAPTER_DIR}/ nor a complete checkpoint"
        raise ConfigError(f"{directory} holds {nothing}: nothing to export yet")
    return Source(directory, dataclasses.replace(policy, adapter=None), _name(base), config, step)


def _name(base: str) -> str:
    return base if is_hub_id(base) else str(assets.model_path(base).absolute())


def export(
    directory: Path,
    out: Path,
    kind: Kind,
    base: str | None = None,
    weight_format: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda stage, done, total: None,
) -> list[str]:
    """Write a policy in one atomic step, after its logits were compared with the policy's.

    Args:
      directory: a run, or an adapter.
      out: directory to write.
      kind: its form.
      base: model that the adapter belongs to, as in `Config.model`; for a run None: its own.
      weight_format: format into which the base was quantized while loading; for a run its own.
      overwrite: replace an earlier export.
      say: called with each line for people.
      progress: called with a stage, and the numbers of layers or tensors done and of all.

    Returns the commands that use it.

    Raises:
      ConfigError: nothing to export there (`find_source`), or an adapter is asked for where all weights were trained.
      FileExistsError: `out` exists, without `overwrite`; or it is or holds a source, or is no export.
      CheckpointError: an adapter or tokenizer that is not the base's, or a damaged file.
      ValueError: the logits differ by more than the bound of `io.rounding`; nothing is written.
    """
    source = find_source(directory, base, weight_format)
    policy, is_full = source.policy, source.config is not None and source.config.is_full
    if is_full and kind in ("peft", "vllm"):
        raise ConfigError(
            f"--as {kind!r} writes an adapter, and {directory} was trained with weight_format 'full', which has none: "
            "use --as merged or --as merged-nvfp4"
        )
    check_output([policy.base, directory, directory / ADAPTER_DIR], out, overwrite, adapters=True)
    with tempfile.TemporaryDirectory() as temporary:
        if is_full:
            weights, step = weights_from_checkpoint(directory, source.config, policy.base)
            say(f"exporting the weights of the newest checkpoint of {directory}, of step {step}")
            policy = dataclasses.replace(policy, weights=weights)
            ended = step == source.config.num_rollouts
            source = dataclasses.replace(source, step=None if ended else step)
        elif policy.adapter is None:
            step = adapter_from_checkpoint(directory, source.config, Path(temporary), source.base_model)
            say(f"{directory} has no {ADAPTER_DIR}/ yet: exporting its newest checkpoint, of step {step}")
            policy = dataclasses.replace(policy, adapter=Path(temporary))
        reader = policy.reader()
        scheme = stored_scheme(policy.base, policy.weight_format)
        check_names(open_checkpoint(policy.base), policy.config, scheme)
        if policy.adapter is not None:
            refuse_other_tokenizer(policy.base, policy.adapter)
        with atomic_directory(out) as building:
            written = write(kind, policy, building, out, source.base_model, progress)
            findings, errors = compare(policy, written, out, kind == "merged-nvfp4", progress)
            for line in findings:
                say(line)
            use = commands(kind, policy, written, source.base_model, reader, out)
            card = Card(
                name=out.resolve().name,
                kind=kind,
                base_model=source.base_model,
                lora=LoraConfig(rank=0) if reader is None else reader.config,
                has_norms=reader is not None and reader.has_norms,
                trained_on=_trained_on(policy),
                use=use,
                findings=findings,
                layer_errors=errors,
                config=source.config,
                evaluations=_evaluations(source),
                step=source.step,
            )
            write_text(building / CARD_FILE, render_card(card))
    return use


def _evaluations(source: Source) -> dict[str, Evaluation]:
    return {} if source.config is None else EvaluationResults(source.directory).all()


def _trained_on(policy: StoredPolicy) -> str:
    scheme = hf_config.stored_format(policy.base)
    if scheme is not None:
        return f"{names.STORED_FORMAT[scheme].upper()}, as stored ({scheme})"
    return f"{policy.weight_format}, quantized while loading" if policy.quantizes else "unquantized"


def commands(
    kind: Kind, policy: StoredPolicy, written: Written, base_model: str, reader: AdapterReader | None, out: Path
) -> list[str]:
    """Commands that use an export, for a shell. `reader`: the adapter's; None where all weights were trained."""
    model = shlex.quote(str(out))
    if kind == "peft":
        chosen = f" --weight-format {policy.weight_format}" if policy.quantizes else ""
        return [f"python -m qerl_jax.evaluate {shlex.quote(base_model)}{chosen} --adapter {model}"]
    if kind != "vllm":
        return [f"vllm serve {model}"]
    served = f"{model}/{BASE_PART}" if written.policy.base != policy.base else shlex.quote(base_model)
    if not reader.config.rank:
        return [f"vllm serve {served}"]
    rank = next((rank for rank in RANKS if rank >= reader.config.rank), reader.config.rank)
    return [f"vllm serve {served} --enable-lora --max-lora-rank {rank} --lora-modules trained={model}/{ADAPTER_PART}"]


def prompt_tokens(base: Path, model: ModelConfig) -> Int32[np.ndarray, "B T"]:
    """The tokens on which an export is compared: four texts cut to one length, or random ids without a tokenizer."""
    length = min(_TOKENS, model.max_position_embeddings)
    tokenizer = load_tokenizer(base, model.vocab_size)
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, model.vocab_size, (len(_PROMPTS), length), np.int32)
    encoded = [tokenizer(text)["input_ids"] for text in _PROMPTS]
    length = min(length, *map(len, encoded))
    return np.asarray([ids[:length] for ids in encoded], np.int32)


def compare(
    policy: StoredPolicy, written: Written, out: Path, is_requantized: bool, progress: Progress
) -> tuple[list[str], list[float]]:
    """Sentences on the distance of an export's logits from the policy's, in fp32 arithmetic on the same prompts, and
    the weight error of each layer where it was quantized again. Raises ValueError beyond the bound.
    """
    model = policy.config
    tokens = prompt_tokens(policy.base, model)

    def logits(stage: str, stored: StoredPolicy) -> np.ndarray:
        return stored.logits(tokens, lambda done, total: progress(stage, done, total))

    wanted, found = logits("policy", policy), logits("export", written.policy)
    distance, bound = Distance.between(found, wanted), Distance(0.0, 0.0)
    if written.rounded:
        perturbed = Perturbed(written.policy.base, written.rounded)
        adapter = written.policy.reader()
        moved = streamed_logits(
            perturbed, model, tokens, adapter=adapter, progress=lambda done, total: progress("rounding", done, total)
        )
        bound = Distance.between(moved, found).bound()
    if not distance.within(bound):
        raise ValueError(
            f"{out} is not written: its logits differ from the policy's by up to {distance}, and rounding explains no "
            f"more than {bound}"
        )
    prompts = f"{tokens.shape[0]} prompts of {tokens.shape[1]} tokens"
    lines = [f"Logits on {prompts} differ from the policy's by at most {distance}; bound {bound}."]
    if not written.rounded:
        return lines, []
    training = Distance.between(wanted, logits("base", dataclasses.replace(policy, adapter=None, weights=None)))
    lines.append(f"Training had moved them by at most {training}.")
    if 2 * distance.mean > training.mean:
        keeps = ": an adapter (--as peft, --as vllm) keeps the policy" if policy.weights is None else ""
        lines.append(f"Rounding moves them by more than half of that{keeps}.")
    if not is_requantized:
        return lines, []
    merged = policy.dense()
    unquantized = streamed_logits(merged, model, tokens, progress=lambda done, total: progress("merged", done, total))
    kl, errors = kl_divergence(unquantized, found), weight_errors(merged, written.policy.base, model)
    lines.append(
        f"Quantizing again: relative weight error of a layer {100 * min(errors):.2f} to {100 * max(errors):.2f} %, KL "
        f"from the merged bf16 model {kl.mean():.3g} nats a token (at most {kl.max():.3g})."
    )
    return lines, errors
