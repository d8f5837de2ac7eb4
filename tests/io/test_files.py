"""Files and directories appear whole or not at all, and what was there is not lost."""

from __future__ import annotations

import os
import threading

import pytest

from qerl_jax.io import files
from qerl_jax.io.files import atomic_directory, check_file_writable, check_writable, write_json, write_text


def test_a_device_and_a_pipe_are_written_to(tmp_path):
    write_json(tmp_path / "null", 1)
    os.unlink(tmp_path / "null")
    (tmp_path / "null").symlink_to(os.devnull)
    write_text(tmp_path / "null", "gone")
    assert (tmp_path / "null").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    check_file_writable(tmp_path / "pipe", "output")
    write_text(tmp_path / "pipe", "text")
    reader.join(timeout=10)
    assert read == ["text"] and (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["null", "pipe"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "file").read_text() == "new"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a\0b", "embedded null byte"), ("a" * 5000, "File name too long"), ("a" * 300, "File name too long")],
)
def test_a_directory_that_no_system_can_name(tmp_path, name, reason):
    """It was taken for one that is not there yet, and the error came later, without the option's name."""
    with pytest.raises(OSError, match=rf"^output_dir '/.* cannot be written: {reason}$"):
        check_writable(tmp_path / name, "output_dir")
    check_writable(tmp_path / "new" / "directory", "output_dir")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("how", ["exception", "kill"])
def test_an_interrupted_replacement_restores_the_old_directory(tmp_path, monkeypatch, how):
    """Between the two renames the target does not exist: an error there puts the old one back at once, a kill (nothing
    runs after it) leaves that to the next writer."""
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "file").write_text("old")
    replace, tidy = os.replace, files._tidy

    def interrupted(source, destination):
        if destination == target and str(source).endswith(".tmp"):
            if how == "kill":
                monkeypatch.setattr(files, "_tidy", lambda target: None)
            raise Killed
        replace(source, destination)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(Killed), atomic_directory(target) as directory:
        (directory / "file").write_text("new")
    assert target.exists() == (how == "exception")
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(files, "_tidy", tidy)
    with pytest.raises(ZeroDivisionError), atomic_directory(target):
        raise ZeroDivisionError
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
