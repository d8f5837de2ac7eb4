"""Names of the files and directories that a run leaves in its output directory."""

from __future__ import annotations

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
COMPLETIONS_DIR = "completions"
EVALUATION_FILE = "evaluation.json"
CHECKPOINTS_DIR = "checkpoints"
ADAPTER_DIR = "adapter"
PLOTS_DIR = "plots"
REPORT_FILE = "report.md"
NONFINITE_DIR = "nonfinite"
HEARTBEAT_FILE = "heartbeat.json"
STACKS_FILE = "stacks.txt"
TENSORBOARD_DIR = "tensorboard"
WANDB_DIR = "wandb"
WANDB_FILE = "wandb.json"
INCOMPLETE_COPY_FILE = "incomplete_copy.txt"
"""Names the run whose files are being taken over; deleted once all of them, and a checkpoint, are there."""

OWNED = (
    CONFIG_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    COMPLETIONS_DIR,
    CHECKPOINTS_DIR,
    ADAPTER_DIR,
    PLOTS_DIR,
    NONFINITE_DIR,
    REPORT_FILE,
    HEARTBEAT_FILE,
    STACKS_FILE,
    TENSORBOARD_DIR,
    WANDB_DIR,
    WANDB_FILE,
    INCOMPLETE_COPY_FILE,
)
"""Everything that `--overwrite` deletes, in this order: `INCOMPLETE_COPY_FILE` last, so that it survives a kill."""
