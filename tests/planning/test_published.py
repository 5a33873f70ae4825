"""The published figures of ZeRO and ZeRO-Infinity against the plan, its lanes and the formulas that it is put beside.

Figures are the papers' own: ZeRO (arXiv 1910.02054), table 1, memory per device in GB by the degree of data
parallelism; ZeRO-Infinity (arXiv 2104.07857), section 4, bandwidth and efficiency on V100s of 70 TFLOPS.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from offloadzero.cli.main import USER_ERROR, main
from offloadzero.cli.plan.answer import step_of
from offloadzero.cli.plan.report import StageBytes, by_stage
from offloadzero.errors import ConfigError
from offloadzero.observe.timeline import D2H, H2D, NVME_READ, NVME_WRITE
from offloadzero.planning.step.forecast import Step
from offloadzero.planning.step.work import AFTER, BACKWARD, FORWARD
from offloadzero.planning.zero_formulas import efficiency_unoverlapped, state_bytes
from offloadzero.update.spec import UpdateForm
from tests.planning.planners import WITH_DEVICE, planner_of
from tests.support.tiny import settings

SIZES = {"7.5b": 7.5e9, "128b": 128e9, "1t": 1e12}
# By degree, then by model: stages 1 (P_os), 2 (P_os+g) and 3 (P_os+g+p).
TABLE = {
    1: {"7.5b": "120 120 120", "128b": "2048 2048 2048", "1t": "16000 16000 16000"},
    4: {"7.5b": "52.5 41.3 30", "128b": "896 704 512", "1t": "7000 5500 4000"},
    16: {"7.5b": "35.6 21.6 7.5", "128b": "608 368 128", "1t": "4750 2875 1000"},
    64: {"7.5b": "31.4 16.6 1.88", "128b": "536 284 32", "1t": "4187 2218 250"},
    256: {"7.5b": "30.4 15.4 0.47", "128b": "518 263 8", "1t": "4046 2054 62.5"},
    1024: {"7.5b": "30.1 15.1 0.12", "128b": "513 257 2", "1t": "4011 2013 15.6"},
}
V100 = 70e12
# torch's checkpoint ends a recomputation before its last product, a third of a block's forward: the paper counts it.
RECOMPUTED = 11 / 12
GB = 1e9


def published(degree: int, model: str) -> dict[int, tuple[float, float]]:
    """By stage, the figure and a unit of its last digit: some are rounded, some are cut off."""
    texts = TABLE[degree][model].split()
    return {
        stage: (float(text), 10.0 ** -len(text.partition(".")[2]))
        for stage, text in zip((1, 2, 3), texts, strict=True)
    }


@functools.cache
def planned(model: str, degree: int) -> tuple[int, dict[int, StageBytes]]:
    """The parameters of a GPT of that size, and its bytes by stage: fp16, fp32 states, all on the device."""
    planner = planner_of(f"gpt:{model}", WITH_DEVICE, form=UpdateForm.TORCH, num_ranks=degree)
    config = settings(placement="device", bf16=None, fp16={"enabled": True})
    found = {one.stage: one for one in by_stage(planner, config)}
    return sum(param.numel() for param in planner.model().parameters()), found


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("degree", TABLE)
def test_zeros_memory_per_device_by_the_formula(degree: int, model: str) -> None:
    for stage, (figure, digit) in published(degree, model).items():
        found = state_bytes(SIZES[model], stage=stage, num_ranks=degree) / GB
        assert abs(found - figure) <= digit, stage


@pytest.mark.parametrize(
    ("degree", "model"), [*((degree, "7.5b") for degree in TABLE), (4, "128b"), (1024, "128b"), (64, "1t")]
)
def test_zeros_memory_per_device_by_the_plan(degree: int, model: str) -> None:
    """The engine's own plan of one rank. It pads units, and divides gradients in stage 1 as ZeRO does in stage 2."""
    count, found = planned(model, degree)
    assert count == pytest.approx(SIZES[model], rel=0.06)
    figures = published(degree, model)
    for stage in (1, 2, 3):
        figure, digit = figures[max(stage, 2)]
        ours = found[stage].states / count * SIZES[model] / GB
        assert figure - digit <= ours <= 1.02 * figure + digit, stage
        formula = state_bytes(count, stage=max(stage, 2), num_ranks=degree)
        assert formula <= found[stage].states <= 1.02 * formula
    assert found[1].states <= found[1].formula * 1.02
    whole = found[0].states
    assert whole == pytest.approx(16 * count, rel=0.001)


def test_a_stage_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="0, 1, 2 or 3"):
        state_bytes(1, stage=4, num_ranks=2)


def test_frozen_parameters_are_parameters_alone() -> None:
    whole = state_bytes(100, stage=2, num_ranks=4, num_frozen=50)
    assert whole == 100 * (2 + 14 / 4) + 2 * 50
    assert state_bytes(100, stage=3, num_ranks=4, num_frozen=50) == (100 * 16 + 2 * 50) / 4


def test_the_command_says_it_by_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings(tmp_path, placement="host")))
    words = ["plan", "--model", "gpt:256/4/4/2000", "--config", str(config), "--no-time", "--ranks", "4"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "One of 4 ranks; zero_optimization.stage is " in text
    assert "One of 4 ranks, by stage of ZeRO:" in text
    assert "Stage 2 is refused: offloadzero.placement.param = 'host'" in text
    assert main([*words, "--json", "-"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [found["stage"] for found in stages] == [0, 1, 2, 3]
    assert [found["tiers"] is None for found in stages] == [False, True, True, False]
    assert stages[3]["tiers"]["host"] < stages[0]["tiers"]["host"] / 3
    assert main([*words, "--local-ranks", "5"]) == USER_ERROR
    assert "--local-ranks = 5: a whole number from 1 to 4" in capsys.readouterr().err


# --- ZeRO-Infinity: efficiency by bandwidth ---


def intensity(what: str, *, batch: int, sequence: int = 1024, hidden: int = 8192) -> float:
    """Operations for each byte, from what the paper's sections 3 and 4.1 count of one block with a checkpoint."""
    params = 12 * hidden**2
    flops = 2 * 4 * params * batch * sequence  # forward, its recomputation, and twice as many in backward
    num_bytes = {
        "parameters": 2 * 4 * params,  # loaded for forward, recomputation and backward; gradients stored
        "states": 2 * 16 * params,  # read and written
        "activations": 2 * 2 * hidden * batch * sequence,  # a checkpoint of 2 bytes, stored and loaded
    }
    return flops / num_bytes[what]


@pytest.mark.parametrize(
    ("what", "sizes", "bandwidth", "at_least"),
    [
        ("parameters", {"batch": 1}, 70 * GB, 0.5),
        ("states", {"batch": 1}, 4 * 70 * GB, 0.5),
        ("states", {"batch": 2}, 1500 * GB, 0.9),
        ("activations", {"batch": 1, "hidden": 2048}, 2 * GB, 0.5),
        ("activations", {"batch": 1, "hidden": 8192}, 1 * GB, 0.5),
    ],
)
def test_efficiencies_that_the_paper_names(
    what: str, sizes: dict[str, int], bandwidth: float, at_least: float
) -> None:
    per_byte = intensity(what, **sizes)
    found = efficiency_unoverlapped(per_byte, bytes_per_s=bandwidth, flops_per_s=V100)
    assert at_least <= found < 1


@pytest.mark.parametrize(
    ("shape", "figure"), [((80, 10240), 1.83), ((128, 25600), 18.31), ((195, 65536), 182.81)]
)
def test_model_states_of_a_tenth_one_and_ten_trillion_parameters(
    shape: tuple[int, int], figure: float
) -> None:
    """Figure 2a, in TiB: 20 bytes for each of 12 layers hidden² parameters, which the figures are checked to be.

    The plan of 1,024 ranks together has 16: ZeRO-Infinity counts a gradient in fp32 as well.
    """
    num_layers, hidden = shape
    states = 20 * 12 * num_layers * hidden**2
    assert states / 2**40 == pytest.approx(figure, abs=0.005)
    model = f"gpt:{hidden}/{num_layers}/{hidden // 128}/256"
    planner = planner_of(model, WITH_DEVICE, form=UpdateForm.TORCH, num_ranks=1024)
    planned, _ = planner.plan(settings("/tmp", bf16=None, fp16={"enabled": True}))
    assert 1024 * planned.plan.home_bytes == pytest.approx(states * 16 / 20, rel=0.02)


@functools.cache
def step_with(placement: str, tier: str) -> tuple[int, Step]:
    """A GPT so wide that matrix products of the blocks are nearly all, as the paper counts; checkpointed."""
    planner = planner_of("gpt:8192/16/64/256", WITH_DEVICE, form=UpdateForm.TORCH, sequence=1024)
    config = settings(
        "/tmp",
        placement=json.loads(placement),
        bf16=None,
        fp16={"enabled": True},
        train_micro_batch_size_per_gpu=1,
        units={"prefetch_units": 1},
        activation_checkpoints={"tier": tier},
    )
    answer = planner.answer(config)
    return answer.planned.num_parameters, step_of(answer)


def moved(step: Step, *where: tuple[str, str]) -> int:
    return sum(step.traffic.by_phase[phase].get(lane, 0) for phase, lane in where)


def flops_per_byte(step: Step, num_bytes: int) -> float:
    assert step.trace is not None
    return step.trace.flops / num_bytes


def test_parameters_and_gradients_move_no_more_than_the_paper_says() -> None:
    """Loaded for forward, recomputation and backward, stored once: 8 bytes. One fetch is enough for the two last."""
    count, step = step_with('"host"', "device")
    num_bytes = moved(step, (FORWARD, H2D), (BACKWARD, H2D), (BACKWARD, D2H))
    assert 5.5 <= num_bytes / count <= 6.05
    found = flops_per_byte(step, num_bytes)
    assert found >= intensity("parameters", batch=1)
    assert found * num_bytes / (8 * count) == pytest.approx(
        RECOMPUTED * intensity("parameters", batch=1), rel=0.03
    )
    assert efficiency_unoverlapped(found, bytes_per_s=70 * GB, flops_per_s=V100) > 0.5


def test_states_move_no_more_than_the_paper_says() -> None:
    """16 bytes there and back; of these the gradient and the fp16 parameter need not come from where states are."""
    count, step = step_with('{"states": "nvme"}', "device")
    num_bytes = moved(step, (AFTER, NVME_READ), (AFTER, NVME_WRITE))
    assert num_bytes / count == pytest.approx(24, rel=0.01)
    found = flops_per_byte(step, num_bytes)
    assert found >= intensity("states", batch=1)
    assert found * num_bytes / (32 * count) == pytest.approx(
        RECOMPUTED * intensity("states", batch=1), rel=0.03
    )


def test_activations_move_as_the_paper_says() -> None:
    _, step = step_with('"device"', "host")
    num_bytes = moved(step, (FORWARD, D2H), (BACKWARD, H2D))
    wanted = intensity("activations", batch=1, hidden=8192)
    assert flops_per_byte(step, num_bytes) == pytest.approx(RECOMPUTED * wanted, rel=0.03)


def test_the_plan_says_the_efficiency_of_each_lane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Computing takes c seconds and a lane l: computing is c / (c + l) of both, one after the other."""
    from tests.cli.planned import words

    assert main(words(tmp_path, "--json", "-")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    seconds = {**found["forecast"]["lanes_s"], **found["forecast"]["parts_s"]}
    flops = found["micro_batch_trace"]["forward_flops"] + found["micro_batch_trace"]["backward_flops"]
    assert {"h2d", "d2h", "update", "nvme read", "nvme write"} <= found["intensity"].keys()
    for lane, said in found["intensity"].items():
        num_bytes = sum(lanes.get(lane, 0) for lanes in found["traffic"].values())
        assert said["flops_per_byte"] == pytest.approx(flops / num_bytes)
        assert said["efficiency"] == pytest.approx(seconds["compute"] / (seconds["compute"] + seconds[lane]))
    assert main(words(tmp_path)) == 0
    assert "efficiency" in capsys.readouterr().out
