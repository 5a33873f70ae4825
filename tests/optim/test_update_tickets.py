"""Tickets of updates that each wait for the one before: only those in flight are kept, however many steps there are."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.memory.tickets import FINISHED, Finished, Promise, unfinished
from offloadzero.update.delivery import UpdateTicket
from tests.support.ranks import run_ranks
from tests.support.sharded import config_of

PLACES = ["device", "host", "nvme"]
NUM_STEPS = 40
MOST_TICKETS = 12  # those of few units, one or two steps each


def offloaded(model: nn.Module, place: str, directory: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    config = {
        "gradient_clipping": 1.0,
        "offloadzero": {
            "placement": {"param": place, "states": place},
            "nvme_path": str(directory),
            "update": {"on_nonfinite": "skip"},
        },
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return offloadzero.offload(model, optimizer, config)


def num_tickets() -> int:
    gc.collect()
    return sum(type(one) is UpdateTicket for one in gc.get_objects())


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(NUM_STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("place", PLACES)
def test_steps_that_are_skipped(place: str, tmp_path: Path) -> None:
    before = num_tickets()
    model, optimizer = offloaded(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), place, tmp_path)
    x = torch.ones(4, 8)
    x[0, 0] = float("nan")
    take_steps(model, optimizer, x)
    assert num_tickets() - before <= MOST_TICKETS
    optimizer.close()  # type: ignore[attr-defined]


class HalfUsed(nn.Module):
    """The second half of its parameters never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 64, bias=False)
        self.unused = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def train_on_a_rank(rank: int, directory: str) -> int:
    config = config_of("host", 3, Path(directory), world_size=2)
    del config["offloadzero"]["units"]
    engine, *_ = offloadzero.initialize(model=HalfUsed(), config=config)
    for _ in range(NUM_STEPS):
        engine.backward(engine(torch.full((2, 64), 1.0 + rank)).square().mean())
        engine.step()
    engine.module_state_dict()
    found = num_tickets()
    engine.close()
    return found


def test_a_rank_without_an_element_to_update(tmp_path: Path) -> None:
    """The second one keeps the half without gradients."""
    assert max(run_ranks(train_on_a_rank, 2, tmp_path, str(tmp_path))) <= MOST_TICKETS


def test_what_is_in_flight_or_has_failed_is_kept() -> None:
    under_way, failed, done, behind = Promise(), Promise(), Promise(), Promise()
    failed.fail(OSError("no such drive"))
    done.fulfil()
    behind.fulfil(under_way)
    assert [unfinished(one) for one in (under_way, failed, behind)] == [under_way, failed, behind]
    assert unfinished(done) is FINISHED
    under_way.fulfil()
    assert isinstance(unfinished(behind), Finished)
