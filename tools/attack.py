"""Attacks the command lines: hostile input, faults of the machine, and programs that try to leave the sandbox.

    python tools/attack.py [--only WORD …] [--piece I/N] [--record FILE] [--list]

Every case of `tools/attacks/` prints one line. None may end in a traceback, hang, succeed where it must be refused,
end with another exit code or other words than expected, or change a file that it was not asked to change. Each runs in
a fork of one process that has imported the libraries, in a directory of its own, so that most cost less than a second.
Exit code 1 if a case went wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), str(ROOT / "tests/rewards"), str(ROOT / "tools")]
os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

TABLES = ("values", "models", "datasets", "stored_runs", "faults", "programs", "exchange")
LIBRARIES = ("jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "transformers", "datasets", "pyarrow.parquet",
             "rich.console", "matplotlib.pyplot", "tyro", "yaml", "math_verify", "torch", "peft",
             "qerl_jax.train")  # fmt: skip


def load() -> list:
    """The cases of all tables. Raises ValueError for two of one name."""
    found = [case for table in TABLES for case in importlib.import_module(f"attacks.{table}").cases()]
    twice = [name for name, count in Counter(case.name for case in found).items() if count > 1]
    if twice:
        raise ValueError(f"cases of the same name: {twice}")
    return found


def prepare(folder: Path) -> Path:
    """The directory that cases copy: model, dataset, adapter, records, and a finished run in `used`."""
    from attacks import templates

    template = folder / "template"
    for make in (templates.make, templates.make_records, templates.make_run):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with open(os.devnull, "w") as sys.stdout:
                    code = make(template) or 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("the templates cannot be made")
    (template / "run").rename(template / "used")
    return template


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="words; cases whose name has one")
    parser.add_argument("--piece", default="1/1", help="I/N: every N-th case, from the I-th")
    parser.add_argument("--record", type=Path, help="file to which one JSON line for each case is appended")
    parser.add_argument("--list", action="store_true", help="count the cases, and run nothing")
    args = parser.parse_args()
    cases = load()
    first, of = map(int, args.piece.split("/"))
    chosen = [case for case in cases if not args.only or any(word in case.name for word in args.only)][first - 1 :: of]
    if args.list:
        print(f"{len(cases)} cases, {len(chosen)} chosen")
        return 0
    for name in LIBRARIES:
        importlib.import_module(name)
    from attacks.harness import attempt
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(ROOT / "qerl_jax/assets/tiny-qwen2")  # imports much more
    wrong, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qerl-attack-") as folder:
        template = prepare(Path(folder))
        for case in chosen:
            outcome = attempt(case, template, Path(folder) / "place")
            wrong += bool(outcome.wrong)
            verdict = "WRONG" if outcome.wrong else "ok"
            print(
                f"{verdict:5} {outcome.seconds:5.1f} s  {case.name}: {outcome.wrong or outcome.said[:200]}", flush=True
            )
            if args.record:
                row = {"case": case.name, "wrong": outcome.wrong, "said": outcome.said, "seconds": outcome.seconds}
                with args.record.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"{len(chosen) - wrong} of {len(chosen)} cases ended as they must, in {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
