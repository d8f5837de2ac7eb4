"""The model card of an export: `README.md` with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from qerl_jax.config import Config
from qerl_jax.evaluation import Evaluation
from qerl_jax.io.export import Kind
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.report import differences, table

_PLACES = ("`output_dir`", "`compilation_cache_dir`")  # settings of the machine, not of the run
_RELATION = {"peft": "adapter", "vllm": "adapter", "merged": "finetune", "merged-nvfp4": "quantized"}
_FULL = {
    "merged": "A bf16 model: fine-tuned from",
    "merged-nvfp4": "An NVFP4 model (compressed-tensors, weights only): fine-tuned from",
}
_KIND = {
    "peft": "A PEFT adapter for",
    "vllm": "An adapter for vLLM, with the base that it belongs to where that is not the original one, trained on",
    "merged": "A bf16 model: an adapter merged into",
    "merged-nvfp4": "An NVFP4 model (compressed-tensors, weights only): an adapter merged into",
}


@dataclasses.dataclass(frozen=True)
class Card:
    """What a model card says.

    Attributes:
      name: title.
      kind: its form, `io.export.Kind`.
      base_model: hub id or path of the base.
      lora: shape of the adapters; rank 0 for none.
      has_norms: whether layer norms were trained.
      trained_on: format of the base's projections in training, such as "nvfp4".
      use: lines of a shell that load or serve it.
      findings: sentences on how it was checked.
      layer_errors: relative weight error of each layer where it was quantized again.
      config: the run's; None where only the adapter is known.
      evaluations: the run's, by name.
      step: step of the checkpoint that it was taken from; None: after the last one, or not known.
    """

    name: str
    kind: Kind
    base_model: str
    lora: LoraConfig
    has_norms: bool
    trained_on: str
    use: Sequence[str]
    findings: Sequence[str]
    layer_errors: Sequence[float] = ()
    config: Config | None = None
    evaluations: Mapping[str, Evaluation] = dataclasses.field(default_factory=dict)
    step: int | None = None


def render_card(card: Card) -> str:
    """The page."""
    lines = [*_front_matter(card), f"# {card.name}", "", *_introduction(card), ""]
    lines += ["## Use", "", "```bash", *card.use, "```", ""]
    if card.evaluations:
        lines += ["## Scores", "", *table(("evaluation", "result"), _scores(card))]
        lines += [f"On `{card.config.eval_dataset}`, before and after training, with the policy in the run.", ""]
    lines += ["## Weights", "", *(f"- {finding}" for finding in card.findings), ""]
    if card.layer_errors:
        rows = [(f"{layer}", f"{100 * error:.2f} %") for layer, error in enumerate(card.layer_errors)]
        lines += ["Relative error of the seven projections of each layer (Frobenius norm):", ""]
        lines += table(("layer", "error"), rows)
    if card.config is not None:
        rows = [row for row in differences(card.config) if row[0] not in _PLACES]
        lines += [
            "## Settings of the run that differ from the defaults",
            "",
            *table(("field", "value", "default"), rows),
        ]
    return "\n".join(lines)


def _front_matter(card: Card) -> list[str]:
    import yaml

    is_adapter = card.kind in ("peft", "vllm")
    tags = ["qerl", "grpo", "reinforcement-learning"]
    tags += ["lora"] if card.lora.rank else []
    tags += ["nvfp4", "compressed-tensors"] if card.kind == "merged-nvfp4" else []
    values = {
        "base_model": card.base_model,
        "base_model_relation": _RELATION[card.kind],
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return ["---", *text.splitlines(), "# license: state yours here; the base model's licence applies too", "---", ""]


def _introduction(card: Card) -> list[str]:
    trained = [f"LoRA of rank {card.lora.rank} on {', '.join(card.lora.target_modules)}"] if card.lora.rank else []
    trained += ["the two norms of every layer"] if card.has_norms else []
    is_full = card.config is not None and card.config.is_full
    trained = ["all weights"] if is_full else trained
    kind = (_FULL if is_full else _KIND)[card.kind]
    lines = [
        f"{kind} `{card.base_model}`, trained by reinforcement learning (GRPO) with QeRL-JAX.",
        "",
        f"- Trained: {' and '.join(trained)}.",
        f"- Projections of the base in training: {card.trained_on}.",
    ]
    if card.config is not None:
        lines.append(f"- Dataset: {', '.join(card.config.dataset)}.")
    if card.step is not None:
        lines.append(f"- The run had not ended: this is its checkpoint of step {card.step}.")
    return lines


def _scores(card: Card) -> list[tuple[str, ...]]:
    return [(name, result.describe()) for name, result in card.evaluations.items()]
