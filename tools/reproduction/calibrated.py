"""The model of the cell `nvfp4-calibrated`: calibrated on the model's own completions of the training problems.

python tools/reproduction/calibrated.py MODEL DATASET OUT
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compare_calibration import TRAIN_TEXTS, load, write_completions

from qerl_jax.io.assets import model_path
from qerl_jax.run.calibrate import calibrate_checkpoint


def main(model: str, dataset: str, out: str) -> None:
    """Sample the texts and write OUT."""
    path = model_path(model)
    with tempfile.TemporaryDirectory() as folder:
        texts = write_completions(load(path), dataset, "train", TRAIN_TEXTS, Path(folder) / "texts.jsonl")
        calibrate_checkpoint(path, out, texts, sequences=TRAIN_TEXTS)


if __name__ == "__main__":
    main(*sys.argv[1:])
