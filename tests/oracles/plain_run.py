"""A whole run in one straight line, in NumPy and PyTorch (float64): what `qerl_jax.train` must do, from files alone.

Only random bits are JAX's, because they define what is sampled, and the first A of each adapter is given. Every metric
and every column is computed here from its definition.

Axes: B completions = P prompts · G group, T tokens.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

from oracles.plain_policy import (
    EOS,
    FAILED,
    LENGTH,
    kept_logits,
    key_of,
    layer_norms,
    load_model,
    sample,
    trained_tensors,
)

AQN, SAMPLE, EVALUATE = 1, 2, 3  # purposes of random keys


def is_equal(rewards: list[float]) -> bool:
    """A group without a learning signal: fewer than two rewards, or no two that differ."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return len(known) < 2 or max(known) == min(known)


def mean(values: list[float]) -> float:
    """Mean of the values that are no NaN."""
    return float(np.mean([value for value in values if not math.isnan(value)]))


def deviation(values: list[float]) -> float:
    """Sample standard deviation of the values that are no NaN; 0 of a single one."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.std(known, ddof=1)) if len(known) > 1 else 0.0


class PlainRun:
    """The run of a config over problems `{"id", "question", "answer"}`.

    Args:
      settings: the config's fields, as a dict.
      directory: the NVFP4 model.
      problems, evaluated: in the order of their files.
      first_a: A of each adapter before the run, by PEFT name.
      rewards: (name, weight, function(completions, lengths) -> values) in order; none of them says what is right.
      failed: rows of the first rollout of a step that fail, {step from 1: rows}.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        directory: Path,
        problems: list[dict],
        evaluated: list[dict],
        first_a: dict[str, np.ndarray],
        rewards: list[tuple[str, float, Callable]],
        failed: dict[int, list[int]],
    ):
        self.s, self.rewards, self.failed = settings, rewards, failed
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.problems, self.evaluated = self._encoded(problems), self._encoded(evaluated)
        generation = json.loads((directory / "generation_config.json").read_text())
        self.eos = set(generation["eos_token_id"])
        rank = settings["lora_rank"]
        scale = settings["lora_alpha"] / (math.sqrt(rank) if settings["use_rslora"] else rank)
        self.model = load_model(directory, first_a, scale)
        self.base = load_model(directory, first_a, scale)  # B = 0: the model itself
        named = trained_tensors(self.model)
        decayed = [value for name, value in named.items() if "lora" in name]
        norms = [value for name, value in named.items() if "norm" in name]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": norms, "weight_decay": settings["weight_decay_of_norms"]}],
            betas=(settings["adam_beta1"], settings["adam_beta2"]),
            eps=settings["adam_epsilon"],
            weight_decay=settings["weight_decay"],
        )
        self.cursor, self.tokens, self.updates = 0, 0, 0
        self.metrics: list[dict[str, float]] = []
        self.completions: list[dict[str, list]] = []

    def _encoded(self, problems: list[dict]) -> list[dict]:
        system = {"role": "system", "content": self.s["system_prompt"]}
        encoded = []
        for problem in problems:
            turns = [system, {"role": "user", "content": problem["question"]}]
            ids = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
            encoded.append({**problem, "ids": ids})
        return encoded

    def run(self) -> None:
        """All steps."""
        for step in range(self.s["max_steps"] // self.s["num_iterations"]):
            self._step(step)

    def evaluate(self) -> dict[str, float]:
        """The noise-free policy on the evaluation problems, whose answers are scored by `<answer>`; none is right."""
        s = self.s
        sampling = {"temperature": s["eval_temperature"], "top_p": s["eval_top_p"]}
        rows = sample(
            self.model, self.evaluated, s["eval_num_generations"], s["max_completion_length"], sampling,
            key_of(s["seed"], EVALUATE, 0), self.eos,
        )  # fmt: skip
        assert not any("<answer>" in self._text(row) for row in rows)
        z = 1.959963984540054
        return {
            "high": z**2 / (len(self.evaluated) + z**2),  # Wilson's bound
            "truncated": float(np.mean([row["finish"] == LENGTH for row in rows])),
            "mean_length": float(np.mean([len(row["new"]) for row in rows])),
            "problems": len(self.evaluated),
            "generations": s["eval_num_generations"],
            "unreadable": 1.0,
            "sampling_error": 0.0,  # none right
        } | dict.fromkeys(("accuracy", "low", "pass_at_k", "format", "failed", "maj_at_k", "ties", "ungradable"), 0)

    def _step(self, step: int) -> None:
        s, group = self.s, self.s["num_generations"]
        sigma, clean = s["sigmas"][step], [norm.weight.detach().clone() for norm in layer_norms(self.model)]
        for i, norm in enumerate(layer_norms(self.model)):
            z = jax.random.normal(key_of(s["seed"], AQN, step, i), clean[i].shape, np.float32)
            norm.weight.data = clean[i] + sigma * torch.tensor(np.asarray(z, np.float64))
        rows, refilled, rounds = self._experience(step)
        for norm, weight in zip(layer_norms(self.model), clean, strict=True):
            norm.weight.data = weight

        rewards = [row["reward"] for row in rows]
        for first in range(0, len(rows), group):
            centre = mean(rewards[first : first + group])
            for row in rows[first : first + group]:
                known = not math.isnan(row["reward"]) and not is_equal(rewards[first : first + group])
                row["advantage"] = (row["reward"] - centre) / (deviation(rewards) + 1e-4) if known else 0.0
                row["masked"] = math.isnan(row["reward"]) or row["finish"] == LENGTH
        rate = self._learning_rate(self.updates)
        update = self._update(rows)
        self._record(rows, update, sigma, rate, refilled, rounds)

    def _experience(self, step: int) -> tuple[list[dict], int, int]:
        """Groups of the step; equal ones are replaced, in order, by unequal ones of fresh problems."""
        s, group = self.s, self.s["num_generations"]
        kept: list[dict] = []
        refilled = rounds = drawn = 0
        count = prompts = s["batch_size"] // group
        sampling = {name: s[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        while True:
            problems = self._next_problems(count)
            drawn += count
            key = key_of(s["seed"], SAMPLE, step, rounds)
            rows = sample(self.model, problems, group, s["max_completion_length"], sampling, key, self.eos)
            for i in self.failed.get(step + 1, []) if rounds == 0 else []:
                rows[i]["finish"] = FAILED
            self._score(rows)
            fresh = [rows[i : i + group] for i in range(0, len(rows), group)]
            if not kept:
                kept = fresh
            else:
                useful = [one for one in fresh if not is_equal([row["reward"] for row in one])]
                for p, one in enumerate(kept):
                    if is_equal([row["reward"] for row in one]) and useful:
                        kept[p] = useful.pop(0)
                        refilled += 1
            remaining = sum(is_equal([row["reward"] for row in one]) for one in kept)
            if not remaining or rounds == s["max_refill_rounds"]:
                return [row for one in kept for row in one], refilled, rounds
            rounds += 1
            count = prompts  # halved while enough of them teach, if as many do as of all that were drawn
            while count > 1 and math.ceil(count / 2) * (prompts - remaining) / drawn >= remaining:
                count = math.ceil(count / 2)

    def _next_problems(self, count: int) -> list[dict]:
        size, chosen = len(self.problems), []
        for place in range(self.cursor, self.cursor + count):
            order = np.random.default_rng([self.s["seed"], place // size, 0]).permutation(size)
            chosen.append(self.problems[order[place % size]])
        self.cursor += count
        return chosen

    def _text(self, row: dict) -> str:
        return self.tokenizer.decode(row["new"][:-1] if row["finish"] == EOS else row["new"])

    def _score(self, rows: list[dict]) -> None:
        texts, lengths = [self._text(row) for row in rows], [len(row["new"]) for row in rows]
        for row, text in zip(rows, texts, strict=True):
            row["text"], row["parts"], row["reward"] = text, {}, 0.0
        for name, weight, function in self.rewards:
            for row, value in zip(rows, function(texts, lengths), strict=True):
                row["parts"][name] = math.nan if value is None else float(value)
                row["reward"] += 0.0 if value is None else weight * value
        for row in rows:
            row["reward"] = math.nan if row["finish"] == FAILED else row["reward"]

    def _learning_rate(self, update: int) -> float:
        s, total, warmup = self.s, self.s["max_steps"], self.s["warmup_updates"]
        if update < warmup:
            return s["learning_rate"] * update / warmup
        return s["learning_rate"] * (1 + math.cos(math.pi * (update - warmup) / (total - warmup))) / 2

    def _logprobs(self, model: torch.nn.Module, row: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each completion token and entropy there, of the truncated distribution and the target."""
        s, start = self.s, len(row["problem"]["ids"])
        logits = model(torch.tensor([row["ids"]])).logits[0, start - 1 : -1]
        targets = torch.tensor(row["new"])
        sampling = {name: s[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        kept = torch.tensor(np.isfinite(kept_logits(logits.detach().numpy(), sampling)))
        kept[torch.arange(len(targets)), targets] = True
        logp = torch.log_softmax(torch.where(kept, logits / s["temperature"], -torch.inf), dim=-1)
        entropy = -torch.where(kept, logp.exp() * torch.where(kept, logp, 0.0), 0.0).sum(-1).detach()
        return logp[torch.arange(len(targets)), targets], entropy

    def _update(self, rows: list[dict]) -> dict[str, float]:
        """`num_iterations` updates; their metrics as one."""
        s, named = self.s, trained_tensors(self.model)
        used, old, each = [row for row in rows if not row["masked"]], [], []
        for iteration in range(s["num_iterations"]):
            self.optimizer.zero_grad()
            loss, seen = torch.zeros((), dtype=torch.float64), []
            for i, row in enumerate(used):
                logp, entropy = self._logprobs(self.model, row)
                if iteration == 0:
                    old.append(logp.detach())
                with torch.no_grad():
                    reference = self._logprobs(self.base, row)[0]
                advantage, ratio = row["advantage"], torch.exp(logp - old[i])
                low, high = 1 - s["epsilon"], 1 + s["epsilon_high"]
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                mismatch = old[i] - torch.tensor(row["logprobs"])
                weight = mismatch.exp().clamp(max=s["importance_sampling_cap"])
                kl = torch.exp(reference - logp) - (reference - logp) - 1
                losses = -surrogate * weight + s["beta"] * kl
                loss = loss + losses.sum() / (len(rows) * len(losses))  # grpo: masked rows count
                seen.append(
                    {
                        "entropy": entropy,
                        "kl": kl.detach(),
                        "clip_ratio/low_mean": (ratio.detach() < low) * float(advantage < 0),
                        "clip_ratio/high_mean": (ratio.detach() > high) * float(advantage > 0),
                        "mismatch": mismatch,
                    }
                )
            loss.backward()
            norm = math.sqrt(sum(float((value.grad**2).sum()) for value in named.values()))
            for value in named.values():
                value.grad *= min(1.0, s["max_grad_norm"] / norm)
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = self._learning_rate(self.updates)
            self.optimizer.step()
            self.updates += 1
            every = {name: torch.cat([one[name] for one in seen]).numpy() for name in seen[0]}
            each.append(_of_update(loss.item(), norm, every))
        extremes = {"/max": max, "/min": min}
        metrics = {}
        for name in each[0]:
            pick = extremes.get(name[-4:], np.mean)
            metrics[name] = float(pick([one[name] for one in each]))
        return metrics

    def _record(self, rows, update, sigma, rate, refilled, rounds) -> None:
        group, rewards = self.s["num_generations"], [row["reward"] for row in rows]
        groups = [rewards[i : i + group] for i in range(0, len(rewards), group)]
        lengths = [len(row["new"]) for row in rows]
        ended = [len(row["new"]) for row in rows if row["finish"] != LENGTH]
        self.tokens += sum(len(row["ids"]) for row in rows)
        metrics = update | {
            "reward": mean(rewards),
            "reward_std": float(np.mean([deviation(one) for one in groups])),
            "frac_reward_zero_std": float(np.mean([is_equal(one) for one in groups])),
            "sampling/entropy": float(np.mean([value for row in rows for value in row["entropies"]])),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": float(np.mean([row["finish"] == LENGTH for row in rows])),
            "completions/mean_terminated_length": float(np.mean(ended)),
            "completions/min_terminated_length": min(ended),
            "completions/max_terminated_length": max(ended),
            "completions/failed": sum(row["finish"] == FAILED for row in rows),
            "dynamic_sampling/refilled_groups": refilled,
            "dynamic_sampling/rounds": rounds,
            "aqn/sigma": sigma,
            "aqn/norms": len(layer_norms(self.model)) if sigma else self.s["norms_without_noise"],
            "learning_rate": rate,
            "num_tokens": self.tokens,
            "epoch": self.cursor / len(self.problems),
            "skipped": 0,
        }
        columns = {
            "problem_id": [row["problem"]["id"] for row in rows],
            "prompt": [row["problem"]["question"] for row in rows],
            "completion": [row["text"] for row in rows],
            "answer": [row["problem"]["answer"] for row in rows],
            "reward": rewards,
            "advantage": [row["advantage"] for row in rows],
            "length": lengths,
            "finish": [row["finish"] for row in rows],
        }
        for name, *_ in self.rewards:
            values = columns[f"rewards/{name}"] = [row["parts"][name] for row in rows]
            metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = mean(values), deviation(values)
            for flag in ("parse_failure", "timeout", "crash"):
                columns[f"rewards/{name}/{flag}"] = [0.0] * len(rows)
                metrics[f"rewards/{name}/{flag}_rate"] = 0.0
        self.metrics.append({"step": len(self.metrics) + 1, **metrics})
        self.completions.append(columns)


def _of_update(loss: float, norm: float, every: dict[str, np.ndarray]) -> dict[str, float]:
    """Metrics of one update from the values of every token in the loss."""
    mismatch = every.pop("mismatch")
    metrics = {name: float(np.mean(values)) for name, values in every.items()}
    metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    ratio = np.exp(mismatch)
    return metrics | {
        "loss": loss,
        "grad_norm": norm,
        "tokens": len(mismatch),
        "trained_tokens": len(mismatch),
        "sampling/sampling_logp_difference/mean": float(np.abs(mismatch).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(mismatch).max()),
        "sampling/kl": float((ratio - 1 - mismatch).mean()),
        "sampling/token_mult_prob_error": float(np.exp(np.abs(mismatch)).mean()),
        "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
    }
