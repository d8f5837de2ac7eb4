"""The released QeRL (NVlabs/QeRL) as functions: what its own code computes from given inputs.

The release pins versions of TRL, vLLM and transformers that do not install together with ours, so its functions are cut
from their files by name and run on stand-ins; what they call of transformers and PEFT is the installed one.

Axes: B sequences, C completion tokens, G group.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import subprocess
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy
import torch

TRAINER = "trl_trainer/grpo_trainer.py"


class Release:
    """A checkout of the release."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def commit(self) -> str:
        command = ["git", "-C", str(self.path), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def functions(self, file: str, *names: str, **namespace: Any) -> dict[str, Any]:
        """Functions and methods of a file by name, undecorated, with `namespace` as their globals."""
        source = (self.path / file).read_text()
        found = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        for name in names:
            node = found[name]
            node.decorator_list, node.returns = [], None
            for argument in node.args.args:
                argument.annotation = None
            exec(compile(ast.Module([node], []), file, "exec"), namespace)
        return namespace

    def lines(self, file: str, first: str, after: str) -> str:
        """The text of a file from the line with `first` up to the one with `after`."""
        text = (self.path / file).read_text()
        assert text.count(first) == text.count(after) == 1, (first, after)
        start = text.rindex("\n", 0, text.index(first)) + 1
        return textwrap.dedent(text[start : text.rindex("\n", 0, text.index(after)) + 1])


class _Accelerator:
    def gather(self, x):
        return x


def completion_mask(release: Release, ids: torch.Tensor, eos: int, mask_truncated: bool) -> torch.Tensor:
    """The tokens [B, C] up to the first EOS; under `mask_truncated` none of a row without EOS."""
    masking = types.SimpleNamespace(eos_token_id=eos, mask_truncated_completions=mask_truncated)
    scope = {"torch": torch, "self": masking, "completion_ids": ids, "device": "cpu"}
    marks = "# Mask everything after the first EOS token", "# Concatenate prompt_mask with completion_mask for logit"
    exec(release.lines(TRAINER, *marks), scope)
    return scope["completion_mask"]


def loss(release: Release, inputs: dict[str, Any], mask: torch.Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """`_compute_loss`, its gradient to the log-probabilities and its metrics.

    Args:
      release: checkout.
      inputs: [B, C] `logp`, `old`, `reference` as tensors; [B] `advantages`; numbers `epsilon`, `epsilon_high` and
        `max_completion_length`.
      mask: tokens that count, [B, C].
      settings: `loss_type`, `importance_sampling_level`, `delta`, `beta`.
    """
    code = release.functions(TRAINER, "nanmin", "nanmax", "_compute_loss", torch=torch)
    logp = inputs["logp"].clone().requires_grad_(True)
    metrics = collections.defaultdict(list)
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp)),
        top_entropy_quantile=1.0,
        importance_sampling_level=settings["importance_sampling_level"],
        beta=settings["beta"],
        loss_type=settings["loss_type"],
        epsilon_low=inputs["epsilon"],
        epsilon_high=inputs["epsilon_high"],
        args=types.SimpleNamespace(delta=settings["delta"]),
        max_completion_length=inputs["max_completion_length"],
        model=types.SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        _metrics={"train": metrics},
    )
    ids = torch.zeros(logp.shape, dtype=torch.long)
    value = code["_compute_loss"](
        trainer,
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": inputs["advantages"],
            "old_per_token_logps": inputs["old"],
            "ref_per_token_logps": inputs["reference"],
        },
    )
    value.backward()
    return {
        "loss": value.item(),
        "gradient": logp.grad.tolist(),
        "metrics": {name: values[0] for name, values in metrics.items()},
    }


def sigmas(release: Release, settings: dict[str, Any], rollouts: int, accumulation: int = 1) -> list[float]:
    """σ of every rollout of one epoch: the trainer's loop over batches, its rule when to generate, and its schedule.

    Args:
      release: checkout.
      settings: `num_iterations`, `num_stages`, `sigma_start`, `sigma_end`.
      rollouts: rollouts of the run.
      accumulation: micro-batches of an update.
    """
    loop = release.lines(
        "replacement/trainer.py", "self.update_step = steps_skipped", "# Store the number of batches for current"
    )
    loop += "    for inputs in batch_samples:\n        self._prepare_inputs(self, inputs)\n"
    trend = release.lines(TRAINER, "sigma_decay_schedule_np =", "print(sigma_trend, self.update_step")
    stages = release.functions("trl_trainer/noise_scheduler.py", "get_sigma_by_step")["get_sigma_by_step"]
    plain = {"split_pixel_values_by_grid", "shuffle_sequence_dict", "unsplit_pixel_values_by_grid"}
    prepare = release.functions(
        TRAINER,
        "_prepare_inputs",
        split_tensor_dict=lambda batch, parts: [batch] * parts,
        **dict.fromkeys(plain, lambda batch: batch),
    )["_prepare_inputs"]
    found: list[float] = []

    def generate(batch, trainer):
        scope = {"self": trainer, "np": numpy}
        exec(trend, scope)
        found.append(stages(trainer.update_step, trainer.total_steps, scope["sigma_trend"])[1])
        return batch

    iterations = settings["num_iterations"]
    batches = rollouts * iterations * accumulation
    state = types.SimpleNamespace(
        **settings,
        total_steps=rollouts * iterations,
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(steps_per_generation=accumulation, gradient_accumulation_steps=accumulation),
        get_batch_samples=lambda iterator, count, device: (list(itertools.islice(iterator, count)), None),
        _prepare_inputs=prepare,
        _buffered_inputs=None,
        _step=0,
    )
    state._generate_and_score_completions = functools.partial(generate, trainer=state)
    args = types.SimpleNamespace(gradient_accumulation_steps=accumulation, device="cpu")
    scope = {"self": state, "args": args, "steps_skipped": 0, "epoch_dataloader": range(batches)}
    exec(loop, scope | {"steps_in_epoch": batches, "print": lambda *_: None})
    assert len(found) == rollouts
    return found
