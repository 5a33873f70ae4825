"""An error on one rank stops all, with its text and long before the timeout; what is not built is refused by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import offloadzero
from offloadzero.engine.join import expect_own_queues
from offloadzero.errors import AioError, ConfigError
from tests.support.faults import fails
from tests.support.ranks import Found, RanksError, run_in_turn, run_ranks
from tests.support.sharded import OddModel, config_of, engine_of, make_odd_model, micro_batch, train

TIMEOUT_S = 40.0


def failed(work: Callable[..., Any], directory: Path, world_size: int = 2) -> list[str]:
    """The last line of what each rank says of its end, which comes before the timeout of the group."""
    begun_s = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(work, world_size, directory / "ranks", str(directory), timeout_s=TIMEOUT_S)
    assert time.monotonic() - begun_s < TIMEOUT_S, caught.value
    return [(text or "").strip().splitlines()[-1] if text else "" for text in caught.value.texts]


# --- a rank that fails, or is gone ---


def lose_the_drive(rank: int, directory: str) -> None:
    engine = engine_of(config_of("nvme", 3, Path(directory), world_size=2))
    train(engine, rank, 2, num_steps=1)
    error = AioError(operation="read", path="/the/file", offset=4096, num_bytes=1, errno=5, label="emb.param")
    with fails("nvme.read", error, at=None) if rank == 1 else nullcontext():
        train(engine, rank, 2, num_steps=2)


def test_one_ranks_drive_stops_all_ranks(tmp_path: Path) -> None:
    first, second = failed(lose_the_drive, tmp_path)
    assert "emb.param (nvme): read /the/file+0x1000, 1 bytes: Input/output error" in second
    assert first.startswith("offloadzero.errors.RankError: ")
    assert "rank 1: AioError: emb.param (nvme): read /the/file+0x1000" in first
    assert not list(tmp_path.glob("*.bin")), "swap files are left"


def be_killed(rank: int, directory: str) -> None:
    engine = engine_of(config_of("nvme", 3, Path(directory) / str(rank), world_size=3))
    for step in range(4):
        train(engine, rank, 3, num_steps=1)
        if (rank, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_stops_the_others(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    first, killed, third = failed(be_killed, tmp_path, 3)
    assert killed == "it has said nothing"
    for said in (first, third):
        assert said.startswith("offloadzero.errors.RankError: ")
        assert " of 3) " in said
    assert not [*(tmp_path / "0").iterdir(), *(tmp_path / "2").iterdir()], "swap files are left"


# --- ranks that differ ---


def take_another_branch(rank: int, directory: str) -> None:
    """The first rank evaluates, the others do not."""
    engine = engine_of(config_of("host", 3, Path(directory), world_size=2))
    train(engine, rank, 2, num_steps=1)
    if rank == 0:
        with torch.no_grad():
            engine(micro_batch(0, 0, 2))
    train(engine, rank, 2, num_steps=2)


def test_a_branch_that_one_rank_takes_is_an_error_on_all(tmp_path: Path) -> None:
    """Before any computes with what it has fetched: that would be another unit's."""
    for said in failed(take_another_branch, tmp_path):
        assert "the ranks fetch weights in different orders: ranks [1] in another order than rank 0" in said


def disagree(rank: int, directory: str) -> dict[str, str]:
    """What is refused on all ranks before the first step, by what differs."""
    found = {}
    makers: dict[str, Callable[[], Any]] = {
        "model": lambda: nn.Sequential(nn.Linear(3, 4 + rank), nn.Linear(4 + rank, 3)),
        "configuration": make_odd_model,
    }
    for name, make in makers.items():
        config = config_of("host", 3, Path(directory), world_size=2)
        if name == "model":
            del config["offloadzero"]["units"]["patterns"]
        else:
            config["gradient_clipping"] = 1.0 + rank
        try:
            offloadzero.initialize(model=make(), config=config)
        except offloadzero.ConfigError as error:
            found[name] = str(error)
    return found


def test_ranks_with_different_models_or_configurations_do_not_start(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(disagree, 2, tmp_path, str(tmp_path))):
        for name in ("model", "configuration"):
            text = (
                f"{name} = 'that of rank {rank}': the same on all ranks: ranks [1] have another than rank 0"
            )
            assert said[name] == text


def close_at_different_micro_batches(rank: int, directory: str) -> None:
    engine = engine_of(config_of("host", 3, Path(directory), world_size=2, accumulation=3))
    engine.set_gradient_accumulation_boundary(rank == 0)
    engine.backward(engine(micro_batch(0, rank, 2)))


def test_the_boundary_is_one_on_all_ranks(tmp_path: Path) -> None:
    for said in failed(close_at_different_micro_batches, tmp_path):
        assert "this micro batch is the last of its step on some ranks and not on others" in said


# --- what is not built ---


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def refusals(rank: int, directory: str) -> dict[str, str]:
    """Messages by what was tried."""
    path = Path(directory)
    found: dict[str, str] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except offloadzero.OffloadError as error:
            found[name] = f"{type(error).__name__}: {error}"

    def start(stage: int, **over: Any) -> None:
        offloadzero.initialize(
            model=make_odd_model(), config=config_of("host", stage, path, world_size=2, **over)
        )

    note(
        "params at stage 2", lambda: start(2, offloadzero={"placement": {"param": "nvme", "states": "host"}})
    )
    note(
        "in backward", lambda: start(3, gradient_clipping=0.0, offloadzero={"update": {"in_backward": True}})
    )
    note("batch", lambda: start(3, train_batch_size=7))
    uneven = OddModel()
    uneven.register_buffer("seen", torch.zeros(3 + rank))
    note(
        "buffers",
        lambda: offloadzero.initialize(model=uneven, config=config_of("host", 0, path, world_size=2)),
    )
    model = OddModel()
    wrapped = DistributedDataParallel(model)
    note("wrapped", lambda: offloadzero.offload(wrapped, torch.optim.AdamW(model.parameters()), {}))
    late, optimizer = offloadzero.offload(
        model, torch.optim.AdamW(model.parameters()), {"zero_optimization": {"stage": 3}}
    )
    note("wrapped later", lambda: DistributedDataParallel(late)(micro_batch(0, rank, 2)))
    fully_shard(late, ignored_params={late.scale})  # which takes no scalars
    note("sharded later", lambda: late(micro_batch(0, rank, 2)))
    optimizer.runtime.close()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    _, optimizer = offloadzero.offload(layers, torch.optim.AdamW(layers.parameters()), {})
    around = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    note("FSDP later", lambda: around(torch.ones(2, 6)))
    optimizer.runtime.close()
    for name, wrap in {
        "wrapped inside": DistributedDataParallel,
        "sharded inside": fully_shard,
        "FSDP inside": partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
    }.items():
        layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        layers[1] = wrap(layers[1])
        for call in ("offload", "initialize"):
            note(f"{name}, {call}", partial(start_in, call, layers))
    with offloadzero.zero.Init(config_dict_or_path=config_of("host", 3, path, world_size=2)):
        built = OddModel()

    def edit_on(modifier_rank: int) -> None:
        with (
            offloadzero.zero.GatheredParameters(built.wide.weight, modifier_rank=modifier_rank),
            torch.no_grad(),
        ):
            built.wide.weight.fill_(5.0)

    note("modifier", lambda: edit_on(2))
    edit_on(1)
    engine = engine_of(config_of("host", 3, path, world_size=2))
    note("iterable", lambda: engine.deepspeed_io(Numbers()))
    param = engine.module.emb.weight
    engine.backward(engine(micro_batch(0, rank, 2)))
    note("local", lambda: offloadzero.zero.safe_get_local_fp32_param(param))
    engine.zero_grad()
    engine.close()
    return found


def start_in(call: str, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    if call == "offload":
        offloadzero.offload(model, optimizer, {"zero_optimization": {"stage": 3}})
    else:
        offloadzero.initialize(
            model=model,
            optimizer=optimizer,
            config={"zero_optimization": {"stage": 3}, "gradient_clipping": 0},
        )


_WITHOUT = "the model without it: ranks divide the parameters themselves at zero_optimization.stage 3"
REFUSED = {
    "FSDP later": "StateError: FullyShardedDataParallel has replaced the parameters of an offloaded model",
    **{
        f"{name} inside, {call}": f"ConfigError: model.1 = '{text}"
        for name, text in {
            "wrapped": "DistributedDataParallel': the module in it, model.1.module: its gradients are averaged",
            "sharded": f"fully_shard()': {_WITHOUT}",
            "FSDP": f"FullyShardedDataParallel': {_WITHOUT}",
        }.items()
        for call in ("offload", "initialize")
    },
    "wrapped": "ConfigError: model = 'DistributedDataParallel': the module in it, model.module: its gradients are ",
    "buffers": "ConfigError: buffers = 'shift (17,) torch.float32 torch.strided, seen (",
    "wrapped later": "ConfigError: model = 'DistributedDataParallel': the module in it: its gradients are averaged ",
    "sharded later": "StateError: fully_shard() has replaced the parameters of an offloaded model",
    "params at stage 2": "ConfigError: offloadzero.placement.param = 'nvme': over 2 ranks device, or ",
    "in backward": "ConfigError: offloadzero.update.in_backward = True: impossible with 2 ranks: all gradients ",
    "batch": "ConfigError: train_batch_size = 7: must equal train_micro_batch_size_per_gpu * "
    "gradient_accumulation_steps * ranks = 3 * 1 * 2 = 6",
    "modifier": "ConfigError: modifier_rank = 2: None, or 0 to 1",
    "iterable": "ConfigError: training_data = 'Numbers': a dataset with a length: over 2 ranks each would get all",
    "local": "StateError: emb.weight: safe_get_local_fp32_param() over several ranks is not built: "
    "safe_get_full_fp32_param() on all of them is",
}


def test_what_is_not_built_over_ranks_is_refused_by_name(tmp_path: Path) -> None:
    for said in run_ranks(refusals, 2, tmp_path, str(tmp_path)):
        assert said.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert said[name].startswith(text)


# --- errors of the script, and of a start ---


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The functions below that stop no process, one after the other in the same ones."""
    works = (
        make_many,
        start_on_one_rank_only,
        be_interrupted_while_another_is_late,
        look_as_a_collective_ends,
    )
    return run_in_turn(works, 2, tmp_path_factory.mktemp("ends"), timeout_s=TIMEOUT_S)


def fail_in_the_script(rank: int, directory: str) -> None:
    engine = engine_of(config_of("host", 3, Path(directory), world_size=2))
    try:
        train(engine, rank, 2, num_steps=1 + rank)
        if rank == 0:
            raise LookupError("no more batches")
        train(engine, rank, 2, num_steps=1)
    finally:
        engine.close()


def test_an_error_of_one_ranks_script_is_what_the_others_are_told(tmp_path: Path) -> None:
    first, second = failed(fail_in_the_script, tmp_path)
    assert first == "LookupError: no more batches"
    assert second.startswith("offloadzero.errors.RankError: ")
    assert "rank 0: LookupError: no more batches" in second


def start_on_one_rank_only(rank: int, directory: str) -> dict[str, str]:
    """By what is wrong on the second rank, which stays; then all start."""
    path, said = Path(directory), {}
    no_directory = {"nvme_path": "/proc/nowhere", "placement": "nvme"}
    for name, over in {
        "key": {"aio": {"no_such_key": 1}},
        "path": {"offloadzero": no_directory},
        "nothing": {},
    }.items():
        config = config_of("host", 3, path, world_size=2, **(over if rank else {}))
        if name == "path":
            config["offloadzero"]["placement"] = "nvme"
        try:
            train(engine_of(config), rank, 2, num_steps=1)
        except offloadzero.OffloadError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_what_keeps_one_rank_from_starting_is_told_to_the_others(found: Found) -> None:
    first, second = found["start_on_one_rank_only"]
    assert first.keys() == second.keys() == {"key", "path"}
    for name, text in second.items():
        assert text.startswith("ConfigError: ")
        assert first[name].startswith("RankError: ")
        assert f"rank 1: {text}" in first[name]
    assert (
        "the start of an engine (rank 0 of 2) is given up: rank 1: ConfigError: aio.no_such_key"
        in first["key"]
    )


# --- what an engine leaves behind ---


def make_many(rank: int, directory: str) -> list[list[int]]:
    """Threads and descriptors of the process after each engine."""
    left = []
    for _ in range(4):
        engine = engine_of(config_of("host", 3, Path(directory), world_size=2))
        train(engine, rank, 2, num_steps=1)
        engine.close()
        left.append([len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")])
    return left


def test_a_closed_engine_leaves_no_process_groups(found: Found) -> None:
    for left in found["make_many"]:
        (_, *more) = left  # torch's own threads come with the first
        assert more[-1][0] - more[0][0] < 4
        assert more[-1][1] - more[0][1] < 4


# --- Ctrl-C ---


def be_interrupted_while_another_is_late(rank: int, directory: str) -> list[str]:
    """What the first rank's backward raises, which waits for the other's, and the next use; what the other gets."""
    engine = engine_of(config_of("host", 1, Path(directory), world_size=2))
    train(engine, rank, 2, num_steps=1)
    engine.synchronize()
    interrupted = Path(directory) / "interrupted"
    loss = engine(micro_batch(1, rank, 2))
    if rank == 0:
        begun_s = time.monotonic()
        timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            engine.backward(loss)
        except KeyboardInterrupt:
            assert time.monotonic() - begun_s < 5
    else:
        until_s = time.monotonic() + TIMEOUT_S
        while not interrupted.exists() and time.monotonic() < until_s:
            time.sleep(0.05)
    said = []
    for _ in range(2):
        try:
            engine.zero_grad()
            train(engine, rank, 2, num_steps=1)
        except offloadzero.OffloadError as error:
            said.append(str(error))
    interrupted.touch()
    return said


def test_ctrl_c_ends_the_wait_for_another_rank(found: Found) -> None:
    first, second = found["be_interrupted_while_another_is_late"]
    assert len(first) == len(second) == 2
    lost = "a backward of this rank did not come to its end"
    assert all(text.startswith(lost) for text in first)
    assert all(f"rank 0: StateError: {lost}" in text for text in second)


# --- waits ---


class SlowToLook:
    """A collective whose end comes between the end of a wait for it and the look at whether it has ended."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.num_looks = 0

    def wait(self, *timeout: Any) -> None:
        try:
            self._work.wait(*timeout)
        except RuntimeError:
            self.num_looks += 1
            while not self._work.is_completed():
                time.sleep(0.01)
            raise

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def look_as_a_collective_ends(rank: int, directory: str) -> list[float]:
    """The sum, and how often the first rank has looked."""
    engine = engine_of(config_of("host", 1, Path(directory), world_size=2))
    ranks = engine.optimizer.runtime.group
    slow: list[SlowToLook] = []
    start = torch.distributed.all_reduce

    def started(*args: Any, **kwargs: Any) -> Any:
        slow.append(SlowToLook(start(*args, **kwargs)))
        return slow[-1]

    if rank == 0:
        torch.distributed.all_reduce = started
    else:
        time.sleep(1.0)  # a wait ends before
    total = torch.tensor([1.0 + rank])
    try:
        ranks.control.all_reduce(total, "the test")
    finally:
        torch.distributed.all_reduce = start
    engine.close()
    return [total.item(), sum(work.num_looks for work in slow)]


def test_a_collective_that_ends_after_a_wait_for_it_has_not_failed(found: Found) -> None:
    first, second = found["look_as_a_collective_ends"]
    assert first == [3.0, 1]
    assert second == [3.0, 0]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1", "CUDA_DEVICE_MAX_CONNECTIONS = 1: 32 where several ranks train"),
        ("8", "CUDA_DEVICE_MAX_CONNECTIONS is 8: streams of an engine share hardware queues"),
        (None, "CUDA_DEVICE_MAX_CONNECTIONS is not set: streams of an engine share"),
        ("32", ""),
    ],
)
def test_streams_that_share_a_queue_of_a_gpu_are_told(
    value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert expect_own_queues(torch.device("cuda"), 1) == expect_own_queues(torch.device("cpu"), 2) == ""
    if value == "1":
        with pytest.raises(ConfigError, match=said):
            expect_own_queues(torch.device("cuda"), 2)
    else:
        assert expect_own_queues(torch.device("cuda"), 2).startswith(said)
        assert bool(said) == bool(expect_own_queues(torch.device("cuda"), 2))
