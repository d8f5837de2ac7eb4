"""Every program of `docs/research.md` runs, on a smaller model than the page's, and does what the page says of it."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import small

from qerl_jax.compilation import CompilationCounter
from qerl_jax.config import Config, ConfigError
from qerl_jax.data import problems
from qerl_jax.parallel import ALONE
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.run.hooks import Hooks
from qerl_jax.train import main, train

PAGE = Path(__file__).resolve().parent.parent / "docs" / "research.md"
BEGINNING = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[1]
PROGRAMS = dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(small.bf16(tmp_path_factory.mktemp("research") / "model"))


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Runs the program below a heading in an empty directory, with few problems; returns its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(problems, "_BUNDLED_FILES", runs.PROBLEMS)

    def execute(heading: str) -> dict:
        names: dict = {"__name__": "research"}
        text = (BEGINNING + PROGRAMS[heading]).replace('"tiny"', repr(model))
        exec(compile(text, str(PAGE), "exec"), names)
        return names

    return execute


def test_the_page_has_the_programs_of_this_file():
    assert len(PROGRAMS) == len(re.findall(r"^```python", PAGE.read_text(), re.M)) - 1 == 4
    assert {heading for heading in PROGRAMS if f'run("{heading}")' not in Path(__file__).read_text()} == set()


def test_a_loss(run):
    """In the first update the ratio is 1 and the slope that of REINFORCE; in the second it is not 1."""
    metrics = run("A loss of one's own")["metrics"]
    assert float(metrics["ratio/max"]) > 1.0 and float(metrics["skipped"]) == 0 < float(metrics["grad_norm"])
    assert "clip_ratio/region_mean" not in metrics


def test_an_entropy_bonus(run):
    """Equal rewards leave the bonus alone in the loss: a gradient where there was none. No step compiles again."""
    names = run("An entropy bonus")
    assert int(names["state"].step) == names["config"].num_rollouts == 2
    grpo_step, batch, frozen = names["grpo_step"], names["batch"], names["policy"].frozen
    silent = batch.replace(advantages=jnp.zeros_like(batch.advantages))
    with CompilationCounter() as counter:
        _, metrics = grpo_step(names["state"], frozen, silent, token_loss=names["with_entropy_bonus"])
        assert counter.take() == []
    assert float(metrics["grad_norm"]) > 1e-4
    # But for the importance weight: the state is one step away from the policy that sampled.
    assert float(metrics["loss"]) == pytest.approx(-0.01 * float(metrics["entropy"]), rel=0.05)


def test_another_optimizer(run, capsys):
    """Lion moves every entry by the learning rate, but for its decay (of A alone: B is 0)."""
    names = run("Another optimizer")
    assert "restored to the bit: True" in capsys.readouterr().out
    after, config = names["state"].lora, names["config"]
    b = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(after) if leaf.shape[0] == config.lora_rank])
    total = sum(float(names["learning_rate"](config)(count)) for count in range(config.num_iterations))
    moved = np.abs(b[b != 0])
    assert len(moved) > 0.5 * len(b) and moved.max() <= total * (1 + 1e-5)


def test_a_noise(run, tmp_path, capsys):
    """σ and noise are those of the program, in metrics, report and plots; a run that an error ended resumes with the
    same functions to the same bits, and with others not at all.
    """
    names = run("A noise of one's own")
    rows = read_metrics(tmp_path / "noise")
    assert [row["aqn/sigma"] for row in rows] == [0.02, 0.01] == [seen[0] for seen in names["seen"]]
    assert [row["entropy"] for row in rows] == [None if math.isnan(seen[1]) else seen[1] for seen in names["seen"]]
    report = (tmp_path / "noise" / "report.md").read_text()
    assert "- sigma was given to `train`: `research.sigma`." in report
    assert {path.name for path in (tmp_path / "noise" / "plots").iterdir()} >= {"reward.png", "accuracy.png"}

    reached = []

    def stop(metrics, state):
        if int(state.step) == 2:
            reached.append(jax.device_get(state.lora))
            raise KeyError("enough")  # before plots and report, which take seconds

    config, hooks = names["config"], {"sigma": names["sigma"], "perturb": names["deeper_is_noisier"]}
    again = {name: value for name, value in vars(config).items() if name not in ("output_dir", "resume")}
    first = type(config)(**again, output_dir="again")
    with pytest.raises(KeyError):
        train(first, **hooks, on_step=stop)
    assert "resume='auto'), …) and the same arguments: sigma, perturb" in capsys.readouterr().out
    second = type(config)(**again, output_dir="again", resume="auto")
    with pytest.raises(ConfigError, match="hook perturb is not what it was"):
        train(second, sigma=hooks["sigma"])
    assert main(["--config", "again/config.yaml", "--resume", "auto"]) == 2
    assert "the run of again was begun by train(…) in Python with sigma, perturb: call it" in capsys.readouterr().err
    with pytest.raises(KeyError):
        train(second, **hooks, on_step=stop)
    assert len(reached) == 2
    for one, other in zip(jax.tree.leaves(reached[1]), jax.tree.leaves(names["state"].lora), strict=True):
        np.testing.assert_array_equal(one, other)


def test_noisy_norms_have_the_form_of_the_clean_ones():
    clean = {"first": {"weight": jnp.ones(4)}, "second": {"weight": jnp.ones(4)}}
    moved = Hooks(perturb=lambda norms, sigma, key: jax.tree.map(lambda w: w + sigma, norms))
    assert moved.noisy(clean, 0.5, jax.random.key(0))["second"]["weight"].tolist() == [1.5] * 4
    for other in (lambda w: w.astype(jnp.bfloat16), lambda w: w[:1], lambda w: [w, w]):
        hooks = Hooks(perturb=lambda norms, sigma, key, other=other: jax.tree.map(other, norms))
        with pytest.raises(ValueError, match=r"perturb returned norms of the form .*, expected that of its argument"):
            hooks.noisy(clean, 0.5, jax.random.key(0))
    for value in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"sigma\(3\) returned .*, expected a finite number of at least 0"):
            Hooks(sigma=lambda step, value=value: value).sigma_at(Config(), 3, ALONE)
