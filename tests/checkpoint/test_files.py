"""Files and directories appear whole or not at all, and what was there is not lost."""

import os
import threading
from pathlib import Path

import pytest

from qerl_jax.atomic import _claim, atomic_directory, check_file_writable, check_writable, write_json, write_text


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
    (tmp_path / "nowhere").symlink_to(tmp_path / "link" / "file")
    with pytest.raises(OSError, match=r"the directory of output .*real/file cannot be written: .* is not a directory"):
        check_file_writable(tmp_path / "nowhere", "output")


def test_nothing_is_written_through_a_link_in_the_place_of_a_temporary_file(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".file.tmp").symlink_to(tmp_path / "mine")
    write_text(tmp_path / "file", "new")
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "file").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a\0b", "embedded null byte"), ("a" * 5000, "File name too long"), ("a" * 300, "File name too long")],
)
def test_a_directory_that_no_system_can_name(tmp_path, name, reason):
    """It was taken for one that is not there yet, and the error came later, without the option's name."""
    with pytest.raises(OSError, match=rf"^output_dir '/.* cannot be written: {reason}$"):
        check_writable(tmp_path / name, "output_dir")
    check_writable(tmp_path / "new" / "directory", "output_dir")
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_takes_no_directories():
    with pytest.raises(OSError, match=r"^output_dir '?/proc/run'? cannot be written: "):
        check_writable(Path("/proc/run"), "output_dir")


def test_an_old_directory_returns_where_its_replacement_failed(tmp_path, monkeypatch):
    """By an error between the two renames at once, after a kill there with the next writer."""
    target, replace = tmp_path / "adapter", os.replace
    target.mkdir()
    (target / "file").write_text("old")

    def failing(source, destination):
        if destination == target and str(source).endswith(".writing"):
            raise OSError("no")
        replace(source, destination)

    with pytest.raises(OSError, match="no"), atomic_directory(target) as directory:
        (directory / "file").write_text("new")
        monkeypatch.setattr(os, "replace", failing)
    assert (target / "file").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["adapter"]
    (tmp_path / ".adapter.writing").mkdir()
    (tmp_path / ".adapter.writing/rest").touch()
    target.rename(tmp_path / ".adapter.replaced")
    with pytest.raises(ZeroDivisionError), atomic_directory(target):
        raise ZeroDivisionError
    assert (target / "file").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_directory_takes_the_place_of_a_link_to_nowhere_and_others_read_it_as_the_umask_says(tmp_path):
    target = tmp_path / "out"
    target.symlink_to(tmp_path / "nowhere")
    umask = os.umask(0o027)
    try:
        with atomic_directory(target) as directory:
            assert directory.stat().st_mode & 0o777 == 0o700 and not list(directory.iterdir())
            (directory / "file").write_text("new")
    finally:
        os.umask(umask)
    assert (target / "file").read_text() == "new" and not target.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o750
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Moved(type(Path())):
    """A directory that another writer has renamed, or renamed and made anew, when it has been opened."""

    def exists(self) -> bool:
        return os.path.isdir(f"{self}.anew")

    def stat(self, **options: bool) -> os.stat_result:
        return os.stat(f"{self}.anew" if self.exists() else str(self), **options)


def test_a_directory_that_its_writer_has_just_put_in_its_place_is_not_taken(tmp_path):
    for _ in range(2):
        with pytest.raises(FileExistsError, match="out is being written by another process"):
            _claim(tmp_path / "out", Moved(tmp_path / ".out.writing"))
        (tmp_path / ".out.writing.anew").mkdir(exist_ok=True)


def test_two_writers_of_one_directory_do_not_destroy_each_other(tmp_path):
    """The second is refused while the first writes, and its refusal leaves the first's files alone."""
    target = tmp_path / "out"
    with atomic_directory(target) as first:
        (first / "file").write_text("first")
        with pytest.raises(FileExistsError, match=r"out is being written by another process"), atomic_directory(target):
            raise AssertionError("not reached")
        with atomic_directory(tmp_path / "other"):
            pass
    assert (target / "file").read_text() == "first"
    with atomic_directory(target) as second:
        (second / "file").write_text("second")
    assert (target / "file").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]
