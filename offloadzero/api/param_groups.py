"""The param groups of an offloaded optimizer: what the configuration gives them, and that they stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from offloadzero.config import UNRESOLVED, OptimizerConfig
from offloadzero.errors import ConfigError, StateError


def group_defaults(config: OptimizerConfig) -> dict[str, Any]:
    """A param group's options from the JSON's optimizer block."""
    return dict(config.params)


def expect_rates(param_groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError for a group without a rate where the configuration leaves the rate at "auto"."""
    if any(group["lr"] is None for group in param_groups):
        raise ConfigError("optimizer.params.lr", "auto", f"{UNRESOLVED}; or pass an optimizer")


class GroupMembers:
    """The parameters that each group had when the model was offloaded.

    A unit keeps the number of each parameter's group, so a group that takes, loses or trades parameters, or another
    order of the groups, would train with options that the script does not see there.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._ids = [_ids_of(group) for group in param_groups]

    def expect_unchanged(
        self, param_groups: Sequence[Mapping[str, Any]], name_of: Callable[[int], str | None]
    ) -> None:
        """Raise StateError unless each group holds its own parameters, in any order.

        Args:
            name_of: the name of a parameter of the model by its id.
        """
        if len(param_groups) != len(self._ids):
            raise StateError(
                f"optimizer.param_groups: {len(param_groups)} groups, where there were {len(self._ids)} when the model "
                f"was offloaded: {_REMEDY}"
            )
        for index, (group, ids) in enumerate(zip(param_groups, self._ids, strict=True)):
            present = _ids_of(group)
            if present != ids and set(present) != set(ids):
                raise StateError(
                    f"optimizer.param_groups[{index}]: {_difference(group, ids, name_of)}: {_REMEDY}"
                )


_REMEDY = (
    "groups keep their parameters and their order. requires_grad_(False) ends the training of a parameter; for other "
    "groups call restore_model(), then offload() with an optimizer that has them"
)


def _ids_of(group: Mapping[str, Any]) -> list[int]:
    return list(map(id, group["params"]))


def _difference(group: Mapping[str, Any], ids: Sequence[int], name_of: Callable[[int], str | None]) -> str:
    params: list[torch.Tensor] = list(group["params"])
    before, present = set(ids), set(map(id, params))
    gone = next((one for one in ids if one not in present), None)
    if gone is not None:
        return f"{name_of(gone)} was in it when the model was offloaded and is not now"
    added = next(param for param in params if id(param) not in before)
    name = name_of(id(added)) or f"a parameter of shape {tuple(added.shape)}"
    return f"{name} was not in it when the model was offloaded and is now"
