"""Ranks that do something else than the others: an error on all of them, or what may differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.ranks import channel, process_groups
from offloadzero.step.collect import GradientCollector
from offloadzero.step.decider import Decider
from offloadzero.step.job import Account
from offloadzero.zero import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from tests.support.ranks import Found, run_in_turn
from tests.support.schedules import BlockForm, RandomModel, token_ids
from tests.support.sharded import (
    WIDTH,
    config_of,
    engine_of,
    make_odd_model,
    micro_batch,
    said_of,
    train,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All functions of this file, one after the other in the same processes."""
    works = (
        read_different_things,
        configure,
        set_own_rates,
        write_alone,
        learn_late_of_a_refused_step,
        use_first_what_was_made_last,
        take_branches,
        wait_for_each_other,
        take_one_micro_batch_more,
        come_late,
    )
    return run_in_turn(works, 2, tmp_path_factory.mktemp("departures"))


# --- reads ---


def read_different_things(rank: int, directory: str) -> dict[str, str]:
    """Each case spoils its engine, which is the point: nothing has been mixed before."""
    said, path, read = {}, Path(directory), safe_get_full_fp32_param
    cases: dict[str, Callable[[offloadzero.Engine, nn.Module], object]] = {
        "weights of one size": lambda _, m: read((m.blocks[0].up, m.blocks[0].down)[rank].weight),
        "weights of two sizes": lambda _, m: read((m.wide, m.emb)[rank].weight),
        "a weight and its state": lambda _, m: (
            read,
            lambda p: safe_get_full_optimizer_state(p, "exp_avg_sq"),
        )[rank](m.wide.weight),
        "one saves": lambda e, m: (
            e.save_checkpoint(str(path / "saved")) if rank == 0 else read(m.wide.weight)
        ),
        "the other saves": lambda e, m: (
            e.save_checkpoint(str(path / "saved")) if rank == 1 else read(m.wide.weight)
        ),
    }
    for name, case in cases.items():
        engine = engine_of(config_of("host", 3, path, world_size=2))
        module = engine.module
        assert isinstance(module, nn.Module)
        said[name] = said_of(lambda case=case, e=engine, m=module: case(e, m))  # type: ignore[misc]
        engine.close()
    return said


READ_DIFFERENTLY = {
    "weights of one size": "rank 0 reads blocks.0.up.weight (param), rank 1 reads blocks.0.down.weight (param) (",
    "weights of two sizes": "rank 0 reads wide.weight (param), rank 1 reads emb.weight (param) (",
    "a weight and its state": "rank 0 reads wide.weight (param), rank 1 reads wide.weight (exp_avg_sq) (",
    "one saves": "rank 0 reads odd (exp_avg) to save it, rank 1 reads wide.weight (param) (",
    "the other saves": "rank 0 reads wide.weight (param), rank 1 saves (",
}


def test_ranks_that_read_different_things_get_an_error_and_no_mixture(found: Found) -> None:
    for rank, said in enumerate(found["read_different_things"]):
        assert said.keys() == READ_DIFFERENTLY.keys()
        for name, text in READ_DIFFERENTLY.items():
            expected = (
                f"StateError: {text}this is rank {rank}): all ranks must read the same weights and states"
            )
            assert said[name].startswith(expected)


def wait_for_each_other(rank: int, directory: str) -> dict[str, str]:
    """What one rank does alone while the other one trains on: each waits in a channel of its own."""

    def norms(engine: offloadzero.Engine) -> None:
        engine.backward(engine(micro_batch(1, rank, 2)))
        if rank == 0:
            torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
        engine.step()

    saved = str(Path(directory) / "alone")
    cases: dict[str, tuple[int, int, Callable[[offloadzero.Engine], object]]] = {  # stage, steps before
        "saves": (3, 1, lambda e: e.save_checkpoint(saved) if rank == 0 else None),
        "loads": (0, 1, lambda e: e.load_checkpoint(saved) if rank == 0 else None),
        "asks for the norms": (2, 1, norms),
        "reads at once": (
            2,
            0,
            lambda e: safe_get_full_fp32_param(e.module.wide.weight) if rank == 0 else None,
        ),
    }
    said = {}
    with patch.object(channel, "WAITED_S", 0.0):
        for name, (stage, num_before, case) in cases.items():
            engine = engine_of(
                config_of("host", stage, Path(directory), world_size=2, bf16={"enabled": not num_before})
            )

            def go(
                case: Callable[..., object] = case,
                engine: offloadzero.Engine = engine,
                num_before: int = num_before,
            ) -> None:
                train(engine, rank, 2, num_steps=num_before)
                case(engine)
                train(engine, rank, 2, num_steps=1)

            said[name] = said_of(go)
            said_of(engine.close)
    return said


def test_ranks_that_wait_for_each_other_get_an_error_long_before_the_timeout(found: Found) -> None:
    acts = {
        "saves": "what the ranks do (reads odd (exp_avg) to save it)",
        "loads": "what the ranks do (loads a checkpoint)",
        "asks for the norms": "what the ranks do (asks for the norms of the gradients of ",
        "reads at once": "what the ranks do (reads wide.weight (master))",
    }
    for said in found["wait_for_each_other"]:
        assert said.keys() == acts.keys()
        for name, act in acts.items():
            assert f", and rank 0 waits in {act}" in said[name]
            assert ", which rank 1 has not called: both would wait forever. All ranks must run" in said[name]


def take_one_micro_batch_more(rank: int, directory: str) -> list[str]:
    """One rank goes backward twice before a step that the other one has taken; by stage."""
    said = []
    with patch.object(channel, "WAITED_S", 0.0):
        for stage in (0, 1):
            config = config_of("host", stage, Path(directory), world_size=2)
            engine = engine_of(config | {"managed_gradient_accumulation": False})

            def go(engine: offloadzero.Engine = engine) -> None:
                for step in range(3):
                    for micro in range(2 if rank == 0 and step == 1 else 1):
                        engine.backward(engine(micro_batch(step + micro, rank, 2)))
                    engine.step()
                engine.optimizer.synchronize()

            said.append(said_of(go))
            said_of(engine.close)
    return said


def test_ranks_that_take_unequally_many_micro_batches_get_an_error_long_before_the_timeout(
    found: Found,
) -> None:
    for said in found["take_one_micro_batch_more"]:
        for text in said:
            assert "and rank 1 waits in step 2: the all-to-all" in text
            assert ", which rank 0 has not called: both would wait forever. All ranks must run" in text
            assert "take equally many micro batches" in text


def come_late(rank: int, directory: str) -> list[str]:
    """What the first rank warns of that has a state dict before the other one, whose script is elsewhere."""
    engine = engine_of(config_of("host", 3, Path(directory), world_size=2))
    with patch.object(channel, "ADVISED_S", 0.0), patch.object(channel.log, "warning") as warning:
        time.sleep(3 * channel.LOOK_UP_S * rank)
        engine.module.state_dict()
    engine.close()
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_a_rank_that_reads_before_the_others_says_so_once(found: Found) -> None:
    (warned, late) = found["come_late"]
    (text,) = warned
    assert text.startswith(
        "what the ranks do (reads emb.weight (param)): the all-to-all (rank 0 of 2): has waited"
    )
    assert "Under the Trainer of transformers, take that of offloadzero.integrations.transformers" in text
    assert not late


# --- the configuration ---


def configure(rank: int, directory: str) -> list[str]:
    path = Path(directory)
    allowed = [{"steps_per_print": 10}, {"offloadzero": {"update": {"num_threads": 1 + rank}}}]
    allowed.append({"offloadzero": {"update": {"cores": [rank]}}})
    refused = {"offloadzero": {"update": {"on_nonfinite": ("skip", "error")[rank]}}}
    said = []
    for over in [*allowed, refused]:

        def go(over: dict[str, Any] = over) -> None:
            engine = engine_of(config_of("host", 1, path, world_size=2, **over))
            train(engine, rank, 2, num_steps=1)
            engine.close()

        said.append(said_of(go))
    return said


def test_what_is_a_ranks_own_in_the_configuration_may_differ(found: Found) -> None:
    for said in found["configure"]:
        assert said[:3] == ["nothing"] * 3
        assert said[3].startswith("ConfigError: configuration = 'that of rank ")


# --- hyperparameters ---


def set_own_rates(rank: int, directory: str) -> list[str]:
    """By stage: a scheduler that goes by each rank's own loss, say."""
    said = []
    for stage in (0, 3):
        model = make_odd_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = config_of("host", stage, Path(directory), world_size=2)
        del config["optimizer"]
        engine, *_ = offloadzero.initialize(model=model, optimizer=optimizer, config=config)
        train(engine, rank, 2, num_steps=1)
        engine.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + rank)

        def step(engine: offloadzero.Engine = engine) -> None:
            train(engine, rank, 2, num_steps=1)
            engine.synchronize()

        said.append(said_of(step))
        said_of(engine.close)
    return said


def test_ranks_with_other_hyperparameters_do_not_step(found: Found) -> None:
    for said in found["set_own_rates"]:
        for text in said:
            assert "step 2: the hyperparameters of ranks [1] are not those of rank 0; rank " in text
            assert "lr=0.001" in text or "lr=0.0005" in text


# --- writes ---


def write_alone(rank: int, directory: str) -> dict[str, list[str]]:
    """By how and when the first rank writes another value: the messages of the write, and of two steps after it."""
    value = torch.full((WIDTH, 241), 0.01)

    def set_in_place(module: nn.Module) -> None:
        with torch.no_grad():
            module.scale.fill_(3.0 - rank)

    def set_data(module: nn.Module) -> None:
        module.narrow.weight.data = value + rank

    def set_state(module: nn.Module) -> None:
        if rank == 0:
            safe_set_full_optimizer_state(module.narrow.weight, value, "exp_avg")

    def load(module: nn.Module) -> None:
        if rank == 0:
            module.load_state_dict({"narrow.weight": value}, strict=False)

    def load_after_the_optimizers(module: nn.Module) -> None:
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        loaded = {name: module.state_dict()[name].clone() for name in ("scale", "narrow.weight")}
        loaded["narrow.weight"][0] += rank
        module.load_state_dict(loaded, strict=False)

    def set_step(module: nn.Module) -> None:  # noqa: ARG001
        saved = engine.optimizer.state_dict()
        states = {
            number: {**state, "step": torch.tensor(5.0 + rank)} for number, state in saved["state"].items()
        }
        engine.optimizer.load_state_dict({**saved, "state": states})

    def all_the_same(module: nn.Module) -> None:
        safe_set_full_fp32_param(module.narrow.weight, value)
        safe_set_full_optimizer_state(module.narrow.weight, value, "exp_avg")
        module.load_state_dict({"narrow.weight": value * 2}, strict=False)

    said = {}
    for stage, is_trained, write in (
        (3, True, set_state),
        (3, False, set_in_place),
        (3, True, load),
        (2, False, set_data),
        (0, True, load),
        (2, True, load_after_the_optimizers),
        (3, True, load_after_the_optimizers),
        (3, True, set_step),
        (3, True, all_the_same),
    ):
        has_masters = {"bf16": {"enabled": True}} if write is load_after_the_optimizers else {}
        engine = engine_of(config_of("host", stage, Path(directory), world_size=2, **has_masters))
        if is_trained:
            train(engine, rank, 2, num_steps=1)
            engine.synchronize()

        def step(engine: offloadzero.Engine = engine) -> None:
            train(engine, rank, 2, num_steps=1)
            engine.synchronize()

        module = engine.module
        assert isinstance(module, nn.Module)
        texts = [said_of(lambda write=write, module=module: write(module))]  # type: ignore[misc]
        said[f"{stage} {write.__name__}"] = [*texts, said_of(step), said_of(step)]
        said_of(engine.close)
    return said


def test_a_write_of_one_rank_alone_is_an_error_on_all(found: Found) -> None:
    for said in found["write_alone"]:
        for name, (written, *steps) in said.items():
            assert written == "nothing", (name, written)
            for text in steps:
                if "all_the_same" in name:
                    assert text == "nothing", (name, text)
                else:
                    text_of_it = "the scripts of ranks [1] have written other values into parameters, states"
                    assert text_of_it in text, (name, text)


# --- steps that are refused ---


class FrozenFirst(nn.Module):
    """Its first blocks are fetched without waiting for the step before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for block in self.blocks[:3]:
            block.requires_grad_(False)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.pow(2).mean() * factor


def learn_late_of_a_refused_step(rank: int, directory: str) -> list[list[str]]:
    """What the lines of a script have raised, with and without a call of zero_grad() after each step."""
    refuse = Decider.refuse

    def refuse_late(decider: Decider, account: Account, names: Sequence[str]) -> None:
        time.sleep(0.7 * rank)
        refuse(decider, account, names)

    found = []
    for drops in (False, True):
        config = config_of("host", 3, Path(directory), world_size=2)
        del config["offloadzero"]["units"]["patterns"]
        engine, *_ = offloadzero.initialize(model=FrozenFirst(), config=config)
        said = []
        with patch.object(Decider, "refuse", refuse_late):
            for number in range(5):
                line = "forward"
                try:
                    if number == 2:
                        time.sleep(0.3)  # the first rank knows by now
                    loss = engine(torch.ones(3, WIDTH) + rank, float("nan") if number == 1 else 1.0)
                    line = "backward"
                    engine.backward(loss)
                    line = "step"
                    engine.step()
                    line = "zero_grad"
                    if drops:
                        engine.zero_grad()
                except offloadzero.NonFiniteError:
                    said.append(line)
                    engine.zero_grad()
        said.append(f"{engine.global_steps} steps, {engine.skipped_steps} skipped")
        engine.close()
        found.append(said)
    return found


def test_a_refused_step_is_told_in_the_same_line_of_all_ranks(found: Found) -> None:
    for without, with_drops in found["learn_late_of_a_refused_step"]:
        assert without == ["forward", "4 steps, 1 skipped"]
        assert with_drops == ["zero_grad", "5 steps, 1 skipped"]


# --- an order of use that is not that of the modules ---


class EmbeddingMadeLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))
        self.emb = nn.Embedding(40, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.pow(2).mean()


class PartUnused(EmbeddingMadeLast):
    """Two of its units take no part: a head for another task, say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(4, nn.Linear(WIDTH, WIDTH, bias=False))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for number, block in enumerate(self.blocks):
            x = x if number == 4 else torch.tanh(block(x))
        return x.pow(2).mean()


def use_first_what_was_made_last(rank: int, directory: str) -> list[int]:
    """The number of gradients that found no lease, by model and stage."""
    found = []
    for make, stage in ((EmbeddingMadeLast, 1), (EmbeddingMadeLast, 3), (PartUnused, 3)):
        config = config_of("host", stage, Path(directory), world_size=2)
        del config["offloadzero"]["units"]["patterns"]
        config["offloadzero"]["units"]["min_leaf_elements"] = 256
        engine, *_ = offloadzero.initialize(model=make(), config=config)
        with patch.object(
            GradientCollector,
            "_temporary_lease",
            autospec=True,
            side_effect=GradientCollector._temporary_lease,
        ) as lend:
            for seed in range(2):
                engine.backward(engine(torch.arange(6).view(2, 3) + seed + rank))
                engine.step()
        engine.close()
        found.append(lend.call_count)
    return found


def test_gradients_of_modules_in_another_order_find_their_leases(found: Found) -> None:
    assert found["use_first_what_was_made_last"] == [[0, 0, 0], [0, 0, 0]]


# --- branches ---

BRANCH_TIMEOUT_S = 5.0  # of the process groups: some ranks wait for what the others never send
ALL_BLOCKS = (0, 1, 2)


def take_branches(rank: int, directory: str) -> dict[str, tuple[str, float]]:
    """By what the second rank alone does in its second step: what is said within three more, and after how long."""

    def forward(engine: offloadzero.Engine, seed: int, use: tuple[int, ...] = ALL_BLOCKS) -> torch.Tensor:
        loss: torch.Tensor = engine(token_ids(2 * seed + rank), use)
        return loss

    def step(engine: offloadzero.Engine, seed: int, use: tuple[int, ...] = ALL_BLOCKS) -> None:
        engine.backward(forward(engine, seed, use))
        engine.step()

    def skip_the_step(engine: offloadzero.Engine) -> None:
        engine.backward(forward(engine, 1))

    branches: dict[str, Callable[[offloadzero.Engine], None]] = {
        "skips a block": lambda e: step(e, 1, (0, 2)),
        "takes blocks in another order": lambda e: step(e, 1, (1, 0, 2)),
        "ends early": lambda e: e.close(),
        "skips the step": skip_the_step,
    }
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "timeout_of_process_group", lambda: timedelta(seconds=BRANCH_TIMEOUT_S))
        for name, branch in branches.items():
            form = BlockForm(hidden=31, frozen="no", unused=0, checkpointed=False)
            torch.manual_seed(0)
            model = RandomModel(15, [form] * 3, tied=False)
            engine, *_ = offloadzero.initialize(
                model=model, config=config_of("host", 3, Path(directory), world_size=2)
            )
            step(engine, 0)
            begun_s = time.monotonic()

            def go_on(engine: offloadzero.Engine = engine, branch: Any = branch) -> None:
                branch(engine) if rank else step(engine, 1)
                for seed in (2, 3, 4):
                    step(engine, seed)
                engine.synchronize()

            said[name] = said_of(go_on), time.monotonic() - begun_s
            said_of(engine.close)
    return said


def test_a_branch_of_one_rank_alone_is_an_error_on_all_in_time(found: Found) -> None:
    for said in found["take_branches"]:
        for name, (text, took_s) in said.items():
            assert text.startswith(("StateError: ", "RankError: ")), (name, text)
            assert took_s < BRANCH_TIMEOUT_S + 20, name
            if "block" in name:
                assert "the ranks fetch weights in different orders" in text, (name, text)
