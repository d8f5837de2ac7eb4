"""Plant bugs, one at a time, and report which of them the tests see.

    python tools/mutate.py [--only WORD ...] [--list]

`tools/mutations.toml` holds bugs that no unit test would name, most of them where data meets data: which split, array,
step or key is read. Each has a file, the exact old text, the new text, a sentence on what breaks, and the tests that
should see it. It is planted in a temporary copy of the files that git tracks, where its tests run. An old text that
does not occur exactly once is an error, and so are tests that fail without a bug. Exit code 1: a bug survived.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUGS = ROOT / "tools" / "mutations.toml"
LIMIT_S = 900


@dataclasses.dataclass(frozen=True)
class Bug:
    """A planted bug.

    Attributes:
      file: path in the repository.
      old, new: exact text, and its replacement.
      breaks: what goes wrong.
      tests: arguments of pytest.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


def load(path: Path = BUGS, root: Path = ROOT) -> list[Bug]:
    """All bugs. Raises ValueError for one that cannot be planted in `root`, or whose tests do not exist there."""
    bugs, wrong = [Bug(**row | {"tests": tuple(row["tests"])}) for row in tomllib.loads(path.read_text())["bug"]], []
    for bug in bugs:
        count = (root / bug.file).read_text().count(bug.old) if (root / bug.file).exists() else 0
        if count != 1:
            wrong.append(f"{bug.breaks}: {bug.old!r} occurs {count} times in {bug.file}, not once")
        wrong += [f"{bug.breaks}: {test} does not exist" for test in bug.tests if not _exists(root, *test.split("::"))]
    if wrong:
        raise ValueError("\n".join(wrong))
    return bugs


def _exists(root: Path, path: str, name: str = "") -> bool:
    """Whether there is a file or directory, and in the file a test of this name."""
    return (root / path).exists() and (not name or f"def {name}(" in (root / path).read_text())


def copy_to(folder: Path) -> None:
    """The files that git tracks."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests pass, and the first that fails, or the end of the output."""
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'kernels'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"no end after {LIMIT_S} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode == 0, failed[0] if failed else done.stdout[-500:]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words; bugs whose file or sentence has one")
    parser.add_argument("--list", action="store_true", help="check that every bug can be planted, and run nothing")
    args = parser.parse_args(argv)
    try:
        bugs = load()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = [bug for bug in bugs if not args.only or any(word in f"{bug.file} {bug.breaks}" for word in args.only)]
    if args.list:
        print("\n".join(f"{bug.file}: {bug.breaks}" for bug in chosen))
        return 0
    survived = 0
    with tempfile.TemporaryDirectory(prefix="qerl-mutate-") as folder:
        copy = Path(folder)
        copy_to(copy)
        passed, why = run_tests(copy, sorted({test for bug in chosen for test in bug.tests}))
        if not passed:
            print(f"error: without any bug the tests fail: {why}", file=sys.stderr)
            return 2
        for bug in chosen:
            text = (copy / bug.file).read_text()
            (copy / bug.file).write_text(text.replace(bug.old, bug.new))
            passed, why = run_tests(copy, bug.tests)
            (copy / bug.file).write_text(text)
            survived += passed
            print(
                f"{'SURVIVED' if passed else 'caught  '} {bug.file}: {bug.breaks}  {'' if passed else why}", flush=True
            )
    print(f"{len(chosen) - survived} of {len(chosen)} bugs caught")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
