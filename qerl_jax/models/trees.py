"""The trees of a policy (`Policy.frozen`, `norms`, `lora`), made from the table of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qerl_jax.models.config import LAYER_NORMS, ModelConfig, TensorSpec, tensors_of
from qerl_jax.models.lora import Lora

Tree = dict[Any, Any]


def weight_trees(config: ModelConfig, tensor: Callable[[TensorSpec, int | None], Any]) -> tuple[Tree, Tree]:
    """`Policy.frozen` and `Policy.norms` with `tensor(spec, layer)` in every place; layer: None outside the layers."""
    frozen, norms = {}, {}
    for spec in tensors_of(config):
        for layer in spec.places(config.num_layers):
            place = () if layer is None else ("layers", layer)
            _put(norms if spec.path[0] in LAYER_NORMS else frozen, (*place, *spec.path), tensor(spec, layer))
    return frozen, norms


def layer_adapters(config: ModelConfig, adapter: Callable[[str, int, int, int], Lora | None]) -> Tree:
    """The adapters of one decoder layer: `adapter(projection, K, N, offset)` where it is not None; {} for none."""
    tree = {}
    for spec in config.projections():
        offset = 0
        for part, rows in spec.part_rows().items():
            lora = adapter(part, spec.columns, rows, offset)
            if lora is not None:
                _put(tree, (*spec.path[:-1], "lora", part), lora)
            offset += rows
    return tree


def _put(tree: Tree, path: tuple[str | int, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
