"""Compare runs side by side; runs that differ only in `seed` form a group with a mean and a 95 % interval.

    python tools/compare_runs.py runs/a-seed0 runs/a-seed1 runs/b-seed0 …      # a table, and comparison.png
    python tools/compare_runs.py runs/tiny-controls/* --output controls.png

Bands and ± are Student's t intervals over seeds; a single run has none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qerl_jax.reporting.comparison import Group, draw, group_runs, read_run, summary


def table(groups: list[Group]) -> Table:
    """The comparison as a table: a column for each group, shares in percent."""
    result = Table(title="mean ± 95 % interval over seeds", title_justify="left")
    result.add_column("")
    for group in groups:
        result.add_column(group.name, justify="right")
    result.add_row("seeds", *(", ".join(str(run.config["seed"]) for run in group.runs) for group in groups))
    summaries = [summary(group) for group in groups]
    for name in dict.fromkeys(name for values in summaries for name in values):
        share = name.startswith("accuracy")
        scale, digits = (100, 1) if share else (1, 3)
        cells = [values[name].describe(scale, digits) if name in values else "–" for values in summaries]
        result.add_row(f"{name}, %" if share else name, *cells)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories; files among them are skipped")
    parser.add_argument("--output", type=Path, default=Path("comparison.png"), help="where the figure goes")
    args = parser.parse_args(argv)
    directories = [path for path in args.runs if path.is_dir() or not path.exists()]
    try:
        groups = group_runs([read_run(path) for path in directories]) if directories else []
        if not groups:
            raise ValueError("no run directory among the arguments")
        draw(groups, args.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    console.print(table(groups))
    console.print(f"figure: {args.output}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
