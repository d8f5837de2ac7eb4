"""Record how the released QeRL behaves: `python tools/make_release_goldens.py CHECKOUT`, CHECKOUT of NVlabs/QeRL.

Writes `tests/golden/release_*.json`, inputs beside outcomes, by the functions of `release.py`. Recorded at e8c6e79 with
the versions in each file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import release
import torch
from release import Release

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
FIXTURE = GOLDEN.parent / "data" / "tiny-random-qwen2-hf"


def losses(checkout: Release) -> dict[str, Any]:
    """`_compute_loss` and its gradient on eight rows, of which two are truncated and masked."""
    eos, length = 9, 6
    ids = torch.tensor(
        [
            [1, 2, 3, 9, 0, 0],
            [4, 9, 0, 0, 0, 0],
            [1, 1, 2, 2, 3, 3],
            [5, 6, 7, 8, 1, 9],
            [9, 0, 0, 0, 0, 0],
            [2, 2, 9, 0, 0, 0],
            [7, 7, 7, 7, 7, 7],
            [3, 1, 4, 1, 9, 0],
        ]
    )
    mask = release.completion_mask(checkout, ids, eos, mask_truncated=True)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).round(decimals=3)

    inputs = {"logp": draw(*ids.shape, scale=1.0).abs().neg(), "advantages": draw(len(ids), scale=1.0)}
    inputs["old"] = inputs["logp"] + draw(*ids.shape, scale=0.5) + draw(len(ids), 1, scale=0.4)
    inputs["reference"] = inputs["logp"] + draw(*ids.shape, scale=0.5)
    limits = {"max_completion_length": length, "epsilon": 0.2, "epsilon_high": 0.28}
    results = []
    for loss_type, level, (delta, beta) in itertools.product(
        ("grpo", "bnpo", "dr_grpo"), ("token", "sequence"), ((None, 0.0), (1.4, 0.3))
    ):
        settings = {"loss_type": loss_type, "importance_sampling_level": level, "delta": delta, "beta": beta}
        results.append({"settings": settings, **release.loss(checkout, inputs | limits, mask, settings)})
    return {
        "eos": eos,
        **limits,
        "completion_ids": ids.tolist(),
        "mask_truncated_completions": mask.tolist(),
        **{name: value.tolist() for name, value in inputs.items()},
        "results": results,
    }


def noise(checkout: Release) -> dict[str, Any]:
    """σ of every rollout of several runs."""
    runs = []
    for rollouts, iterations, accumulation, num_stages, end in (
        (20, 1, 1, 10, 5e-4),
        (97, 1, 2, 10, 1e-4),
        (50, 4, 8, 10, 5e-4),
        (7, 1, 1, 10, 5e-4),
        (22, 1, 1, 10, 5e-4),
        (12, 2, 1, 4, 1e-3),
        (1, 1, 1, 5, 5e-4),
    ):
        settings = {"num_iterations": iterations, "num_stages": num_stages, "sigma_start": 1e-2, "sigma_end": end}
        runs.append({"settings": settings, "sigmas": release.sigmas(checkout, settings, rollouts, accumulation)})
    return {"runs": runs}


def optimizer(checkout: Release) -> dict[str, Any]:
    """The parameters that decay, shown by one update without a gradient, and the learning rate of every update."""
    from torch import nn
    from transformers import TrainingArguments, get_scheduler
    from transformers.trainer_pt_utils import get_parameter_names

    code = checkout.functions(
        "replacement/trainer.py",
        *("get_decay_parameter_names", "create_optimizer", "create_scheduler"),
        **{"nn": nn, "get_parameter_names": get_parameter_names, "get_scheduler": get_scheduler},
        is_sagemaker_mp_enabled=lambda: False,
    )
    model = _adapted()
    rate, decay = 1e-2, 0.5
    trainer = types.SimpleNamespace(
        model=model,
        optimizer=None,
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": rate}),
        args=types.SimpleNamespace(weight_decay=decay),
        get_decay_parameter_names=functools.partial(code["get_decay_parameter_names"], None),
    )
    code["create_optimizer"](trainer)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    after = {name: sorted(set(parameter.flatten().tolist())) for name, parameter in trained.items()}
    assert all(len(values) == 1 for values in after.values())

    rates = []
    for kind, total, ratio in (("cosine", 15, 0.1), ("linear", 25, 0.1), ("constant", 4, 0.3), ("cosine", 20, 0.0)):
        name = "constant_with_warmup" if kind == "constant" else kind
        arguments = TrainingArguments(output_dir="unused", warmup_steps=ratio, use_cpu=True, report_to=[])
        args = types.SimpleNamespace(
            lr_scheduler_type=name, lr_scheduler_kwargs={}, get_warmup_steps=arguments.get_warmup_steps
        )
        sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = code["create_scheduler"](types.SimpleNamespace(lr_scheduler=None, args=args), total, sgd)
        values = []
        for _ in range(total):
            values += scheduler.get_last_lr()
            sgd.step()
            scheduler.step()
        rates.append({"lr_scheduler_type": kind, "warmup_ratio": ratio, "updates": total, "rates": values})
    return {
        "learning_rate": rate,
        "weight_decay": decay,
        "one_after_an_update_without_gradient": {name: value for name, (value,) in after.items()},
        "schedules": rates,
    }


def _adapted() -> Any:
    """The fixture of three layers under PEFT as qerl.py sets it up: LoRA, and the layer norms in `modules_to_save`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(FIXTURE, dtype=torch.float32)
    norms = ["input_layernorm", "post_attention_layernorm"]
    lora = LoraConfig(r=1, lora_alpha=2, target_modules=["q_proj", "v_proj"], modules_to_save=norms)
    return get_peft_model(model, lora)


def reference(checkout: Release) -> dict[str, Any]:
    """Log-probabilities of the KL term's reference for an adapter with norms, which is saved beside the values."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    file = "trl_trainer/grpo_trainer.py"
    method = checkout.functions(
        file,
        "_get_per_token_logps_and_entropies",
        **{"torch": torch, "selective_log_softmax": selective_log_softmax, "entropy_from_logits": entropy_from_logits},
    )["_get_per_token_logps_and_entropies"]
    model = _adapted()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = 0.3 if "lora" in name else 0.1
            parameter.data += torch.randn(parameter.shape, generator=generator) * scale
    model.peft_config["default"].base_model_name_or_path = FIXTURE.name
    model.save_pretrained(GOLDEN / "adapter_with_norms")
    (GOLDEN / "adapter_with_norms" / "README.md").unlink(missing_ok=True)
    (GOLDEN / "adapter_with_norms" / "adapter_model.safetensors").chmod(0o644)

    ids = torch.randint(0, 1000, (2, 10), generator=generator)
    trainer = types.SimpleNamespace(
        beta=0.3,
        ref_model=None,
        model=model,
        temperature=1.0,
        model_kwarg_keys=set(),
        accelerator=types.SimpleNamespace(unwrap_model=lambda model: model),
    )
    trainer._get_per_token_logps_and_entropies = functools.partial(method, trainer)
    mask = torch.ones_like(ids)
    scope = {"self": trainer, "prompt_completion_ids": ids, "attention_mask": mask, "logits_to_keep": 9}
    scope |= {"batch_size": 2, "prompt_inputs": {}}
    marks = "# Compute the per-token log probabilities for the reference model", "# Decode the generated completions"
    with torch.no_grad():
        exec(checkout.lines(file, *marks), scope)
        own, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 9)
    return {"tokens": ids.tolist(), "logp": own.tolist(), "reference": scope["ref_per_token_logps"].tolist()}


def xml_count(checkout: Release) -> dict[str, Any]:
    """`xmlcount_reward_func` of texts with tags that are missing, repeated, overlapping or followed by a tail."""
    code = checkout.functions("utils/rewards.py", "count_xml", "xmlcount_reward_func")
    full = "<think>\na\n</think>\n<answer>\n5\n</answer>"
    texts = [
        *(full, full + "\n", full + "\ntail", full * 2, "", "x\n<answer>\n5", "<think>a</think><answer>5</answer>"),
        full + "\n</answer>\nand a tail",  # two closing tags that share a line break
        full + "\n</answer>\n</answer>\n",
        "\n<answer>\n<answer>\n" + full,
    ]
    completions = [[{"content": text}] for text in texts]
    values = code["xmlcount_reward_func"](completions=completions)
    return {"cases": [list(pair) for pair in zip(texts, values, strict=True)]}


PARTS = {"losses": losses, "noise": noise, "optimizer": optimizer, "reference": reference, "xml_count": xml_count}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Record the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="checkout of NVlabs/QeRL")
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    arguments = parser.parse_args()
    checkout = Release(arguments.checkout)
    made = {"release": checkout.commit, **{name: version(name) for name in ("torch", "transformers", "peft")}}
    GOLDEN.mkdir(exist_ok=True)
    for part in arguments.parts:
        values = {"made_with": made, **_rounded(PARTS[part](checkout))}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        (GOLDEN / f"release_{part}.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
