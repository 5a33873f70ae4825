"""Arguments and results of operations, walked without leaving anything for Python's collector.

torch's pytree walks with functions inside functions that call themselves: each call is a cycle of objects, and a loop
over a model's weights makes a dozen of them per operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `function(leaf)` in the place of each leaf."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([map_leaves(function, one) for one in tree])
    if kind is dict:
        return {key: map_leaves(function, one) for key, one in tree.items()}
    if kind in pytree.SUPPORTED_NODES or isinstance(tree, tuple):  # named tuples are among them
        return pytree.tree_map(function, tree)
    return function(tree)


def leaves_of(tree: Any) -> list[Any]:
    """Yield the leaves, in order."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return leaves
