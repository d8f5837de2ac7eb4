"""What a run says on a real terminal."""

import contextlib
import io
import os
import pty
import re
import threading

from command_lines import time_limit
from rich.console import Console

from qerl_jax.reporting.console import RunConsole
from qerl_jax.reporting.progress import TrainingProgress, summary_table

METRICS = {"reward": 0.5, "entropy": 1.0, "aqn/sigma": 0.0, "completions/mean_length": 20.0, "tokens_per_second": 100.0}


def test_a_bar_and_lines_share_a_terminal():
    """A bar replaces `sys.stdout` by what prints on its console, which must not print on that again."""
    near, far = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(near, 4096):
                said.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(far, "w") as terminal, contextlib.redirect_stdout(terminal), time_limit(20):
        console = RunConsole()
        assert console.is_terminal
        with TrainingProgress(0, 2, console) as progress:
            print("said by another")
            console.print("said by the run")
            progress.update(1, METRICS | {"step_time": 1.0})
    reader.join(5)
    os.close(near)
    text = b"".join(said).decode()
    assert text.count("said by another") == text.count("said by the run") == 1
    assert "step 1/2" in text and "reward 0.500" in text


def test_a_log_has_twenty_lines_of_a_run_from_where_it_began():
    """Of 60 steps, resumed after the seventh, every third, and the last."""
    file = io.StringIO()
    with TrainingProgress(7, 60, Console(file=file, width=200)) as progress:
        for step in range(8, 61):
            progress.update(step, METRICS | {"step_time": 1.0})
    assert list(map(int, re.findall(r"^step (\d+)/60", file.getvalue(), re.M))) == [*range(10, 60, 3), 60]


def test_a_line_names_its_numbers():
    file = io.StringIO()
    numbers = {"reward": 0.5, "entropy": 0.25, "aqn/sigma": 0.01, "completions/mean_length": 20.4, "step_time": 1.5}
    with TrainingProgress(0, 2, Console(file=file, width=200)) as progress:
        progress.update(1, numbers | {"tokens_per_second": 99.6})
    assert file.getvalue() == ("step 1/2  reward 0.500  entropy 0.250  σ 1.0e-02  length 20  100 tok/s  1.50 s/step\n")


def test_a_summary_has_results_and_then_files():
    file = io.StringIO()
    summary_table(Console(file=file, width=60), [("before", "1 %"), ("after", "2 %")], "runs/a", [("report", "r.md")])
    said, _, *rows, _ = file.getvalue().splitlines()
    assert said == "the finished run is in runs/a"
    assert rows == ["│ before │ 1 %  │", "│ after  │ 2 %  │", "├────────┼──────┤", "│ report │ r.md │"]


def test_a_bar_begins_where_the_run_does():
    file = io.StringIO()
    with TrainingProgress(7, 60, Console(file=file, width=200, force_terminal=True)):
        pass
    assert "step 7/60" in file.getvalue() and "step 0/" not in file.getvalue()


def test_a_log_keeps_paths_whole(tmp_path):
    """Where rich assumes 80 columns, a path of a run's messages and of its summary can be copied."""
    path = "/runs/" + 10 * "a-long-name/"
    with (tmp_path / "log").open("w") as log, contextlib.redirect_stdout(log):
        console = RunConsole()
        console.print(f"12.0 M parameters, 8 problems, into {path}", markup=False)
        summary_table(console, [("after", "pass@1 50.0 %")], path, [("report", "report.md")])
    assert console.width < len(path)
    first, second, *table = (tmp_path / "log").read_text().splitlines()
    assert first.endswith(path) and second.endswith(path)
    assert [line for line in table if "report" in line] == ["│ report │ report.md     │"]
