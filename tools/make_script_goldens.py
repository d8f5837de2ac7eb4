"""Record the nine scripts of the released QeRL: `python tools/make_script_goldens.py CHECKOUT`, of NVlabs/QeRL.

Writes tests/golden/release_scripts.json: the flags that each script passes to qerl.py, as its shell works them out (a
variable that is not set leaves a flag without a value, ""), and the fields and defaults of the argument dataclasses.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "release_scripts.json"
CLASSES = ("DataConfig", "QeRLConfig", "ModelConfig")  # the parser of qerl.py takes these three


def flags(script: Path) -> dict[str, str]:
    """Flags of the one command of a script, run with a function in place of accelerate."""
    program = f"accelerate() {{ printf '%s\\n' \"$@\"; }}; . {script.resolve()}"
    words = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    words, found = words[words.index("qerl.py") + 1 :], {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) else ""
            found[word[2:]] = "" if value.startswith("--") else value
    return found


def fields(checkout: Path) -> dict[str, dict[str, str]]:
    """Fields of each argument dataclass with their defaults as Python writes them."""
    tree = ast.parse((checkout / "utils" / "configs.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        name: {
            item.target.id: ast.unparse(item.value.keywords[0].value)
            for item in classes[name].body
            if isinstance(item, ast.AnnAssign)
        }
        for name in CLASSES
    }


def main() -> None:
    checkout = Path(sys.argv[1])
    commit = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    content = {
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "scripts": {script.name: flags(script) for script in sorted((checkout / "training").glob("*.sh"))},
        "fields": fields(checkout),
    }
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
