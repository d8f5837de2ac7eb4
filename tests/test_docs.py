"""The documentation is true: its blocks run, its tables are the code's, its links and commands lead somewhere."""

import importlib
import inspect
import json
import re
import shlex
from pathlib import Path

import small
from command_lines import replaced

from qerl_jax.config import Config
from qerl_jax.config.from_trl import translate
from qerl_jax.train import train

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "kernels", "tools") for path in (ROOT / folder).rglob("*.md")),
]
CODE = [path for folder in ("qerl_jax", "kernels", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
COINED = {
    r"octets?": "n8 tile",
    r"multiprocessors?": "SM",
    r"what (precedes|comes out|is drawn)": "the noun itself",
    r"that there are not": "missing, absent",
    r"(matrix|NVFP4|4-bit|decode) products?": "GEMM",
}
"""Coined words that once stood here, and the field's word for each."""


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_the_tables_of_the_config_are_the_codes(tool):
    """`docs/config.md` has every field with its default and docstring, `docs/migration.md` TRL's other defaults."""
    for page, text in tool("config_docs").pages().items():
        assert page.read_text() == text, "run python tools/config_docs.py"


def test_the_guide_runs(tmp_path, monkeypatch, capfd):
    """All Python blocks, which share their names, and the commands between them, in one directory and this process; on
    a smaller model than the page's, whose programs compile sooner.
    """
    monkeypatch.chdir(tmp_path)
    names, model = {}, str(small.bf16(tmp_path / "model", shards=1))
    for language, text in blocks((ROOT / "docs" / "guide.md").read_text()):
        assert language in ("bash", "python"), f"a block of {language} is run by nobody"
        if language == "python":
            exec(text.replace('load_policy("tiny"', f"load_policy({model!r}"), names)
        else:
            python, option, module, *flags = shlex.split(text.replace("\\\n", " "))
            assert (python, option) == ("python", "-m")
            if flags[0] == "tiny":
                flags[0] = model
            elif "--dry-run" not in flags:
                flags = replaced(flags, "--config", "tiny", "--model", model)
            assert importlib.import_module(module).main(flags) == 0
    said = capfd.readouterr().out
    assert "Dry run: no weights were loaded" in said and "step 3  sigma 0.0005" in said
    assert Path("my-adapter/adapter_model.safetensors").exists()
    assert Path("runs/pens/metrics.jsonl").read_text().count("rewards/my_reward.py:brevity/mean") == 2


def test_two_evaluations_are_compared(tmp_path, monkeypatch, capsys):
    """Two of four, one of one and none of two problems' completions gained; a problem without gold does not count."""
    monkeypatch.chdir(tmp_path)
    verdicts = {"base": ["0011", "0", "01", "-"], "trained": ["1111", "1", "10", "-"]}
    for name, rows in verdicts.items():
        found = [[{"0": "wrong", "1": "correct", "-": "no gold"}[letter] for letter in row] for row in rows]
        lines = [{"settings": {}}, *({"verdicts": row} for row in found)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [(_, text)] = [block for block in blocks((ROOT / "docs" / "evaluation.md").read_text()) if block[0] == "python"]
    exec(text, {})
    assert "difference': Estimate(value=0.5, low=0.0, high=" in capsys.readouterr().out


def test_a_script_of_trl_moves_over():
    """The program of docs/migration.md calls `train` with a config and arguments that it takes, and its reward pays.
    The config is what `--from-trl` makes of the same settings.
    """
    [(_, text)] = [block for block in blocks((ROOT / "docs" / "migration.md").read_text()) if block[0] == "python"]
    calls, names = [], {"records": [{"prompt": [{"role": "user", "content": "2 + 2"}], "solution": "4"}]}
    names["train"] = lambda *values, **named: calls.append(inspect.signature(train).bind(*values, **named).arguments)
    exec(text.replace("from qerl_jax.train import train\n", ""), names)
    [given] = calls
    assert given["train_dataset"] == names["records"] and given["config"].reward_columns == ("solution",)
    lora = {"use_peft": True, "lora_r": 32, "lora_alpha": 64, "lora_target_modules": "all-linear"}
    batch = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4, "max_completion_length": 256}
    fields, _ = translate(lora | batch | {"learning_rate": 1e-5, "output_dir": "runs/moved"})
    ours = {"model": "qwen-7b-nvfp4", "reward_columns": ("solution",)}
    assert given["config"] == Config(**fields | ours)
    assert given["reward_funcs"][0]([[{"content": " 4\n"}], [{"content": "5"}]], ["4", "4"]) == [1.0, 0.0]


def test_the_guide_names_the_fields_that_may_change_on_resume():
    from qerl_jax.config import FREE_ON_RESUME

    text = (ROOT / "docs" / "guide.md").read_text()
    fields = text[text.index("leave the algorithm as it is may change:") :].partition(". ")[0]
    assert set(re.findall(r"`(\w+)`", fields)) == FREE_ON_RESUME - {
        "resume", "overwrite", "max_steps", "num_train_epochs",
    }  # fmt: skip


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in found}


def test_links_files_and_commands_exist():
    """Relative links with their anchors, and the files that pages name; results and changes name those of their day."""
    wrong = []
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()):
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    named = re.compile(r"(?<![\w/.-])(?:tools|docs|configs)/[\w./-]+\.(?:py|md|yaml|json|png)\b")
    for page in PAGES:
        if page.name != "CHANGELOG.md" and "results" not in page.parts:
            missing = {name for name in named.findall(page.read_text()) if not (ROOT / name).exists()}
            wrong += [f"{page.relative_to(ROOT)}: {name}" for name in missing]
    assert not wrong, "\n".join(wrong)


def test_pages_use_the_fields_words():
    """No coined word outside of quotes."""
    wrong = []
    for path in [*CODE, *PAGES]:
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            text = re.sub(r"`[^`]*`|\"[^\"]*\"", "", line)
            where = f"{path.relative_to(ROOT)}:{number}"
            for word, better in COINED.items():
                if found := re.search(rf"\b{word}\b", text, re.IGNORECASE):
                    wrong.append(f"{where}: {found[0]!r}: {better}")
    assert not wrong, "\n".join(wrong)


def test_the_script_of_ci_names_tests_that_exist():
    named = re.findall(r"tests/[\w/]+\.py(?:::\w+)?", (ROOT / ".ci" / "run").read_text())
    assert len(named) > 3
    for path, _, test in (name.partition("::") for name in named):
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
        assert (ROOT / path).is_file(), path
