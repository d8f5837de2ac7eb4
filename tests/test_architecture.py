"""The layout's promises: import direction, no dead knob, no torch in the package, a light import."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import qerl_jax
from qerl_jax.config import Config
from qerl_jax.config.fields import descriptions

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(qerl_jax.__file__).parent
KERNELS = ROOT / "kernels" / "qerl_kernels"

# A package may import itself and packages of the levels above it in this list, never one of its own level.
LAYERS = [
    ("qerl_kernels",),
    ("partition", "messages", "parallel"),
    ("compilation", "lowered", "buckets"),
    ("programs",),
    ("types",),
    ("keys", "aqn", "models", "rewards", "atomic", "cluster", "driver"),
    ("rollout", "data"),
    ("config",),
    ("checkpoint", "rl"),
    ("evaluation", "backends"),
    ("reporting",),
    ("run",),
    ("command",),
    ("launch",),
    ("train", "evaluate", "quantize", "export", "compare", "tune"),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# config reads the shapes of an adapter and a format's name; types only numbers: nothing below them may import config.
FORBIDDEN = {"rewards": {"jax", "flax", "models"}, "models": {"config"}, "types": {"config", "models"}}

WITH_TORCH = PACKAGE / "checkpoint" / "torch_reference.py"  # the only module that runs PyTorch, for `compare` alone


def modules() -> list[tuple[str, Path]]:
    """(layer, file) of every module of both packages."""
    found = [("qerl_kernels", path) for path in KERNELS.rglob("*.py")]
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            found.append((parts[0], path))
    return found


def imported(path: Path, everywhere: bool = True) -> list[str]:
    """Dotted names that a module imports, wherever in it or outside its functions."""
    names, tree = [], ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not everywhere:
            function.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def layer_of(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "qerl_kernels":
        return "qerl_kernels"
    return parts[1] if parts[0] == "qerl_jax" and len(parts) > 1 else None


def is_torch(name: str) -> bool:
    """Whether a dotted name is PyTorch, a library on top of it, or a model of transformers."""
    return name.split(".")[0] in ("torch", "peft", "compressed_tensors") or bool(
        re.fullmatch(r"transformers\.\w*Model\w*", name)
    )


def test_imports_point_downwards():
    for layer, path in modules():
        forbidden = FORBIDDEN.get(layer, set())
        for name in imported(path):
            other, where = layer_of(name), f"{path.relative_to(ROOT)} ({layer}) imports {name}"
            assert other not in LEVEL or other == layer or LEVEL[other] < LEVEL[layer], where
            assert other not in forbidden and name.split(".")[0] not in forbidden, where
            assert name != "qerl_jax.checkpoint.torch_reference" or layer == "compare", where
            assert path == WITH_TORCH or not is_torch(name), where


def test_what_may_be_absent_is_imported_in_functions_alone():
    """PyTorch, so that `compare` can say in one line that it is missing, and JAX's inner modules, which may move."""
    found = {name for _, path in modules() for name in imported(path, everywhere=False)}
    assert not [name for name in found if is_torch(name) or name.startswith("jax._src")]
    assert any(map(is_torch, imported(WITH_TORCH))) and "transformers" not in found


def test_every_layer_is_known():
    assert {layer for layer, _ in modules()} <= set(LEVEL)


def test_every_config_field_is_read():
    """No dead knob: each field is read as an attribute somewhere outside config/, or by a property that is."""
    read: set[str] = set()
    for _, path in modules():
        if path.parent != PACKAGE / "config":
            read |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    for name, member in vars(Config).items():
        if isinstance(member, property) and name in read:
            tree = ast.parse(inspect.cleandoc(inspect.getsource(member.fget).replace("    @property", "@property", 1)))
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {field.name for field in dataclasses.fields(Config)} - read


def test_every_config_field_is_described():
    found = descriptions()
    assert list(found) == [field.name for field in dataclasses.fields(Config)]
    assert min(map(len, found.values())) > 10


def public_functions() -> list[tuple[str, ast.FunctionDef]]:
    found = []
    for _, path in modules():
        for node in ast.parse(path.read_text()).body:
            members = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else [node]
            found += [
                (f"{path.relative_to(ROOT)}:{member.name}", member)
                for member in members
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_")
            ]
    return found


def test_public_functions_are_annotated_and_documented():
    problems = []
    for where, function in public_functions():
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        problems += [
            f"{where}: {a.arg} has no annotation" for a in arguments if not (a.annotation or a.arg in ("self", "cls"))
        ]
        if function.returns is None and function.name != "__init__":
            problems.append(f"{where} has no return annotation")
        if not ast.get_docstring(function):
            problems.append(f"{where} has no docstring")
    assert not problems, "\n".join(problems)


def test_all_names_of_the_api_exist():
    for name in qerl_jax.__all__:
        assert hasattr(qerl_jax, name)


IMPORT_PROBE = """
import json, sys
import qerl_jax
from jax._src import xla_bridge
heavy = sorted({"torch", "transformers", "datasets", "matplotlib", "tyro", "pyarrow", "orbax"} & set(sys.modules))
print(json.dumps([sorted(xla_bridge._backends), heavy]))
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.tokenizer import load_tokenizer
print(type(load_tokenizer(model_path("tiny"))("a")).__name__, "torch" in sys.modules)
"""


def test_import_is_light_and_starts_no_device():
    """And the tokenizer of a Qwen model is read and used without PyTorch, which takes as long to import as all else."""
    probe = [sys.executable, "-c", IMPORT_PROBE]
    found = subprocess.run(probe, capture_output=True, text=True, check=True).stdout
    assert found == "[[], []]\nBatchEncoding False\n"


def test_no_text_is_read_as_markup():
    """A path or a prompt may hold brackets, which rich would take for a style; tables have texts of ours alone."""
    tables, found = ("table", "parameter_table(report)", "memory_table(report.memory, config, devices)"), []
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "print":
                named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if named.get("markup") != "False" and ast.unparse(node.args[0]) not in tables:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found
