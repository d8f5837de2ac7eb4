"""Replay the released QeRL beside ours on recorded inputs, and print how far each quantity is apart.

    python tools/compare_qerl.py                                 # against values recorded from the release
    python tools/compare_qerl.py --checkout QERL                 # against its code, on the same inputs
    python tools/compare_qerl.py --checkout QERL --inputs FILE   # its losses and masks on inputs of yours
    python tools/compare_qerl.py --checkout QERL --run RUN       # what a run of ours recorded, against its code

QERL: a checkout of NVlabs/QeRL. Quantities: σ of every rollout, at the release's own step index; the mask of truncated
completions; loss, its gradient to the log-probabilities and its metrics; advantages; rewards of texts. FILE: JSON like
`tests/golden/release_losses.json`: [B, C] `completion_ids`, `logp`, `old`, `reference`; [B] `advantages`; `eos`,
`max_completion_length`, `epsilon`, `epsilon_high`; `results`, each with its `settings`. RUN: its config, the σ of
`metrics.jsonl`, and rewards and advantages of `completions/`.

A departure on purpose is counted beside its quantity, with the reason, and is no failure. Exit code 1: another
difference beyond its bound; 2: unusable input.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import release
import torch
from difference_table import Row, compared, show
from release import Release
from rich.console import Console

from qerl_jax import aqn
from qerl_jax.config import Config
from qerl_jax.config import load as load_config
from qerl_jax.io.run_files import COMPLETIONS_DIR, CONFIG_FILE
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.rewards.functions import load_reward
from qerl_jax.rl.advantages import group_advantages, make_batch
from qerl_jax.rl.loss import LossSettings, token_losses, token_weights
from qerl_jax.types import FinishReason, Rollout

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
ULP = 2.0**-24  # relative rounding error of fp32
SIGMA_BOUND = 1e-8  # relative; recorded values have nine digits
_ANSWER = re.compile("<answer>.*</answer>", re.DOTALL)
METRICS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean")
# A reward of ours: the release's function, its value of a full score, and why ours may depart from it.
REWARDS = {
    "qerl_exact": ("correctness_reward_func", 2.0, ""),
    "xml_count": ("xmlcount_reward_func", 1.0, ""),
    "soft_format": ("soft_format_reward_func", 0.2, ""),
    "strict_format": ("strict_format_reward_func", 0.2, "thoughts may have several lines"),
    "answer": ("correctness_reward_func", 2.0, "numbers in <answer>, not texts"),
}
# Completion and gold answer, beside those of the recorded `xml_count`.
TEXTS = (
    ("<think>2</think><answer>1234</answer>", "1,234"),
    ("<think>\none\ntwo\n</think>\n<answer>\n5\n</answer>", "5"),
    ("<think>\none\n</think>\n<answer>\n6\n</answer>", "5"),
    ("5", "5"),
    ("<answer>5</answer>", "5"),
)


def noise_row(
    name: str, settings: dict[str, Any], ours: Sequence[float], theirs: Sequence[float], epochs: float = 1
) -> Row:
    """σ of every rollout. A departure on purpose is one where the release's float division gives another stage than
    integers do; its σ there is still that of the stage before. Beyond one epoch all of them are: the release begins
    again in each.
    """
    total, stages = len(theirs) * settings["num_iterations"], settings["num_stages"]
    updates = [step * settings["num_iterations"] + 1 for step in range(len(theirs))]
    borders = [
        update // (total / stages) != update * stages // total
        and np.isclose(ours[max(step - 1, 0)], theirs[step], rtol=SIGMA_BOUND, atol=0)
        for step, update in enumerate(updates)
    ]
    bound = SIGMA_BOUND * np.where(np.asarray(theirs) > 0, theirs, settings["sigma_start"])
    if epochs > 1:
        return compared(name, ours, theirs, bound, True, "one schedule over all epochs")
    return compared(name, ours, theirs, bound, borders, "stage borders in integers")


def noise_rows(runs: Sequence[dict[str, Any]], checkout: Release | None) -> list[Row]:
    """Rows of recorded schedules; with a checkout replayed, one micro-batch an update."""
    rows = []
    for run in runs:
        settings, count = run["settings"], len(run["sigmas"])
        theirs = release.sigmas(checkout, settings, count) if checkout else run["sigmas"]
        config = Config(**settings)
        ours = [aqn.sigma(config, step, count) for step in range(count)]
        updates, stages = settings["num_iterations"], settings["num_stages"]
        rows.append(noise_row(f"σ, {count} rollouts of {updates} updates, {stages} stages", settings, ours, theirs))
    return rows


def our_mask(ids: np.ndarray, eos: int) -> np.ndarray:
    """The tokens [B, C] in the loss under `mask_truncated_completions`, behind prompts of one token."""
    ends = (ids == eos).any(axis=1)
    lengths = np.where(ends, (ids == eos).argmax(axis=1) + 1, ids.shape[1])
    tokens = np.concatenate([np.ones((len(ids), 1), np.int32), ids.astype(np.int32)], axis=1)
    rollout = Rollout(
        tokens=jnp.asarray(tokens),
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        prompt_lengths=jnp.ones(len(ids), jnp.int32),
        lengths=jnp.asarray(1 + lengths, jnp.int32),
        finish=jnp.asarray(np.where(ends, FinishReason.EOS, FinishReason.LENGTH), jnp.int8),
        prompt_index=jnp.arange(len(ids), dtype=jnp.int32),
    )
    batch = make_batch(rollout, jnp.zeros(len(ids)), mask_truncated_completions=True)
    return np.asarray(batch.loss_mask[:, 1:])


def our_loss(inputs: dict[str, Any], mask: np.ndarray, settings: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradient and metrics, as `release.loss`."""
    limits = {name: inputs[name] for name in ("max_completion_length", "epsilon", "epsilon_high")}
    config = Config(**limits, **settings, importance_sampling_cap=None)
    names = "logp", "old", "reference", "advantages"
    logp, old, reference, advantages = (jnp.asarray(inputs[name], jnp.float32) for name in names)

    def total(logp: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        arrays = logp, old, old, reference if config.beta else None, advantages, jnp.asarray(mask)
        losses, values = token_losses(*arrays, LossSettings.of(config))
        weights = token_weights(jnp.asarray(mask), config.loss_type, config.max_completion_length)
        return jnp.sum(weights * losses), values

    (loss, values), gradient = jax.value_and_grad(total, has_aux=True)(logp)
    metrics = {name: float(values[name].sum() / mask.sum()) for name in METRICS if name in values}
    return {"loss": float(loss), "gradient": np.asarray(gradient), "metrics": metrics}


def loss_rows(inputs: dict[str, Any], checkout: Release | None) -> list[Row]:
    """Rows of the mask, and of loss, gradient and metrics under each of the settings.

    The bound: a log-probability is off by half a unit in the last place, so a ratio by as much times its exponent, and
    sums over tokens add a few units more.
    """
    ids = np.asarray(inputs["completion_ids"])
    mask = our_mask(ids, inputs["eos"])
    tensors = {n: torch.tensor(inputs[n], dtype=torch.float64) for n in ("logp", "old", "reference", "advantages")}
    theirs_mask = inputs.get("mask_truncated_completions")
    if checkout:
        theirs_mask = release.completion_mask(checkout, torch.tensor(ids), inputs["eos"], mask_truncated=True).numpy()
    rows = [compared("mask of truncated completions", mask, theirs_mask, 0)]
    unit = ULP * (16 + 4 * max(float(tensors[name].abs().max()) for name in ("logp", "old", "reference")))
    for result in inputs["results"]:
        settings = result["settings"]
        theirs = result
        if checkout:
            theirs = release.loss(checkout, inputs | tensors, torch.tensor(np.asarray(theirs_mask)), settings)
        ours = our_loss(inputs, mask, settings)
        name = ", ".join(
            str(value) if key == "loss_type" else f"{key.removeprefix('importance_sampling_')} {value}"
            for key, value in settings.items()
            if value
        )
        for what in ("loss", "gradient"):
            largest = float(np.abs(np.asarray(theirs[what], np.float64)).max(initial=0))
            rows.append(compared(f"{what}: {name}", ours[what], theirs[what], unit * max(1.0, largest)))
        found = [key for key in METRICS if key in ours["metrics"] and key in theirs["metrics"]]
        values = ([each["metrics"][key] for key in found] for each in (ours, theirs))
        of_sequences = settings["importance_sampling_level"] == "sequence"
        meant = [of_sequences and key.startswith("clip_ratio") for key in found]
        rows.append(compared(f"metrics: {name}", *values, unit, meant, "clipped share of tokens, not of sequences"))
    return rows


def reward_row(name: str, ours: Sequence[float], texts: Sequence[str], answers: Sequence[str], code: Release) -> Row:
    """A reward of texts against the release's function. Where a departure is meant, ours may score what the release
    does not; the other way round only `answer` on a text without both tags, of which the release takes the rest.
    """
    function, full, reason = REWARDS[name]
    theirs = np.asarray(release.rewards(code, function, texts, answers)) / full
    untagged = np.asarray([name == "answer" and not _ANSWER.search(text) for text in texts])
    meant = ((np.asarray(ours) > theirs) | untagged) & bool(reason)
    return compared(f"reward {name}", ours, theirs, 1e-6, meant, reason)


def text_rows(checkout: Release | None) -> list[Row]:
    """Rows of rewards on recorded texts; without a checkout of `xml_count` alone, which is recorded."""
    cases = json.loads((GOLDEN / "release_xml_count.json").read_text())["cases"]
    texts, recorded = [text for text, _ in cases], [value for _, value in cases]
    if checkout is None:
        ours = load_reward("xml_count")(completions=texts)
        return [compared("reward xml_count", ours, recorded, 1e-6)]
    answers = ["5"] * len(texts) + [answer for _, answer in TEXTS]
    texts += [text for text, _ in TEXTS]
    rows = []
    for name in REWARDS:
        ours = load_reward(name)(completions=texts, answer=answers)
        rows.append(reward_row(name, np.asarray(ours, float), texts, answers, checkout))
    return rows


def advantage_row(rewards: np.ndarray, ours: np.ndarray, group: int, scaled: bool, code: Release) -> Row:
    """Advantages of completions, row = p · G + g. A completion without a reward counts in no mean here."""
    theirs = np.asarray(release.advantages(code, np.nan_to_num(rewards).tolist(), group, scaled))
    grouped = rewards.reshape(-1, group)
    deviation = np.nan_to_num(grouped).std(axis=1, ddof=1) if scaled else np.ones(len(grouped))
    scale = np.repeat(np.abs(np.nan_to_num(grouped)).max(axis=1) / (deviation + 1e-4 * scaled), group)
    meant = np.repeat(np.isnan(grouped).any(axis=1), group)
    bound = 16 * ULP * (np.abs(theirs) + scale)
    return compared("advantages", ours, theirs, bound, meant, "completions without a reward")


def run_rows(directory: Path, checkout: Release) -> list[Row]:
    """Rows for the records of a run: σ, rewards and advantages, as far as the release has its settings. Raises
    ValueError for a run without a finished step.
    """
    config, metrics = load_config(directory / CONFIG_FILE), read_metrics(directory)
    files = sorted((directory / COMPLETIONS_DIR).glob("*.parquet"))
    if not metrics or not files:
        raise ValueError(f"{directory} holds no finished step")
    rows = []
    if (config.noise_schedule, config.noise_formula) == ("exponential", "qerl") and config.sigma_start:
        settings = {n: getattr(config, n) for n in ("num_iterations", "num_stages", "sigma_start", "sigma_end")}
        theirs = release.sigmas(checkout, settings, config.num_rollouts)
        ours = [row["aqn/sigma"] for row in metrics]
        whole = ours + [aqn.sigma(config, step, config.num_rollouts) for step in range(len(ours), len(theirs))]
        epochs = metrics[-1].get("epoch", 0) / len(metrics) * config.num_rollouts
        rows.append(noise_row(f"σ of {len(ours)} rollouts", settings, whole, theirs, epochs))
    columns: dict[str, list[Any]] = {}
    for file in files:
        for name, values in pyarrow.parquet.read_table(file).to_pydict().items():
            columns.setdefault(name, []).extend(values)
    if config.scale_rewards != "batch":  # the release has no such scale
        rewards, ours = (np.asarray(columns[name], float) for name in ("reward", "advantage"))
        scaled = config.scale_rewards == "group"
        rows.append(advantage_row(rewards, ours, config.num_generations, scaled, checkout))
    for name in REWARDS:
        if f"rewards/{name}" in columns:
            ours = np.asarray(columns[f"rewards/{name}"], float)
            rows.append(reward_row(name, ours, columns["completion"], columns["answer"], checkout))
    return rows


def advantage_rows(checkout: Release) -> list[Row]:
    """A row of advantages of random rewards, groups of equal ones among them."""
    rewards = np.random.default_rng(0).choice([0.0, 0.2, 2.0, 2.2], 64).astype(np.float32)
    rewards[8:16] = 2.2
    ours = np.asarray(group_advantages(jnp.asarray(rewards), 8))
    return [advantage_row(rewards.astype(float), ours, 8, True, checkout)]


def rows_of(arguments: argparse.Namespace) -> list[Row]:
    """The rows that the arguments ask for."""
    checkout = Release(arguments.checkout) if arguments.checkout else None
    if checkout is None and (arguments.run or arguments.inputs):
        raise ValueError("--run and --inputs need --checkout: only the recorded inputs have recorded results")
    if arguments.run:
        return run_rows(arguments.run, checkout)
    if arguments.inputs:
        return loss_rows(json.loads(arguments.inputs.read_text()), checkout)
    recorded = {name: json.loads((GOLDEN / f"release_{name}.json").read_text()) for name in ("noise", "losses")}
    rows = noise_rows(recorded["noise"]["runs"], checkout) + loss_rows(recorded["losses"], checkout)
    return rows + (advantage_rows(checkout) if checkout else []) + text_rows(checkout)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, text in (
        ("checkout", "checkout of NVlabs/QeRL; without one, values recorded from it"),
        ("run", "directory of a run of ours"),
        ("inputs", "JSON of inputs for the losses"),
    ):
        parser.add_argument(f"--{name}", type=Path, help=text)
    try:
        rows = rows_of(parser.parse_args(argv))
    except KeyError as error:
        print(f"error: the inputs lack {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 160)
    return show("Ours against the released QeRL", rows, console)


if __name__ == "__main__":
    sys.exit(main())
