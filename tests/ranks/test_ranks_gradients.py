"""Plain loops over several ranks: `param.grad` means what it means in torch, and is the mean over the ranks."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import offloadzero
from offloadzero.ranks.channel import Channel
from tests.support.cases import IN_FULL
from tests.support.ranks import Found, run_in_turn, run_ranks
from tests.support.sharded import (
    OddModel,
    config_of,
    digest,
    engine_of,
    make_odd_model,
    micro_batch,
    said_of,
)

NUM_STEPS = 3 if IN_FULL else 2
NUM_MICRO = 2
MAX_NORM = 0.05
CASES = (
    (0, "resident"),
    (3, "resident"),
    (1, "host"),
    (3, "nvme"),
)  # the first edit alone where all is resident

Edit = Callable[[OddModel, torch.optim.Optimizer], list[float]]


def with_gradients(model: nn.Module) -> Iterator[nn.Parameter]:
    return (param for param in model.parameters() if param.grad is not None)


def clip(model: OddModel, _: torch.optim.Optimizer) -> list[float]:
    return [float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))]


def clip_values(model: OddModel, _: torch.optim.Optimizer) -> list[float]:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return []


def look(model: OddModel, _: torch.optim.Optimizer) -> list[float]:
    grads = [param.grad for param in with_gradients(model) if param.grad is not None]
    rows = [[float(grad.abs().max()), float(grad.view(-1)[-1]), float(grad.norm(1))] for grad in grads]
    return [number for row in rows for number in row]


def square(model: OddModel, _: torch.optim.Optimizer) -> list[float]:
    for param in with_gradients(model):
        assert param.grad is not None
        param.grad.mul_(param.grad.abs()).mul_(3.0)
    return [float(model.narrow.weight.grad.norm())] if model.narrow.weight.grad is not None else []


def add_noise(model: OddModel, _: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    for param in with_gradients(model):
        assert param.grad is not None
        param.grad.add_(torch.randn(param.shape, generator=generator), alpha=1e-3)
    return clip(model, _)


def assign(model: OddModel, _: torch.optim.Optimizer) -> list[float]:
    for param in with_gradients(model):
        assert param.grad is not None
        param.grad = param.grad.detach().clone() * 0.5
    model.unused.grad = torch.full_like(model.unused, 0.25)
    return clip(model, _)


def drop_some(model: OddModel, _: torch.optim.Optimizer) -> list[float]:
    model.wide.weight.grad = None
    model.blocks[0].norm.weight.grad = None
    return clip(model, _)


def make_zero(model: OddModel, _: torch.optim.Optimizer) -> list[float]:
    for param in with_gradients(model.blocks):
        assert param.grad is not None
        param.grad.zero_()
    return clip(model, _)


def keep_zeros(model: OddModel, optimizer: torch.optim.Optimizer) -> list[float]:
    """Step twice: with the gradients, and with zeros that momentum moves weights by."""
    found = clip(model, optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return [*found, *clip(model, optimizer)]


EDITS: tuple[Edit, ...] = (
    clip,
    clip_values,
    look,
    square,
    add_noise,
    assign,
    drop_some,
    make_zero,
    keep_zeros,
)


def run_loop(
    model: OddModel, optimizer: torch.optim.Optimizer, edit: Edit, rank: int, world_size: int
) -> tuple[list[float], list[float]]:
    """The losses of this rank's micro batches, and the numbers of the edits, of a plain loop."""
    losses, numbers = [], []
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            loss = model(micro_batch(step * NUM_MICRO + micro, rank, world_size)) / NUM_MICRO
            loss.backward()
            losses.append(loss.item())
        numbers += edit(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return losses, numbers


def loops(rank: int, world_size: int, stage: int, placement: str, directory: str) -> dict[str, Any]:
    """By edit: losses, numbers and hashes of the weights."""
    config = config_of(placement, stage, Path(directory), world_size=world_size)
    del config["gradient_clipping"], config["optimizer"]
    if placement == "nvme":
        config["offloadzero"]["placement"] = dict.fromkeys(("param", "states", "grad"), "nvme")
    found = {}
    for edit in EDITS if placement in ("host", "nvme") else EDITS[:1]:
        plain = make_odd_model()
        model, optimizer = offloadzero.offload(
            plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), copy.deepcopy(config)
        )
        losses, numbers = run_loop(plain, optimizer, edit, rank, world_size)
        found[edit.__name__] = [losses, numbers, digest(model.state_dict())]
        optimizer.close()
    return found


@pytest.fixture(scope="module")
def in_torch() -> dict[str, tuple[list[float], list[float]]]:
    """The same loops of one process on the global batches, without this library."""
    found = {}
    for edit in EDITS:
        model = make_odd_model()
        found[edit.__name__] = run_loop(
            model, torch.optim.AdamW(model.parameters(), lr=3e-3), edit, rank=0, world_size=1
        )
    return found


@pytest.fixture(scope="module")
def by_case(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("loops")
    found = {}
    for stage, placement in CASES:
        own = directory / f"{stage} {placement}"
        found[stage, placement] = run_ranks(loops, 2, own, 2, stage, placement, str(own))
    return found


@pytest.mark.parametrize("edit", [edit.__name__ for edit in EDITS])
def test_a_plain_loop_over_ranks_gives_the_numbers_of_torch(
    edit: str,
    by_case: dict[tuple[int, str], list[dict[str, Any]]],
    in_torch: dict[str, tuple[list[float], list[float]]],
) -> None:
    losses, numbers = in_torch[edit]
    for case, by_rank in by_case.items():
        if edit not in by_rank[0]:
            continue
        means = [sum(both) / 2 for both in zip(*(of_rank[edit][0] for of_rank in by_rank), strict=True)]
        assert means == pytest.approx(losses, rel=1e-5), case
        for of_rank in by_rank:
            assert of_rank[edit][1] == pytest.approx(numbers, rel=2e-4, abs=1e-6), case
            assert of_rank[edit][1:] == by_rank[0][edit][1:], case
    assert edit != clip.__name__ or by_case[3, "resident"][0][edit] == by_case[3, "nvme"][0][edit]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The functions below, one after the other in the same processes."""
    works = (
        clip_by_config,
        step_again,
        edit_otherwise,
        depart_in_reads,
        use_before_its_time,
        overflow,
        read_in_a_mesh,
    )
    return run_in_turn(works, 2, tmp_path_factory.mktemp("gradients"))


def clip_by_config(rank: int, directory: str) -> dict[str, list[float]]:
    """Norms and losses of an engine that clips, and of one whose script does."""
    found = {}
    for by_script in (False, True):
        config = config_of("nvme", 3, Path(directory), world_size=2, accumulation=NUM_MICRO)
        config["gradient_clipping"] = 0.0 if by_script else MAX_NORM
        engine = engine_of(config)
        numbers = []
        for seed in range(NUM_STEPS * NUM_MICRO):
            loss = engine(micro_batch(seed, rank, 2))
            engine.backward(loss)
            if by_script and engine.is_gradient_accumulation_boundary():
                numbers += clip(engine.module, engine.optimizer)
            engine.step()
            numbers.append(loss.item())
            if not by_script and (seed + 1) % NUM_MICRO == 0:
                numbers.insert(-1, engine.get_global_grad_norm())
        found[str(by_script)] = numbers
        engine.close()
    return found


def test_a_script_clips_as_the_engine_does(found: Found) -> None:
    for numbers in found["clip_by_config"]:
        assert numbers["True"] == pytest.approx(numbers["False"], rel=1e-5)


# --- steps with the same gradients ---


def step_again(rank: int, directory: str) -> dict[str, dict[str, str]]:
    """The weights after three steps with one backward's gradients, by stage and by how fast new weights are sent."""
    found = {}
    for stage, placement in ((1, "host"), (1, "resident"), (3, "host")):
        for is_slow in (False, True):
            config = config_of(placement, stage, Path(directory), world_size=2)
            del config["gradient_clipping"], config["optimizer"]
            model = make_odd_model()
            _, optimizer = offloadzero.offload(model, torch.optim.SGD(model.parameters(), lr=3e-3), config)
            model(micro_batch(0, rank, 2)).backward()
            with pytest.MonkeyPatch.context() as patch:
                if is_slow:
                    patch.setattr(type(optimizer.runtime.group.updates), "all_gather", _gather_late)
                for _ in range(3):
                    optimizer.step()
                    if not is_slow:
                        model.state_dict()  # waits
                found[f"{stage} {placement} {'slow' * is_slow}"] = digest(model.state_dict())
            optimizer.close()
    return found


def _gather_late(channel: Channel, whole: torch.Tensor, label: str) -> None:
    """Take long from the first byte that is read to the last one that is written."""
    gathered = whole.clone()
    _all_gather(channel, gathered, label)
    time.sleep(0.02)
    whole.copy_(gathered)


_all_gather = Channel.all_gather


def test_a_second_step_with_the_same_gradients_comes_after_the_first_ones_weights_are_sent(
    found: Found,
) -> None:
    for weights in found["step_again"]:
        for name in ("1 host ", "1 resident ", "3 host "):
            assert weights[f"{name}slow"] == weights[name], name


# --- steps without gradients ---


def step_without(rank: int, world_size: int, directory: str) -> list[list[float]]:
    """The loss scale after each step of a plain loop, whether it was applied, and its norm."""
    config = config_of("host", 3, Path(directory), world_size=world_size)
    del config["gradient_clipping"], config["optimizer"]
    config["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    model = make_odd_model()
    _, optimizer = offloadzero.offload(model, torch.optim.SGD(model.parameters(), lr=3e-3), config)
    found = []
    for has_gradients in (True, False, False, True):
        if has_gradients:
            optimizer.scale(model(micro_batch(0, rank, world_size))).backward()
        optimizer.step()
        coordinator = optimizer.runtime.coordinator
        found.append([optimizer.loss_scale, coordinator.was_applied(), coordinator.grad_norm() > 0])
        optimizer.zero_grad()
    optimizer.close()
    return found


def test_a_step_without_gradients_leaves_the_loss_scale_to_those_that_have_them(tmp_path: Path) -> None:
    expected = [[16.0, True, True], [16.0, False, False], [16.0, False, False], [32.0, True, True]]
    assert step_without(0, 1, str(tmp_path)) == expected
    assert run_ranks(step_without, 2, tmp_path, 2, str(tmp_path)) == [expected] * 2


# --- departures ---


def edit_otherwise(rank: int, directory: str) -> dict[str, str]:
    """What the step says where the ranks have edited differently, by edit."""
    departures: dict[str, Callable[[nn.Parameter], object]] = {
        "scaled": lambda param: param.grad.mul_(0.25 + 0.25 * rank),  # type: ignore[union-attr]
        "written": lambda param: param.grad.add_(torch.full((17,), 1e-3 * rank)),  # type: ignore[union-attr]
        "dropped": lambda param: setattr(param, "grad", None if rank else param.grad),
        "zeroed": lambda param: param.grad.zero_() if rank else None,  # type: ignore[union-attr]
        "assigned": lambda param: setattr(param, "grad", torch.full((17,), 1.0 * rank)),
    }
    found = {}
    for name, depart in departures.items():
        engine = engine_of(config_of("host", 3, Path(directory), world_size=2))
        engine.backward(engine(micro_batch(0, rank, 2)))
        depart(engine.module.blocks[0].norm.weight)

        def step(engine: offloadzero.Engine = engine) -> None:
            engine.step()
            engine.synchronize()

        found[name] = said_of(step)
        engine.close()
    return found


def test_ranks_that_edit_otherwise_stop_at_the_step(found: Found) -> None:
    for by_edit in found["edit_otherwise"]:
        for name, said in by_edit.items():
            assert "step 1: the scripts of ranks [1] have written other values" in said, name


def depart_in_reads(rank: int, directory: str) -> dict[str, str]:
    """What the reads of gradients say, by how the ranks read."""
    reads: dict[str, tuple[Callable[[OddModel], Any], Callable[[OddModel], Any]]] = {
        "another": (lambda model: model.narrow.weight.grad.sum(), lambda model: model.wide.weight.grad.sum()),
        "norm": (lambda model: model.wide.weight.grad.sum(), lambda model: model.wide.weight.grad.norm()),
        "weight": (lambda model: model.wide.weight.grad.sum(), lambda model: model.wide.weight.sum()),
    }
    found = {}
    for name, by_rank in reads.items():
        engine = engine_of(config_of("host", 3, Path(directory), world_size=2))
        engine.backward(engine(micro_batch(0, rank, 2)))
        grad = engine.module.emb.weight.grad
        grad.norm()  # all gradients are home then, so no other collective is told of the end
        grad.add_(1.0)  # and the norms are asked for anew
        found[name] = said_of(functools.partial(by_rank[rank], engine.module))
        engine.close()
    return found


def test_ranks_that_read_otherwise_are_told_so(found: Found) -> None:
    texts = {
        "another": "rank 0 reads narrow.weight (grad), rank 1 reads wide.weight (grad)",
        "norm": "rank 0 reads wide.weight (grad), rank 1 asks for the norms of the gradients of ",
        "weight": "rank 0 reads wide.weight (grad), rank 1 reads wide.weight (param)",
    }
    for rank, said in enumerate(found["depart_in_reads"]):
        for name, text in texts.items():
            assert said[name].startswith(f"StateError: {text}")
            assert f"this is rank {rank}" in said[name]


def use_before_its_time(rank: int, directory: str) -> dict[str, str]:
    """What is said of a read in a hook, and of a gradient that was assigned before a backward."""
    found = {}
    config = config_of("host", 3, Path(directory), world_size=2)
    model = make_odd_model()
    weight = model.wide.weight
    _, optimizer = offloadzero.offload(model, torch.optim.AdamW(model.parameters()), config)
    weight.register_hook(lambda _: found.update(hook=said_of(lambda: model.narrow.weight.grad.norm())))
    model(micro_batch(0, rank, 2)).backward()
    weight.grad = own = torch.ones_like(weight)
    model(micro_batch(1, rank, 2)).backward()
    assert weight.grad is own
    found["assigned"] = said_of(optimizer.step)
    optimizer.zero_grad()
    model(micro_batch(1, rank, 2)).backward()
    found["dropped"] = said_of(optimizer.step)
    optimizer.close()
    return found


def test_gradients_of_one_rank_are_in_no_step(found: Found) -> None:
    for said in found["use_before_its_time"]:
        assert said["hook"].startswith(
            "StateError: narrow.weight.grad: over several ranks a gradient is the mean"
        )
        assert said["assigned"].startswith(
            "StateError: wide.weight.grad was assigned before a backward, which has added this rank's gradient"
        )
        assert said["dropped"] == "nothing"


def read_in_a_mesh(_: int, directory: str) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    engine = engine_of(config_of("host", 3, Path(directory)), mpu=mesh)
    engine.backward(engine(micro_batch(0, 0, 1)))
    said = said_of(lambda: engine.module.wide.weight.grad.norm().item())
    engine.close()
    return said


def test_in_a_mesh_gradients_are_not_read(found: Found) -> None:
    for said in found["read_in_a_mesh"]:
        assert said.startswith("StateError: wide.weight.grad: in a mesh gradients are reduced unit by unit")


# --- norms of what is not finite ---


def overflow(rank: int, directory: str) -> list[Any]:
    """A gradient that is not finite on one rank's part alone."""
    config = config_of("host", 3, Path(directory), world_size=2)
    config["offloadzero"]["update"] = {"on_nonfinite": "skip"}
    engine = engine_of(config)
    engine.backward(engine(micro_batch(0, rank, 2)))
    spoiled = torch.zeros_like(engine.module.wide.weight)
    spoiled[-1, -1] = math.inf
    engine.module.wide.weight.grad += spoiled
    norm = float(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0))
    engine.step()
    applied = engine.was_step_applied()
    engine.close()
    return [norm, applied]


def test_what_is_not_finite_on_one_rank_is_so_for_all(found: Found) -> None:
    for norm, applied in found["overflow"]:
        assert norm == math.inf
        assert not applied
