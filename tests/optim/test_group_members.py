"""The parameters of an optimizer's groups, and the order of the groups, are those of offload()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadzero.api.optimizer import GroupMembers
from offloadzero.errors import StateError
from tests.support.plain_form import final_weights, make_model, make_optimizer, offloaded
from tests.support.tiny import tokens

Groups = list[dict[str, Any]]


def swap(groups: Groups) -> None:
    groups[0], groups[1] = groups[1], groups[0]


def move(groups: Groups) -> None:
    groups[0]["params"].append(groups[1]["params"].pop(0))


def only_some(groups: Groups) -> None:
    groups[0]["params"] = groups[0]["params"][1:]


def add_frozen(groups: Groups) -> None:
    groups[1]["params"].append(nn.Parameter(torch.ones(3)))


REFUSED: dict[str, tuple[Callable[[Groups], object], str]] = {
    "the other way round": (lambda groups: groups.reverse(), r"param_groups\[0\]: \S+weight was in it"),
    "swapped": (swap, r"param_groups\[0\]: \S+weight was in it"),
    "one moved": (move, r"param_groups\[0\]: \S+ was not in it"),
    "only some": (only_some, r"param_groups\[0\]: \S+weight was in it"),
    "one more": (add_frozen, r"param_groups\[1\]: a parameter of shape \(3,\) was not in it"),
    "a group less": (lambda groups: groups.pop(), r"param_groups: 1 groups, where there were 2"),
    "a group more": (lambda groups: groups.append({**groups[0], "params": []}), r"param_groups: 3 groups"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_changed_are_refused_by_the_step(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    with offloaded("host", tmp_path) as (model, optimizer):
        model(tokens(0)).backward()
        kept = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        weights = final_weights(model)
        change(optimizer.param_groups)
        with pytest.raises(StateError, match=message):
            optimizer.step()
        assert all(torch.equal(value, weights[key]) for key, value in final_weights(model).items())
        optimizer.param_groups[:] = kept
        optimizer.step()
        assert not all(torch.equal(value, weights[key]) for key, value in final_weights(model).items())


class Watched(list[int]):
    """Counts how often it is looked through."""

    num_looks = 0

    def __iter__(self) -> Iterator[int]:
        self.num_looks += 1
        return super().__iter__()


def test_the_first_parameter_that_is_new_is_found_in_one_look() -> None:
    """It may be the last of a hundred thousand."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(40)]
    members = GroupMembers([{"params": params[:-1]}])
    members._ids[0] = watched = Watched(members._ids[0])
    with pytest.raises(StateError, match=r"the new one was not in it"):
        members.expect_unchanged([{"params": params}], {id(params[-1]): "the new one"}.get)
    assert watched.num_looks <= 4


def test_what_groups_may_do(tmp_path: Path) -> None:
    """Other dicts, another list of them, other options, the parameters of a group in another order."""

    def train(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        for seed in range(4):
            model(tokens(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if seed == 0:
                optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 3e-3}
            elif seed == 1:
                optimizer.param_groups = [dict(group, weight_decay=0.3) for group in optimizer.param_groups]
            else:
                optimizer.param_groups[1]["params"].reverse()
        return final_weights(model)

    plain = make_model()
    expected = train(plain, make_optimizer(plain))
    with offloaded("nvme", tmp_path) as (model, optimizer):
        for name, value in train(model, optimizer).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
