"""Runs of `qerl_jax.train`, one after the other in one process, so that what they have in common is compiled once.

python tools/reproduction/worker.py

Reads the config file of a run from each line of standard input and answers with the run's exit code, as
`python -m qerl_jax.train --config FILE --resume auto` would have it. CONFIG.log beside CONFIG.yaml takes what the run
prints.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path

from qerl_jax import train


def main() -> None:
    """Do the runs."""
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            code = run(Path(line.rstrip("\n")))
            print(code, file=answers, flush=True)


def run(config_file: Path) -> int:
    """Exit code of a run; its output and that of its child processes goes to its log."""
    with config_file.with_suffix(".log").open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    try:
        return train.main(["--config", str(config_file), "--resume", "auto"])
    except Exception:  # a defect; the next run may not have it
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        gc.collect()  # the policy, before the next one is loaded


if __name__ == "__main__":
    main()
