"""`offloadzero plan` as a command: what it prints, its status, and the machine as a file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadzero.cli.main import FAILURE, USER_ERROR, main
from offloadzero.cli.plan import answer
from offloadzero.cli.plan.answer import Planner
from offloadzero.cli.plan.command import FORMAT, read_count
from offloadzero.errors import ConfigError
from offloadzero.observe.bound import CORES
from offloadzero.planning.hardware import Memory
from offloadzero.planning.model.shapes import read_model, read_shape
from tests.cli.planned import GIB, MACHINE, MIB, SHAPE, PlanJson, PlanText, words
from tests.planning.test_time_model import KNOWN
from tests.support.tiny import settings


def test_what_it_says(plan_text: PlanText) -> None:
    text = plan_text("--tokens", "1m", "--drive-tbw", "600TB")
    count = sum(param.numel() for param in read_model(SHAPE).build().parameters())
    for part in (
        f"llama:64/3/4/101/256/4 (Llama): {count:,} parameters in 6 units, Adam, fp32 layout",
        "home: exp_avg_sq",
        "activations",
        "Python and torch              300.00 MiB",
        "The CPU is the device",
        "It fits.",
        "A step takes ",
        "Simulated unit by unit, with its leases and buffers, it takes ",
        "cores ",
        "  compute ",
        "nvme read ",
        "What would make it faster: ",
        "1,000,000 tokens: 31,250 steps, ",
        "they are worn out after ",
    ):
        assert part in text, part
    days = re.search(
        r"they are worn out after ([0-9.]+) days", plan_text("--tokens", "1m", "--drive-tbw", "1GB")
    )
    assert days is not None
    assert float(days[1]) < 300  # it said 0.0 years


def test_what_does_not_fit_is_said_with_what_would(plan_text: PlanText) -> None:
    small = replace(MACHINE, memory=Memory(host=310 * MIB, nvme=8 * GIB))
    text = plan_text(machine=small, placement="nvme", model="llama:256/2/2/9000", status=FAILURE)
    assert "It does not fit: host " in text
    assert "The smallest change with which it fits: offloadzero." in text
    text = plan_text(budgets={"host": "1KiB"}, status=FAILURE)
    assert "offloadzero.budgets.host: " in text
    assert "The smallest change with which it fits: offloadzero.budgets.host = " in text


def test_training_without_clipping_is_named_as_another_training(plan_text: PlanText) -> None:
    small = replace(MACHINE, memory=Memory(host=310 * MIB, nvme=8 * GIB))
    keys: dict[str, Any] = {"machine": small, "placement": "host", "model": "llama:256/2/2/9000"}
    text = plan_text(gradient_clipping=1.0, status=FAILURE, **keys)
    said = re.search(r"If you train without clipping.* keeps none of the ([0-9.]+ MiB) of gradients", text)
    assert said is not None
    assert f"home: grad                     {said[1]}" in text
    assert "without clipping" not in plan_text(gradient_clipping=0.0, status=FAILURE, **keys)
    assert "without clipping" not in plan_text(
        gradient_clipping=1.0, gradient_accumulation_steps=2, status=FAILURE, **keys
    )


def test_a_drive_without_a_mixed_rate_and_a_missing_rate_are_named_by_their_key(plan_text: PlanText) -> None:
    assert "no mixed rate is known" not in plan_text(placement="nvme")
    unmixed = replace(MACHINE, rates=replace(KNOWN, nvme_mixed=None))
    text = plan_text(placement="nvme", machine=unmixed)
    assert "no mixed rate is known (mixed_gb_per_s of a cluster's drives, nvme_mixed of rates)" in text
    unknown = replace(MACHINE, rates=replace(KNOWN, nvme_cpu_s_per_byte=None))
    text = plan_text(placement="nvme", machine=unknown)
    assert "no rate or no count of file engine (rates.nvme_cpu_s_per_byte)." in text


def test_memory_of_the_device_that_is_left_is_named_where_it_makes_the_step_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with that budget the step takes as long as was said."""
    own = {"placement": "auto", "nvme_path": str(tmp_path), "activation_checkpoints": {}}
    command = ["plan", "--model", "llama:13b", "--hardware", "h100", "--loop", "offload"]

    def said(micro_batch: int = 8, **more: Any) -> str:
        config = settings(tmp_path, **own, **more)
        (tmp_path / "config.json").write_text(json.dumps(config))
        given = ["--config", str(tmp_path / "config.json"), "--sequence", "1024"]
        assert main([*command, *given, "--micro-batch", str(micro_batch)]) == 0
        return capsys.readouterr().out

    advice = r'^offloadzero\.budgets\.device = "(\d+GiB)" makes it (\S+ s): auto leaves that memory to others'
    found = re.search(advice, said(), re.MULTILINE)
    assert found is not None
    then = said(budgets={"device": found[1]})
    assert f"A step takes {found[2]} (forecast;" in then
    assert "budgets.device" not in then


def test_changes_that_make_the_step_faster_come_with_their_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word on it the plan of eight cards was one of stage 0, sixteen times as slow; the fastest is first."""
    own = {"placement": "auto", "nvme_path": str(tmp_path), "activation_checkpoints": {}}
    given = settings(tmp_path, zero_optimization=None, gradient_clipping=1.0, **own)
    (tmp_path / "config.json").write_text(json.dumps(given))
    command = [
        "plan",
        "--model",
        "llama:13b",
        "--config",
        str(tmp_path / "config.json"),
        "--hardware",
        "8xh100",
    ]
    assert main([*command, "--sequence", "1024", "--json", str(tmp_path / "plan.json")]) == 0
    found = re.findall(r"^(\S+) = (\S+) makes it ([\d.]+ m?s): ", capsys.readouterr().out, re.MULTILINE)
    assert [one[:2] for one in found[:2]] == [
        ("zero_optimization.stage", "3"),
        ("offloadzero.state_layout", '"compact"'),
    ]
    faster = json.loads((tmp_path / "plan.json").read_text())["faster"]
    assert [one["keys"] for one in faster[:2]] == [
        {"zero_optimization.stage": 3},
        {"offloadzero.state_layout": "compact"},
    ]
    config = json.loads((tmp_path / "config.json").read_text()) | {"zero_optimization": {"stage": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([*command, "--sequence", "1024"]) == 0
    assert f"A step takes {found[0][2]} (forecast;" in capsys.readouterr().out


def test_the_plan_is_printed_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    search = Planner.smallest_change

    def watched(planner: Planner, source: Any) -> Any:
        printed.append(capsys.readouterr().out)
        return search(planner, source)

    monkeypatch.setattr(Planner, "smallest_change", watched)
    assert main(words(tmp_path, budgets={"host": "1KiB"})) == FAILURE
    assert "offloadzero.budgets.host: " in printed[0]
    assert "home: " in printed[0]
    rest = capsys.readouterr().out
    assert "home: " not in rest
    assert "The smallest change with which it fits: " in rest


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], plan_json: PlanJson) -> None:
    file = tmp_path / "plan.json"
    assert main(words(tmp_path, "--json", str(file))) == 0
    capsys.readouterr()
    result = plan_json()
    assert result == json.loads(file.read_text())
    shape = read_shape("", SHAPE)
    assert shape is not None
    assert (result["format"], result["fits"], result["num_parameters"]) == (FORMAT, True, shape.count())
    planned = sum(line["bytes"] for line in result["plan"])
    beside = result["beside"]
    assert sum(result["needed"].values()) == planned + sum(beside.values())
    assert beside["host"] == 300 * MIB
    assert beside["device"] == result["micro_batch_trace"]["peak_bytes"]
    assert beside["holes"] == beside["device"] // 2, "all of them are small"
    on_card = replace(MACHINE, device="a card", memory=replace(MACHINE.memory, device=8 * GIB))
    assert plan_json(machine=on_card, device="cpu")["beside"]["holes"] == 0
    assert result["forecast"]["seconds"] >= result["forecast"]["bound_s"]
    assert result["forecast"]["lane"] in (CORES, "nvme", "nvme read", "nvme write")
    simulated = result["simulated"]
    assert simulated["seconds"] == pytest.approx(sum(simulated["critical_s"].values()))
    assert simulated["seconds"] == pytest.approx(max(end_s for *_, end_s in simulated["spans"]))
    assert {lane for lane, *_ in simulated["spans"]} == set(simulated["busy_s"])


def test_auto_by_time_says_what_it_chose_and_what_was_slower(plan_text: PlanText) -> None:
    keys = {"placement": "auto", "budgets": {"device": "1MiB", "host": "4MiB"}, "gradient_clipping": 1.0}
    text = plan_text(**keys)
    assert "auto, by the simulated step" not in text
    text = plan_text(placement_tokens=4096, **keys)
    assert (
        "auto, by the simulated step with 4,096 tokens in a micro batch, without attention: to the host "
        in text
    )
    assert "\nslower: to the host " in text
    assert "by the simulated step" in plan_text("--no-time", placement_tokens=4096, **keys), (
        "the rates of a file are known all the same"
    )


def test_settings_that_are_not_in_the_rates_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan_text: PlanText
) -> None:
    """Of a device whose copies are not pinned a step was forecast with those that are, and nothing was said."""
    card = replace(MACHINE, memory=replace(MACHINE.memory, device=GIB), device="a card")
    card = replace(card, rates=replace(card.rates, h2d=1e9, d2h=1e9, device_update={"fp32": 1e9}))
    pinned = {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    keys: dict[str, Any] = {
        "placement": {"states": "nvme"},
        "update": {"num_threads": 1},
        "aio": {"checksums": True},
    }
    said = (
        "Not in it: pin_memory = false, with which copies are slower than the pinned ones of the rates; "
        "offloadzero.update.num_threads: the rate of updates is that of as many as an engine takes itself; "
        "aio.queue_depth: the drive's rates are those of the default settings; offloadzero.aio.checksums, for which "
        "the cores pass once more over what the drive moves."
    )
    arguments = words(tmp_path, machine=card, **keys)
    config = Path(arguments[arguments.index("--config") + 1])
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "zero_optimization": pinned, "aio": {"queue_depth": 4}})
    )
    assert main(arguments) == 0
    assert said in capsys.readouterr().out.splitlines()
    assert main([*arguments, "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["left_out"]) == 4
    assert "Not in it" not in plan_text(placement={"states": "nvme"})


def test_a_rule_that_places_nothing_is_named(plan_text: PlanText) -> None:
    rules = [{"units": "blocks.0", "param": "host"}, {"units": "model.layers.0", "param": "host"}]
    named = [
        line for line in plan_text("--no-time", placement=rules).splitlines() if "places nothing" in line
    ]
    assert len(named) == 1
    assert "'blocks.0' places nothing: the model has no such unit, it has " in named[0]
    assert "model.layers.0, model.layers.1" in named[0]


def test_a_micro_batch_takes_the_place_of_the_configurations(plan_json: PlanJson) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 12, "gradient_accumulation_steps": 3}
    results = []
    for more in ((), ("--micro-batch", "2")):
        results.append(plan_json(*more, **sizes))
    assert [result["micro_batch"] for result in results] == [4, 2]
    assert [result["forecast"]["tokens"] for result in results] == [4 * 3 * 16, 2 * 3 * 16]
    assert results[0]["beside"]["device"] > results[1]["beside"]["device"]


def test_a_micro_batch_leaves_the_accumulation_that_follows_from_the_others(plan_json: PlanJson) -> None:
    """32 samples in micro batches of 4 are 8 of them, whether or not the configuration says so."""
    sizes = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 32, "gradient_accumulation_steps": None}
    results = []
    for more in ((), ("--micro-batch", "4"), ("--micro-batch", "2")):
        results.append(plan_json(*more, placement="host", **sizes))
    assert [result["forecast"]["tokens"] for result in results] == [8 * 4 * 16, 8 * 4 * 16, 8 * 2 * 16]
    assert results[0]["plan"] == results[1]["plan"] == results[2]["plan"]
    assert "home: grad" in [line["what"] for line in results[0]["plan"]]


@pytest.mark.parametrize("loop", ["initialize", "offload"])
def test_the_loop_decides_how_long_gradients_are_kept(loop: str, plan_json: PlanJson) -> None:
    kept = [
        line["what"] for line in plan_json("--loop", loop, placement="host")["plan"] if line["tier"] == "host"
    ]
    assert ("home: grad" in kept) == (loop == "offload")


def test_a_reason_that_ends_its_sentence_gets_no_second_full_stop(
    monkeypatch: pytest.MonkeyPatch, plan_text: PlanText
) -> None:
    monkeypatch.setattr(
        Planner, "_trace", lambda *_, **__: "Model: RuntimeError: Expected inputs of BF16 type."
    )
    text = plan_text("--no-time")
    assert "Activations are not counted: Model: RuntimeError: Expected inputs of BF16 type.\n" in text


def test_bytes_alone_need_no_rates(plan_text: PlanText) -> None:
    text = plan_text("--no-time", machine="probe")
    assert "It fits." in text
    assert "A step takes" not in text
    no_rates = replace(MACHINE, rates=replace(KNOWN, nvme_read=None, flops={}))
    text = plan_text("--tokens", "1m", machine=no_rates)
    assert (
        "The step's time is not forecast: no rate or no count of compute (rates.flops), nvme read (rates.nvme_read)."
        in text
    )
    assert re.search(r"1,000,000 tokens: 31,250 steps, \S+ \wiB written to the drives", text), (
        "bytes need no rates"
    )


def test_directories_of_another_machine_are_not_looked_for_here(plan_text: PlanText) -> None:
    keys = {"nvme_path": ["/of another machine/drive0", "/of another machine/drive1"], "placement": "nvme"}
    plan_text("--micro-batch", "1", "--no-time", **keys)
    small = replace(MACHINE, memory=Memory(host=310 * MIB, nvme=8 * GIB))
    assert "The smallest change with which it fits: " in plan_text(
        "--no-time", machine=small, model="llama:256/2/2/9000", **keys, status=FAILURE
    )
    assert "there is no such directory" in plan_text("--no-time", machine="probe", status=USER_ERROR, **keys)


def test_a_sample_has_no_more_tokens_than_a_model_has_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_positions=24, n_embd=32, n_head=2, n_layer=1, vocab_size=101)
    (tmp_path / "gpt").mkdir()
    config.save_pretrained(tmp_path / "gpt")
    arguments = words(tmp_path, "--json", "-", model=str(tmp_path / "gpt"))
    at = arguments.index("--sequence")
    assert main([*arguments[:at], *arguments[at + 2 :]]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batch_trace"]["num_tokens"] == 2 * 24
    assert main([*arguments, "--sequence", "25"]) == USER_ERROR
    assert "--sequence = 25: at most 24, the positions of" in capsys.readouterr().err


def test_a_config_of_four_bits_has_fewer_bytes_and_as_many_operations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.LlamaConfig(vocab_size=101, architectures=["LlamaForCausalLM"], **sizes)
    four_bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = {}
    for name, quantised in {
        "none": None,
        "4 bits": four_bits,
        "doubled": {**four_bits, "bnb_4bit_use_double_quant": True},
        "but some": {**four_bits, "llm_int8_skip_modules": ["lm_head", "down_proj"]},
        "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "gptq": {"quant_method": "gptq", "bits": 4},
    }.items():
        written = {**config.to_dict(), **({"quantization_config": quantised} if quantised else {})}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(written, default=str))
        arguments = words(
            tmp_path, "--json", "-", "--lora", "4", model=str(tmp_path / name), placement="host"
        )
        if main(arguments) == 0:
            found[name] = json.loads(capsys.readouterr().out)
        else:
            assert re.search("quantization_config = .*: 4 bits of bitsandbytes", capsys.readouterr().err)
    assert found.keys() == {"none", "4 bits", "doubled", "but some"}
    traces = [one["micro_batch_trace"] for one in found.values()]
    for key in ("forward_flops", "backward_flops"):
        assert len({trace[key] for trace in traces}) == 1, key
    assert not any(trace["uncounted"] for trace in traces)


def test_a_machine_with_another_device_than_the_configuration_s_is_told_of(plan_text: PlanText) -> None:
    card = replace(MACHINE, memory=Memory(host=8 * GIB, device=8 * GIB, nvme=8 * GIB), device="a card")
    said = "has offloadzero.device = cpu; this is the plan for the device of --hardware, a card."
    assert said in plan_text("--no-time", machine=card)
    for machine, device in ((card, "cuda:1"), (card, None), (MACHINE, "cpu")):
        assert "of --hardware" not in plan_text("--no-time", machine=machine, device=device)


def test_what_waits_on_a_drive_without_room_cannot_be_built(plan_text: PlanText) -> None:
    small = replace(MACHINE, memory=Memory(host=8 * GIB, nvme=MIB))
    text = plan_text("--no-time", machine=small, placement="auto", model="llama:256/2/2/9000")
    assert re.search(r"1\.00 MiB are available, 2\d\.\d\d MiB too few: it cannot be built so\.", text)


def test_the_largest_is_the_one_beyond_which_nothing_fits(plan_json: PlanJson) -> None:
    small = replace(MACHINE, memory=Memory(host=306 * MIB, nvme=8 * GIB), process_bytes=300 * MIB)
    found: list[int] = []
    for more in ([], ["--lora", "4"]):
        text = plan_json("--largest", *more, machine=small, placement="host")["model"]
        assert text.endswith(" with adapters of rank 4") == bool(more)
        shape = read_shape("", text.partition(" ")[0])
        assert shape is not None
        found.append(shape.num_layers)
        for num_layers, status in ((shape.num_layers, 0), (shape.num_layers + 1, FAILURE)):
            model = str(replace(shape, num_layers=num_layers))
            plan_json(*more, machine=small, placement="host", model=model, status=status)
    assert 3 < found[0] < found[1]


def test_the_largest_that_is_tried_is_called_so(plan_text: PlanText, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MAX_LAYERS", 5)
    text = plan_text("--largest", "--no-time")
    assert "More than 5 blocks are not tried." in text
    assert "does not fit" not in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sequence", "0"], "--sequence = 0: a whole number from 1"),
        (
            ["--sequence", "2049", "--model", "gpt:64/2/2/300"],
            "--sequence = 2049: at most 2,048, the positions of gpt:",
        ),
        (["--micro-batch", "0"], "--micro-batch = 0: a whole number from 1"),
        (["--lora", "0"], "--lora = 0: a whole number from 1"),
        (["--tokens", "many"], "--tokens = 'many': a number of tokens such as 300b"),
        (["--model", "lama:13b"], "did you mean 'llama:13b'"),
        (["--config", "not there.json"], "the file cannot be read"),
        (
            ["--hardware", "rtx4090"],
            "a file, or one of probe, 8xh100, h100, h200, rtx-3090, rtx-4090 (did you mean 'rtx-4090'?)",
        ),
        (["--no-time", "--hardware-out", "x"], "left out with --no-time"),
        (["--no-time", "--tokens", "1b"], "--tokens = '1b': left out with --no-time"),
        (["--drive-tbw", "600TB"], "--drive-tbw = '600TB': together with --tokens"),
        (["--tokens", "1b", "--drive-tbw", "0TB"], "--drive-tbw = '0TB': more than nothing"),
    ],
)
def test_mistakes(more: list[str], message: str, plan_text: PlanText) -> None:
    assert message in plan_text(*more, status=USER_ERROR)


@pytest.mark.parametrize("key", ["--json", "--html", "--hardware-out"])
def test_a_result_replaces_neither_the_configuration_nor_another_result(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration was overwritten by the answer, and one answer by the other."""
    given = [word for word in words(tmp_path) if word != "--no-time"]
    config = Path(given[given.index("--config") + 1])
    before = config.read_bytes()
    assert main([*given, key, str(config.parent / "." / config.name)]) == USER_ERROR
    assert f"{key} = " in (text := capsys.readouterr().err)
    assert "another file than that of --config" in text
    assert config.read_bytes() == before
    other = "--html" if key == "--json" else "--json"
    assert main([*given, key, str(tmp_path / "out"), other, str(tmp_path / "out")]) == USER_ERROR
    assert "another file than that of --" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [["--tokens", "many"], ["--tokens", "1b", "--drive-tbw", "600T"]])
def test_numbers_are_read_before_the_machine_is_measured(
    more: list[str], monkeypatch: pytest.MonkeyPatch, plan_text: PlanText
) -> None:
    """A misspelled --tokens was said after a minute."""
    monkeypatch.setattr("offloadzero.cli.plan.command.ask", lambda *_: pytest.fail("measured first"))
    assert f"{more[-2]} = " in plan_text(*more, status=USER_ERROR)


def test_a_configuration_with_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What load_config takes is planned, and changed where it does not fit."""
    text = json.dumps(settings(tmp_path, placement="host", budgets={"host": "1KiB"}), indent=1)
    arguments = words(tmp_path, "--json", "-")
    (tmp_path / "config.json").write_text(f"// a comment\n{text[:-2]}, # and a comma\n}}")
    assert main(arguments) == FAILURE
    assert list(json.loads(capsys.readouterr().out)["change"]["keys"]) == ["offloadzero.budgets.host"]


def test_counts_of_tokens() -> None:
    assert [read_count("", text) for text in (None, "7", "1.5k", "300B", "1.4t")] == [
        *(None, 7, 1500, 300 * 10**9, 1_400_000_000_000)
    ]
    for text in ("", "b", "-3", "nan", "1e30t"):
        with pytest.raises(ConfigError):
            read_count("--tokens", text)
