"""Record how the released QeRL behaves: `python tools/make_release_goldens.py CHECKOUT`, CHECKOUT of NVlabs/QeRL.

Writes `tests/golden/release_*.json`, inputs beside outcomes. The release pins versions of TRL, vLLM and transformers
that do not install together with ours, so its functions are cut from their files by name and run on stand-ins; what
they call of transformers and PEFT is the installed one. Recorded at e8c6e79 with the versions in each file.
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import json
import subprocess
import textwrap
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


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


def losses(release: Release) -> dict[str, Any]:
    """`_compute_loss` and its gradient on eight rows, of which two are truncated and masked."""
    trainer = "trl_trainer/grpo_trainer.py"
    code = release.functions(trainer, "nanmin", "nanmax", "_compute_loss", torch=torch)
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
    masking = types.SimpleNamespace(eos_token_id=eos, mask_truncated_completions=True)
    scope = {"torch": torch, "self": masking, "completion_ids": ids, "device": "cpu"}
    marks = "# Mask everything after the first EOS token", "# Concatenate prompt_mask with completion_mask for logit"
    exec(release.lines(trainer, *marks), scope)
    mask = scope["completion_mask"]

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).round(decimals=3)

    inputs = {"logp": draw(*ids.shape, scale=1.0).abs().neg(), "advantages": draw(len(ids), scale=1.0)}
    inputs["old"] = inputs["logp"] + draw(*ids.shape, scale=0.5) + draw(len(ids), 1, scale=0.4)
    inputs["reference"] = inputs["logp"] + draw(*ids.shape, scale=0.5)
    results = []
    for loss_type, level, delta, beta in itertools.product(
        ("grpo", "bnpo", "dr_grpo"), ("token", "sequence"), (None, 1.4), (0.0, 0.3)
    ):
        logp = inputs["logp"].clone().requires_grad_(True)
        metrics = collections.defaultdict(list)
        trainer = types.SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, logp=logp, **__: (logp, torch.zeros_like(logp)),
            top_entropy_quantile=1.0,
            importance_sampling_level=level,
            beta=beta,
            loss_type=loss_type,
            epsilon_low=0.2,
            epsilon_high=0.28,
            args=types.SimpleNamespace(delta=delta),
            max_completion_length=length,
            model=types.SimpleNamespace(training=True),
            accelerator=_Accelerator(),
            _metrics={"train": metrics},
        )
        loss = code["_compute_loss"](
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
        loss.backward()
        settings = {"loss_type": loss_type, "importance_sampling_level": level, "delta": delta, "beta": beta}
        results.append(
            {
                "settings": settings,
                "loss": loss.item(),
                "gradient": logp.grad.tolist(),
                "metrics": {name: values[0] for name, values in metrics.items()},
            }
        )
    return {
        "eos": eos,
        "max_completion_length": length,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "completion_ids": ids.tolist(),
        "mask_truncated_completions": mask.tolist(),
        **{name: value.tolist() for name, value in inputs.items()},
        "results": results,
    }


PARTS = {"losses": losses}


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
    release = Release(arguments.checkout)
    made = {"release": release.commit, **{name: version(name) for name in ("torch", "transformers", "peft")}}
    GOLDEN.mkdir(exist_ok=True)
    for part in arguments.parts:
        values = {"made_with": made, **_rounded(PARTS[part](release))}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        (GOLDEN / f"release_{part}.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
