"""Result files of benchmarks: each row carries its commit, date and command, as the program finds them.

    python tools/record.py FROM.json TO.json

adds the rows that another machine wrote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = {
    "batch_invariant": False,
    "kv_cache_dtype": "auto",
    "tensor_parallel": 1,
}  # values of rows without the field
MEASURED = frozenset((
    "us", "seconds", "tokens_per_s", "decode_ms_per_step", "peak_bytes", "predicted_bytes", "commit", "date", "command",
    "kernels", "kl", "mean_abs_dlogp", "token_mult_prob_error", "rollout_abs_dlogp_fp32", "trainer_abs_dlogp_fp32",
    "first_call_s", "kernel_ms_per_step", "model_fraction_of_peak", "fraction_of_peak", "compile_s",
    "rollout_peak_bytes", "recomputed_layers", "recomputed_gate_up", "bits_per_weight", "weight_error_mean",
    "weight_error_worst", "worst_projection", "mean_abs_dlogit", "top1_agreement", "compared_tokens",
    "kl_standard_error", "tokens", "equal_groups", "trained_share", "compilations_last_step", "compiled", "cached",
    "compile", "accuracy_before", "accuracy_after", "steps_done", "exit_code", "each",
))  # fmt: skip
"""Fields that do not tell one case from another; nor do those whose names end in `_seconds`."""


def shell(*command: str) -> str:
    """Standard output of a command; nothing where there is no such program or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit_of(given: str | None, root: Path = ROOT) -> tuple[str, str]:
    """The commit of a tree, and where it is known from.

    Args:
      given: `--commit`, the commit that a copy without its .git was made from.
      root: the tree.

    Returns:
      (commit, "git") in a checkout, with "-dirty" appended where a tracked file outside tools/results differs from it;
      in a copy (`given`, "--commit"), or ("unknown", "nowhere").

    Raises SystemExit where git says another commit than `given`.
    """
    git = ("git", "-C", str(root))
    if shell(*git, "rev-parse", "--show-toplevel") != str(root):
        return (given, "--commit") if given else ("unknown", "nowhere")
    found = shell(*git, "rev-parse", "HEAD")
    if given and not found.startswith(given):
        raise SystemExit(f"--commit says {given}, but this checkout is at {found}")
    differs = shell(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)tools/results")
    return shell(*git, "rev-parse", "--short", "HEAD") + ("-dirty" if differs else ""), "git"


def given_commit(given: str) -> str:
    """The value of `--commit`, refused while the command line is parsed and not after minutes of measuring."""
    try:
        commit_of(given)
    except SystemExit as contradiction:
        raise argparse.ArgumentTypeError(str(contradiction)) from None
    return given


def add_commit(parser: argparse.ArgumentParser) -> None:
    """Adds `--commit`."""
    parser.add_argument("--commit", type=given_commit, help="that of a copy without its .git")


def with_jax() -> dict[str, str]:
    """The device and version of JAX."""
    import jax  # here, because programs that time PyTorch need no JAX

    return {"gpu": jax.local_devices()[0].device_kind, "jax": jax.__version__}


def command_of(words: list[str]) -> str:
    """A command line without `--out` and `--commit`: where a file went and what `commit` says already."""
    places = ("--out", "--commit")
    kept = [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & {*places}]
    return " ".join(word for word in kept if not word.startswith(tuple(f"{place}=" for place in places)))


def meta(given: str | None, about: dict | None = None) -> dict:
    """GPU, date, commit (`commit_of`), command and versions of a measurement.

    Args:
      given: `--commit`.
      about: "gpu" and the versions of what was measured; None: those of JAX.
    """
    commit, source = commit_of(given)
    return {
        **(with_jax() if about is None else about),
        "date": str(date.today()),
        "commit": commit,
        "commit_from": source,
        "command": command_of(["python", *sys.argv]),
        "driver": (shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown").split()[0],
    }


def write_rows(path: Path, rows: list[dict], given: str | None, about: dict | None = None) -> None:
    """Add rows to a result file; rows that agree in every field that is not measured are replaced.

    `meta` is that of the last call, so each row has its own commit, date and command. `given`, `about`: as in `meta`.
    """
    last = meta(given, about)
    _replace(path, last, [{**row, **{name: last[name] for name in ("commit", "date", "command")}} for row in rows])


def merge(source: Path, path: Path) -> None:
    """Add the rows of a result file from another machine, with its `meta`, as `write_rows` there would have."""
    found = json.loads(source.read_text())
    last = {**found["meta"], "command": command_of(found["meta"]["command"].split())}
    about = {name: last[name] for name in ("commit", "date")}
    _replace(path, last, [{**about, **row} for row in found["rows"]])


def _replace(path: Path, last: dict, fresh: list[dict]) -> None:
    def case(row: dict) -> tuple:
        told = {
            k: str(v)
            for k, v in row.items()
            if k not in MEASURED and not k.endswith("_seconds") and (k not in DEFAULTS or DEFAULTS[k] != v)
        }
        return tuple(sorted(told.items()))

    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in old if case(row) not in {case(row) for row in fresh}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": last, "rows": kept + fresh}, indent=1) + "\n")


if __name__ == "__main__":  # python tools/record.py FROM.json TO.json
    merge(*map(Path, sys.argv[1:]))
