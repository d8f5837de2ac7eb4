"""Run the paper's claims as experiments with seeds, intervals and verdicts, after the plan of `docs/claims.md`.

    python tools/reproduce.py --pilot --model policy-30m --out runs/claims      # prints the learning rate to --set
    python tools/reproduce.py --fitness --model policy-30m --out runs/fitness   # prints the --dataset to take
    python tools/reproduce.py 1 4 --model policy-30m --out runs/claims          # two claims
    python tools/reproduce.py --model policy-30m --out runs/claims --at-once 4  # all, four runs at a time on a GPU
    python tools/reproduce.py --model policy-30m --out runs/claims --at-once 4 --gpus 0 1   # and four on another
    python tools/reproduce.py --model Qwen/Qwen2.5-3B-Instruct --dataset gsm8k --out runs/gsm8k \\
        --set max_prompt_length=512 max_completion_length=4096 batch_size=128 num_generations=8 learning_rate=1e-5

Every cell of the plan is run with every seed (`tools/reproduction/plan.py`); a finished run is not repeated and an
interrupted one goes on, so that the same command continues an experiment. Writes OUT/claims.json, OUT/claims.png,
OUT/curves.png, OUT/runs.json with the figures of each run, and a table: mean paired difference, bootstrap interval,
effect size, corrected p-value, and a verdict, supported, not supported, reversed or undecided. Comparisons whose runs
are not all there get none, unless `--fewest N` admits those whose cells both have the seeds 0 to N − 1, or more, on the
seeds before the first that one of them lacks. Exit code 1: some run failed.
`--set` changes a setting of all runs; a deviation from the plan is a deviation, and is stored with the results.
`--cells` runs these cells alone and analyses all that are finished, for an experiment in parts. `--list` prints the
runs and ends; `--report` runs nothing and analyses the finished runs in OUT, also where they were made elsewhere: their
settings must be the plan's but for the paths.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from record import add_commit, meta
from reproduction import plan, report
from reproduction.analysis import analyse
from reproduction.fitness import chosen, fitness_jobs, fitness_of
from reproduction.fitness import table as fitness_table
from reproduction.runs import (
    Job,
    calibrate,
    check_settings,
    environment_of,
    jobs_of,
    needs_calibration,
    pilot_jobs,
    run_all,
)

CLAIMS = sorted({comparison.claim for comparison in plan.COMPARISONS})


def claim(text: str) -> int:
    """The number of a claim."""
    if text not in map(str, CLAIMS):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {CLAIMS}")
    return int(text)


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as in YAML."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    name = name.replace("-", "_")
    if name in {"seed", "output_dir", *(key for own in plan.CELLS.values() for key in own)} - {
        "learning_rate",
        "lora_rank",
    }:
        raise argparse.ArgumentTypeError(f"{name} is set by the plan's cells")
    found = yaml.safe_load(value)
    with contextlib.suppress(TypeError, ValueError):  # YAML takes 1e-4 for a text
        found = float(found) if isinstance(found, str) else found
    return name, found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", type=claim, nargs="*", metavar="CLAIM", help="1 to 8; none: all")
    parser.add_argument("--model", required=True, help="as in qerl_jax.train")
    parser.add_argument("--dataset", help="trained and evaluated on, splits train and test (default word_problems)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and results")
    parser.add_argument("--seeds", type=int, default=plan.SEEDS, help=f"seeds 0 to N − 1 (default {plan.SEEDS})")
    parser.add_argument("--fewest", type=int, metavar="N", help="seeds that a comparison needs (default: all)")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time on each GPU")
    parser.add_argument("--gpus", nargs="+", default=[], metavar="GPU", help="their numbers; none: one GPU")
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE", help="settings of all runs")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--pilot", action="store_true", help="choose the learning rate of all runs, by BF16 runs alone")
    choice.add_argument("--fitness", action="store_true", help="choose the dataset, by BF16 runs on those of the plan")
    choice.add_argument("--cells", nargs="+", default=[], metavar="CELL", help="run these cells of the claims alone")
    parser.add_argument("--list", action="store_true", help="print the runs and end")
    parser.add_argument("--report", action="store_true", help="analyse the finished runs alone")
    add_commit(parser)
    args = parser.parse_args(argv)
    if args.seeds < 2 or args.at_once < 1:
        parser.error(f"--seeds {args.seeds} and --at-once {args.at_once}: at least 2 and 1")
    args.fewest = args.seeds if args.fewest is None else args.fewest
    if not 2 <= args.fewest <= args.seeds:
        parser.error(f"--fewest {args.fewest}: 2 to {args.seeds}, the number of --seeds")
    if args.fitness and (args.dataset or args.claims):
        parser.error(f"--fitness takes the datasets of the plan, not --dataset {args.dataset} or claims {args.claims}")
    args.dataset = args.dataset or "word_problems"
    try:
        return experiment(args)
    except ValueError as error:  # settings or files of runs that do not fit
        print(f"error: {error}", file=sys.stderr)
        return 2


def experiment(args: argparse.Namespace) -> int:
    """Run, analyse and report; returns the exit code."""
    common = {
        **plan.COMMON,
        "model": args.model,
        "dataset": args.dataset,
        "eval_dataset": args.dataset,
        **dict(args.set),
    }
    comparisons = [one for one in plan.COMPARISONS if not args.claims or one.claim in args.claims]
    seeds = range(args.seeds)
    cells = plan.cells_of(comparisons)
    if others := sorted(set(args.cells) - set(cells)):
        raise ValueError(f"--cells {' '.join(others)}: not among the claims' cells, {' '.join(cells)}")
    choice = pilot_jobs if args.pilot else fitness_jobs if args.fitness else None
    jobs = choice(common, args.out) if choice else jobs_of(cells, seeds, common, args.out)
    wanted = [job for job in jobs if not args.cells or job.cell in args.cells]
    if args.list:
        print("\n".join(f"{job.directory} {'finished' if job.finished() else 'to do'}" for job in wanted))
        return 0
    failed: list[Job] = []
    if args.report:
        check_settings(jobs)
    else:
        failed = do_runs(wanted, args)
    if args.pilot:
        return pilot_result(jobs)
    if args.fitness:
        return fitness_result(jobs, args)
    planned, pilot = (
        [(job, run) for job in group if (run := job.finished())] for group in (jobs, pilot_jobs(common, args.out))
    )
    runs = {(job.cell, job.seed): run for job, run in planned}
    results = analyse(runs, comparisons, seeds, args.fewest)
    about = {"model": Path(args.model).name, "dataset": args.dataset}
    of_runs = origin(args, args.out / "claims.json") | {"fewest_seeds": args.fewest}
    report.write(report.rows(results, about), of_runs, args.out / "claims.json")
    report.write(report.run_rows([*planned, *pilot]), of_runs, args.out / "runs.json")
    if results:
        report.draw(results, args.out / "claims.png")
        report.draw_curves(runs, seeds, args.fewest, args.out / "curves.png")
        print(report.table(results))
    for line in filter(
        None, [report.incomplete(comparisons, results), *(f"failed: {job.directory}" for job in failed)]
    ):
        print(line)
    return 1 if failed else 0


def do_runs(jobs: Sequence[Job], args: argparse.Namespace) -> list[Job]:
    """Do the runs, beside the calibration of their model where they need it. Returns those that are not finished.
    Raises ValueError if the calibration failed, after the other runs.
    """
    if not needs_calibration(jobs, args.out):
        return run_all(jobs, args.at_once, args.gpus)
    environment = environment_of(args.at_once + 1, args.gpus[-1] if args.gpus else None)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        calibration = pool.submit(calibrate, args.model, args.dataset, args.out, environment)
        failed = run_all(jobs, args.at_once, args.gpus, calibration)
    calibration.result()
    return failed


def origin(args: argparse.Namespace, results: Path) -> dict[str, Any]:
    """`meta` of a file of results. With `--report` it stays that of the program which made the runs, the GPU and the
    commit are its, and what analysed them stands beside.
    """
    here = meta(args.commit) | {"changes": dict(args.set)}
    if not (args.report and results.exists()):
        return here
    return json.loads(results.read_text())["meta"] | {"report_commit": here["commit"], "report_date": here["date"]}


def pilot_result(jobs: Sequence[Job]) -> int:
    """Print final pass@1 of each learning rate and the best; returns the exit code."""
    runs = {job.config["learning_rate"]: job.finished() for job in jobs}
    if not all(runs.values()):
        print("the pilot is not complete: run it again")
        return 1
    for rate, run in runs.items():
        print(f"learning_rate {rate:g}: pass@1 {100 * run.after.accuracy:.1f} %")
    print(f"--set learning_rate={max(runs, key=lambda rate: runs[rate].after.accuracy):g}")
    return 0


def fitness_result(jobs: Sequence[Job], args: argparse.Namespace) -> int:
    """Write OUT/fitness.json, print the figures of each dataset and the choice; returns the exit code."""
    found = fitness_of([(job, run) for job in jobs if (run := job.finished())])
    best, about = chosen(found), {"model": Path(args.model).name}
    rows = [about | dataclasses.asdict(one) | {"gain": one.gain, "is_fit": one.is_fit} for one in found]
    report.write(rows, origin(args, args.out / "fitness.json"), args.out / "fitness.json")
    print(fitness_table(found))
    if len(found) < len(plan.FITNESS_DATASETS):
        print("the runs are not complete: run it again")
        return 1
    print(f"--dataset {best.dataset}" if best else "none of the datasets is fit for the plan with this policy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
