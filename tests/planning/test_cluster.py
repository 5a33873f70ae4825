"""Machines that are not at hand: what a rank has of them, what goes between ranks, and forecasts for 1,024 devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadzero.cli.main import USER_ERROR, main
from offloadzero.cli.plan.answer import step_of
from offloadzero.errors import ConfigError
from offloadzero.observe.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from offloadzero.observe.timeline import D2H, H2D, LANDING, NVME_READ, NVME_WRITE, UPDATE
from offloadzero.planning.cluster import _ENTRIES, FORMAT, Cluster, between_ranks, cluster_from_json
from offloadzero.planning.hardware import share_of
from offloadzero.planning.step.forecast import Forecast, Rates, Step, simulated
from offloadzero.planning.step.work import HOST_MEMORY, LINKS, NETWORK
from offloadzero.update.spec import UpdateForm
from tests.cli.planned import MACHINE
from tests.planning.planners import WITH_DEVICE, planner_of
from tests.support.tiny import settings
from tests.support.training import merge

GB = 1e9
# 128 machines with eight devices of 131 GiB each.
LARGE: Mapping[str, Any] = {
    "format": FORMAT,
    "format_version": 1,
    "machines": 128,
    "gpus_per_machine": 8,
    "gpu": {"name": "H200", "memory_gib": 131, "tflops": 600, "memory_gb_per_s": 4000},
    "host": {"memory_gib": 2000, "gb_per_s": 300, "cores": 96},
    "pcie": {"to_gpu_gb_per_s": 50, "from_gpu_gb_per_s": 50},
    "drives": {"number": 8, "size_gb": 7680, "read_gb_per_s": 6, "write_gb_per_s": 5},
    "links": {"gb_per_s": 450},
    "network": {"gb_per_s": 400},
    "collective_us": 40,
    "unit_us": 300,
}
# The machines of ZeRO-Infinity's paper, of which one has 16 V100s, 48 GB/s from the host to all of them together and
# 25.6 GB/s from its drives.
DGX2: Mapping[str, Any] = {
    **LARGE,
    "machines": 64,
    "gpus_per_machine": 16,
    "gpu": {"name": "V100", "memory_gib": 32, "tflops": {"fp16": 70}, "memory_gb_per_s": 800},
    "pcie": {"to_gpu_gb_per_s": 12, "from_gpu_gb_per_s": 12, "machine_gb_per_s": 48},
    "drives": {"number": 8, "size_gb": 3500, "read_gb_per_s": 3.2, "write_gb_per_s": 3.2},
}


def cluster_of(described: Mapping[str, Any]) -> Cluster:
    return cluster_from_json("--hardware", described)


# --- what a rank has ---


def test_the_bandwidth_of_many_machines_is_what_zero_infinity_says() -> None:
    """3 GB/s from the host and 1.6 GB/s from the drives for each of 1,024 devices: over 3 and over 1.5 TB/s in all.

    Figures of the paper's section 6.1, which these follow from.
    """
    rank = cluster_of(DGX2).rank(16)
    assert rank.rates.h2d == rank.rates.d2h == pytest.approx(3.0 * GB)
    assert rank.rates.nvme_read == pytest.approx(1.6 * GB)
    assert rank.rates.h2d is not None
    assert rank.rates.nvme_read is not None
    assert 3.0e12 < 1024 * rank.rates.h2d < 3.1e12
    assert 1.5e12 < 1024 * rank.rates.nvme_read < 1.7e12
    assert rank.rates.flops == {"fp16": 70e12}


def test_a_rank_alone_has_a_machine_to_itself() -> None:
    alone, shared = cluster_of(DGX2).rank(1), cluster_of(DGX2).rank(16)
    assert alone.rates.h2d == 12 * GB
    for name in ("nvme_read", "nvme_write", "network", "landing", "host_memory"):
        assert getattr(alone.rates, name) == pytest.approx(16 * getattr(shared.rates, name))
    assert alone.rates.update["compact"] == 16 * shared.rates.update["compact"] == 300 * GB
    assert (alone.rates.links, alone.rates.flops) == (shared.rates.links, shared.rates.flops)
    assert alone.memory == shared.memory


@pytest.mark.parametrize(
    ("threads", "factor"), [(None, 1 / 2), (1, 1 / 4), (4, 1 / 2)], ids=["as measured", "one", "all"]
)
def test_ranks_share_the_cores_that_compute(threads: int | None, factor: float) -> None:
    """Of four cores each of two ranks has two, or as many as torch has threads there."""
    of_rank = share_of(MACHINE, 2, num_threads=threads)
    assert of_rank.num_cores == 2
    assert of_rank.rates.flops["bf16"] == pytest.approx(factor * MACHINE.rates.flops["bf16"])
    on_devices = replace(MACHINE, memory=replace(MACHINE.memory, device=1 << 30), device="GPU")
    assert share_of(on_devices, 2, num_threads=threads).rates.flops == MACHINE.rates.flops
    assert share_of(MACHINE, 1) == MACHINE
    assert of_rank.rates.copy == MACHINE.rates.copy, "of one thread"


# --- between ranks ---


def received(num_ranks: int, num_near: int) -> tuple[int, int]:
    """Blocks that the busiest rank gets over links and through the network, so that each has one block of every rank.

    Each block goes to each other machine once, to its ranks in turn, and from there to the others.
    """
    has = [{rank} for rank in range(num_ranks)]
    links, network = [0] * num_ranks, [0] * num_ranks
    for machine in range(0, num_ranks, num_near):
        ranks = range(machine, machine + num_near)
        missing = [block for block in range(num_ranks) if block not in ranks]
        for turn, block in enumerate(missing):
            network[machine + turn % num_near] += 1
            has[machine + turn % num_near].add(block)
        here = {block for rank in ranks for block in has[rank]}
        for rank in ranks:
            links[rank] = len(here - has[rank])
    return max(links), max(network)


@pytest.mark.parametrize(("num_ranks", "num_near"), [(8, 8), (8, 1), (8, 4), (16, 4), (64, 16), (2, 1)])
def test_an_all_gather_brings_each_machine_all_blocks_once(num_ranks: int, num_near: int) -> None:
    expected = received(num_ranks, num_near)
    for kind, times in ((ALL_GATHER, 1), (REDUCE_SCATTER, 1), (ALL_REDUCE, 2)):
        found = between_ranks(kind, 1000.0 * num_ranks, num_ranks=num_ranks, num_near=num_near)
        assert found == pytest.approx([times * 1000 * blocks for blocks in expected])


@pytest.mark.parametrize(("num_ranks", "num_near"), [(8, 8), (8, 1), (16, 4)])
def test_an_all_to_all_sends_a_part_to_each_other_rank(num_ranks: int, num_near: int) -> None:
    peers = [rank // num_near for rank in range(1, num_ranks)]  # the machines of the others, of rank 0
    found = between_ranks(ALL_TO_ALL, 1000.0 * num_ranks, num_ranks=num_ranks, num_near=num_near)
    assert found == pytest.approx((1000 * peers.count(0), 1000 * (len(peers) - peers.count(0))))


# --- the lanes of a step ---


def step_on(
    described: Mapping[str, Any], model: str, num_ranks: int | None = None, **over: Any
) -> tuple[int, Step, Forecast]:
    """The number of parameters, and the step of one of the ranks, as the command makes it."""
    cluster = cluster_of(described)
    num_ranks = num_ranks or cluster.num_gpus
    num_local = cluster.local_ranks("--ranks", num_ranks)
    ranks = {"num_ranks": num_ranks, "num_local_ranks": num_local}
    planner = planner_of(model, WITH_DEVICE, form=UpdateForm.TRITON, sequence=512, **ranks)
    base = settings("/tmp", train_micro_batch_size_per_gpu=1, gradient_clipping=1.0)
    answer = planner.answer(merge(base, over))
    step = step_of(answer, num_local_ranks=num_local, cluster=cluster)
    return answer.planned.num_parameters, step, cluster.rank(num_local).forecast(step)


TWO = {**LARGE, "machines": 2}
GPT = "gpt:1024/6/8/500"


def lanes(step: Step) -> Mapping[str, int]:
    return step.traffic.lanes


def test_stage_3_sends_three_times_the_parameters() -> None:
    """Gathered for forward and for backward, reduced once; 16 ranks on two machines. A few of the blocks stay."""
    count, step, _ = step_on(TWO, GPT)
    psi = 2 * count
    assert 2.6 <= lanes(step)[NETWORK] / (psi * (1 / 8 - 1 / 16)) <= 3.05
    assert lanes(step)[LINKS] / lanes(step)[NETWORK] == pytest.approx((1 - 1 / 8) / (1 / 8 - 1 / 16))
    one = step_on({**LARGE, "machines": 1}, GPT)[1]
    assert NETWORK not in lanes(one)
    alone = step_on({**LARGE, "machines": 1, "gpus_per_machine": 1}, GPT)[1]
    assert not {NETWORK, LINKS} & lanes(alone).keys()


def test_zero_plus_plus_sends_a_quarter_between_machines() -> None:
    """Codes of eight bits for forward, none for backward, codes of four bits once for a machine: 0.75 for 3 times.

    Of the gradient's bytes a rank's all-to-all has half for the other machine.
    """
    count, whole, _ = step_on(TWO, GPT)
    keys = {"zero_quantized_weights": True, "zero_hpz_partition_size": 8, "zero_quantized_gradients": True}
    _, coded, _ = step_on(TWO, GPT, zero_optimization=keys)
    ratio = lanes(coded)[NETWORK] / lanes(whole)[NETWORK]
    assert 0.24 < ratio < 0.30
    psi = 2 * count
    gradients = 0.25 * psi * (1 / 8) * (1 / 2)  # 1/8 of the codes are for one rank's place, half of them stay
    weights = 0.5 * psi * (1 / 8 - 1 / 16)
    assert lanes(coded)[NETWORK] == pytest.approx(gradients + weights, rel=0.1)


def test_each_rank_moves_its_part_on_its_own_link() -> None:
    """Sixteen ranks move what one would alone, by sixteenths, so each byte serves as much more computation."""
    _, alone, _ = step_on({**LARGE, "machines": 1, "gpus_per_machine": 1}, GPT)
    _, step, _ = step_on(TWO, GPT)
    for lane in (H2D, D2H, UPDATE, LANDING, NVME_READ, NVME_WRITE, HOST_MEMORY):
        assert 16 * lanes(step)[lane] == pytest.approx(lanes(alone)[lane], rel=0.12), lane
    through = (H2D, D2H, UPDATE, LANDING, NVME_READ, NVME_WRITE)
    assert lanes(step)[HOST_MEMORY] == sum(lanes(step)[lane] for lane in through)


@pytest.mark.parametrize(
    ("slow", "lane"),
    [
        ({"gpu": {"tflops": 0.1}}, "compute"),
        ({"host": {"gb_per_s": 0.1}}, HOST_MEMORY),
        ({"pcie": {"to_gpu_gb_per_s": 0.01}}, H2D),
        ({"pcie": {"from_gpu_gb_per_s": 0.01}}, D2H),
        ({"drives": {"read_gb_per_s": 0.001}}, NVME_READ),
        ({"drives": {"mixed_gb_per_s": 0.001, "read_gb_per_s": 0.001, "write_gb_per_s": 0.001}}, "nvme"),
        ({"links": {"gb_per_s": 0.01}}, LINKS),
        ({"network": {"gb_per_s": 0.01}}, NETWORK),
    ],
)
def test_what_is_slow_is_the_bound(slow: dict[str, Any], lane: str) -> None:
    _, step, found = step_on(TWO, GPT)
    assert (found.unknown, step.num_ranks) == ((), 16)
    _, _, slower = step_on(merge(TWO, slow), GPT)
    assert slower.lane == lane
    assert slower.seconds is not None
    assert found.seconds is not None
    assert slower.seconds > found.seconds
    assert slower.bound_s is not None
    assert slower.alone_s is not None
    assert slower.bound_s <= slower.seconds <= slower.alone_s


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_simulated_step_waits_for_the_host_s_memory(placement: str) -> None:
    """Copies, updates and the drive share it: with less of it than they ask for a step takes at least its bytes."""
    alone = {**LARGE, "machines": 1, "gpus_per_machine": 1}
    fast, slow = merge(alone, {"host": {"gb_per_s": 10_000}}), merge(alone, {"host": {"gb_per_s": 20}})
    times = []
    for described in (fast, slow):
        _, step, found = step_on(described, GPT, offloadzero={"placement": placement})
        rates = cluster_of(described).rank(1).rates
        simulation = simulated(step, rates, num_cores=1, device_is_cpu=False)
        assert simulation is not None
        times.append(simulation.seconds)
        spared = simulation.spared_s * (rates.nvme_read or 0.0)  # reads of parameters that updates deliver
        assert simulation.seconds >= 0.99 * (found.lanes_s[HOST_MEMORY] - spared / (rates.host_memory or 1.0))
    assert times[1] > times[0]


@pytest.mark.parametrize("coded", [False, True])
def test_a_start_counts_on_the_lanes_of_its_bytes_alone(coded: bool) -> None:
    """What the ranks agree on over their hosts is on no lane; what stays on a machine does not start on the network."""
    keys = {"zero_quantized_weights": True, "zero_hpz_partition_size": 8, "zero_quantized_gradients": True}
    over = {"zero_optimization": keys} if coded else {}
    _, step, found = step_on(TWO, GPT, **over)
    _, _, without = step_on({**TWO, "collective_us": None}, GPT, **over)
    calls: dict[str, int] = {}
    for counts in step.traffic.collectives.values():
        for key, count in counts.items():
            purpose = key.partition(" ")[0]
            calls[purpose] = calls.get(purpose, 0) + count.num_calls
    assert calls.pop("orders") > 0
    near = sum(num for purpose, num in calls.items() if purpose != "far_gradients")
    far = sum(num for purpose, num in calls.items() if not purpose.startswith("near_"))
    assert (near == far) is not coded
    assert found.lanes_s[NETWORK] - without.lanes_s[NETWORK] == pytest.approx(far * 40e-6)
    assert found.lanes_s[LINKS] - without.lanes_s[LINKS] == pytest.approx(near * 40e-6)


# --- the command ---


def words(tmp_path: Path, described: Mapping[str, Any], model: str, *more: str, **keys: Any) -> list[str]:
    files = {"config": settings(tmp_path, gradient_clipping=1.0, **keys), "cluster": described}
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    config, hardware = str(tmp_path / "config.json"), str(tmp_path / "cluster.json")
    return ["plan", "--model", model, "--config", config, "--hardware", hardware, *more]


def test_a_model_of_a_trillion_parameters_on_1024_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the formulas of the design: 8 operations for each parameter and token, 3 times the parameters sent."""
    keys = {"activation_checkpoints": {"tier": "device"}, "train_micro_batch_size_per_gpu": 1}
    arguments = words(tmp_path, LARGE, "gpt:1t", "--sequence", "1024", **keys)
    assert main([*arguments, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    count, num_ranks, tokens = found["num_parameters"], 1024, 1024
    assert count == pytest.approx(1e12, rel=0.06)
    assert (found["ranks"], found["local_ranks"], found["cluster"]["gpu"]["name"]) == (1024, 8, "H200")
    homes = sum(line["bytes"] for line in found["plan"] if line["what"].startswith("home: "))
    assert homes == pytest.approx(14 * count / num_ranks, rel=0.02)
    lanes_s = found["forecast"]["lanes_s"]
    assert lanes_s["compute"] == pytest.approx(8 * count * tokens / 600e12, rel=0.12)
    assert (
        lanes_s["host memory"]
        > lanes_s["update"]
        == pytest.approx(26 * count / num_ranks / (300e9 / 8), rel=0.03)
    )
    assert lanes_s["network"] == pytest.approx(6 * count * (1 / 8 - 1 / 1024) / 50e9, rel=0.03)
    assert lanes_s["links"] == pytest.approx(6 * count * (1 - 1 / 8) / 450e9, rel=0.03)
    assert lanes_s["nvme write"] == pytest.approx(12 * count / num_ranks / 5e9, rel=0.03)
    assert found["forecast"]["tokens"] == num_ranks * tokens
    assert found["forecast"]["lane"] == "network"
    flops = found["micro_batch_trace"]["forward_flops"] + found["micro_batch_trace"]["backward_flops"]
    assert found["tflops_of_device"] == pytest.approx(flops / found["forecast"]["seconds"] / 1e12)
    stages = found["stages"]
    assert [one["stage"] for one in stages] == [0, 1, 2, 3]
    assert stages[3]["forecast"]["seconds"] == found["forecast"]["seconds"]
    assert any("slower" in one for one in found["left_out"])
    assert not any("collective_us" in one for one in found["left_out"])


def test_what_it_says_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {name: value for name, value in TWO.items() if name not in ("collective_us", "unit_us")}
    arguments = words(tmp_path, small, GPT, placement={"states": "host"})
    assert main([*arguments, "--tokens", "1m"]) == 0
    text = capsys.readouterr().out
    for part in (
        "One of 16 ranks, 8 on each of 2 machines: H200; zero_optimization.stage is 3",
        "tokens/s of 16 ranks, ",
        "TFLOPS on each device",
        "longest lane",
        "What would make it faster: ",
        "Not in it: ranks that are slower than others",
        "the start of each collective (collective_us); Python for each unit (unit_us).",
        "1,000,000 tokens: ",
    ):
        assert part in text, part
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit() and " B" in line]
    assert [row[0] for row in rows[:4]] == ["0", "1", "2", "3"]
    page = tmp_path / "plan.html"
    assert main([*arguments, "--html", str(page)]) == 0
    assert "16, 8 on a machine" in page.read_text()


def test_fewer_ranks_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words(tmp_path, TWO, GPT, "--json", "-")
    for num_ranks, num_local in ((8, 8), (4, 4), (1, 1)):
        assert main([*arguments, "--ranks", str(num_ranks)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["ranks"], found["local_ranks"]) == (num_ranks, num_local)
        assert found["forecast"]["seconds"] > 0
    for more, said in (
        (["--ranks", "12"], "--ranks = 12: at most 8, those of a machine, or all of some of the 2 machines"),
        (["--ranks", "32"], "--ranks = 32: at most 8, "),
        (["--ranks", "0"], "--ranks = 0: a whole number from 1 to "),
        (["--local-ranks", "4"], "--local-ranks = 4: 8, as the cluster says"),
    ):
        assert main([*arguments, *more]) == USER_ERROR
        assert said in capsys.readouterr().err


def test_a_machine_s_ranks_need_a_rate_between_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words(tmp_path, MACHINE.to_json(), "llama:64/3/4/101", "--ranks", "4", "--local-ranks", "2")
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert (
        "The step's time is not forecast: no rate or no count of collectives (rates.collectives); --hardware"
        in text
    )
    known = replace(MACHINE, rates=replace(MACHINE.rates, collectives=1e9))
    (tmp_path / "cluster.json").write_text(json.dumps(known.to_json()))
    assert main(arguments) == 0
    assert "collectives  " in capsys.readouterr().out


def without(table: str, entry: str | None = None) -> dict[str, Any]:
    if entry is None:
        return {name: value for name, value in LARGE.items() if name != table}
    return {**LARGE, table: {name: value for name, value in LARGE[table].items() if name != entry}}


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (without("machines"), "--hardware.machines = None: a whole number"),
        ({**LARGE, "machines": 2.5}, "--hardware.machines = 2.5: a whole number from 1 to 65,536"),
        ({**LARGE, "machines": 10**6}, "--hardware.machines = 1000000: at most 65,536 devices"),
        (without("gpu"), "--hardware.gpu.memory_gib = None: a positive number: it is needed"),
        (without("host", "gb_per_s"), "--hardware.host.gb_per_s = None: a positive number"),
        (without("links"), "--hardware.links.gb_per_s = None: a positive number"),
        (without("network"), "--hardware.network.gb_per_s = None: a positive number"),
        (without("drives", "number"), "--hardware.drives.number = None: a positive number"),
        (
            merge(LARGE, {"gpu": {"tflop": 5}}),
            "--hardware.gpu.tflop = 5: no such entry (did you mean 'tflops'?)",
        ),
        (merge(LARGE, {"gpu": {"tflops": {"int8": 5}}}), "--hardware.gpu.tflops.int8 = 5: no such entry"),
        (merge(LARGE, {"gpu": {"name": 5}}), "--hardware.gpu.name = 5: a name"),
        (merge(LARGE, {"host": {"gb_per_s": -1}}), "--hardware.host.gb_per_s = -1: a positive number"),
        ({**LARGE, "nodes": 5}, "--hardware.nodes = 5: no such entry"),
        ({**LARGE, "gpu": 5}, "--hardware.gpu = 5: an object"),
    ],
)
def test_what_a_file_lacks_is_named(described: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster_of(described)
    assert said in str(caught.value)


@pytest.mark.parametrize("table", [None, "gpu", "host", "pcie", "drives", "links", "network"])
def test_each_number_of_a_file_is_checked(table: str | None) -> None:
    """A number that is only read when a forecast is made ends in another error, or in a forecast of nonsense."""
    names = ("machines", "gpus_per_machine", "collective_us", "unit_us") if table is None else _ENTRIES[table]
    for name in names:
        if name == "name":
            continue
        dotted = name if table is None else f"{table}.{name}"
        for wrong in ("50", -5, True, [1]):
            described = {name: wrong} if table is None else {table: {name: wrong}}
            with pytest.raises(ConfigError) as caught:
                cluster_of(merge(LARGE, described))
            assert f"--hardware.{dotted} = {wrong!r}: a " in str(caught.value)


def test_one_device_needs_no_links_and_no_drive() -> None:
    described = {name: LARGE[name] for name in ("format", "format_version", "gpu", "host", "pcie")}
    cluster = cluster_of({**described, "machines": 1, "gpus_per_machine": 1})
    assert cluster.machine.memory.nvme == 0, "it is known that there is none"
    assert (cluster.machine.rates.nvme_read, cluster.machine.rates.links) == (None, None)
    assert isinstance(cluster.rank(1).rates, Rates)
