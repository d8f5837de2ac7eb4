"""The decode prologues, their instructions run for all threads of all CTAs on the numpy machine, against fp64."""

import jax.numpy as jnp
import numpy as np
import pytest
from decode_prologue_oracle import EPS, check, inputs_of, wide
from numpy_machine import NumpyLaunch
from qerl_kernels.decode_prologue import kernel
from qerl_kernels.decode_prologue.config import PrologueConfig as Config
from qerl_kernels.decode_prologue.config import PrologueSpec as Spec
from qerl_kernels.gpu import H200, gpu_of

FEATURES = 896  # 28 k-tiles: 7 for each of 4 CTAs, 2 steps of 4 warps, the second of which lacks one


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array


def run(spec: Spec, config: Config, inputs: list, a) -> list:
    """`kernel.fused_prologue` on the numpy machine."""
    launch = NumpyLaunch()
    gpu = H200 if config.cluster > 1 else gpu_of("RTX 3090", 86, 82)  # a CTA alone has neither clusters nor mbarriers
    found = kernel.run(launch, spec, config, inputs, a, gpu)
    if spec.kind == "norm" and spec.columns % 32 == 0:  # whole sectors but for lora_x
        assert sum(cta.used for cta in launch.ctas) > 0.94 * sum(cta.moved for cta in launch.ctas)
    return list(found)


def split(spec: Spec, out: list) -> tuple:
    """(s or None, y or None, t or None)."""
    t = out.pop() if spec.columns else None
    s = out.pop(0) if spec.residual else None
    return s, out.pop() if out else None, t


NORM = {"eps": EPS, "residual": True}


@pytest.mark.parametrize(
    "spec, configs",
    [
        (Spec("norm", 5, FEATURES, (32, 8, 64), **NORM), [Config(4, 4, 1, 2)]),
        (
            Spec("norm", 19, FEATURES, (32,) * 3, **NORM),
            [Config(4, 4, 1, 1, column_splits=3), Config(4, 4, 3, 2, column_splits=2)],
        ),
        (Spec("norm", 9, FEATURES, (8,), **NORM), [Config(4, 4, 1, 2), Config(4, 4, 2, 1)]),
        (Spec("norm", 9, FEATURES, **NORM), [Config(4, 4, 1, 1), Config(4, 4, 2, 1), Config(4, 8, 1, 1)]),
        (Spec("norm", 27, FEATURES, **NORM), [Config(16, 4, 4, 1)]),  # of more CTAs than warps each gets 2 KiB
        (Spec("silu", 11, FEATURES, (16, 16), eps=EPS), [Config(4, 4, 1, 2), Config(4, 4, 2, 1, column_splits=2)]),
        (Spec("silu", 3, FEATURES), [Config(4, 4, 1, 1)]),
        (Spec("plain", 17, FEATURES, (40,)), [Config(4, 4, 3, 2)]),
        (Spec("silu", 11, FEATURES, (16, 16), eps=EPS), [Config(1, 8, 2, 2), Config(1, 8, 1, 1, column_splits=2)]),
        (Spec("plain", 17, FEATURES, (40,)), [Config(1, 4, 3, 2)]),
    ],
    ids=lambda value: f"{value.kind}{value.tokens}-{value.columns}" if isinstance(value, Spec) else "",
)
def test_against_fp64(spec, configs):
    """Each byte of the results is written once; configurations with equal cluster size and warps agree in every bit."""
    inputs, a = inputs_of(spec.kind, spec.tokens, spec.features, spec.columns, seed=spec.tokens)
    a = a if spec.columns else None
    before = {}
    for config in configs:
        found = split(spec, run(spec, config, inputs, a))
        check(spec.kind, inputs, a, spec.ranks, found)
        for one, other in zip(found, before.setdefault((config.cluster, config.warps), found), strict=True):
            assert one is None or np.array_equal(bits(one), bits(other))


def test_without_a_residual():
    """s of one call is x of the other: the same y and t."""
    spec, config = Spec("norm", 6, FEATURES, (32,), **NORM), Config(4, 4, 1, 2)
    inputs, a = inputs_of("norm", spec.tokens, spec.features, spec.columns)
    s, y, t = run(spec, config, inputs, a)
    alone = Spec("norm", 6, FEATURES, (32,), eps=EPS)
    for one, other in zip(run(alone, config, [s, inputs[2]], a), (y, t), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


@pytest.mark.parametrize("kind", ["silu", "plain"])
@pytest.mark.parametrize(
    ("tokens", "config"),
    [(3, Config(4, 4, 1, 1, k_splits=2)), (19, Config(4, 4, 3, 1, k_splits=3)), (11, Config(1, 4, 2, 2, k_splits=4))],
)
def test_split_k_partials(kind, tokens, config):
    spec = Spec(kind, tokens, FEATURES, (16, 8), partials=True)
    [x], a = inputs_of(kind, tokens, FEATURES, spec.columns)
    _, y, parts = split(spec, run(spec, config, [x], a))
    if y is not None:
        check(kind, [x], a, spec.ranks, (None, y, None))
    rows = wide(x if y is None else y)
    assert parts.shape == (config.k_splits, tokens, 24)
    bound = 4 * FEATURES**0.5 * 2.0**-24 * np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(wide(a), axis=0)
    assert np.all(np.abs(wide(parts).sum(0) - rows @ wide(a)) <= bound)
