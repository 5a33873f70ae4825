"""What comes back from a checkpoint is what was saved: options, schedules, counters; and what a failing load leaves."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offloadzero
from offloadzero import AioError, CheckpointError, ConfigError, StateError
from offloadzero.checkpoint.format import manifest
from offloadzero.checkpoint.format.json_file import decode_plain, encode_plain
from offloadzero.checkpoint.format.manifest import FileEntry, HashedFile, HashingPool, check_file
from tests.support.checkpoints import Net, small_engine, train, whole_state
from tests.support.faults import fails, observes
from tests.support.tiny import run_script

# --- the digest ---


PIECE = 8192


@pytest.mark.parametrize("num_bytes", [0, 1, 511, 4096, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 100_001])
@pytest.mark.parametrize("written", [1_000, PIECE, 4097, 100_001])
def test_the_digest_is_that_of_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, written: int
) -> None:
    """However the file is written, and however it is cut into reads."""
    monkeypatch.setattr(manifest, "PIECE_BYTES", PIECE)
    data = os.urandom(num_bytes)
    pieces = [data[start : start + PIECE] for start in range(0, num_bytes, PIECE)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    with HashingPool() as pool:
        file = HashedFile(tmp_path / "x", pool)
        for start in range(0, num_bytes, written):
            given = bytearray(data[start : start + written])
            file.write(given)
            given[:] = bytes(len(given))  # the caller's memory is its own again
        entry = file.close()
        assert entry == FileEntry(num_bytes, expected)
        assert (tmp_path / "x").read_bytes() == data
        check_file(tmp_path / "x", entry, pool)
        for at in {0, num_bytes // 2, num_bytes - 1} & set(range(num_bytes)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            (tmp_path / "x").write_bytes(flipped)
            with pytest.raises(CheckpointError, match="is damaged"):
                check_file(tmp_path / "x", entry, pool)


@pytest.mark.parametrize("refused", ["open", "pwritev", None])
def test_a_filesystem_without_direct_writes_gets_the_same_file(
    refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse when the file is opened, some when it is written, in pieces of any size; others write less."""
    monkeypatch.setattr(manifest, "PIECE_BYTES", PIECE)
    data, calls = os.urandom(5 * PIECE + 77), {name: getattr(os, name) for name in ("open", "pwritev")}
    was_direct = []

    def opened(path: Path, flags: int, mode: int) -> int:
        if refused == "open" and flags & os.O_DIRECT:
            calls["open"](path, flags, mode)  # Linux makes the file and refuses it then
            raise OSError(errno.EINVAL, "no direct I/O")
        descriptor: int = calls["open"](path, flags, mode)
        return descriptor

    def written(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        was_direct.append(is_direct)
        if refused == "pwritev" and is_direct:
            raise OSError(errno.EINVAL, "not aligned")
        num_bytes: int = calls["pwritev"](descriptor, [buffers[0][:4096]], offset)
        return num_bytes

    with HashingPool() as pool:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opened)
            file = HashedFile(tmp_path / "x", pool)
        monkeypatch.setattr(os, "pwritev", written)
        file.write(data)
        entry = file.close()
        assert (tmp_path / "x").read_bytes() == data
        check_file(tmp_path / "x", entry, pool)
    assert any(was_direct) == (refused != "open")
    assert all(was_direct) == (refused is None)


def test_a_file_takes_the_memory_of_a_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a tensor, also where the drive is slow."""
    monkeypatch.setattr(manifest, "PIECE_BYTES", PIECE)
    made, pwritev, new_memory = [], os.pwritev, mmap.mmap
    monkeypatch.setattr(manifest.mmap, "mmap", lambda *given: made.append(given) or new_memory(*given))

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(0.002)
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    with HashingPool() as pool:
        file = HashedFile(tmp_path / "x", pool)
        file.write(bytes(60 * PIECE))
        file.close()
        assert 1 < len(made) <= pool.num_threads + 2


def test_no_read_of_the_check_is_longer_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded whatever the size of a file."""
    lengths = []
    pread = os.pread

    def watched(descriptor: int, num_bytes: int, offset: int) -> bytes:
        lengths.append(num_bytes)
        return pread(descriptor, min(num_bytes, 100_000), offset)  # and may be short

    with HashingPool() as pool:
        file = HashedFile(tmp_path / "x", pool)
        file.write(bytes(9_000_001))
        entry = file.close()
        monkeypatch.setattr(os, "pread", watched)
        check_file(tmp_path / "x", entry, pool)
    assert max(lengths) == manifest.PIECE_BYTES == 4 * 2**20
    assert len(lengths) > 90


def test_a_full_disk_is_named() -> None:
    """By a later call where the one that gave the bytes is over."""
    with HashingPool() as pool:
        file = HashedFile(Path("/dev/full"), pool, is_there=True)
        with pytest.raises(AioError, match=r"write /dev/full\+0x0, 4194304 bytes: No space left on device"):
            file.write(bytes(99 << 20))
        file.abandon()
        small = HashedFile(Path("/dev/full"), pool, is_there=True)
        small.write(bytes(9))
        with pytest.raises(AioError, match=r"write /dev/full\+0x0, 9 bytes: No space left on device"):
            small.close()
        small.abandon()


# --- what JSON would change ---

PLAIN = [
    None, True, 0, -1, 2**70, 0.1, math.inf, "", "é\ud800", [], [1, [2]], (), (1, (2,)), {}, {"a": (1,)}, {1: 2},
    {"a": {(1, 2): [3]}}, {None: 1, True: 2}, {"__tuple__": 1}, {"__dict__": []}, Counter({30: 1, 60: 2}),
    Counter("aab"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode_plain(json.loads(json.dumps(encode_plain(value, "x"))))
    assert back == value
    assert type(back) is type(value)


def test_what_json_cannot_keep_is_refused_by_its_place(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine = engine_of()
    cyclic: dict[str, Any] = {}
    cyclic["a"] = cyclic
    for state, where in (
        ({"rng": [0, torch.zeros(1)]}, r"client_state\['rng'\]\[1\] = 'Tensor': a checkpoint keeps numbers"),
        ({"x": b"bytes"}, r"client_state\['x'\] = 'bytes'"),
        ({"x": {1, 2}}, r"client_state\['x'\] = 'set'"),
        (cyclic, "client_state = 'dict': nested more than 100 deep"),
        ({"x": 10**5000}, "JSON cannot keep it"),
        ([1], "client_state = 'list': a dict"),
    ):
        with pytest.raises(ConfigError, match=where):
            engine.save_checkpoint(tmp_path / "saved", client_state=state)
    assert not (tmp_path / "saved").exists()


def tensor_rates(net: nn.Module) -> torch.optim.Optimizer:
    """Two groups that share the tensor of the rate, one with another of its own."""
    params = list(net.parameters())
    groups: list[dict[str, Any]] = [
        {"params": params[:1], "weight_decay": np.float32(0.1)},
        {"params": params[1:2]},
        {"params": params[2:], "lr": torch.tensor(3e-3), "eps": np.float64(1e-8)},
    ]
    return torch.optim.AdamW(groups, lr=torch.tensor(1e-2))


def losses_with(engine: Any, optimizer: Any, *, first: int) -> list[float]:
    losses = train(engine, 2, first=first)
    optimizer.param_groups[2]["lr"].fill_(2e-2)
    return [*losses, *train(engine, 2, first=first + 2)]


@pytest.mark.parametrize("with_schedule", [False, True])
def test_rates_that_are_tensors_are_saved_as_numbers(with_schedule: bool, tmp_path: Path) -> None:
    """And what is loaded goes into tensors again, which the script may change in place."""

    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = Net()
        optimizer = tensor_rates(net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if with_schedule else None
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "offloadzero": {"placement": "host", "units": {"min_leaf_elements": 100}},
        }
        engine, optimizer, _, _ = offloadzero.initialize(
            model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config
        )
        return engine, optimizer

    engine, optimizer = build()
    losses_with(engine, optimizer, first=0)
    engine.save_checkpoint(tmp_path / "saved")
    rates = engine.get_lr()
    expected = losses_with(engine, optimizer, first=4)
    engine.close()
    meta = json.loads((tmp_path / "saved" / "global_step4" / "meta.json").read_text())
    assert [group["lr"] for group in meta["param_groups"]] == rates

    engine, optimizer = build()
    engine.load_checkpoint(tmp_path / "saved")
    assert engine.get_lr() == rates
    assert all(type(group["lr"]) is torch.Tensor for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["lr"] is not optimizer.param_groups[1]["lr"]
    assert losses_with(engine, optimizer, first=4) == expected
    engine.close()


def test_a_rate_in_a_tensor_follows_torch() -> None:
    """Changed in place by the script, between steps."""
    losses = []
    for offloads in (False, True):
        torch.manual_seed(0)
        net = Net()
        optimizer: Any = tensor_rates(net)
        if offloads:
            config = {"train_micro_batch_size_per_gpu": 2, "offloadzero": {"placement": "host"}}
            optimizer = offloadzero.offload(net, optimizer, config)[1]
        got = []
        for step in range(6):
            optimizer.param_groups[0]["lr"].fill_(0.02 / (step + 1))
            loss = net(torch.randint(0, 24, (2, 7), generator=torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            got.append(loss.item())
        losses.append(got)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=0.1),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
            ],
            [2],
        ),
    ],
)
def test_torchs_schedules_go_on(tmp_path: Path, schedule: Any) -> None:
    """MultiStepLR's milestones are numbers: as texts, no rate would ever fall again."""

    def engine_of() -> Any:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "offloadzero": {"placement": "host"},
        }
        return offloadzero.initialize(model=Net(), config=config, lr_scheduler=schedule)[0]

    engine = engine_of()
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    expected, rates = [], []
    for step in range(2, 8):
        expected += train(engine, 1, first=step)
        rates.append(engine.get_lr())
    assert len({str(rate) for rate in rates}) > 1
    engine.close()
    engine = engine_of()
    engine.load_checkpoint(tmp_path)
    for step in range(2, 8):
        assert train(engine, 1, first=step) == [expected[step - 2]]
        assert engine.get_lr() == rates[step - 2]
    engine.close()


def test_options_keep_their_types(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine = engine_of()
    engine.optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    engine.save_checkpoint(tmp_path / "saved", client_state={"shape": (1, 2), "by_id": {7: "a"}})
    engine.optimizer.param_groups[0]["betas"] = (0.9, 0.95)
    _, state = engine.load_checkpoint(tmp_path / "saved")
    assert engine.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert state == {"shape": (1, 2), "by_id": {7: "a"}}


# --- the other ways to load ---


def test_a_schedule_or_none(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    with_one, without = engine_of(), engine_of(scheduler=None)
    for engine, name in ((with_one, "with"), (without, "without")):
        engine.save_checkpoint(tmp_path / name)
    for engine, name, reason in (
        (with_one, "without", "saved without a schedule; WarmupLR would begin anew"),
        (without, "with", "saved with WarmupLR, the engine has no schedule"),
    ):
        before = whole_state(engine)
        with pytest.raises(CheckpointError, match=f"{reason}: pass load_lr_scheduler_states=False"):
            engine.load_checkpoint(tmp_path / name)
        assert whole_state(engine) == before
        engine.load_checkpoint(tmp_path / name, load_lr_scheduler_states=False)


@pytest.mark.parametrize(
    ("options", "counters"),
    [
        ({}, (3, 6, 3)),
        ({"load_optimizer_states": False}, (3, 6, 3)),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, (3, 6, 0)),
        ({"load_module_only": True}, (0, 0, 0)),
    ],
)
def test_counters_come_with_all_but_the_model_alone(
    engine_of: Callable[..., Any], options: dict[str, bool], counters: tuple[int, int, int], tmp_path: Path
) -> None:
    """As in DeepSpeed: a run that goes on with new states counts on, and its schedule with it."""
    engine = engine_of()
    train(engine, 3)
    engine.save_checkpoint(tmp_path / "saved")
    engine = engine_of()
    engine.load_checkpoint(tmp_path / "saved", **options)
    steps = engine.lr_scheduler.last_epoch
    assert (engine.global_steps, engine.global_samples, steps) == counters


PRECISIONS = {
    "bf16": {"bf16": {"enabled": True}},
    "dynamic": {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 6}},
    "static": {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 32.0}},
}


@pytest.mark.parametrize("written", PRECISIONS)
@pytest.mark.parametrize("read", PRECISIONS)
def test_the_loss_scale_is_the_configs_unless_both_are_dynamic(
    engine_of: Callable[..., Any], tmp_path: Path, written: str, read: str
) -> None:
    """A bf16 run that took over the scale of fp16 would multiply its loss by it, for good."""
    engine = engine_of(**PRECISIONS[written])
    if written == "dynamic":
        engine._coordinator.restore(0, 0, {"scale": 16.0, "good_steps": 7, "hysteresis_left": 1})
    engine.save_checkpoint(tmp_path / "saved")
    engine = engine_of(**PRECISIONS[read])
    before = engine.loss_scale
    engine.load_checkpoint(tmp_path / "saved")
    both = (written, read) == ("dynamic", "dynamic")
    assert engine.loss_scale == (16.0 if both else before)
    if both:
        assert engine._coordinator.loss_scale_state()["good_steps"] == 7


def test_a_step_that_was_begun_begins_anew(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    """Its gradients were not saved: the step must have all of its micro batches again."""
    keys = {"gradient_accumulation_steps": 2}
    engine = engine_of(**keys)
    train(engine, 2)  # one step
    engine.save_checkpoint(tmp_path / "whole")
    expected = train(engine, 4, first=2)
    engine = engine_of(**keys)
    train(engine, 3)
    engine.save_checkpoint(tmp_path / "begun")
    for name in ("whole", "begun"):
        engine = engine_of(seed=3, **keys)
        train(engine, 1, first=50)  # a gradient of weights that are gone then
        engine.load_checkpoint(tmp_path / name)
        assert (engine.micro_steps, engine.global_steps) == (2 if name == "whole" else 3, 1)
        assert train(engine, 4, first=2) == expected


def test_not_strict_takes_what_both_have(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    class Larger(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(5, 5)
            self.register_buffer("count", torch.ones(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + self.more.weight.sum() * 0

    engine = engine_of()
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "saved")
    expected = whole_state(engine)
    larger = engine_of(Larger(), seed=4)
    before = whole_state(larger)
    with pytest.raises(CheckpointError, match=r"missing count, more.bias, more.bias.exp_avg, .*5 and 0"):
        larger.load_checkpoint(tmp_path / "saved")
    assert whole_state(larger) == before
    larger.load_checkpoint(tmp_path / "saved", load_module_strict=False)
    after = larger.module.state_dict()
    assert torch.equal(after["count"], torch.ones(3))
    assert whole_state(larger)["counts"] == expected["counts"]
    back = engine_of(seed=6)
    back.load_checkpoint(tmp_path / "saved")
    assert whole_state(back) == expected
    for name, value in back.module.state_dict().items():
        assert torch.equal(value, after[name]), name


def test_a_save_in_atexit(tmp_path: Path) -> None:
    """No thread can be started there any more."""
    script = """
        import atexit, sys
        from tests.support.checkpoints import small_engine, train
        engine = small_engine(sys.argv[1])
        train(engine, 1)
        atexit.register(lambda: (engine.save_checkpoint(sys.argv[1]), print("SAVED", flush=True)))
    """
    done = run_script(script, tmp_path)
    assert done.stdout == "SAVED\n", done.stderr
    engine = small_engine(tmp_path, seed=1)
    assert engine.load_checkpoint(tmp_path)[0] is not None
    engine.close()


# --- a load that does not come to its end ---


def test_a_load_that_fails_half_way_is_the_end_of_the_engine(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = engine_of()
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    with fails("checkpoint.load", KeyboardInterrupt(), at=3), pytest.raises(KeyboardInterrupt):
        engine.load_checkpoint(tmp_path / "saved")
    before = sorted((tmp_path / "saved").rglob("*"))
    for use in (
        lambda: engine.load_checkpoint(tmp_path / "saved"),
        lambda: engine.save_checkpoint(tmp_path / "saved"),
        lambda: engine.save_16bit_model(tmp_path / "saved"),
        lambda: train(engine, 1),
    ):
        with pytest.raises(StateError, match="did not come to its end, so weights and states are a mixture"):
            use()
    assert sorted((tmp_path / "saved").rglob("*")) == before


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_a_closed_engine_neither_loads_nor_saves(placement: str, tmp_path: Path) -> None:
    """It says so each time, before it looks at any file."""
    engine = small_engine(tmp_path, placement)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    before = sorted((tmp_path / "saved").rglob("*"))
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (engine.load_checkpoint, (tmp_path / "saved",)),
        (engine.save_checkpoint, (tmp_path / "saved", "other")),
        (engine.load_checkpoint, (tmp_path / "nowhere",)),
        (engine.save_16bit_model, (tmp_path / "saved",)),
    ]
    for call, arguments in calls:
        with pytest.raises(StateError, match=rf"^engine\.{call.__name__}\(\): the engine .* is closed"):
            call(*arguments)
    assert sorted((tmp_path / "saved").rglob("*")) == before


def test_an_engine_that_has_given_its_model_back_neither_loads_nor_saves(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = engine_of()
    engine.save_checkpoint(tmp_path / "saved")
    engine.restore_model()
    before = sorted((tmp_path / "saved").rglob("*"))
    for call in (engine.load_checkpoint, engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(
            StateError, match=rf"^engine\.{call.__name__}\(\): restore_model\(\) has made the model"
        ):
            call(tmp_path / "saved")
    assert sorted((tmp_path / "saved").rglob("*")) == before


def test_a_file_that_changes_between_check_and_load(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine = engine_of()
    engine.save_checkpoint(tmp_path / "saved")

    def cut(_name: object) -> None:
        for unit in (tmp_path / "saved").rglob("unit-*"):
            os.truncate(unit, 10)

    with observes("checkpoint.load", before=cut), pytest.raises(CheckpointError, match="cut short"):
        engine.load_checkpoint(tmp_path / "saved")
    with pytest.raises(StateError, match="mixture"):
        engine.save_checkpoint(tmp_path / "saved")
