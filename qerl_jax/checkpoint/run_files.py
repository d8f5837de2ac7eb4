"""Names of the files and directories that a run leaves in its output directory."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
COMPLETIONS_DIR = "completions"
EVALUATION_FILE = "evaluation.json"
CHECKPOINTS_DIR = "checkpoints"
ADAPTER_DIR = "adapter"
PLOTS_DIR = "plots"
REPORT_FILE = "report.md"
NONFINITE_DIR = "nonfinite"
TENSORBOARD_DIR = "tensorboard"
WANDB_DIR = "wandb"
WANDB_FILE = "wandb.json"
LOCK_FILE = "run.lock"
"""Host and process of the run that holds the directory. Never deleted: a lock belongs to the file, not to its name."""

CHECKPOINT_RESTS = (".[0-9]*.writing", ".[0-9]*.replaced")
"""What a killed writer left among the checkpoints, as `atomic_directory` names it."""

_STEP = "step_" + "[0-9]" * 6
OWNED: dict[str, tuple[str, ...]] = {
    CHECKPOINTS_DIR: (),
    EVALUATION_FILE: (),
    METRICS_FILE: (),
    COMPLETIONS_DIR: (f"{_STEP}.parquet", f"{_STEP}.tmp"),
    ADAPTER_DIR: ("adapter_config.json", "adapter_model.safetensors"),
    PLOTS_DIR: ("reward.png", "accuracy.png", "entropy.png", "length.png", "mismatch.png"),
    NONFINITE_DIR: (f"{_STEP}.npz",),
    REPORT_FILE: (),
    TENSORBOARD_DIR: ("events.out.tfevents.*",),
    WANDB_DIR: ("run-*", "offline-run-*", "latest-run", "debug*.log", "settings"),
    WANDB_FILE: (),
    CONFIG_FILE: (),
}
"""What `--overwrite` deletes, in this order: files, and in directories the entries of these patterns (of checkpoints
those that hold one). The file by which a run is known comes last, so that it survives a kill."""


def is_run(directory: Path) -> bool:
    """Whether a directory looks like that of a run that has begun."""
    return (directory / CONFIG_FILE).is_file() and (directory / CHECKPOINTS_DIR).is_dir()
