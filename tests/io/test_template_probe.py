"""Chat templates that hold the interpreter: rendered first in a process that can be killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
import small

from qerl_jax.io.assets import model_path
from qerl_jax.io.template_probe import refuse_endless

CONVERSATION = [{"role": "user", "content": "1+1?"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{{ 9 ** (9 ** 9) }}"
SCRIPT = """
import sys
from pathlib import Path
from qerl_jax.io import tokenizer
tokenizer.TEMPLATE_SECONDS = 0.5
tokenizer.load_tokenizer(Path(sys.argv[1]))
"""


def test_a_model_whose_template_computes_a_power(tmp_path):
    """No thread of a process can end it: one that loads the tokenizer is given a minute."""
    for name in small.TOKENIZER:
        shutil.copy(model_path("tiny") / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}" + POWER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    said = f"{tmp_path}: the chat template fails on a user's message: TimeoutError: no end after 0.5 s"
    assert ran.stderr.splitlines()[-1].endswith(said)


@pytest.mark.parametrize(
    "template",
    [
        POWER,
        LOOP,
        "{% generation %}" + POWER + "{% endgeneration %}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}" + POWER + "{% endfor %}",
        "{{ messages | tojson(indent=1) }}{{ strftime_now('%Y') }}{{ bos_token }}" + POWER,
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% if messages|length == 3 %}" + POWER + "{% endif %}",
    ],
)
def test_a_template_without_an_end(template):
    began, assistant = time.monotonic(), {"role": "assistant", "content": "2"}
    system = {"role": "system", "content": "be brief"}
    conversations = [CONVERSATION, [system, *CONVERSATION], [*CONVERSATION, assistant, *CONVERSATION]]
    with pytest.raises(TimeoutError, match=r"^no end after 0.3 s$"):
        refuse_endless(template, conversations, {"bos_token": "<s>"}, 0.3)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ messages[0].content | center(10**10) }}",
        "{{ '%10000000000d' % messages|length }}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    ],
)
def test_a_template_beyond_all_memory(template):
    with pytest.raises(MemoryError, match=r"^it takes more than 1 GB$"):
        refuse_endless(template, [CONVERSATION], {}, 60.0)


def test_what_ends_is_let_through():
    """With an error of its own too: it is told by whoever renders the template next."""
    qwen = (model_path("tiny") / "chat_template.jinja").read_text()
    for template in (qwen, "{{ 'a' * 10**7 }}", "{% for %}", "{{ raise_exception('no') }}", "{{ 1 // 0 }}"):
        refuse_endless(template, [CONVERSATION], {"object": object()}, 60.0)
