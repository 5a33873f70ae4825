"""What only a CUDA device can show of scripts: streams and allocators of torch's, graphs, cuDNN, compiled code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offloadzero import StateError
from tests.support.tiny import (
    VOCABULARY,
    TinyModel,
    all_states,
    make_engine,
    script_environment,
    settings,
    tokens,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

Outcome = tuple[list[float], dict[str, torch.Tensor]]
Step = Callable[[Any, torch.Tensor], torch.Tensor]


def plain(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    """A step on the current stream."""
    loss: torch.Tensor = engine(batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def outcome(
    directory: Path,
    placement: Any,
    *,
    make_model: Callable[[], nn.Module] = TinyModel,
    step: Step = plain,
    **keys: Any,
) -> Outcome:
    """Losses and all states after four steps; nobody asks for a loss before the end."""
    torch.manual_seed(1)
    engine = make_engine(settings(directory, placement=placement, device="cuda", **keys), make_model())
    losses = [step(engine, tokens(seed, batch=4, length=33).cuda()) for seed in range(4)]
    states = all_states(engine)
    engine.close()
    return [float(loss) for loss in losses], states


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, state in expected[1].items():
        assert torch.equal(state, found[1][name]), name


# --- streams ---


class OnTwoStreams:
    """The forward on one stream, backward and step on another, each behind the one before, as a script orders them."""

    def __init__(self) -> None:
        self._forward, self._backward = torch.cuda.Stream(), torch.cuda.Stream()

    def __call__(self, engine: Any, batch: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        self._forward.wait_stream(here)
        batch.record_stream(self._forward)
        with torch.cuda.stream(self._forward):
            loss: torch.Tensor = engine(batch)
        self._backward.wait_stream(self._forward)
        with torch.cuda.stream(self._backward):
            engine.backward(loss)
            engine.step()
        self._forward.wait_stream(self._backward)
        here.wait_stream(self._backward)
        return loss.detach()


@pytest.mark.parametrize("inputs", ["kept", "device", "host"])
@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_script_on_streams_of_its_own(placement: str, inputs: str, tmp_path: Path) -> None:
    """`inputs`: of checkpointed units, if there are any."""
    keys: dict[str, Any] = {} if inputs == "kept" else {"activation_checkpoints": {"tier": inputs}}
    expected = outcome(tmp_path, placement, **keys)
    assert_same(outcome(tmp_path, placement, step=OnTwoStreams(), **keys), expected)


def test_more_streams_than_torch_has(tmp_path: Path) -> None:
    """torch's come from a pool of 32, so lanes of two engines, and a script's streams, are the same ones."""
    expected = outcome(tmp_path, "host")
    streams = [torch.cuda.Stream() for _ in range(29)]
    made = settings(tmp_path, placement="host", device="cuda")
    engines = []
    for _ in range(3):
        torch.manual_seed(1)
        engines.append(make_engine(made, TinyModel()))
        streams += [torch.cuda.Stream() for _ in range(3)]
    losses: list[list[torch.Tensor]] = [[] for _ in engines]
    for seed in range(4):
        for engine, seen, stream in zip(engines, losses, streams, strict=False):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                seen.append(plain(engine, tokens(seed, batch=4, length=33).cuda()))
            torch.cuda.current_stream().wait_stream(stream)
    for engine, seen in zip(engines, losses, strict=True):
        assert_same(([float(loss) for loss in seen], all_states(engine)), expected)
        engine.close()


def test_an_event_that_is_recorded_again_is_another_for_those_who_wait_later() -> None:
    """The clock of the device records events again while streams may still wait for what they stood for."""
    event, other = torch.cuda.Event(enable_timing=True, blocking=True), torch.cuda.Stream()
    torch.cuda._sleep(1)  # CUDA loads a kernel at its first launch
    torch.cuda.synchronize()
    event.record()
    other.wait_event(event)
    torch.cuda._sleep(400_000_000)
    event.record()
    assert not event.query()
    other.synchronize()
    assert not event.query(), "the stream has waited for the second record"
    event.synchronize()


# --- memory ---


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_memory_that_is_not_pinned(placement: str, tmp_path: Path) -> None:
    """Copies from and to it go through the driver's own buffers, and block the lanes."""
    unpinned = {"pin_memory": False, "device": "cpu"}
    zero = {"stage": 3, "offload_param": unpinned, "offload_optimizer": unpinned}
    keys: dict[str, Any] = {"activation_checkpoints": {"tier": "host"}}
    expected = outcome(tmp_path, placement, **keys)
    assert_same(outcome(tmp_path, placement, zero_optimization=zero, **keys), expected)


DIGEST = """
import hashlib, sys
from pathlib import Path
import torch
from tests.gpu.test_gpu_scripts import outcome

torch.use_deterministic_algorithms(True)
losses, states = outcome(Path(sys.argv[1]), "host", activation_checkpoints={"tier": "host"})
digest = hashlib.sha256(repr(losses).encode())
for name in sorted(states):
    digest.update(states[name].view(torch.uint8).numpy().tobytes())
print(torch.cuda.get_allocator_backend(), digest.hexdigest())
"""


def test_torchs_other_allocators(tmp_path: Path) -> None:
    """Which is chosen before torch is imported."""
    digests = {}
    for chosen in ("", "expandable_segments:True", "backend:cudaMallocAsync"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST, str(tmp_path)],
            env={**script_environment(), "PYTORCH_CUDA_ALLOC_CONF": chosen},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{chosen}: {done.stderr}"
        backend, digests[chosen] = done.stdout.split()
        assert backend == ("cudaMallocAsync" if "backend" in chosen else "native")
    assert len(set(digests.values())) == 1, digests


CONTEXTS = """
import sys
import torch
from tests.support.tiny import make_engine, settings, tokens

engine = make_engine(settings(sys.argv[1], placement=sys.argv[2], device="cuda:1"))
for seed in range(2):
    engine.backward(engine(tokens(seed).to("cuda:1")))
    engine.step()
engine.close()
print([torch._C._cuda_hasPrimaryContext(index) for index in range(2)])
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
def test_an_engine_on_the_second_device_takes_nothing_of_the_first(placement: str, tmp_path: Path) -> None:
    """A context there is half a gigabyte, of each rank."""
    command = [sys.executable, "-c", CONTEXTS, str(tmp_path), placement]
    done = subprocess.run(command, env=script_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[False, True]"


# --- graphs ---


def test_a_graph_of_something_else_is_captured_while_updates_run(tmp_path: Path) -> None:
    """In the mode that torch has for scripts with other threads: those of the engine wait for events meanwhile."""
    expected = outcome(tmp_path, "host")
    x = torch.zeros(1024, device="cuda")

    def step_and_capture(engine: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = plain(engine, batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = x + 1
            time.sleep(0.05)  # for the updates and the fetches behind them
        graph.replay()
        assert bool((y == 1).all())
        return loss

    assert_same(outcome(tmp_path, "host", step=step_and_capture), expected)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_forward_is_not_captured(tmp_path: Path) -> None:
    """The engine goes on after the error."""
    expected = outcome(tmp_path, "host")

    def capture_and_step(engine: Any, batch: torch.Tensor) -> torch.Tensor:
        with (
            pytest.raises(StateError, match="a CUDA graph is being captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            engine(batch)
        return plain(engine, batch)

    assert_same(outcome(tmp_path, "host", step=capture_and_step), expected)


# --- code that only runs on a device ---


class Recurrent(nn.Module):
    """LSTMs that ask cuDNN for their fast form in each forward, as many models do; the forward returns the loss."""

    def __init__(self, *, flattens: bool = True) -> None:
        super().__init__()
        self.flattens = flattens
        self.emb = nn.Embedding(VOCABULARY, 64)
        self.cells = nn.ModuleList(nn.LSTM(64, 64, batch_first=True) for _ in range(3))
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(batch[:, :-1])
        for cells in self.cells:
            assert isinstance(cells, nn.LSTM)
            if self.flattens:
                cells.flatten_parameters()
            hidden = hidden + cells(hidden)[0]
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_weights_of_cudnn(placement: str, tmp_path: Path) -> None:
    """Those of one layer lie in a unit as cuDNN has them, which may then save all of the unit's memory for backward."""
    expected = outcome(tmp_path, "device", make_model=partial(Recurrent, flattens=False), bf16=None)
    assert_same(outcome(tmp_path, placement, make_model=Recurrent, bf16=None), expected)


def under_autocast(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss: torch.Tensor = engine(batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_weights_that_autocast_casts(placement: str, tmp_path: Path) -> None:
    expected = outcome(tmp_path, "device", step=under_autocast, bf16=None)
    assert_same(outcome(tmp_path, placement, step=under_autocast, bf16=None), expected)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_loss_that_is_scaled(placement: str, tmp_path: Path) -> None:
    """The first steps overflow, and are skipped."""
    keys: dict[str, Any] = {
        "bf16": None,
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
    }
    expected = outcome(tmp_path, "device", **keys)
    assert_same(outcome(tmp_path, placement, **keys), expected)


def compiled_model() -> nn.Module:
    model = TinyModel()
    for block in model.blocks:
        block.compile()
    return model


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_blocks_that_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that was compiled for the weights of one lease runs with those of another."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.fspath(tmp_path / "inductor"))
    files = tmp_path / "files"
    files.mkdir()
    expected = outcome(files, "device", make_model=compiled_model)
    for placement in ("host", "nvme"):
        assert_same(outcome(files, placement, make_model=compiled_model), expected)
