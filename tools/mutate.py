"""Plants bugs, one at a time, and reports which of them the tests see.

    python tools/mutate.py [--only WORD …] [--piece I/N] [--gpu] [--record FILE] [--list]

`tools/mutations/*.toml` holds the bugs: a file, the exact old text, the new text, a sentence on what breaks, and the
tests that should see it. Each is planted in a temporary copy of the checkout, where its tests run. A bug whose old text
does not occur exactly once is an error, and so is a test that fails without any bug. `equivalent` says why a change
alters no result; it is not counted. Bugs of kernels that only a GPU's tests see have `gpu = true` and run under `--gpu`
alone. Where all tests of a bug are skipped (some compile for an H200, which takes Python 3.12 and NVIDIA's compilers),
the bug counts as not run.

Every bug runs in a fork of one process that has imported the libraries, and all share a cache of compiled programs, so
that most cost seconds. `--record` appends one JSON line for each bug; `--report FILE …` prints the table of such files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = ROOT / "tools" / "mutations"
LIBRARIES = ("pytest", "jax", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "jaxtyping", "beartype",
             "transformers", "torch", "pyarrow.parquet", "rich.console", "matplotlib", "yaml")  # fmt: skip
LIMIT = 600  # seconds for the tests of one bug; a bug that makes them hang is seen
PASSED, FAILED, INTERRUPTED, NO_TESTS, BROKEN = 0, 1, 2, 5, 70  # exit codes of pytest, and of a child that breaks


class MutationError(ValueError):
    """A bug that cannot be planted, or tests that fail without one."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A planted bug.

    Attributes:
      name: area and number, such as "loop/3".
      file: path in the repository.
      old, new: exact text, and its replacement.
      breaks: what goes wrong.
      tests: pytest arguments: files, or tests of a file.
      equivalent: why no result changes; empty for a bug.
      gpu: whether only tests on a GPU see it.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    equivalent: str = ""
    gpu: bool = False


def load(folder: Path = MUTATIONS, root: Path = ROOT) -> list[Mutation]:
    """All bugs. Raises MutationError for one that cannot be planted in `root`, or whose tests do not exist there."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for number, row in enumerate(tomllib.loads(path.read_text())["mutation"], 1):
            mutation = Mutation(name=f"{path.stem}/{number}", **{**row, "tests": tuple(row["tests"])})
            text = (root / mutation.file).read_text()
            if text.count(mutation.old) != 1:
                raise MutationError(
                    f"{mutation.name} ({mutation.breaks}): {mutation.old!r} occurs {text.count(mutation.old)} times in "
                    f"{mutation.file}, not once"
                )
            for test in mutation.tests:
                if not (root / test.partition("::")[0]).exists():
                    raise MutationError(f"{mutation.name}: {test} does not exist")
            found.append(mutation)
    return found


@contextlib.contextmanager
def checkout() -> Iterator[Path]:
    """A temporary copy of the files that git tracks or would track, or without a repository of all but hidden ones."""
    try:
        names = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [str(path) for path in paths if not any(part.startswith(".") for part in path.parts)]
    with tempfile.TemporaryDirectory(prefix="qerl-mutate-") as folder:
        for name in names:
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, Path(folder) / name)
        yield Path(folder)


def run_tests(copy: Path, tests: Sequence[str], log: Path, gpu: bool = False) -> int | None:
    """Exit code of pytest on a copy, stopped at the first failure; None if it took longer than `LIMIT`. `gpu`: of the
    tests on a GPU."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _run_tests_here(copy, tests, log, gpu)
        except BaseException:
            traceback.print_exc()
        os._exit(BROKEN)
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_tests_here(copy: Path, tests: Sequence[str], log: Path, gpu: bool) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    ours = [str(copy), str(copy / "kernels")]
    sys.path[:] = ours + [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(ours)
    import pytest

    flags = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "--no-header"]
    flags += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the fork begins with some plugins imported
    flags += ["-m", "gpu"] if gpu else []
    code = pytest.main([*flags, *tests], plugins=[_CompilationCache(log.parent / "programs")])
    sys.stdout.flush()
    os._exit(int(code))


class _CompilationCache:
    """Turns on what `tests/conftest.py` turns off: few of the programs of a test change by a bug."""

    def __init__(self, directory: Path):
        self._directory = directory

    def pytest_sessionstart(self) -> None:
        import jax

        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", str(self._directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@contextlib.contextmanager
def planted(copy: Path, mutation: Mutation) -> Iterator[None]:
    """The copy with the bug."""
    path = copy / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        path.write_text(text)


def verdict(code: int | None, log: Path) -> tuple[str, str]:
    """("caught", the test that failed), ("survived", ""), ("not run", "") where all tests are skipped, or ("broken",
    why): the changed program does not even load.
    """
    if code is None:
        return "caught", f"no end after {LIMIT} s"
    text = log.read_text(errors="replace")
    if code == PASSED:
        return ("survived" if re.search(r"^\d+ passed", text, re.MULTILINE) else "not run"), ""
    lines = text.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if failed and code in (FAILED, BROKEN):  # pytest itself may break after a failure
        return "caught", failed[0].split(" - ")[0].split(" ", 1)[1]
    return (
        ("broken", lines[-1] if lines else "")
        if code in (INTERRUPTED, NO_TESTS, BROKEN)
        else ("caught", f"exit {code}")
    )


def check_baseline(copy: Path, mutations: Sequence[Mutation], log: Path, gpu: bool) -> None:
    """Raises MutationError where a test of these bugs fails without a bug, too."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    tests = [test for test in tests if "::" not in test or test.partition("::")[0] not in tests]
    code = run_tests(copy, tests, log, gpu)
    if code != PASSED:
        raise MutationError(f"without any bug pytest ends with {code}:\n{log.read_text()[-3000:]}")


def report(rows: Sequence[dict]) -> str:
    """The results as Markdown: counts, survivors, and one line for each bug."""
    kinds = "caught", "survived", "equivalent", "not run"
    counts = {kind: sum(row["result"] == kind for row in rows) for kind in kinds}
    bugs = counts["caught"] + counts["survived"]
    lines = [
        f"{counts['caught']} of {bugs} bugs caught ({100 * counts['caught'] / max(bugs, 1):.1f} %), "
        f"{counts['survived']} survived; {counts['equivalent']} further changes alter no result, {counts['not run']} "
        "were not run.",
        "",
        "| bug | result | s | what breaks, and the test that saw it |",
        "|---|---|---|---|",
    ]
    for row in rows:
        seen = f" ({row['seen_by'].partition('::')[2] or row['seen_by']})" if row["seen_by"] else ""
        lines.append(f"| {row['name']} | {row['result']} | {row['seconds']:.0f} | {row['breaks']}{seen} |")
    return "\n".join(lines)


def run(mutations: Sequence[Mutation], record: Path | None, gpu: bool = False) -> list[dict]:
    """Plant each bug and run its tests; `gpu`: those on a GPU."""
    os.environ |= {"JAX_PLATFORMS": "cuda,cpu" if gpu else "cpu"}
    if gpu:  # trying out XLA's own GEMMs would take most of the time
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a cached file may have the time and size of the changed one
    sys.dont_write_bytecode = True
    for name in LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):  # the tests that need it are skipped
            importlib.import_module(name)
    import transformers

    transformers.AutoTokenizer.from_pretrained(ROOT / "qerl_jax" / "assets" / "tiny-qwen2")  # imports much more
    rows = []
    with checkout() as copy, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        check_baseline(copy, mutations, log, gpu)
        for mutation in mutations:
            started = time.perf_counter()
            with planted(copy, mutation):
                result, seen_by = verdict(run_tests(copy, mutation.tests, log, gpu), log)
            if result == "broken":
                raise MutationError(f"{mutation.name}: the changed program does not load:\n{log.read_text()[-2000:]}")
            if mutation.equivalent:
                if result == "caught":
                    raise MutationError(f"{mutation.name} is listed as equivalent, but {seen_by} fails")
                result = "equivalent"
            row = {"name": mutation.name, "file": mutation.file, "breaks": mutation.breaks, "result": result}
            rows.append({**row, "seconds": time.perf_counter() - started, "seen_by": seen_by})
            print(
                f"{result:10} {rows[-1]['seconds']:4.0f} s  {mutation.name}: {mutation.breaks}  {seen_by}", flush=True
            )
            if record:
                with record.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    return rows


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="words; bugs whose name, file or sentence has one")
    parser.add_argument("--piece", default="1/1", help="I/N: every N-th bug, from the I-th")
    parser.add_argument(
        "--gpu", action="store_true", help="the bugs that only tests on a GPU see, in place of the others"
    )
    parser.add_argument("--record", type=Path, help="file to which one JSON line for each bug is appended")
    parser.add_argument("--report", type=Path, nargs="*", help="print the table of such files and run nothing")
    parser.add_argument("--list", action="store_true", help="check that every bug can be planted, and run nothing")
    args = parser.parse_args()
    if args.report:
        rows = {row["name"]: row for path in args.report for row in map(json.loads, path.read_text().splitlines())}
        print(report([rows[name] for name in sorted(rows, key=lambda n: (n.split("/")[0], int(n.split("/")[1])))]))
        return 0
    try:
        mutations = load()
        chosen = [
            one for one in mutations
            if one.gpu == args.gpu
            and (not args.only or any(word in f"{one.name} {one.file} {one.breaks}" for word in args.only))
        ]  # fmt: skip
        first, of = map(int, args.piece.split("/"))
        chosen = chosen[first - 1 :: of]
        if args.list:
            print(f"{len(mutations)} bugs can be planted, {len(chosen)} chosen")
            return 0
        rows = run(chosen, args.record, args.gpu)
    except MutationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(rows).splitlines()[0])
    return int(any(row["result"] == "survived" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
