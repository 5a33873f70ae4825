"""torch.compile of an offloaded model: the compiler sees the model's own operations, and nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offloadzero
from tests.support.plain_form import plain_steps
from tests.support.tiny import VOCABULARY, Block, TinyModel, settings, tokens

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
        losses = plain_steps(forward, optimizer, range(NUM_STEPS))
        optimizer.close()
        return losses

    expected = trained(is_compiled=False)
    assert trained(is_compiled=True) == expected
    # The block's whole forward, for all blocks the same one, and what follows the last unit.
    assert len(graphs) == 2


class OuterReader(nn.Module):
    """A model whose own forward reads weights of its children, which are units of their own."""

    def __init__(self, read: str, width: int = 48) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        self.read = read

    def by_embedding(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.emb.weight)

    def logits(self, hidden: torch.Tensor) -> Any:
        weight = self.head.weight
        match self.read:
            case "tied head":
                return F.linear(hidden, self.emb.weight)
            case "in a method":
                return 2 * self.by_embedding(hidden)
            case "a view":
                rows = self.emb.weight[:-1]
                return F.linear(2 * hidden, rows)
            case "detached":
                value = weight.detach()
                return F.linear(2 * hidden, value) + self.head(hidden)
            case "data":
                value = weight.data
                return F.linear(2 * hidden, value) + self.head(hidden)
            case "dtype, device and shape":
                hidden = hidden.to(self.head.weight.dtype).to(self.head.weight.device)
                return self.head(hidden.reshape(-1, hidden.shape[1], self.head.weight.shape[1]))
            case "mean":
                return self.head(hidden + self.head.weight.mean())
            case "without gradient":
                with torch.no_grad():
                    norm = self.head.weight.norm()
                return self.head(hidden * norm)
            case "every parameter":
                squares = sum((param * param).sum() for param in self.parameters())
                return self.head(hidden) + 1e-3 * squares
        raise AssertionError(self.read)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.logits(hidden)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten() % logits.shape[-1])


READS = (
    "tied head",
    "in a method",
    "a view",
    "detached",
    "data",
    "dtype, device and shape",
    "mean",
    "without gradient",
    "every parameter",
)


def losses_of_outer_reader(
    directory: Path, read: str, placement: str, when: str, backend: Any
) -> list[float]:
    torch.compiler.reset()
    torch.manual_seed(1)
    forward: Any = OuterReader(read)
    if when == "before":
        forward = torch.compile(forward, backend=backend)
    elif when == "in place":
        forward.compile(backend=backend)
    optimizer: Any = torch.optim.AdamW(forward.parameters(), lr=1e-2, eps=1e-5)
    if placement != "plain":
        config = settings(directory, placement=placement, bf16=None, optimizer=None)
        forward, optimizer = offloadzero.offload(forward, optimizer, config)
    if when == "after":
        forward = torch.compile(forward, backend=backend)
    losses = plain_steps(forward, optimizer, range(NUM_STEPS))
    if placement != "plain":
        optimizer.close()
    return losses


@pytest.mark.parametrize("read", READS)
@pytest.mark.usefixtures("no_recompiles")
def test_forward_that_reads_weights_of_other_units(tmp_path: Path, read: str) -> None:
    """A graph ends at the read, which takes the present value: no step finds a constant of an earlier one."""
    plain = losses_of_outer_reader(tmp_path, read, "plain", "never", None)
    compiled = losses_of_outer_reader(tmp_path, read, "host", "after", "aot_eager")
    assert compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("when", ["before", "after", "in place"])
@pytest.mark.parametrize(("placement", "backend"), [("device", "eager"), ("nvme", "aot_eager")])
@pytest.mark.usefixtures("no_recompiles")
def test_tied_head_by_a_read(tmp_path: Path, when: str, placement: str, backend: str) -> None:
    plain = losses_of_outer_reader(tmp_path, "tied head", "plain", "never", None)
    compiled = losses_of_outer_reader(tmp_path, "tied head", placement, when, backend)
    assert compiled == pytest.approx(plain, rel=1e-5)


def test_compiled_again_while_gradients_are_away(tmp_path: Path) -> None:
    """A batch of another length between two steps: the compiler sees parameters whose gradients have landed."""

    def trained(*, is_compiled: bool) -> list[float]:
        torch.compiler.reset()
        torch.manual_seed(1)
        plain = TinyModel()
        config = settings(tmp_path, placement="host", bf16=None, optimizer=None)
        model, optimizer = offloadzero.offload(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), config)
        forward: Any = torch.compile(model, backend="aot_eager") if is_compiled else model
        losses = []
        for number, length in enumerate((9, 7, 8, 6)):
            loss = forward(tokens(number, length=length))
            loss.backward()
            losses.append(loss.item())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
        return losses

    expected = trained(is_compiled=False)
    assert trained(is_compiled=True) == pytest.approx(expected, rel=1e-5)
    torch.compiler.reset()
