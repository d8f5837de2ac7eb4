"""Record facts of the installed TRL in tests/golden: names and defaults of its settings, and the updates that epochs
make.

python tools/make_trl_goldens.py    # writes tests/golden/trl_fields.json and trl_epochs.json
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import peft
import transformers
import trl
from trl.scripts.grpo import GRPOScriptArguments
from trl.trainer.utils import RepeatSampler

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
# problems, completions of a micro-batch, accumulated micro-batches, group, iterations, epochs
RUNS = [
    (7473, 128, 1, 8, 1, 1.0),
    (7473, 128, 1, 8, 4, 1.0),
    (7473, 2, 1, 2, 1, 1.0),
    (7473, 8, 1, 8, 1, 1.0),
    (7473, 4, 16, 4, 1, 1.0),
    (100, 8, 3, 8, 2, 3.0),
    (100, 24, 1, 8, 3, 0.5),
    (101, 8, 2, 4, 2, 2.5),
    (16, 16, 1, 2, 1, 0.1),
]


def fields() -> dict[str, Any]:
    """Defaults of GRPOConfig: `fields` that it adds to TrainingArguments or changes, and `inherited` ones; names of
    the `command` trl grpo besides, of the `trainer` and of PEFT's `lora`.
    """
    base = {field.name: default_of(field) for field in dataclasses.fields(transformers.TrainingArguments)}
    all_ = {field.name: default_of(field) for field in dataclasses.fields(trl.GRPOConfig)}
    own = {name: default for name, default in all_.items() if base.get(name) != default}
    command = (GRPOScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig)
    return {
        "fields": own,
        "inherited": {name: default for name, default in all_.items() if name not in own},
        "command": list(dict.fromkeys(field.name for kind in command for field in dataclasses.fields(kind))),
        "trainer": list(inspect.signature(trl.GRPOTrainer).parameters),
        "lora": [field.name for field in dataclasses.fields(peft.LoraConfig)],
    }


def default_of(field: dataclasses.Field) -> str:
    """A default as Python writes it."""
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "None" if field.default_factory is dataclasses.MISSING else repr(field.default_factory())


def updates(problems: int, micro_batch: int, accumulated: int, group: int, iterations: int, epochs: float) -> int:
    """Optimizer updates of GRPOTrainer on one device: the length of its sampler in batches of its data loader, and
    transformers' own count of steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulated,
            num_generations=group,
            num_iterations=iterations,
            num_train_epochs=epochs,
            use_cpu=True,
            bf16=False,
            report_to=[],
        )
    sampler = RepeatSampler(  # as GRPOTrainer._get_train_sampler makes it
        data_source=range(problems),
        mini_repeat_count=arguments.num_generations,
        batch_size=arguments.generation_batch_size // arguments.num_generations,
        repeat_count=arguments.num_iterations * arguments.steps_per_generation,
        shuffle=False,
    )
    batches = len(sampler) // (arguments.per_device_train_batch_size * arguments.steps_per_generation)
    trainer = object.__new__(transformers.Trainer)
    trainer.num_examples = trainer.get_total_train_batch_size = lambda _: problems
    trainer.get_sp_size = lambda: 1
    return trainer.set_initial_training_values(arguments, range(batches))[-1]


def main() -> None:
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    runs = [
        {
            "problems": run[0],
            "config": {
                "batch_size": run[1] * run[2],
                "num_generations": run[3],
                "num_iterations": run[4],
                "num_train_epochs": run[5],
            },
            "updates": updates(*run),
        }
        for run in RUNS
    ]
    for name, content in {"epochs": {"runs": runs}, "fields": fields()}.items():
        (GOLDEN / f"trl_{name}.json").write_text(json.dumps(versions | content, indent=1) + "\n")


if __name__ == "__main__":
    main()
