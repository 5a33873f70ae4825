"""Collectives of a script's own, on weights and gradients that are away: torch's numbers, or an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import offloadzero
from tests.support.ranks import run_ranks
from tests.support.sharded import OddModel, config_of, make_odd_model, micro_batch, said_of

# Newer versions of torch have other names for these functions, and warn of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

CASES = ((0, "resident"), (0, "host"), (1, "host"), (3, "nvme"))


def weight_itself(param: nn.Parameter, _: OddModel) -> Tensor:
    return param


def data(param: nn.Parameter, _: OddModel) -> Tensor:
    return param.data


def copied(param: nn.Parameter, model: OddModel) -> Tensor:
    names = {id(one): name for name, one in model.named_parameters()}
    value: Tensor = model.state_dict()[names[id(param)]]
    return value


def gradient(param: nn.Parameter, _: OddModel) -> Tensor:
    assert param.grad is not None
    return param.grad


def reduce(tensor: Tensor, _: int) -> None:
    dist.all_reduce(tensor)


def reduce_later(tensor: Tensor, _: int) -> None:
    work: Any = dist.all_reduce(tensor, async_op=True)
    work.wait()


def reduce_together(tensor: Tensor, _: int) -> None:
    distributed_c10d.all_reduce_coalesced([tensor])


def scatter(tensor: Tensor, rank: int) -> None:
    wholes = [2.0 * tensor.detach().clone()] * 2
    dist.scatter(tensor, wholes if rank == 1 else None, src=1)


def gather_halves(tensor: Tensor, rank: int) -> None:
    """Both halves of the tensor, as each rank has doubled its own."""
    halves = tensor.detach().chunk(2)
    dist.all_gather([*halves], 2.0 * halves[rank].clone())


def traced(tensor: Tensor, _: int) -> None:
    own = tensor.detach()
    torch.ops._c10d_functional.all_reduce_(own, "sum", dist.group.WORLD.group_name)  # type: ignore[union-attr]


DOUBLING: tuple[Callable[[Tensor, int], None], ...] = (
    reduce,
    reduce_later,
    reduce_together,
    scatter,
    gather_halves,
    traced,
)
# Functions of which older versions of torch do not tell.
CALLED: dict[Callable[[Tensor, int], None], Any] = {
    reduce_together: distributed_c10d.all_reduce_coalesced,
    scatter: dist.scatter,
}
OF_COPIES = DOUBLING[:4]  # views of copies, and operations below dist's functions, are not seen


def is_told(function: Any) -> bool:
    """Whether this torch tells `__torch_function__` of a function. Of another, what would be lost is an error."""
    return "handle_torch_function" in inspect.unwrap(function).__code__.co_names


def is_refused(find: Callable[..., Tensor], double: Callable[[Tensor, int], None]) -> bool:
    """Whether C++ would take memory that is not the value's, or not tell of what it writes."""
    return find in (weight_itself, copied) and double in CALLED and not is_told(CALLED[double])


def offloaded(
    rank: int, world_size: int, stage: int, placement: str, directory: str
) -> tuple[Any, torch.optim.Optimizer]:
    """A model, and its optimizer, with gradients."""
    config = config_of(placement, stage, Path(directory), world_size=world_size)
    del config["gradient_clipping"], config["optimizer"]
    model: Any = make_odd_model()
    model, optimizer = offloadzero.offload(model, torch.optim.SGD(model.parameters(), lr=0.01), config)
    model(micro_batch(0, rank, world_size)).backward()
    return model, optimizer


def doubled(rank: int, world_size: int, stage: int, placement: str, directory: str) -> list[str]:
    """What did not double what it should have, and the errors."""
    model, optimizer = offloaded(rank, world_size, stage, placement, directory)
    wrong = []
    for find in (weight_itself, data, copied, gradient):
        for double in OF_COPIES if find is copied else DOUBLING:
            param = model.blocks[3].up.weight  # of an even number of rows
            before = (param.grad if find is gradient else param).detach().clone()
            factor = 2.0
            with torch.no_grad():
                if is_refused(find, double):
                    factor = 1.0
                    if "that a collective does not tell of" not in said_of(
                        partial(double, find(param, model), rank)
                    ):
                        wrong.append(f"{find.__name__} {double.__name__}: no error")
                else:
                    double(find(param, model), rank)
            after = (param.grad if find is gradient else param).detach().clone()
            if not torch.equal(after, factor * before):
                wrong.append(f"{find.__name__} {double.__name__}")
    optimizer.step()
    optimizer.zero_grad()
    if not model(micro_batch(1, rank, world_size)).isfinite():
        wrong.append("the loss")
    optimizer.close()  # type: ignore[attr-defined]
    return wrong


@pytest.mark.parametrize(("stage", "placement"), CASES)
def test_what_collectives_write_arrives(tmp_path: Path, stage: int, placement: str) -> None:
    directory = tmp_path / "nvme"
    directory.mkdir()
    assert run_ranks(doubled, 2, tmp_path / "ranks", 2, stage, placement, str(directory)) == [[], []]


def received(rank: int, world_size: int, directory: str) -> list[str]:
    """What is said of receives into what is away."""
    model, optimizer = offloaded(rank, world_size, 0, "host", directory)
    other = 1 - rank
    said = [
        said_of(lambda: dist.recv(model.wide.weight.data, other)),
        said_of(lambda: dist.irecv(model.wide.weight.data, other)),
        said_of(lambda: dist.irecv(model.state_dict()["wide.weight"], other)),
    ]
    optimizer.close()  # type: ignore[attr-defined]
    return said


def test_a_receive_into_what_is_away_is_an_error(tmp_path: Path) -> None:
    of_a_copy = (
        "receive into a tensor of its own" if is_told(dist.irecv) else "that a collective does not tell of"
    )
    for said in run_ranks(received, 2, tmp_path / "ranks", 2, str(tmp_path)):
        assert all("receive into a tensor of its own" in text for text in said[:2]), said
        assert of_a_copy in said[2]


def taken_untold(rank: int, world_size: int, directory: str) -> list[str]:
    """What is said of collectives that write what is away, and that torch tells of what they read alone."""
    model, optimizer = offloaded(rank, world_size, 0, "host", directory)
    with torch.no_grad():
        param = model.blocks[3].up.weight
        before = param.clone()
        whole, half = before.clone(), before.chunk(2)[rank].clone()
        calls: list[Callable[[], Any]] = [
            partial(dist.all_gather, [param, whole.clone()], whole),
            partial(_all_gather, param, half),
            partial(dist.all_to_all_single, param, whole),
            partial(dist.all_to_all, [param, whole.clone()], [whole] * 2),
        ]
        said = [said_of(call) for call in calls]
        assert torch.equal(param, before)
        # A tensor of a state dict is told of each.
        state = model.state_dict()["blocks.3.up.weight"]
        for number, call in enumerate(
            (
                lambda new: dist.all_gather([state, new.clone()], new),
                lambda new: _all_gather(state, new.chunk(2)[rank].clone()),
                lambda new: dist.all_to_all_single(state, torch.cat([new.chunk(2)[rank]] * 2)),
                lambda new: dist.all_to_all([state, new.clone()], [new] * 2),
            )
        ):
            call(before + number + 1)
            assert torch.equal(state, before + number + 1)
            assert torch.equal(param, before + number + 1)
    optimizer.close()  # type: ignore[attr-defined]
    return said


def test_a_collective_that_torch_tells_nothing_of_is_an_error(tmp_path: Path) -> None:
    """An all-to-all wrote behind the one element that a parameter that is away has."""
    for said in run_ranks(taken_untold, 2, tmp_path / "ranks", 2, str(tmp_path)):
        assert len(said) == 4
        assert all("give it a tensor of its own, and copy_() the result" in text for text in said), said


def scattered(rank: int, world_size: int, directory: str) -> list[str]:
    """What is said of scatters whose sources are away, and whether clones of them arrive."""
    model, optimizer = offloaded(rank, world_size, 3, "host", directory)
    said = []
    with torch.no_grad():
        for away in (model.blocks[3].up.weight.data, model.blocks[3].up.weight.data[:4]):
            out = torch.zeros(away.shape)
            if rank == 0:  # the error comes before anything is sent
                said += [said_of(partial(dist.scatter, out, [away] * 2)) for _ in range(2)]
            whole = away.clone()
            dist.scatter(out, [whole, whole] if rank == 0 else None)
            assert torch.equal(out, whole)
            dist.scatter(away, [2.0 * whole] * 2 if rank == 0 else None)
            assert torch.equal(away.clone(), 2.0 * whole)
    optimizer.close()  # type: ignore[attr-defined]
    return said


def test_a_scatter_of_what_is_away_is_an_error(tmp_path: Path) -> None:
    """It took the wrapper's memory, which there is none of, and ended the process."""
    said, of_other = run_ranks(scattered, 2, tmp_path / "ranks", 2, str(tmp_path))
    assert len(said) == 4
    assert of_other == []
    assert all("a scatter would take the memory of its sources" in text for text in said), said
