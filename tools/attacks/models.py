"""Model directories, tokenizers, chat templates and adapters."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import small
from attacks.harness import Case, quoted
from attacks.templates import both, dry_runs, evaluates, exports, model_config, quantizes, reads, written
from test_bad_input import MODELS

from qerl_jax.io import safetensors as st

HUGE = 10**401
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
FILE = "model/model.safetensors"


def cases() -> Iterator[Case]:
    """Every case."""
    yield from known_models()
    yield from configs()
    yield from special_files()
    yield from weights()
    yield from tokenizers()
    yield from templates()
    yield from adapters()
    yield from random_damage()


def known_models() -> Iterator[Case]:
    """The models of the tests, through three command lines."""
    for name, (layout, damage, message) in MODELS.items():

        def prepare(place: Path, layout=layout, damage=damage) -> None:
            shutil.rmtree(place / "model")
            damage(layout(place / "model"))

        said = tuple(part for part in map(quoted, message.replace("MODEL", "model").split("…")) if part)
        yield Case(f"model: {name}", reads(), said, prepare=prepare)
        yield Case(f"model: {name}, evaluated", evaluates(), said, prepare=prepare)


def configs() -> Iterator[Case]:
    """Values in config.json and generation_config.json."""
    for key in SIZES:
        for value in (0, -1, 1.5, "16", None if key in ("hidden_size", "vocab_size") else [], True, HUGE, 2**31, {}):
            name = f"{value}" if len(str(value)) < 30 else "of 401 digits"
            yield Case(f"config.json: {key} {name}", dry_runs(), (key,), prepare=model_config(**{key: value}))
    for key in ("rope_theta", "rms_norm_eps"):
        for value in (0, -1, "x", math.inf, math.nan, HUGE, True, []):
            name = f"{value}" if len(str(value)) < 30 else "of 401 digits"
            yield Case(f"config.json: {key} {name}", dry_runs(), (key,), prepare=model_config(**{key: value}))
    for value in (-1, 512, 1.5, "2", HUGE, [2, -1], {"a": 1}, True):
        name = f"{value}" if len(str(value)) < 30 else "of 401 digits"
        yield Case(
            f"config.json: eos_token_id {name}", dry_runs(), ("eos_token_id",), prepare=model_config(eos_token_id=value)
        )
    table: dict[str, tuple[dict[str, Any], str]] = {
        "10^7 layers": ({"num_hidden_layers": 10**7}, "num_hidden_layers must be a whole number from 1 to 1,000"),
        "an embedding beyond all memory": (
            {"vocab_size": 2**31 - 1, "hidden_size": 2**30, "head_dim": 8},
            "parameters",
        ),
        "heads that do not divide": ({"num_attention_heads": 3, "num_key_value_heads": 2}, "not a multiple"),
        "an odd head": ({"head_dim": 7}, "head_dim 7 is odd"),
        "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
        "scaled positions": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        "a section that is a list": ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        "sliding windows": ({"use_sliding_window": True}, "use_sliding_window"),
        "layers of another kind": ({"layer_types": ["sliding_attention"]}, "layer_types"),
        "tied by a text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        "another quantization": ({"quantization_config": {"quant_method": "awq"}}, "quantization method 'awq'"),
        "a quantization that is a text": ({"quantization_config": "nvfp4"}, "quantization_config must be an object"),
        "markup as model_type": ({"model_type": "[/b]"}, r"model_type is '\[/b\]'"),
        "a model_type of 1 MB": ({"model_type": "x" * 10**6}, "model_type is 'xxx"),
        "code of its own": (
            {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "model_type": "evil"},
            "model_type",
        ),
    }
    for name, (changes, says) in table.items():
        yield Case(f"config.json: {name}", dry_runs(), (says,), prepare=model_config(**changes))
    text = "model/config.json"
    for name, content in {
        "empty": b"",
        "not UTF-8": b'{"a": "\xff"}',
        "a list": b"[1]",
        "nested too deep": b"[" * 10**5,
        "a key twice": b'{"a": 1, "a": 2}',
        "a number of 5000 digits": b'{"a": ' + b"9" * 5000 + b"}",
        "null": b"null",
        "cut short": b'{"model_type": "qw',
    }.items():
        yield Case(f"config.json: {name}", dry_runs(), (text,), prepare=written(text, content))
        yield Case(
            f"generation_config.json: {name}",
            dry_runs(),
            ("generation_config.json",),
            prepare=written("model/generation_config.json", content),
        )
    yield Case(
        "config.json: no eos_token_id is told",
        dry_runs(),
        ("name no eos_token_id",),
        0,
        prepare=both(model_config(eos_token_id=None), written("model/generation_config.json", "{}")),
    )


def special_files() -> Iterator[Case]:
    """What is no regular file in the place of each file of a model."""

    def fifo(path: Path) -> None:
        os.mkfifo(path)

    def device(path: Path) -> None:
        path.symlink_to("/dev/zero")

    def listener(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(path.parent, os.O_RDONLY)
            made.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)

    def loop(path: Path) -> None:
        path.symlink_to(path.name)

    def dangling(path: Path) -> None:
        path.symlink_to("nowhere")

    names = ("config.json", "generation_config.json", "model.safetensors", *small.TOKENIZER, "extra.json")
    for name in names:
        kinds: tuple[Callable, ...] = (fifo, device, listener)
        if name in ("config.json", "model.safetensors"):
            kinds += (Path.mkdir, loop, dangling)
        for make in kinds:

            def prepare(place: Path, name=name, make=make) -> None:
                (place / "model" / name).unlink(missing_ok=True)
                make(place / "model" / name)

            kind = make.__name__.replace("mkdir", "directory")
            yield Case(f"model files: {kind} {name}", reads(), ("model",), prepare=prepare)
    yield Case("model files: the model is a file", reads("--model", "rows.jsonl"), ("rows.jsonl does not exist",))
    yield Case(
        "model files: the model is empty",
        reads("--model", "empty"),
        ("empty/config.json does not exist",),
        prepare=lambda place: (place / "empty").mkdir(),
    )
    yield Case(
        "model files: brackets in the name",
        dry_runs("--model", "m[/b]"),
        code=0,
        prepare=lambda place: ((place / "m[").mkdir(), (place / "model").rename(place / "m[/b]")),
    )


def header(change: Callable[[dict], Any], length: int | None = None) -> Callable[[Path], object]:
    """Prepare: a safetensors header after `change`, which may return another."""

    def prepare(place: Path) -> None:
        data = (place / FILE).read_bytes()
        size = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + size])
        made = change(table)
        text = made if isinstance(made, bytes) else json.dumps(table if made is None else made).encode()
        prefix = (len(text) if length is None else length).to_bytes(8, "little")
        (place / FILE).write_bytes(prefix + text + data[8 + size :])

    return prepare


NORM = "model.norm.weight"


def weights() -> Iterator[Case]:
    """Safetensors files and indices."""

    def entry(**changes: Any) -> Callable[[dict], None]:
        return lambda table: table[NORM].update(changes)

    table: dict[str, tuple[Callable[[Path], object], str]] = {
        "a header of 2^63 bytes": (header(lambda t: None, 2**63), "the header claims"),
        "a header of no bytes": (header(lambda t: None, 0), "header"),
        "a header that is a list": (header(lambda t: [1]), "the header is a list"),
        "a header that is no JSON": (header(lambda t: b"{" * 100), "the header is not JSON"),
        "a header that is not UTF-8": (header(lambda t: b'{"\xff": 1}'), "the header is not JSON"),
        "a header nested too deep": (header(lambda t: b"[" * 100_000), "the header is not JSON"),
        "a tensor twice": (header(lambda t: json.dumps(t).encode()[:-1] + b', "x": 1, "x": 1}'), "given twice"),
        "a tensor that is a number": (header(lambda t: t.update(x=1)), "entry 'x' is malformed"),
        "a shape of 100 dimensions": (header(entry(shape=[1] * 100 + [16])), "has the shape"),
        "a shape of 2^62": (header(entry(shape=[2**62, 0])), "has the shape"),
        "a negative dimension": (header(entry(shape=[-16])), "malformed"),
        "a dimension of 401 digits": (header(entry(shape=[HUGE])), "model.norm.weight"),
        "a shape that is a text": (header(entry(shape="16")), "malformed"),
        "an unknown dtype": (header(entry(dtype="F4")), "dtype 'F4'"),
        "a dtype that is a list": (header(entry(dtype=["BF16"])), "malformed"),
        "negative offsets": (header(entry(data_offsets=[-32, 0])), "malformed"),
        "offsets that overlap": (header(entry(data_offsets=[0, 32])), "model.safetensors"),
        "offsets behind the end": (header(entry(data_offsets=[10**9, 10**9 + 32])), "cut short"),
        "three offsets": (header(entry(data_offsets=[0, 1, 2])), "malformed"),
        "a name of 1 MB": (header(lambda t: t.update({"x" * 10**6: t.pop(NORM)})), "model"),
        "a name with markup": (header(lambda t: t.update({"[/b]": t.pop(NORM)})), "model.norm.weight"),
        "an empty file": (written(FILE, b""), "0 bytes is too short"),
        "seven bytes": (written(FILE, b"1234567"), "7 bytes is too short"),
        "zeros": (written(FILE, bytes(4096)), "header"),
        "a pickle": (written(FILE, b"\x80\x04\x95" + bytes(64)), "header"),
    }
    for name, (prepare, says) in table.items():
        yield Case(f"safetensors: {name}", reads(), (says,), prepare=prepare)
        if not name.startswith(("offsets", "a dim")):
            yield Case(f"safetensors: {name}, dry run", dry_runs(), code=(0, 2), prepare=prepare)
    for cut in (1, 8, 100, 1000, 5000):
        yield Case(
            f"safetensors: {cut} bytes cut off",
            reads(),
            ("model.safetensors",),
            prepare=lambda place, cut=cut: os.truncate(place / FILE, (place / FILE).stat().st_size - cut),
        )

    def index(content: Any) -> Callable[[Path], None]:
        def prepare(place: Path) -> None:
            (place / FILE).rename(place / "model/part.safetensors")
            made = content(list(st.open_checkpoint(place / "model2"))) if callable(content) else content
            small.write_json(place / "model" / st.INDEX_FILE, made)

        return prepare

    indices: dict[str, tuple[Any, str]] = {
        "an empty weight_map": ({"weight_map": {}}, "weight_map must map tensor names to file names"),
        "no weight_map": ({}, "weight_map must map"),
        "a weight_map that is a list": ({"weight_map": [1]}, "weight_map must map"),
        "files that are numbers": ({"weight_map": {NORM: 1}}, "weight_map must map"),
        "a file that is missing": ({"weight_map": {NORM: "nothing.safetensors"}}, "are missing"),
        "a file that is a directory": ({"weight_map": {NORM: "."}}, "are missing"),
        "a file elsewhere": ({"weight_map": {NORM: "../../../etc/passwd"}}, "model"),
        "a file from the root": ({"weight_map": {NORM: "/etc/passwd"}}, "passwd"),
        "a device": ({"weight_map": {NORM: "/dev/zero"}}, "/dev/zero"),
        "a zero byte": ({"weight_map": {NORM: "a\0b"}}, ""),
        "a name of 5000 characters": ({"weight_map": {NORM: "a" * 5000}}, "File name too long"),
        "a tensor that is not there": ({"weight_map": {"x": "part.safetensors"}}, "puts 'x' into part.safetensors"),
        "a tensor alone": ({"weight_map": {NORM: "part.safetensors"}}, ""),
    }
    for name, (content, says) in indices.items():
        yield Case(
            f"index: {name}",
            reads(),
            (says,) if says else (),
            code=(2,) if "alone" not in name else (0, 2),
            prepare=index(content),
        )
        yield Case(f"index: {name}, dry run", dry_runs(), code=(0, 2), prepare=index(content))


def tokenizers() -> Iterator[Case]:
    """Tokenizer files."""
    table: dict[str, tuple[str, bytes | str]] = {}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for kind, content in {
            "empty": b"",
            "a list": b"[]",
            "null": b"null",
            "not UTF-8": b'{"a": "\xff"}',
            "nested too deep": b"[" * 100_000,
            "cut short": b'{"version": "1.0"',
            "zeros": bytes(100),
            "an empty object": b"{}",
            "a text": b'"x"',
        }.items():
            table[f"{name} {kind}"] = (name, content)
    table["code of its own"] = (
        "tokenizer_config.json",
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}),
    )
    table["an unknown class"] = ("tokenizer_config.json", '{"tokenizer_class": "os.system"}')
    table["a length of 401 digits"] = ("tokenizer_config.json", f'{{"model_max_length": {HUGE}}}')
    table["a special token that is a number"] = ("tokenizer_config.json", '{"eos_token": 17}')
    table["a special token that is new"] = ("tokenizer_config.json", '{"eos_token": "<new>"}')
    for name, (file, content) in table.items():
        evil = written("model/evil.py", "open('owned', 'w').write('x')\n")
        yield Case(f"tokenizer: {name}", reads(), code=(0, 2), prepare=both(evil, written(f"model/{file}", content)))


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
USER = "{{ messages[-1]['content'] }}"


def templates() -> Iterator[Case]:
    """Chat templates: programs in a sandbox of Jinja's."""
    table: dict[str, tuple[str, str]] = {
        "that loops": (LOOP + USER, "chat template fails .*no end after 10 s"),
        "that loops on a prompt": (
            "{% if '+' in messages[-1].content %}" + LOOP + "{% endif %}" + USER,
            "no end after",
        ),
        "that raises a power": (USER + "{{ 9 ** (9 ** 9) }}", "chat template fails .*no end after 10 s"),
        "that recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template fails"),
        "that takes 10 GB": ("{{ 'a' * 10000000000 }}", "chat template fails .*MemoryError: it takes more than 1 GB"),
        "that makes 30 MB": (USER + "{{ 'a' * 30000000 }}", "chat template makes 30,"),
        "that drops the user": ("nothing", "loses the user's message"),
        "that is no template": ("{% for %}", "chat template"),
        "that includes a file": ("{% include '/etc/passwd' %}", "chat template fails"),
        "that imports": ("{% import 'os' as o %}{{ o }}", "chat template fails"),
        "that looks for classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template fails"),
        "that looks for globals": ("{{ messages.append.__globals__ }}", "chat template"),
        "that changes the messages": ("{{ messages.append(1) }}", "chat template fails"),
        "that raises": ("{{ raise_exception('[/b] no') }}", r"chat template fails .*\[/b\] no"),
        "that divides by zero": ("{{ 1 // 0 }}", "chat template fails"),
        "that reads what is not there": ("{{ nothing.at.all }}", "chat template fails"),
        "that is empty": ("{# #}", "chat template|loses"),
        "that formats widely": ("{{ '%10000000000d' % messages|length }}", "more than 1 GB"),
    }
    for name, (template, says) in table.items():
        yield Case(
            f"chat template: {name}", reads(), (says,), limit=60, prepare=written("model/chat_template.jinja", template)
        )


def adapters() -> Iterator[Case]:
    """PEFT directories."""

    def changed(**changes: Any) -> Callable[[Path], None]:
        return lambda place: small.change_json(place / "adapter/adapter_config.json", **changes)

    table: dict[str, dict[str, Any]] = {
        f"{key} {value!r}"[:60]: {key: value}
        for key, values in {
            "peft_type": ("LOHA", None, 1, "[/b]", ["LORA"]),
            "r": (0, -1, 1.5, "8", True, HUGE, None, 7),
            "lora_alpha": (0, -1, "x", math.nan, math.inf, HUGE, None, True),
            "lora_dropout": (-0.1, 1, "x", math.nan),
            "target_modules": ("q_proj", ["q_proj", 1], ["lm_head"], [], {"a": 1}, ["q_proj"]),
            "modules_to_save": (["lm_head"], "x", [1]),
            "bias": ("all", 1),
            "use_dora": (True,),
            "use_rslora": ("yes", 1),
            "rank_pattern": ({"q_proj": 4},),
            "layers_to_transform": (0, [0]),
            "init_lora_weights": ("pissa",),
            "a_key_of_tomorrow": (3,),
        }.items()
        for value in values
    }
    for name, changes in table.items():
        yield Case(
            f"adapter: {name}",
            reads("--adapter", "adapter"),
            ("adapter",),
            prepare=changed(**changes),
            uses=("adapter",),
        )
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        for kind, damage in {
            "gone": Path.unlink,
            "empty": lambda path: path.write_bytes(b""),
            "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
            "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
            "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
            "a directory": lambda path: (path.unlink(), path.mkdir()),
        }.items():
            yield Case(
                f"adapter: {file} {kind}",
                reads("--adapter", "adapter"),
                (file,),
                uses=("adapter",),
                prepare=lambda place, file=file, damage=damage: damage(place / "adapter" / file),
            )
    yield Case(
        "adapter: evaluated after damage",
        evaluates("--adapter", "adapter"),
        ("adapter_model",),
        uses=("adapter",),
        prepare=lambda place: os.truncate(place / "adapter/adapter_model.safetensors", 500),
    )
    for kind, damage in {
        "cut": lambda path: os.truncate(path, 100),
        "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
        "gone": Path.unlink,
    }.items():
        yield Case(
            f"adapter: exported, {kind}",
            exports("adapter", "out", "--as", "merged"),
            ("adapter_model.safetensors",),
            uses=("adapter",),
            prepare=lambda place, damage=damage: damage(place / "adapter/adapter_model.safetensors"),
        )


def random_damage() -> Iterator[Case]:
    """Files changed at random: refused in one line, or read; `tests/test_fuzz.py` checks that what is read is right."""
    for case in range(60):
        yield Case(
            f"damage: model {case}",
            reads(),
            code=(0, 2),
            limit=30,
            prepare=lambda place, case=case: mutations.change_directory(
                place / "model", np.random.default_rng([8, case])
            ),
        )
    for case in range(20):
        yield Case(
            f"damage: adapter {case}",
            reads("--adapter", "adapter"),
            code=(0, 2),
            uses=("adapter",),
            prepare=lambda place, case=case: mutations.change_directory(
                place / "adapter", np.random.default_rng([9, case])
            ),
        )
    for case in range(20):

        def prepare(place: Path, case=case) -> None:
            small.bf16(place / "plain", 1)
            mutations.change_directory(place / "plain", np.random.default_rng([10, case]))

        yield Case(
            f"damage: quantized {case}", quantizes("plain", "out"), code=(0, 2), prepare=prepare, writes=("out",)
        )
