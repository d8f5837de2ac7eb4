"""The documentation is true: the guide's blocks run as they stand, the reference is what the docstrings say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_the_reference_is_up_to_date():
    tool = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_api_docs.py"), "--check"], capture_output=True, text=True
    )
    assert tool.returncode == 0, tool.stderr


def test_every_export_and_field_is_in_the_reference():
    import dataclasses

    import qerl_jax

    text = (ROOT / "docs" / "api.md").read_text()
    for name in qerl_jax.__all__:
        assert f"`{name}`" in text or f"`qerl_jax.{name}`" in text, name
    for field in dataclasses.fields(qerl_jax.Config):
        assert f"- `{field.name}` = " in text, field.name


def test_the_guide_runs(tmp_path):
    """One program for all Python blocks, which share their names, with the commands between them, in one directory."""
    program = ["import importlib"]
    for language, text in blocks((ROOT / "docs" / "guide.md").read_text()):
        assert language in ("bash", "python"), f"a block of {language} is run by nobody"
        if language == "python":
            program.append(text)
        else:
            command = shlex.split(text.replace("\\\n", " "))
            assert command[:2] == ["python", "-m"]  # here its main(), because starting Python anew costs seconds each
            program.append(f"assert importlib.import_module({command[2]!r}).main({command[3:]!r}) == 0")
    (tmp_path / "guide.py").write_text("\n".join(program))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "guide.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Dry run: nothing was loaded" in run.stdout and "step 3  sigma 0.0005" in run.stdout
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()
    metrics = (tmp_path / "runs" / "pens" / "metrics.jsonl").read_text()
    assert metrics.count("rewards/my_reward.py:brevity/mean") == 2
    links = re.findall(r"\]\(([\w./]+)\)", (ROOT / "docs" / "guide.md").read_text())
    assert links and all((ROOT / "docs" / link).exists() for link in links)


def test_the_guide_names_the_fields_that_may_change_on_resume():
    from qerl_jax.config import FREE_ON_RESUME

    text = (ROOT / "docs" / "guide.md").read_text()
    fields = text[text.index("leave the algorithm as it is may change:") :].partition(". ")[0]
    assert set(re.findall(r"`(\w+)`", fields)) == FREE_ON_RESUME - {"resume", "overwrite"}


def test_links_and_named_notes_exist():
    """Relative links of every page, and the notes that code or prose names, lead to a file."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tools").rglob("*.md")]
    pages += (ROOT / "kernels").rglob("*.md")
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", page.read_text())]
    assert len(links) > 20
    assert not [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()]
    code = [path for folder in ("qerl_jax", "kernels", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    notes = re.compile(r"tools/results/notes/[\w-]+\.md")
    named = [(path, name) for path in [*code, *pages] for name in notes.findall(path.read_text())]
    assert not [f"{path}: {name}" for path, name in named if not (ROOT / name).exists()]
