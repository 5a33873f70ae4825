"""`GatheredParameters` over several ranks: the values and writes of one process, and the same errors on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.access.gathered import GatheredBlock, ScriptBlocks
from offloadzero.ranks import process_groups
from offloadzero.zero import GatheredParameters, safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.support.cases import IN_FULL
from tests.support.ranks import Found, RanksError, run_in_turn, run_ranks
from tests.support.sharded import OddModel, config_of, digest, engine_of, micro_batch, said_of, train

BF16 = {"bf16": {"enabled": True}}
COMPACT = {"offloadzero": {"state_layout": "compact"}, **BF16}
# By number of ranks: stage, placement, keys laid over the configuration.
CASES: dict[int, dict[str, tuple[int, str, dict[str, Any]]]] = {
    2: {
        "stage 0, host, bf16": (0, "host", BF16),
        "stage 1, nvme": (1, "nvme", {}),
        "stage 2, resident, bf16": (2, "resident", BF16),
        "stage 3, host, compact": (3, "host", COMPACT),
        "stage 3, resident": (3, "resident", {}),
        "stage 3, codes": (3, "nvme", {**BF16, "zero_optimization": {"zero_quantized_weights": True}}),
    },
    3: {
        "stage 1, host, compact": (1, "host", COMPACT),
        "stage 3, nvme, bf16": (3, "nvme", BF16),
        "stage 3, host": (3, "host", {}),
    },
}
if IN_FULL:
    CASES[2]["stage 3, nvme, bf16"] = (3, "nvme", BF16)
BRANCH_TIMEOUT_S = 4.0


def model_of(engine: offloadzero.Engine) -> OddModel:
    module = engine.module
    assert isinstance(module, OddModel)
    return module


def masters(engine: offloadzero.Engine) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(param) for name, param in model_of(engine).named_parameters()}


# --- what is read and written: as with one process ---


def edit(engine: offloadzero.Engine, *, modifier_rank: int, is_modifier: bool) -> None:
    """Write tied, frozen and small weights on one rank, and something else on the others."""
    model = model_of(engine)
    weights = [model.wide.weight, model.head.weight, model.blocks[1].up.weight, model.odd, model.scale]
    weights += [model.blocks[0].norm.bias, model.unused]
    with GatheredParameters((each for each in weights), modifier_rank=modifier_rank), torch.no_grad():
        if not is_modifier:
            for weight in weights:
                weight.fill_(torch.nan)
            return
        model.wide.weight[3, :5] = 3.0
        model.wide.weight[7].mul_(2.0)
        model.wide.weight[200] += 0.0
        model.emb.weight[5] = 0.1
        model.blocks[1].up.weight.fill_(0.125)
        model.odd.data = torch.linspace(-1.0, 1.0, 511, device=model.odd.device).to(model.odd.dtype)
        model.scale.neg_()
        model.blocks[0].norm.bias.copy_(torch.arange(17.0) / 7)


def read_and_write(
    rank: int, world_size: int, cases: dict[str, tuple[int, str, dict[str, Any]]], directory: str
) -> dict[str, Any]:
    """By case: digests of what was read, and of the masters and weights after the writes of the last rank."""
    found: dict[str, Any] = {}
    for name, (stage, placement, over) in cases.items():
        config = config_of(placement, stage, Path(directory), world_size=world_size, **over)
        engine = engine_of(config)
        model, modifier = model_of(engine), world_size - 1
        with GatheredParameters(model.parameters()):
            seen = {key: param.detach().cpu().clone() for key, param in model.named_parameters()}
        edit(engine, modifier_rank=modifier, is_modifier=rank == modifier)
        after = masters(engine)
        of_module = {key: value.clone() for key, value in engine.module.state_dict().items()}
        found[name] = {"read": digest(seen), "masters": digest(after), "weights": digest(of_module)}
        engine.save_checkpoint(f"{directory}/{stage} {placement} of {world_size}", tag="edited")
        if world_size > 1:
            found[name]["goes on"] = goes_on_as_its_twin(engine, rank, world_size, config, after)
        engine.close()
    return found


def goes_on_as_its_twin(
    engine: offloadzero.Engine,
    rank: int,
    world_size: int,
    config: dict[str, Any],
    after: dict[str, torch.Tensor],
) -> bool:
    """Whether an engine whose masters are set to these values trains to the same bits, with more edits on the way."""
    twin = engine_of(config)
    for name, param in model_of(twin).named_parameters():
        safe_set_full_fp32_param(param, after[name])
    outcomes = []
    for each in (engine, twin):
        losses = train(each, rank, world_size, num_steps=1)
        weight = model_of(each).wide.weight
        if each is engine:
            with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                weight.mul_(0.5 if rank == 0 else 3.0)
            written = safe_get_full_fp32_param(weight)
        else:
            safe_set_full_fp32_param(weight, written)
        losses += train(each, rank, world_size, num_steps=2)
        outcomes.append((losses, digest(masters(each)), each.get_global_grad_norm()))
    twin.close()
    return outcomes[0] == outcomes[1]


@pytest.mark.parametrize("world_size", CASES)
def test_values_and_writes_are_those_of_one_process(world_size: int, tmp_path: Path) -> None:
    cases = CASES[world_size]
    by_rank = run_ranks(
        read_and_write, world_size, tmp_path / "ranks", world_size, cases, str(tmp_path), timeout_s=120
    )
    expected = read_and_write(0, 1, cases, str(tmp_path))
    for found in by_rank:
        for name in cases:
            assert found[name].pop("goes on"), name
            assert found[name] == expected[name], name
    for name, (stage, placement, over) in cases.items():
        engine = engine_of(config_of(placement, stage, tmp_path, **over), seed=1)
        assert digest(masters(engine)) != expected[name]["masters"]
        engine.load_checkpoint(f"{tmp_path}/{stage} {placement} of {world_size}", tag="edited")
        assert digest(masters(engine)) == expected[name]["masters"], name
        engine.close()


# --- what ranks may do inside, and what they must do together ---


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All functions below, one after the other in the same processes."""
    works = (
        change_without_a_modifier,
        nest,
        read_alone,
        load_alone,
        compute_inside,
        write_under_a_graph,
        fail_inside,
        give_other_memory,
        be_without_memory,
        gather_of_two,
        gather_different_things,
    )
    return run_in_turn(works, 2, tmp_path_factory.mktemp("gathered"), timeout_s=100)


def start(directory: str, stage: int = 3, **over: Any) -> offloadzero.Engine:
    return engine_of(config_of("host", stage, Path(directory), world_size=2, **{**BF16, **over}))


def change_without_a_modifier(rank: int, directory: str) -> dict[str, list[Any]]:
    """By stage: what is raised, whether the weights stay, and whether the engine trains on."""
    said = {}
    for stage in (0, 1, 3):
        engine = start(directory, stage)
        model = model_of(engine)
        before = digest(masters(engine))

        def change(model: OddModel = model) -> None:
            weights = [model.narrow.weight, model.odd, model.scale, model.wide.weight]
            with GatheredParameters(weights), torch.no_grad():
                model.scale.fill_(2.0 + rank)
                if rank == 1:
                    model.narrow.weight[0, 0] = 9.0

        text = said_of(change)
        is_same = digest(masters(engine)) == before
        said[str(stage)] = [text, is_same, said_of(lambda e=engine: train(e, rank, 2, num_steps=2))]  # type: ignore[misc]
        engine.close()
    return said


def test_a_change_without_a_modifier_is_an_error_on_all_and_is_dropped(found: Found) -> None:
    for said in found["change_without_a_modifier"]:
        for text, is_same, later in said.values():
            assert text == (
                "StateError: scale (ranks [0, 1]), narrow.weight (ranks [1]) changed under "
                "GatheredParameters(modifier_rank=None), which drops the change: pass modifier_rank=0 to keep it"
            )
            assert is_same
            assert later == "nothing"


def nest(rank: int, directory: str) -> dict[str, Any]:
    """Blocks in blocks, each with another rank that may write; what rank 0 sees of the inner one, and what stays."""
    engine = start(directory)
    model = model_of(engine)
    wide, odd = model.wide.weight, model.odd
    with GatheredParameters({wide, odd}, modifier_rank=0), torch.no_grad():
        wide.fill_(1.0 + rank)
        with GatheredParameters([odd, wide, odd], modifier_rank=1):
            wide[0].fill_(5.0 + rank)
            odd.fill_(7.0 + rank)
            with GatheredParameters(wide):
                pass
        seen = [float(wide[0, 0]), float(wide[1, 0]), float(odd[0])]
        if rank == 0:
            wide[1, 0] = 4.0
    with GatheredParameters([wide]), GatheredParameters(iter([wide, odd])), torch.no_grad():
        stays = [float(wide[0, 0]), float(wide[1, 0]), float(wide[2, 0]), float(odd[3])]
    with GatheredParameters([]), GatheredParameters(list(model.parameters()), enabled=False):
        pass
    later = said_of(lambda: train(engine, rank, 2, num_steps=1))
    engine.close()
    return {"seen": seen, "stays": stays, "later": later}


def test_blocks_in_blocks(found: Found) -> None:
    for said in found["nest"]:
        assert said == {"seen": [6.0, 2.0, 8.0], "stays": [6.0, 4.0, 2.0, 8.0], "later": "nothing"}


def read_alone(rank: int, directory: str) -> bool:
    """Whether what the first rank alone saves inside the block is what all ranks read together."""
    engine = start(directory)
    train(engine, rank, 2, num_steps=1)
    model = model_of(engine)
    expected = digest({name: value.cpu() for name, value in model.state_dict().items()})
    seen = expected
    with GatheredParameters(model.parameters()):
        if rank == 0:
            seen = digest({name: value.cpu() for name, value in model.state_dict().items()})
            assert model.wide.weight.norm().item() > 0
    train(engine, rank, 2, num_steps=1)
    engine.close()
    return seen == expected


def test_one_rank_alone_may_read_inside(found: Found) -> None:
    assert found["read_alone"] == [True, True]


def load_alone(rank: int, directory: str) -> bool:
    """Whether all ranks have what the first rank alone loads inside the block, and train on with it."""
    engine = start(directory)
    saved = {name: value + 0.5 for name, value in engine.module.state_dict().items()}
    with GatheredParameters(engine.module.parameters(), modifier_rank=0):
        if rank == 0:
            model_of(engine).load_state_dict(saved)
    now = dict(model_of(engine).named_parameters())
    is_same = digest({name: param.data for name, param in now.items()}) == digest(
        {name: saved[name] for name in now}
    )
    train(engine, rank, 2, num_steps=1)
    engine.close()
    return is_same


def test_one_rank_alone_may_load_inside(found: Found) -> None:
    assert found["load_alone"] == [True, True]


def compute_inside(rank: int, directory: str) -> dict[str, Any]:
    """By stage: losses before the edit, inside and after, of the same batch; a step inside of a block that reads."""
    said = {}
    for stage in (1, 3):
        engine = start(directory, stage)
        model, batch = model_of(engine), micro_batch(5, 0, 2)
        with torch.no_grad():
            losses = [engine(batch).item()]
            with GatheredParameters([model.wide.weight, model.narrow.weight], modifier_rank=1):
                model.wide.weight.add_(0.5 * rank)
                losses.append(engine(batch).item())
                losses.append(engine(batch).item())
            losses.append(engine(batch).item())
        with GatheredParameters([model.wide.weight, model.emb.weight]):
            loss = engine(batch)
        engine.backward(loss)
        engine.step()
        said[str(stage)] = losses
        engine.close()
    return said


def test_a_forward_inside_computes_with_what_was_written(found: Found) -> None:
    for said in found["compute_inside"]:
        for before, *inside in said.values():
            assert len(set(inside)) == 1
            assert before != inside[0]
    assert found["compute_inside"][0] == found["compute_inside"][1]


def write_under_a_graph(rank: int, directory: str) -> dict[str, list[str]]:
    """Between forward and backward: what backward raises after a read, and after a write."""
    said: dict[str, list[str]] = {}
    for stage in (1, 3):
        texts = said[str(stage)] = []
        for modifier_rank in (None, 0):
            engine = start(directory, stage)
            loss = engine(micro_batch(0, rank, 2))
            weight = model_of(engine).narrow.weight
            with GatheredParameters(weight, modifier_rank=modifier_rank), torch.no_grad():
                if modifier_rank == rank:
                    weight.mul_(2.0)

            def go_on(engine: offloadzero.Engine = engine, loss: torch.Tensor = loss) -> None:
                engine.backward(loss)
                engine.step()
                engine.synchronize()

            texts.append(said_of(go_on))
            said_of(engine.close)
    return said


def test_between_forward_and_backward_a_write_is_an_error_on_all(found: Found) -> None:
    for said in found["write_under_a_graph"]:
        for after_read, after_write in said.values():
            assert after_read == "nothing"
            assert after_write.startswith(("StateError: ", "RankError: "))
            assert "updated between this forward and its backward" in after_write


def fail_inside(rank: int, directory: str) -> dict[str, Any]:
    """The script of one rank catches its own error outside of the block: what was written, on all ranks."""
    engine = start(directory)
    weight = model_of(engine).odd

    def fails() -> None:
        with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(2.0)
            if rank == 0:
                weight[1] = 4.0
                raise KeyError("the script's own")

    with suppress(KeyError):
        fails()
    values = safe_get_full_fp32_param(weight)[:3].tolist()
    later = said_of(lambda: train(engine, rank, 2, num_steps=1))
    engine.close()
    return {"values": values, "later": later}


def test_an_error_that_one_rank_catches_ends_the_block_as_any_end(found: Found) -> None:
    assert found["fail_inside"] == [{"values": [2.0, 4.0, 2.0], "later": "nothing"}] * 2


def give_other_memory(rank: int, directory: str) -> dict[str, Any]:
    """Of another shape on the rank that may write; and a rank that is not there."""
    engine = start(directory)
    weight = model_of(engine).odd

    def write() -> None:
        with GatheredParameters(weight, modifier_rank=1):
            if rank == 1:
                weight.data = torch.zeros(3, dtype=weight.dtype)

    said = [said_of(write), said_of(lambda: GatheredParameters(weight, modifier_rank=2).__enter__())]
    is_same = bool((safe_get_full_fp32_param(weight) == 0.5).all())
    said.append(said_of(lambda: train(engine, rank, 2, num_steps=1)))
    engine.close()
    return {"said": said, "is same": is_same}


def test_memory_that_does_not_fit_is_an_error_on_all(found: Found) -> None:
    for rank, each in enumerate(found["give_other_memory"]):
        text = ("'that of rank 1': torch.bfloat16 (511,)", "(3,): must keep the shape (511,)")[rank]
        assert each["said"][0].startswith(f"ConfigError: odd.data = {text}"), each["said"][0]
        assert each["said"][1] == (
            "ConfigError: modifier_rank = 2: None, or 0 to 1: a rank among those that share the data"
        )
        assert each["said"][2] == "nothing"
        assert each["is same"]


def be_without_memory(rank: int, directory: str) -> list[str]:
    """One rank has too little: what is raised, and what comes after it."""
    engine = start(directory)
    model = model_of(engine)

    def take(*_: Any) -> tuple[list[torch.Tensor], RuntimeError]:
        return [], RuntimeError("no memory")

    def enter() -> None:
        GatheredParameters([model.wide.weight, model.odd]).__enter__()

    if rank == 1:
        with patch.object(GatheredBlock, "_take_memory", take):
            said = [said_of(enter)]
    else:
        said = [said_of(enter)]
    said.append(said_of(lambda: train(engine, rank, 2, num_steps=1)))
    engine.close()
    return said


def test_a_rank_without_memory_is_an_error_on_all(found: Found) -> None:
    first, second = found["be_without_memory"]
    names = {"odd, wide.weight", "wide.weight, odd"}
    assert first[0] in {
        f"StateError: GatheredParameters of {each}: ranks [1] have no memory for them" for each in names
    }
    assert second[0] == "RuntimeError: no memory"
    assert first[1] == second[1] == "nothing"


def gather_of_two(rank: int, directory: str) -> list[float]:
    """Parameters of two engines in one block, in another order on each rank, as a set may have."""
    engines = [start(directory), start(directory, 1)]
    weights = [model_of(engine).odd for engine in engines]
    with GatheredParameters(weights[:: 1 - 2 * rank], modifier_rank=1), torch.no_grad():
        for number, weight in enumerate(weights):
            weight.fill_(2.0 * number + rank)
    seen = [float(safe_get_full_fp32_param(weight)[5]) for weight in weights]
    for engine in engines:
        engine.close()
    return seen


def test_a_block_over_two_engines(found: Found) -> None:
    assert found["gather_of_two"] == [[1.0, 3.0]] * 2


# --- ranks that depart ---


def gather_different_things(rank: int, directory: str) -> dict[str, tuple[str, float]]:
    """Each case spoils its engine: what is raised, and after how long."""
    path, said = Path(directory), {}

    def within(params: Any, modifier_rank: int | None = None, then: Callable[[], Any] = int) -> None:
        with GatheredParameters(params, modifier_rank=modifier_rank):
            then()

    cases: dict[str, Callable[[offloadzero.Engine, Any], object]] = {
        "others": lambda _, m: within((m.blocks[0].up, m.blocks[0].down)[rank].weight),
        "more": lambda _, m: within([m.wide.weight, m.odd][: 1 + rank]),
        "modifiers": lambda _, m: within(m.odd, (None, 1)[rank]),
        "an absent one": lambda _, m: within(m.odd, (1, 2)[rank]),
        "nobody": lambda _, m: within(m.odd, (None, -1)[rank]),
        "a block and a read": lambda _, m: (
            within(m.odd) if rank == 0 else safe_get_full_fp32_param(m.wide.weight)
        ),
        "a block and a save": lambda e, m: within(m.odd) if rank else e.save_checkpoint(str(path / "saved")),
        "an end and a read": lambda _, m: within(
            m.odd, 0, int if rank else lambda: safe_get_full_fp32_param(m.wide.weight)
        ),
        "a forward": lambda e, m: within(m.odd, 0, (lambda: train(e, rank, 2, num_steps=1)) if rank else int),
        "one nests": lambda _, m: within(m.odd, 0, int if rank else lambda: within(m.odd, 0)),
        "written before": lambda _, m: (
            m.load_state_dict({"odd": torch.full((511,), 1.0 + rank)}, strict=False),
            within(m.wide.weight, 0),
        ),
        "one alone": lambda e, m: (rank and within(m.odd), train(e, rank, 2, num_steps=2)),
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            process_groups, "timeout_of_process_group", lambda: timedelta(seconds=BRANCH_TIMEOUT_S)
        )
        for name, case in cases.items():
            engine = start(directory)
            begun_s = time.monotonic()
            text = said_of(lambda e=engine, case=case: case(e, e.module))  # type: ignore[misc]
            said[name] = text, time.monotonic() - begun_s
            said_of(engine.close)
    return said


DEPARTURES = {
    "others": ("rank 0 gathers blocks.0.up.weight, rank 1 gathers blocks.0.down.weight (",),
    "more": (
        "rank 0 enters GatheredParameters of 1 parameters (modifier_rank=None), "
        "rank 1 enters GatheredParameters of 2 parameters (modifier_rank=None)",
    ),
    "modifiers": ("1 parameters (modifier_rank=None), rank 1 enters", "1 parameters (modifier_rank=1)"),
    "an absent one": ("1 parameters (modifier_rank=1), rank 1 enters", "1 parameters (modifier_rank=2)"),
    "nobody": ("1 parameters (modifier_rank=None), rank 1 enters", "1 parameters (modifier_rank=-1)"),
    "a block and a read": ("rank 0 enters GatheredParameters", "rank 1 reads wide.weight (param)"),
    "a block and a save": ("rank 0 reads odd (master) to save it", "rank 1 enters GatheredParameters"),
    "an end and a read": ("rank 0 reads wide.weight (param)", "rank 1 leaves GatheredParameters"),
    "a forward": ("rank 0 leaves GatheredParameters", "rank 1 begins a forward inside GatheredParameters"),
    "one nests": ("rank 0 enters GatheredParameters", "rank 1 leaves GatheredParameters"),
    "written before": ("have written other values into parameters",),
}


def test_ranks_that_gather_different_things_get_an_error(found: Found) -> None:
    for said in found["gather_different_things"]:
        for name, texts in DEPARTURES.items():
            text, took_s = said[name]
            assert text.startswith("StateError: "), (name, text)
            assert all(each in text for each in texts), (name, text)
            assert took_s < BRANCH_TIMEOUT_S, name
        text, took_s = said["one alone"]
        assert text.startswith(("RankError: ", "StateError: ")), text
        assert took_s < BRANCH_TIMEOUT_S + 20


def end_inside(rank: int, directory: str) -> None:
    """The script of one rank ends by an error in the block, and the other one computes there."""
    engine = start(directory)
    weight: nn.Parameter = model_of(engine).odd
    with GatheredParameters(weight, modifier_rank=0):
        if rank == 1:
            raise KeyError("the script's own")
    train(engine, rank, 2, num_steps=1)


def test_a_script_that_ends_inside_stops_the_others(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(end_inside, 2, tmp_path / "ranks", str(tmp_path), timeout_s=40)
    assert time.monotonic() - begun_s < 40
    first, second = [(text or "").strip().splitlines()[-1] for text in caught.value.texts]
    assert second == 'KeyError: "the script\'s own"'
    assert first.startswith("offloadzero.errors.RankError: ")
    assert 'rank 1: KeyError: "the script\'s own"' in first


def edit_and_close(rank: int, directory: str) -> str:
    """A block whose parameters each rank has whole, so that its end sends nothing more."""
    engine = engine_of(config_of("host", 1, Path(directory), world_size=4))
    value_by = ScriptBlocks.value_by

    def late(*given: Any) -> torch.Tensor:
        if rank == 3:
            time.sleep(1.0)  # the others close meanwhile, and it looks for ends again: LOOK_AGAIN_S
        return value_by(*given)

    def edit_one() -> None:
        with GatheredParameters([model_of(engine).blocks[0].norm.bias], modifier_rank=0):
            pass

    with patch.object(ScriptBlocks, "value_by", late):
        said = said_of(edit_one)
    engine.close()
    return said


def test_a_rank_that_closes_after_a_block_does_not_end_that_of_a_late_one(tmp_path: Path) -> None:
    assert run_ranks(edit_and_close, 4, tmp_path / "ranks", str(tmp_path)) == ["nothing"] * 4
