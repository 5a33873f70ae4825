"""How `offloadzero plan` measures computation: a standard block's, and that of the micro batch which is planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offloadzero.cli.main import main
from offloadzero.cli.plan import computation, measure
from offloadzero.cli.plan.answer import step_of
from offloadzero.cli.plan.computation import Computation, NotMeasuredError, _Seconds, micro_batch_rates
from offloadzero.errors import ConfigError
from offloadzero.memory.device import CpuDevice, Device, find_device
from offloadzero.planning import hardware
from offloadzero.planning.hardware import (
    Hardware,
    Memory,
    cache_file,
    hardware_from_json,
    model_key,
    read_hardware,
    share_of,
)
from offloadzero.planning.model.shapes import ModelShape, ModelSource, read_model
from offloadzero.planning.model.trace import loss_of_ids, trace_micro_batch
from tests.planning.planners import planner_of
from tests.planning.test_time_model import KNOWN
from tests.support.tiny import settings

GIB = 1 << 30
SHAPE, DEEP = "llama:64/3/4/101", "llama:64/7/4/101"
OWN = Computation(3e9, 5e9, 0.75)
BLOCK = Computation(1e12, 1e12)
CPU = find_device("cpu")
OF_A_FUNCTION = ModelSource("a:function", lambda: read_model(SHAPE).build())
Measured = list[tuple[nn.Module, int, int]]  # a model, and the size of its micro batch


class Card(CpuDevice):
    def free_bytes(self) -> int | None:
        return GIB


def test_computation_on_fewer_threads_than_cores_is_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of one thread is a second, and of three threads a third, however many cores there are."""
    monkeypatch.setattr(computation, "usable_cores", lambda: 4.0)
    monkeypatch.setattr(computation.time, "process_time", lambda: 12.0)
    assert [computation.cores_s(num) for num in (1, 3, 8)] == [12.0, 4.0, 3.0]
    assert computation.cores_s() == 3.0
    clocks: list[Any] = []

    def samples(calls: Any, of_calls: Any, _: Any) -> list[list[list[float]]]:
        clocks.append(of_calls[1]())
        return [[[1.0, 1.0] for _ in calls]]

    monkeypatch.setattr(computation, "_samples", samples)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    computation.block_rates(CPU, torch.float32)
    assert clocks == [6.0]


@pytest.mark.parametrize("device", [CPU, Card()], ids=["cpu", "card"])
def test_forward_and_backward_are_measured_apart(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products of one layout are slow, those of backward say, one rate for both is that of neither."""
    made: list[nn.Module] = []
    ways: list[str] = []

    def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        ways.append("forward")
        made.append(model)
        loss = loss_of_ids(model, ids)
        loss.register_hook(lambda _: ways.append("backward"))
        return loss

    def samples(calls: Any, _: Any, __: Any) -> list[list[list[float]]]:
        for call in calls:
            call()
        odd = [[9.0, 9.0], [9.0, 9.0]]
        return [odd, [[1.0, 0.25], [8.0, 4.25]], [[1.0, 0.25], [8.0, 4.25]]]

    monkeypatch.setattr(computation, "loss_of_ids", loss_of)
    monkeypatch.setattr(computation, "_samples", samples)
    monkeypatch.setattr(computation, "ModelShape", lambda kind, *_: ModelShape(kind, 64, 1, 2, 32, 128, 2))
    found = computation.block_rates(device, torch.float32)
    assert ways == ["forward", "backward"] * 2, "the first micro batch is not measured"
    assert all(param.grad is None for param in made[0].parameters())
    num_tokens, ratio, share = (4096, 8.0, 1.0) if device.free_bytes() else (256, 17.0, 4.5 / 9.0)
    trace = trace_micro_batch(made[0], dtype=None, micro_batch=1, sequence=num_tokens)
    assert found.forward / found.backward == pytest.approx(ratio * trace.forward_flops / trace.backward_flops)
    assert found.core_share == pytest.approx(share)


def test_what_takes_long_is_not_repeated() -> None:
    now = iter(range(0, 100, 3))
    calls: list[int] = []
    assert computation.best_s(lambda: calls.append(1), lambda: next(now)) == 3
    assert len(calls) == 2


def test_a_clock_that_has_not_ticked_is_none() -> None:
    """The processor's time may come in hundredths of a second: a rate was a division by zero."""
    assert 0 < computation.best_s(lambda: sum(range(1000)), lambda: 12.0) < 1.0


def rates(
    source: ModelSource, *, device: Device = CPU, room: int = GIB, block: Computation = BLOCK, **shape: int
) -> Computation:
    shape = {"micro_batch": 2, "sequence": 16, **shape}
    return micro_batch_rates(source, device, torch.bfloat16, room=room, block=block, **shape)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """What is measured; each way would take a second."""
    seen: Measured = []

    def measure(model: nn.Module, _: Device, micro_batch: int, sequence: int) -> _Seconds:
        seen.append((model, micro_batch, sequence))
        return _Seconds(1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(computation, "_time_micro_batches", measure)
    return seen


def test_many_blocks_are_measured_by_what_two_of_them_add(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(model: nn.Module, _: Device, micro_batch: int, sequence: int) -> _Seconds:
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        assert (micro_batch, sequence) == (2, 16)
        number = len(model.get_submodule("model.layers"))  # type: ignore[arg-type]
        measured.append(number)
        return _Seconds(1.0 + 2.0 * number, 2.0 + 3.0 * number, 0.5 + number, 1.0 + 2.0 * number)

    monkeypatch.setattr(computation, "_time_micro_batches", measure)
    monkeypatch.setattr(computation, "MOST_WHOLE_BYTES", 1 << 10)
    whole = trace_micro_batch(read_model(DEEP).on_meta(), dtype=torch.bfloat16, micro_batch=2, sequence=16)
    found = rates(read_model(DEEP))
    assert measured == [1, 3]
    assert found.forward == pytest.approx(whole.forward_flops / 7.5)
    assert found.backward == pytest.approx(whole.backward_flops / 15.0)
    assert found.core_share == pytest.approx(22.5 / 38.0)
    found = rates(read_model(DEEP), device=Card())
    assert found.forward == pytest.approx(whole.forward_flops / 15.0)
    assert found.backward == pytest.approx(whole.backward_flops / 23.0)
    assert found.core_share == 1.0
    monkeypatch.setattr(computation, "_time_micro_batches", lambda *_: _Seconds(1.0, 2.0, 1.0, 2.0))
    with pytest.raises(NotMeasuredError, match="3 blocks took no longer than 1"):
        rates(read_model(DEEP))
    monkeypatch.setattr(computation, "_time_micro_batches", measure)
    measured.clear()
    rates(read_model(SHAPE))
    assert measured == [3], "few blocks are measured whole"
    monkeypatch.setattr(computation, "MOST_WHOLE_BYTES", 1 << 30)
    rates(read_model(DEEP))
    assert measured == [3, 7], "so are small ones: the weights of some of them might lie in a cache"


def test_a_model_of_a_function_is_measured_whole_as_it_is_made(measured: Measured) -> None:
    rates(OF_A_FUNCTION)
    ((model, _, _),) = measured
    assert all(bool(param.isfinite().all()) for param in model.parameters())
    assert len(list(model.parameters())) == len(list(read_model(SHAPE).build().parameters()))


def test_adapters_are_measured_beside_codes_and_where_a_model_asks_for_dtypes(
    measured: Measured, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    coded = transformers.LlamaConfig(vocab_size=101, **sizes).to_dict()
    coded["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    asking = transformers.T5Config(vocab_size=101, decoder_start_token_id=0, **sizes).to_dict()
    for name, config in ("LlamaForCausalLM", coded), ("T5ForConditionalGeneration", asking):
        values = {**config, "architectures": [name]}
        (tmp_path / "config.json").write_text(json.dumps(values, default=str))
        rates(replace(read_model(str(tmp_path)), adapter_rank=2))
    dtypes = [{param.dtype for param in model.parameters()} for model, _, _ in measured]
    assert dtypes == [{torch.bfloat16, torch.uint8}, {torch.bfloat16}]


def test_a_micro_batch_that_would_take_long_is_shortened(measured: Measured) -> None:
    trace = trace_micro_batch(read_model(SHAPE).on_meta(), dtype=torch.bfloat16, micro_batch=4, sequence=512)
    whole_s = computation.MOST_S * trace.flops
    for share, expected in (
        (2.0, (4, 512)),
        (0.51, (2, 512)),
        (0.26, (1, 512)),
        (0.125, (1, 256)),
        (0.02, (1, 128)),
    ):
        rate = whole_s * share / computation.MOST_S**2
        measured.clear()
        rates(read_model(SHAPE), micro_batch=4, sequence=512, block=Computation(rate, rate))
        assert measured[0][1:] == pytest.approx(expected, abs=3)
    measured.clear()
    short = trace_micro_batch(read_model(SHAPE).on_meta(), dtype=torch.bfloat16, micro_batch=1, sequence=16)
    rate = short.flops / (2 * computation.MOST_S)
    rates(read_model(SHAPE), micro_batch=1, sequence=16, block=Computation(rate, rate))
    assert [one[1:] for one in measured] == [(1, 16)], "a sample shorter than that stays as it is"


@pytest.mark.parametrize("shape", [{"micro_batch": 4, "sequence": 512}, {"micro_batch": 1, "sequence": 16}])
def test_what_takes_long_however_short_is_not_measured(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of a llama of 405 billion parameters take minutes for 128 tokens on a CPU."""
    monkeypatch.setattr(computation, "_time_micro_batches", None)
    num_tokens = min(128, shape["sequence"])
    short = trace_micro_batch(
        read_model(SHAPE).on_meta(), dtype=torch.bfloat16, micro_batch=1, sequence=num_tokens
    )
    rate = short.flops / 500.0
    with pytest.raises(NotMeasuredError, match=f"^{num_tokens} tokens alone would take 500 s"):
        rates(read_model(SHAPE), block=Computation(rate, rate), **shape)


def test_a_model_without_room_is_refused_before_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computation, "_trace", None)
    with pytest.raises(NotMeasuredError, match="more than half of the memory"):
        rates(read_model(SHAPE), room=1 << 10)


def test_a_tied_head_is_measured_tied(measured: Measured) -> None:
    source = read_model("gpt:64/3/4/101")
    rates(source)
    ((model, _, _),) = measured
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    assert sum(map(torch.Tensor.numel, model.parameters())) == sum(
        map(torch.Tensor.numel, source.on_meta().parameters())
    )


@pytest.mark.parametrize("source", [read_model(SHAPE), OF_A_FUNCTION], ids=["shape", "function"])
def test_few_weights_are_drawn_and_copied(
    source: ModelSource, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To draw the weights of a large model would take longer than all the rest."""
    monkeypatch.setattr(computation, "_NUM_DRAWN", 1 << 10)
    rates(source)
    ((model, _, _),) = measured
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight").detach().flatten()
    assert torch.equal(weight[:1024], weight[1024:2048])
    assert weight[:1024].unique().numel() > 100
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_what_takes_too_much_memory_or_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotMeasuredError, match="more than half of the memory"):
        rates(read_model(SHAPE), room=1 << 20)

    def fails(*_: Any) -> _Seconds:
        raise ZeroDivisionError("of the model's\nown code")

    monkeypatch.setattr(computation, "_time_micro_batches", fails)
    with pytest.raises(NotMeasuredError, match="ZeroDivisionError: of the model's own code"):
        rates(read_model(SHAPE))
    with pytest.raises(NotMeasuredError, match="nothing that is counted"):
        rates(ModelSource("a:function", lambda: nn.Embedding(8, 8)))


# --- beside the machine's rates ---


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Return a machine whose rates are kept below `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured = replace(KNOWN, holds={"copy": 1e-10, "fp32": 2e-11})
    monkeypatch.setattr(measure, "measure", lambda *_, **__: measured)
    return measure.this_hardware("cpu", [], fresh=False)


def with_model(machine: Hardware, *, model: str = SHAPE, fresh: bool = False, **keys: Any) -> Hardware:
    source = read_model(model)
    keys = {"dtype": torch.bfloat16, "micro_batch": 2, "sequence": 16, **keys}
    return measure.with_model(machine, "cpu", source, fresh=fresh, **keys)


def test_a_model_is_measured_once_for_each_size_of_its_micro_batch(
    machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(measure, "micro_batch_rates", lambda *_, **keys: measured.append(keys) or OWN)
    for fresh, times in ((False, 1), (False, 1), (True, 2)):
        found = with_model(measure.this_hardware("cpu", [], fresh=False), fresh=fresh)
        assert list(found.of_models.values()) == [OWN]
        assert len(measured) == times
    with_model(measure.this_hardware("cpu", [], fresh=False), sequence=32)
    assert with_model(machine, dtype=None) == machine, "no rate of fp32 is known"
    with_model(measure.this_hardware("cpu", [], fresh=False), model=DEEP)
    kept = read_hardware(str(cache_file(machine.identity)))
    assert len(measured) == len(kept.of_models) + 1 == 4
    assert measured[0]["room"] == pytest.approx(machine.memory.host, rel=0.1), "of that moment"
    assert measured[0]["block"] == Computation(KNOWN.flops["bf16"], KNOWN.flops["bf16"]), (
        "no rate of gradients is known"
    )
    monkeypatch.setattr(hardware, "MOST_MODELS", 2)
    assert len(with_model(kept, sequence=8).of_models) == 2, "the oldest are forgotten"


@pytest.mark.parametrize("of_card", [None, 5 * GIB], ids=["cpu", "card"])
def test_a_model_gets_half_of_what_is_free_beside_this_process(
    machine: Hardware,
    of_card: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a control group of 1 GiB the half of all would not be free beside Python, torch and the probe."""
    rooms: list[int] = []

    class Free(CpuDevice):
        def free_bytes(self) -> int | None:
            return of_card

    def measured(*_: Any, room: int, **__: Any) -> Computation:
        rooms.append(room)
        return OWN

    monkeypatch.setattr(measure, "find_device", lambda _: Free())
    monkeypatch.setattr(measure, "available_host_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(measure, "micro_batch_rates", measured)
    with_model(machine)
    assert rooms == [of_card or 3 * GIB]


@pytest.mark.parametrize("load", [0.0, 100.0])
def test_a_busy_machine_is_said_where_a_model_is_measured(
    machine: Hardware, load: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of the cores comes of the time on a clock, which other work makes longer."""
    monkeypatch.setattr(measure, "micro_batch_rates", lambda *_, **__: OWN)
    monkeypatch.setattr(measure.os, "getloadavg", lambda: (load, 0.0, 0.0))
    with_model(machine)
    said = (
        "This machine is busy (load 100.0): the model's computation will seem slow."
        in capsys.readouterr().err
    )
    assert said == (load > 0)


def test_plans_that_measure_at_the_same_time_keep_all_models(
    machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has read the file before the other one writes it; what another has measured anew stays new."""
    monkeypatch.setattr(measure, "micro_batch_rates", lambda *_, **__: OWN)
    newer = replace(machine, rates=replace(KNOWN, copy=123.0))
    hardware.keep(newer)
    found = [with_model(machine, sequence=sequence) for sequence in (16, 32)]
    assert [len(one.of_models) for one in found] == [1, 1]
    kept = hardware.kept_hardware(machine.identity)
    assert kept is not None
    assert kept.of_models == found[0].of_models | found[1].of_models  # type: ignore[operator]
    assert kept.rates == newer.rates


def test_an_engine_never_reads_a_half_of_what_is_kept(
    machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    write = Path.write_text

    def write_in_halves(path: Path, text: str, **keys: Any) -> int:
        write(path, text[: len(text) // 2], **keys)
        seen.append(hardware.kept_hardware(machine.identity))
        return write(path, text, **keys)

    monkeypatch.setattr(Path, "write_text", write_in_halves)
    newer = replace(machine, of_models={"a model": OWN})
    hardware.keep(newer)
    assert [one.of_models for one in seen] == [{}]
    assert hardware.kept_hardware(machine.identity) == newer
    directory = cache_file(machine.identity).parent
    assert len(list(directory.iterdir())) == 1

    def no_room(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(OSError, match="No space"):
        hardware.keep(machine)
    assert hardware.kept_hardware(machine.identity) == newer, "as it was"


def test_a_user_without_a_home_has_a_plan(
    machine: Hardware, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(measure, "micro_batch_rates", lambda *_, **__: OWN)
    found = with_model(measure.this_hardware("cpu", [], fresh=False))
    assert (found.rates, [*found.of_models.values()]) == (machine.rates, [OWN])
    said = capsys.readouterr().err
    assert said.count("is not kept for the next time: Could not determine home directory.") == 2
    assert "What was measured before is not used: " in said


def test_a_model_that_cannot_be_measured_is_said(
    machine: Hardware, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: Any, **__: Any) -> Computation:
        raise NotMeasuredError("for a reason")

    monkeypatch.setattr(measure, "micro_batch_rates", refuses)
    assert with_model(machine) == machine
    assert "a standard block's is taken: for a reason" in capsys.readouterr().err


def test_the_rates_are_found_for_the_step_of_that_model_alone(tmp_path: Path) -> None:
    source = settings(tmp_path, train_micro_batch_size_per_gpu=2)
    machine = Hardware(Memory(host=8 * GIB, nvme=8 * GIB), KNOWN, num_cores=4)
    step = step_of(planner_of(SHAPE, machine.memory, sequence=16).answer(source), num_local_ranks=1)
    count = sum(param.numel() for param in read_model(SHAPE).build().parameters())
    known = replace(machine, of_models={model_key(step.dtype, 32, count): OWN})
    found = known.rates_of(step)
    assert (found.flops[step.dtype], found.gradient_flops[step.dtype]) == OWN[:2]
    assert found.core_shares[step.dtype] == OWN.core_share
    assert known.rates_of(replace(step, num_params=count + 1)) == KNOWN
    assert known.rates_of(replace(step, dtype="another")) == KNOWN
    assert known.rates_of(replace(step, trace=None)) == KNOWN
    on_card = replace(known, memory=replace(known.memory, device=GIB))
    assert on_card.rates_of(step).core_shares == KNOWN.core_shares
    assert share_of(known, 2).of_models == {}


def test_a_file_of_the_machine_has_them() -> None:
    machine = Hardware(Memory(host=8 * GIB), KNOWN, num_cores=4, of_models={"a model": OWN})
    written = json.loads(json.dumps(machine.to_json()))
    assert hardware_from_json("--hardware", written) == machine
    for damage in ({"forward": None}, {"forward": -1.0}, {"more": 1.0}, {"core_share": 1.5}):
        entry = {**written["of_models"]["a model"], **damage}
        with pytest.raises(ConfigError, match=r"--hardware\.of_models\.a model\."):
            hardware_from_json("--hardware", {**written, "of_models": {"a model": entry}})
    beyond = {**written, "rates": {**written["rates"], "core_shares": {"bf16": 1.5}}}
    with pytest.raises(ConfigError, match=r"--hardware\.rates\.core_shares\.bf16 = 1\.5: .*at most 1"):
        hardware_from_json("--hardware", beyond)


@pytest.mark.usefixtures("machine")
def test_the_command_forecasts_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings(tmp_path, placement="host")))
    words = ["plan", "--model", SHAPE, "--config", str(config), "--sequence", "16", "--json", "-"]

    def seconds(*more: str) -> float:
        assert main([*words, *more]) == 0
        found: float = json.loads(capsys.readouterr().out)["forecast"]["seconds"]
        return found

    saved = tmp_path / "machine.json"
    own_s = seconds("--hardware-out", str(saved))
    (key,) = read_hardware(str(saved)).of_models
    assert key.startswith(f"{sum(p.numel() for p in read_model(SHAPE).build().parameters())} parameters, 32 ")
    assert seconds() == own_s
    assert seconds("--hardware", str(saved)) == own_s
    machine_alone = json.loads(saved.read_text())
    machine_alone["of_models"] = {}
    saved.write_text(json.dumps(machine_alone))
    assert seconds("--hardware", str(saved)) != own_s


@pytest.mark.usefixtures("machine")
def test_auto_goes_by_kept_rates_where_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine goes by them: with --no-time the plan was another one, and said that no rate is known."""
    monkeypatch.setattr(measure, "micro_batch_rates", lambda *_, **__: OWN)
    config = tmp_path / "config.json"
    keys = {"placement": "auto", "placement_tokens": 32, "budgets": {"host": "1GiB", "device": "1GiB"}}
    config.write_text(json.dumps(settings(tmp_path, **keys)))
    words = ["plan", "--model", SHAPE, "--config", str(config), "--sequence", "16"]

    def said(*more: str) -> str:
        assert main([*words, *more]) == 0
        return capsys.readouterr().out

    by_bytes = '"auto" goes by bytes: no rate of '
    assert by_bytes in said("--no-time")
    assert "auto, by the simulated step with 32 tokens" in said()
    assert "auto, by the simulated step with 32 tokens" in said("--no-time")


def test_a_model_that_takes_no_use_cache_is_given_none() -> None:
    """Its configuration may name it all the same, as BertConfig does."""

    class Masked(nn.Module):
        config = SimpleNamespace(use_cache=True)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (ids + labels).float().sum()

    assert loss_of_ids(Masked(), torch.ones(1, 4, dtype=torch.long)) == 8
