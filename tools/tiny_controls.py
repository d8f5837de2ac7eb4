"""The bundled default run and its controls over several seeds, into `tools/results/cpu/tiny.json`.

    python tools/tiny_controls.py                 # 3 seeds x (default, lr0, sigma0, bf16), one run after another
    python tools/tiny_controls.py --jobs 8        # eight runs at a time, two cores each

Every run is the README's command, `python -m qerl_jax.train`, with the flags of its variant. `seconds` is the wall time
with start, compilation and both evaluations. `load_average` is the machine's 5-minute load at the end of the run; above
2 x jobs, other work slowed it. `cpu_seconds` is the run's own processor time. Greedy accuracies come from `python -m
qerl_jax.evaluate` on the same held-out problems. Finished runs are not repeated, so an interrupted series continues.
`comparison.png` in the work directory shows the curves of all variants with intervals over seeds, as
`tools/compare_runs.py` draws them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import yaml
from record import add_commit, commit_of, meta

from qerl_jax.reporting.comparison import draw, group_runs, mean_interval, read_run

ROOT = Path(__file__).resolve().parent.parent
VARIANTS: dict[str, list[str]] = {
    "default": [],
    "lr0": ["--learning-rate", "0"],
    "sigma0": ["--sigma-start", "0", "--sigma-end", "0"],
    "bf16": ["--weight-format", "bf16"],
}


def run(command: list[str], cores: list[int], log: Path) -> tuple[float, float]:
    """Run a command on given cores; returns wall and processor seconds.

    Raises RuntimeError with the end of the log if the command fails.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores and shutil.which("taskset") else []
    began = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen([*pinned, sys.executable, *command], stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if code := process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {log.read_text()[-2000:]}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def one_run(variant: str, seed: int, work: Path, cores: list[int], commit: str) -> dict:
    """Train and evaluate one variant with one seed; returns the row of the result file, marked with `commit`."""
    directory = work / f"{variant}-{seed}"
    row_file = work / f"{variant}-{seed}.json"
    if row_file.exists():
        return json.loads(row_file.read_text())
    flags = [*VARIANTS[variant], "--seed", str(seed), "--output-dir", str(directory), "--overwrite"]
    seconds, cpu_seconds = run(["-m", "qerl_jax.train", *flags], cores, work / f"{variant}-{seed}.log")
    load = os.getloadavg()[1]
    config = yaml.safe_load((directory / "config.yaml").read_text())
    results = json.loads((directory / "evaluation.json").read_text())
    before, after = results["before"], results["after"]
    row = {
        "variant": variant,
        "seed": seed,
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "steps": config["max_steps"],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "cores": len(cores),
        "load_average": load,
        "problems": before["problems"],
        "generations": before["generations"],
        "pass_at_8_before": before["pass_at_k"],
        "pass_at_8_after": after["pass_at_k"],
        "greedy_before": greedy(config, None, cores, work / f"greedy-before-{config['weight_format']}.json"),
        "greedy_after": greedy(config, directory / "adapter", cores, work / f"{variant}-{seed}-greedy-after.json"),
        "format_before": before["format"],
        "format_after": after["format"],
        "format_share_before": format_share(config, before),
        "format_share_after": format_share(config, after),
        "commit": commit,
    }
    row_file.write_text(json.dumps(row))
    return row


def greedy(config: dict, adapter: Path | None, cores: list[int], output: Path) -> float:
    """Greedy accuracy on the problems of the run's own evaluation."""
    if output.exists():
        return json.loads(output.read_text())["accuracy"]
    command = ["-m", "qerl_jax.evaluate", config["model"], "--dataset", config["eval_dataset"]]
    command += ["--temperature", "0", "--top-p", "1", "--samples", str(config["eval_samples"])]
    for name in ("weight_format", "dtype", "max_prompt_length", "max_completion_length"):
        command += [f"--{name.replace('_', '-')}", str(config[name])]
    command += ["--batch-size", str(config["eval_batch_size"]), "--output", str(output)]
    run([*command, *(["--adapter", str(adapter)] if adapter else [])], cores, output.with_suffix(".log"))
    return json.loads(output.read_text())["accuracy"]


def format_share(config: dict, result: dict) -> float:
    """Share of the mean reward that is due to format: `w_f · format / (w_a · accuracy + w_f · format)`."""
    weights = dict(zip(config["reward_funcs"], config["reward_weights"], strict=True))
    of_format = weights["soft_format"] * result["format"]
    return of_format / (weights["answer"] * result["accuracy"] + of_format)


def processor() -> str:
    """Name of the processor."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on two cores each")
    parser.add_argument("--work", type=Path, default=Path("runs/tiny-controls"), help="where the runs are written")
    parser.add_argument("--output", type=Path, default=ROOT / "tools/results/cpu/tiny.json")
    add_commit(parser)
    args = parser.parse_args()

    commit, _ = commit_of(args.commit)
    args.work.mkdir(parents=True, exist_ok=True)
    available = sorted(os.sched_getaffinity(0))
    slots: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for job in range(args.jobs):
        slots.put([available[(2 * job + i) % len(available)] for i in range(2)])

    def work(item: tuple[int, str]) -> dict:
        cores = slots.get()
        try:
            row = one_run(item[1], item[0], args.work, cores, commit)
        finally:
            slots.put(cores)
        print(json.dumps(row), flush=True)
        return row

    items = [(seed, variant) for seed in args.seeds for variant in args.variants]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        rows = sorted(pool.map(work, items), key=lambda row: (list(VARIANTS).index(row["variant"]), row["seed"]))
    about = meta(args.commit, {"gpu": None, "cpu": processor(), "jax": jax.__version__, "parallel_runs": args.jobs})
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"meta": about, "rows": rows}, indent=2) + "\n")
    for variant in args.variants:
        chosen = [row for row in rows if row["variant"] == variant]
        before, after, seconds = (
            mean_interval([row[key] for row in chosen]) for key in ("accuracy_before", "accuracy_after", "seconds")
        )
        print(
            f"{variant:8} pass@1 {before.describe(100)} -> {after.describe(100)} %, {seconds.describe(digits=0)} s, "
            f"{len(chosen)} seeds (± is a 95 % interval over seeds)"
        )
    groups = group_runs([read_run(args.work / f"{variant}-{seed}") for seed, variant in items])
    named = [dataclasses.replace(group, name=name) for name, group in zip(args.variants, groups, strict=True)]
    draw(named, args.work / "comparison.png")


if __name__ == "__main__":
    main()
