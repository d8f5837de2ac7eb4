"""The losses in PyTorch, one sequence and one token at a time, from the papers' formulas; and TRL's own, called on a
stand-in trainer.
"""

import collections
import functools
import inspect
import math
import textwrap
import types

import torch


def token_loss(ratio, logp, advantage, settings) -> torch.Tensor:
    """GRPO's clipped surrogate (arXiv 2402.03300 eq. 3; two-sided: 2505.07291), or CISPO's (2506.13585 eq. 4, without
    its lower clip).
    """
    if settings.loss_type == "cispo":
        return -torch.minimum(ratio, torch.tensor(settings.upper_clip)).detach() * advantage * logp
    bounded = ratio if settings.delta is None else torch.minimum(ratio, torch.tensor(settings.delta))
    low, high = 1 - settings.epsilon, 1 + settings.upper_clip
    clipped = low if ratio < low else high if ratio > high else ratio
    return -torch.minimum(bounded * advantage, clipped * advantage)


def loss(logp, old, behaviour, reference, advantages, mask, settings) -> torch.Tensor:
    """Scalar loss of a batch.

    Per token: surrogate · importance weight + β (e^d − d − 1), d = log π_ref − log π. Then `grpo`: mean
    over the tokens of each row, mean over all rows (0 for one without a token); `bnpo`, `dapo`, `cispo`: mean over
    all tokens; `dr_grpo`: sum over all rows · max length.
    """
    rows = []
    for b in range(len(logp)):
        where = [t for t in range(logp.shape[1]) if mask[b][t]]
        if not where:
            continue
        log_ratios = {t: logp[b, t] - old[b, t] for t in where}
        if settings.importance_sampling_level == "sequence":  # GSPO, arXiv 2507.18071 eq. 7
            mean = sum(log_ratios.values()) / len(where)
            log_ratios = dict.fromkeys(where, mean)
        losses = []
        for t in where:
            value = token_loss(torch.exp(log_ratios[t]), logp[b, t], advantages[b], settings)
            value = value * _importance(old[b] - behaviour[b], where, t, settings)
            if settings.beta:
                d = reference[b, t] - logp[b, t]
                value = value + settings.beta * (torch.exp(d) - d - 1)
            losses.append(value)
        rows.append(losses)
    if not rows:
        return logp.sum() * 0
    if settings.loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / len(logp)
    total = sum(sum(row) for row in rows)
    if settings.loss_type == "dr_grpo":
        return total / (len(logp) * settings.max_completion_length)
    return total / sum(len(row) for row in rows)


def _importance(mismatch, where, t, settings) -> float:
    """Weight of token t of a row whose tokens in the loss are `where`."""
    cap, floor = settings.importance_sampling_cap, settings.importance_sampling_floor or 0.0
    if cap is None:
        return 1.0
    granularity, constraint = settings.importance_sampling_mode.split("_")
    ratio = math.exp(mismatch[t] if granularity == "token" else sum(mismatch[s] for s in where))
    if constraint == "truncate":
        return min(max(ratio, floor), cap)
    return ratio if floor <= ratio <= cap else 0.0


@functools.cache
def _trl_importance_lines() -> types.CodeType:
    """TRL's own lines from the log-probabilities to the ratio, cut out of the method that makes its batches."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.index("                mask = completion_mask if tool_mask is None")
    end = source.index("            # Compute the per-token log probabilities for the reference model")
    return compile(textwrap.dedent(source[start:end]), "trl", "exec")


def trl_importance(old, behaviour, mask, settings) -> torch.Tensor:
    """The importance weights by TRL's own lines."""
    trainer = types.SimpleNamespace(
        vllm_importance_sampling_mode=settings.importance_sampling_mode,
        vllm_importance_sampling_clip_max=settings.importance_sampling_cap,
        vllm_importance_sampling_clip_min=settings.importance_sampling_floor,
    )
    names = {"torch": torch, "math": math, "self": trainer, "tool_mask": None, "completion_mask": mask.to(old.dtype)}
    names |= {"old_per_token_logps": old, "sampling_per_token_logps": behaviour}
    exec(_trl_importance_lines(), names)
    return names["vllm_importance_sampling_ratio"]


class _Accelerator:
    num_processes = 1
    sync_gradients = False

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def trl_loss(logp, old, behaviour, reference, advantages, mask, settings) -> tuple[torch.Tensor, dict[str, float]]:
    """`GRPOTrainer._compute_loss` on a stand-in whose model returns `logp`, and the metrics it logged."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    metrics = {"eval": collections.defaultdict(list)}
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.importance_sampling_level,
        beta=settings.beta,
        loss_type=settings.loss_type,
        epsilon_low=settings.epsilon,
        epsilon_high=settings.upper_clip,
        use_vllm=settings.importance_sampling_cap is not None,
        vllm_importance_sampling_correction=True,
        model=types.SimpleNamespace(training=False),
        max_completion_length=settings.max_completion_length,
        accelerator=_Accelerator(),
        _entropy_bonus_enabled=False,
        _metrics=metrics,
        args=types.SimpleNamespace(delta=settings.delta, use_bias_correction_kl=False),
    )
    ids = torch.zeros(logp.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": mask.to(logp.dtype), "advantages": advantages, "old_per_token_logps": old,
        "ref_per_token_logps": reference, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if settings.importance_sampling_cap is not None:
        inputs["importance_sampling_ratio"] = trl_importance(old, behaviour, mask, settings)
    value = GRPOTrainer._compute_loss(trainer, None, inputs)
    return value, {name: values[0] for name, values in metrics["eval"].items()}
