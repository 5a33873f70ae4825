"""torch.compile of an offloaded model: the compiler sees the model's own operations, and nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from tests.support.tiny import TinyModel, settings, tokens

NUM_STEPS = 4


@pytest.fixture
def no_recompiles() -> Iterator[None]:
    """What is compiled again for another address or another unit is an error."""
    import torch._dynamo

    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(("placement", "observe"), [("host", False), ("nvme", True)])
@pytest.mark.usefixtures("no_recompiles")
def test_nothing_is_compiled_again(tmp_path: Path, placement: str, observe: bool) -> None:
    graphs: list[int] = []  # operations in each

    def count(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph

    def trained(*, is_compiled: bool) -> list[float]:
        torch.manual_seed(1)
        plain = TinyModel()
        keys: dict[str, Any] = {"observe": {"run_dir": str(tmp_path / "run")}} if observe else {}
        config = settings(tmp_path, placement=placement, **keys)
        model, optimizer = offloadzero.offload(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), config)
        forward: Any = torch.compile(model, backend=count) if is_compiled else model
        losses = []
        for number in range(NUM_STEPS):
            loss = forward(tokens(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        return losses

    expected = trained(is_compiled=False)
    assert trained(is_compiled=True) == expected
    # Of the site of each unit, and of what lies between them; those of equal blocks are one.
    assert 3 <= len(graphs) <= 8
