"""Tensor-parallel ranks that keep a part each of the inputs of checkpointed units: the same bits, half the bytes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offloadzero
from offloadzero.config import PARTITION_KEY
from offloadzero.core.constants import GRID_BYTES
from offloadzero.core.segments import TierName
from tests.support import faults, meshes
from tests.support.ranks import Found, run_in_turn
from tests.support.sharded import digest, said_of
from tests.support.training import merge

TIMEOUT_S = 100.0
IS_LONG = os.environ.get("OFFLOADZERO_TEST_RANKS") == "all"
NUM_BLOCKS, ROWS, LENGTH = 5, 2, 64  # rows of one rank
NUM_STEPS, NUM_MICRO = 2, 2
STAYING = 1  # the last input, which is on the device when backward begins
INPUT_BYTES = ROWS * LENGTH * meshes.WIDTH * 4
WHOLE_ELEMENTS = 1027  # which no two ranks divide, and more than stays on the device
WHOLE_BYTES = 2 * GRID_BYTES  # on pages
PARTITIONED: dict[str, Any] = {"activation_checkpointing": {"partition_activations": True}}
SLOW_S = 0.02  # of each copy
LATE_S = 0.5  # within which a small input comes back from its file


class _Block(meshes.Block):
    """A block that gets a tensor beside its input; it counts the calls of all, and one of them may take long."""

    num_calls: ClassVar[int] = 0
    slow_call: ClassVar[int] = 0

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        _Block.num_calls += 1
        if _Block.num_calls == _Block.slow_call:
            time.sleep(LATE_S)
        return super().forward(x if shift is None else x + shift[0])


class _Model(nn.Module):
    """Five blocks of which the ranks of `group` have a part each. `shifts`: all get a tensor that is kept whole."""

    def __init__(self, group: Any, *, shifts: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(meshes.VOCABULARY, meshes.WIDTH)
        self.blocks = nn.ModuleList(_Block(group) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(meshes.WIDTH, meshes.VOCABULARY)
        self.dropout = 0.0  # of what the blocks get
        self.shifts = shifts

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.emb(tokens), self.dropout)
        beside = [x.mean() * torch.ones(WHOLE_ELEMENTS)] if self.shifts else []
        for block in self.blocks:
            x = block(x, *beside)
        return self.head(x)


def mesh_of(*names: str, shape: tuple[int, int] = (2, 2)) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def config_of(tier: str, directory: str, *, stage: int = 3, **over: Any) -> dict[str, Any]:
    base = meshes.config_of("host", stage, directory, num_ranks=2)
    del base["train_batch_size"]
    return merge(merge(base, {"offloadzero": {"activation_checkpoints": {"tier": tier}}}), over)


def engine_of(config: dict[str, Any], mesh: Any, *, own_group: bool = True, **which: Any) -> Any:
    torch.manual_seed(0)
    model = _Model(mesh.get_group("tp") if own_group else None, **which)
    return offloadzero.initialize(model=model, config=config, mpu=mesh)[0]


def loss_of(engine: Any, number: int) -> Tensor:
    """Of a micro batch, which the tensor-parallel ranks have in common."""
    seed = 2 * number + engine.get_data_parallel_rank()
    tokens = torch.randint(
        0, meshes.VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    return meshes.loss_of(engine(tokens[:, :-1]), tokens[:, 1:])


def train(engine: Any) -> list[Any]:
    """The losses, the norm and the bits of the weights."""
    losses = []
    for number in range(NUM_STEPS * NUM_MICRO):
        loss = loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return [losses, engine.get_global_grad_norm(), digest(dict(engine.module.state_dict()))]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All functions of this file, one after the other in the same processes."""
    works = (
        train_in_parts,
        train_planned,
        train_at_other_speeds,
        train_on_other_inputs,
        depart,
        start_with_other_keys,
    )
    return run_in_turn(works, 4, tmp_path_factory.mktemp("partitioned"), timeout_s=TIMEOUT_S)


# --- numbers and bytes ---

TIERS = ("device", "host", "nvme")
STAGES = (3, 0) if IS_LONG else (3,)


def train_in_parts(_: int, directory: str) -> dict[str, Any]:
    """By stage, tier and whether inputs are in parts: what training comes to, bytes at home, bytes gathered."""
    mesh = mesh_of("dp", "tp")
    found: dict[str, Any] = {}
    for stage in STAGES:
        for tier in TIERS:
            for over in ({}, PARTITIONED):
                engine = engine_of(config_of(tier, directory, stage=stage, **over), mesh, shifts=True)
                numbers = train(engine)
                store = engine._runtime.activations
                taken = 0 if store._home is None else store._home.space.reserved()[TierName(tier)]
                sent = {
                    name: [*count] for name, count in engine.collectives().items() if "activation" in name
                }
                found[f"{stage} {tier} {bool(over)}"] = [numbers, taken, sent]
                engine.close()
    return found


def test_bits_are_those_with_whole_inputs(found: Found) -> None:
    for of_rank in found["train_in_parts"]:
        for stage in STAGES:
            expected = of_rank[f"{stage} device False"][0]
            for tier in TIERS:
                for parts in (False, True):
                    assert of_rank[f"{stage} {tier} {parts}"][0] == expected, (stage, tier, parts)


def test_each_of_two_ranks_keeps_half(found: Found) -> None:
    whole = NUM_BLOCKS * INPUT_BYTES + WHOLE_BYTES
    for of_rank in found["train_in_parts"]:
        assert of_rank["3 device False"][1] == 0
        for tier in TIERS:
            assert of_rank[f"3 {tier} True"][1] == whole - NUM_BLOCKS * INPUT_BYTES // 2
        for tier in TIERS[1:]:
            assert of_rank[f"3 {tier} False"][1] == whole


def test_what_is_gathered_is_counted(found: Found) -> None:
    num_gathers = NUM_STEPS * NUM_MICRO * (NUM_BLOCKS - STAYING)
    for of_rank in found["train_in_parts"]:
        for tier in TIERS:
            assert of_rank[f"3 {tier} False"][2] == {}
            sent = of_rank[f"3 {tier} True"][2]
            assert sent["activations all-gather"] == [num_gathers, num_gathers * INPUT_BYTES]
            assert sent["activation_orders all-to-all"][0] == num_gathers


def train_planned(_: int, directory: str) -> dict[str, Any]:
    """By tier: the bytes of homes that are planned and those that are taken without a plan; the error of too few."""
    mesh = mesh_of("dp", "tp")
    found: dict[str, Any] = {}
    for tier in TIERS[1:]:
        given = []
        for input_bytes in (None, INPUT_BYTES):
            own = {"offloadzero": {"activation_checkpoints": {"input_bytes": input_bytes}}}
            engine = engine_of(config_of(tier, directory, **PARTITIONED, **own), mesh)
            numbers = train(engine)
            runtime = engine._runtime
            lines = {(line.tier.value, line.what): line.num_bytes for line in runtime.plan.lines}
            taken = runtime.activations.reserved()
            planned = lines.get((tier, "activation checkpoints"), 0)
            staging = [lines.get(("host", "activation staging"), 0), taken.get(TierName.HOST, 0)]
            given.append([numbers, planned, taken.get(TierName(tier), 0), staging])
            engine.close()
        found[tier] = given
        less = {"offloadzero": {"activation_checkpoints": {"input_bytes": INPUT_BYTES - GRID_BYTES}}}
        engine = engine_of(config_of(tier, directory, **PARTITIONED, **less), mesh, shifts=True)
        found[f"less {tier}"] = said_of(lambda: loss_of(engine, 0))  # noqa: B023
        said_of(engine.close)
    return found


def test_what_is_planned_is_what_is_taken(found: Found) -> None:
    homes = NUM_BLOCKS * INPUT_BYTES // 2
    for of_rank in found["train_planned"]:
        for tier in TIERS[1:]:
            grown, planned = of_rank[tier]
            assert grown[:3] == [planned[0], 0, homes]
            assert planned[1:3] == [homes, 0]
            assert of_rank[f"less {tier}"].startswith("BudgetError: blocks."), tier
        (_, _, _, (_, grown)), (_, _, _, (staged, _)) = of_rank["nvme"]
        assert grown == staged == 4 * INPUT_BYTES // 2


# --- what goes by time ---


def train_at_other_speeds(rank: int, directory: str) -> dict[str, Any]:
    """What training comes to where copies are slow on one rank, by direction."""
    mesh = mesh_of("dp", "tp")
    found: dict[str, Any] = {}
    for lane in (None, "activation-d2h", "activation-h2d"):
        slow = faults.delays("lane.launch", SLOW_S, about=lane) if lane and rank == 1 else nullcontext()
        with slow:
            engine = engine_of(config_of("host", directory, **PARTITIONED), mesh)
            found[str(lane)] = [said_of(lambda: found.update(numbers=train(engine)))]  # noqa: B023
            found[str(lane)] += [found.pop("numbers", None)]
            said_of(engine.close)
    return found


def test_ranks_of_other_speeds_gather_the_same(found: Found) -> None:
    for of_rank in found["train_at_other_speeds"]:
        assert of_rank["None"][0] == "nothing"
        for said, numbers in of_rank.values():
            assert [said, numbers] == of_rank["None"]


# --- ranks that differ ---


@contextmanager
def _seed_of(rank: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        yield


def train_on_other_inputs(rank: int, directory: str) -> dict[str, Any]:
    """What is said where what blocks get differs by rank, in parts and not, from the first step on and later.

    And after how many calls of blocks; the first one in backward takes long on some ranks.
    """
    mesh = mesh_of("dp", "tp", shape=(1, 4))
    found = {}
    for name, over in (("in parts", PARTITIONED), ("later", PARTITIONED), ("whole", {})):
        engine = engine_of(config_of("nvme", directory, **over), mesh)
        if name == "later":
            train(engine)
        engine.module.dropout = 0.3
        _Block.num_calls, _Block.slow_call = 0, 0 if rank % 2 else NUM_BLOCKS + 1
        with _seed_of(rank == 2):
            found[name] = [said_of(lambda: train(engine)), _Block.num_calls]  # noqa: B023
        said_of(engine.close)
    return found


def _in_own_words(all_said: list[str]) -> list[str]:
    """What each rank says itself.

    One that comes to the line later may find a failed rank's text before it, where it adds up the gradients of the
    block above, or fetches the inputs of the one below: it says that text then. The first to fail has found nothing.
    """
    own = [_FOUND_BESIDE.sub("", said) for said in all_said]
    assert any(map(str.__eq__, own, all_said)), all_said
    return own


_FOUND_BESIDE = re.compile(
    r"^RankError: blocks\.\d(\.grad|: the comparison of the ranks' inputs): "
    r"the [a-z-]+ \([^)]*\) is given up: rank \d: (?!StateError: it has closed)"
)


def test_inputs_that_differ_are_an_error_on_all_ranks(found: Found) -> None:
    """At one line: the model's own collectives, in each block, wait for none that has stopped before."""
    by_rank = found["train_on_other_inputs"]
    for of_rank in by_rank:
        assert of_rank["whole"][0] == "nothing"
    for name in ("in parts", "later"):
        all_said, all_calls = zip(*(of_rank[name] for of_rank in by_rank), strict=True)
        # Those whose inputs are on the device have been computed again.
        assert all_calls == (NUM_BLOCKS + 2,) * len(by_rank)
        for said in _in_own_words([*all_said]):
            assert said.startswith(
                f"StateError: blocks.2: {PARTITION_KEY}: an input of this checkpointed unit"
            )
            assert "is not the same on the tensor-parallel ranks [0, 1, 2, 3]: ranks [2] have another" in said


def depart(rank: int, directory: str) -> dict[str, str]:
    """What is said where half of the ranks go on without a backward, and where one ends; their blocks are undivided."""
    mesh = mesh_of("dp", "tp", shape=(1, 4))
    found = {}
    for name, departs in (("goes on", rank % 2 == 1), ("ends", rank == 3)):
        engine = engine_of(config_of("host", directory, stage=1, **PARTITIONED), mesh, own_group=False)

        def work() -> None:
            for number in range(2):
                loss = loss_of(engine, number)  # noqa: B023
                if not departs or (name == "goes on" and number == 1):  # noqa: B023
                    engine.backward(loss)  # noqa: B023
                elif name == "ends":  # noqa: B023
                    engine.close()  # noqa: B023
                    return

        found[name] = said_of(work)
        said_of(engine.close)
    return found


def test_a_rank_that_departs_is_an_error_on_all_others(found: Found) -> None:
    goes_on, ends = ([of_rank[name] for of_rank in found["depart"]] for name in ("goes on", "ends"))
    for said in _in_own_words(goes_on):
        assert said.startswith("StateError: blocks.2: tensor-parallel ranks, [0, 1, 2, 3], compute ")
        assert "in different orders: ranks [1, 3] in another order than rank 0" in said
    *others, closed = ends
    assert closed == "nothing"
    for said in _in_own_words(others):
        assert said.startswith("RankError: blocks.2: the comparison of the ranks' inputs: ")
        assert "rank 3: StateError: it has closed its engine" in said


def start_with_other_keys(rank: int, directory: str) -> dict[str, str]:
    """What is said at the start, by what is wrong there."""
    mesh = mesh_of("dp", "tp")

    def start(over: dict[str, Any], mpu: Any) -> str:
        return said_of(lambda: engine_of(config_of("host", directory, **over), mpu, own_group=False).close())

    class _OfOne:
        """As if there were one place along the tensor-parallel axis, as an mpu says it."""

        get_group = mesh.get_group
        get_data_parallel_group = staticmethod(lambda: mesh.get_group("dp"))
        get_tensor_model_parallel_rank = staticmethod(lambda: mesh.get_local_rank("tp"))
        get_tensor_model_parallel_world_size = staticmethod(lambda: 4)

    return {
        "some": start(PARTITIONED if rank != 3 else {}, mesh),
        "size": start(PARTITIONED, _OfOne),
        "right": start(PARTITIONED, mesh),
    }


def test_what_is_wrong_is_said_on_all_ranks(found: Found) -> None:
    for of_rank in found["start_with_other_keys"]:
        assert of_rank["right"] == "nothing"
        some = f"ConfigError: {PARTITION_KEY} = "
        assert of_rank["some"].startswith(some)
        assert of_rank["some"].endswith("the same on all ranks: ranks [3] have another than rank 0")
        assert "4 tensor-parallel ranks in " in of_rank["size"]
