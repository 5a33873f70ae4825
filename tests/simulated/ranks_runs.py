"""Short trainings of several ranks on the simulated device, that go through every way of what ranks send each other.

Each is also made on the CPU, without streams: the numbers are the same. More of them are drawn by seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import offloadzero
from offloadzero.activations import input_homes
from offloadzero.activations import store as activations
from offloadzero.core.segments import SegmentKind
from offloadzero.step import collect
from offloadzero.step.collect import GradientCollector
from offloadzero.update.kept_elements import kept_place
from tests.simulated import reached
from tests.simulated.backward import Backward
from tests.simulated.checked import checked
from tests.simulated.collectives import ON_DEVICE
from tests.simulated.device import simulated
from tests.simulated.order import RaceError
from tests.simulated.random_scripts import in_directory
from tests.simulated.ranks_scripts import (
    Acts,
    EndedError,
    Here,
    Script,
    close_beside_one_that_failed,
    drop_gradients,
    edit_gradients,
    notice_a_refused_step,
    read_states,
    step_again,
    train,
    trained_at_the_end,
    use_a_graph_from_before_the_step,
    use_old_graphs_without_room,
)
from tests.simulated.rare_scripts import Shift, stack_of_frozen_weights
from tests.simulated.reached import OF_RANKS
from tests.simulated.small_runs import OnceWithoutGradient, ask_early
from tests.support import sharded
from tests.support.models import SMALL_GRADIENT_BYTES, Stack
from tests.support.ranks import RanksError, run_ranks
from tests.support.sharded import OddModel, config_of, digest
from tests.support.training import make_config, merge

# Of the process groups, in a run of a mutant; after a little more it is killed, before it is taken for one that hangs.
TIMEOUT_S = float(os.environ.get("OFFLOADZERO_TEST_HANG_S", "120")) / 2
NO_DIRECTORY = Path("nowhere")
Patches = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class RanksRun:
    """One training, and how the device behaves in it."""

    make_model: Callable[[], nn.Module]
    script: Script
    config: dict[str, Any]
    world_size: int = 2
    node_ranks: int = 0  # LOCAL_WORLD_SIZE; 0: all
    slow: Sequence[str] = ()
    backward: Backward = Backward.CALLER
    max_waiting: int = SMALL_GRADIENT_BYTES
    patches: Sequence[Patches] = ()
    # Laid over the configuration, for the same bits.
    only_simulated: dict[str, Any] = field(default_factory=dict)
    is_tensor_parallel: bool = False  # the ranks have the same data
    planted: Patches | None = None  # a bug of the simulated one


def play(run: RanksRun, rank: int, directory: Path, *, over: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a run comes to on this rank: losses, norm, and the bits of weights and states."""
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "MAX_WAITING_BYTES", run.max_waiting)
        patch.setattr(sharded, "GLOBAL_BATCH", 2 * run.world_size)
        patch.setenv("LOCAL_WORLD_SIZE", str(run.node_ranks or run.world_size))
        for change in run.patches:
            change(patch)
        # The first rank's weights are those of all that share the data.
        torch.manual_seed(0 if run.is_tensor_parallel else rank)
        config = in_directory(merge(run.config, over or {}), directory)
        mpu, here = None, Here(rank, run.world_size, directory)
        if run.is_tensor_parallel:
            mpu = init_device_mesh("cpu", (1, run.world_size), mesh_dim_names=("dp", "tp"))
            here = Here(0, 1, directory)
        engine, *_ = offloadzero.initialize(model=run.make_model(), config=config, mpu=mpu)
        try:
            losses = run.script(engine, here)
            # Sums in fp64, which torch takes in another order on the device than the kernels on the host.
            norm = f"{engine.get_global_grad_norm():.12g}"
            return {"losses": losses, "norm": norm, **own_bits(engine)}
        finally:
            engine.close()


def own_bits(engine: offloadzero.Engine) -> dict[str, str]:
    """The bits of what this rank keeps of weights and states, read where they are."""
    engine.synchronize()
    runtime = engine._runtime
    found: dict[str, torch.Tensor] = {}
    for record in runtime.records:
        for kind, home in {**record.segments, SegmentKind.PARAM: record.param_home}.items():
            if kind is SegmentKind.GRAD:  # what the last step has read may be there still, or not
                continue
            for slot in record.slots if kind is SegmentKind.PARAM else record.trainable_slots:
                place = kept_place(record, slot, kind)
                if place.num_elements:
                    part = torch.empty(place.num_elements, dtype=home.dtype)
                    runtime.store.read(home, part, start=place.start).wait()
                    found[f"{slot.name} {kind.value}"] = part
    return digest(found)


def play_simulated(
    run: RanksRun, rank: int, directory: Path, seed: int
) -> tuple[dict[str, Any] | str, list[str]]:
    """The same on the simulated device, or its error; and the races."""
    found: dict[str, Any] | str = "an error"
    races: list[str] = []
    try:
        with pytest.MonkeyPatch.context() as patch, checked() as order:
            own_seed = run.world_size * seed + rank
            with simulated(patch, own_seed, slow=run.slow, backward=run.backward):
                if run.planted is not None:
                    run.planted(patch)
                try:
                    found = play(run, rank, directory, over=run.only_simulated)
                finally:
                    order.settle()
                    races = [str(race) for race in order.races]
    except RaceError:
        pass
    except EndedError as ended:
        found = {"told": str(ended)}
    except Exception as error:
        found = f"{type(error).__name__}: {error}"[:300]
    return found, races


# --- the table of mutants: tests/simulated/mutations.py ---


def run(name: str, *, seed: int = 0) -> tuple[str, list[str]]:
    """The digest of all ranks' numbers, or an error, and the races.

    The ranks are forks of this process.
    """
    with tempfile.TemporaryDirectory() as directory:
        try:
            world_size = (RUNS | ENDING)[name].world_size
            by_rank = run_ranks(
                _run_one,
                world_size,
                Path(directory) / "ranks",
                name,
                seed,
                directory,
                timeout_s=TIMEOUT_S,
                forks=True,
            )
        except RanksError as error:
            return f"RanksError: {error}"[-300:], []
    for _, _, places in by_rank:
        reached.PLACES.update((file, line) for file, line in places)
    races = [race for _, of_rank, _ in by_rank for race in of_rank]
    errors = [found for found, *_ in by_rank if isinstance(found, str)]
    told = json.dumps([found for found, *_ in by_rank], sort_keys=True)
    return (errors[0] if errors else hashlib.sha256(told.encode()).hexdigest()), races


def _run_one(
    rank: int, name: str, seed: int, directory: str
) -> tuple[dict[str, Any] | str, list[str], list[Any]]:
    found, races = play_simulated((RUNS | ENDING)[name], rank, Path(directory) / "files", seed)
    return found, races, sorted(reached.PLACES)


def of(
    placement: str | dict[str, str],
    *,
    stage: int = 3,
    make_model: Callable[[], nn.Module] = Stack,
    script: Script = train,
    zero: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> RanksRun:
    """A run of a small model; `zero` are keys of zero_optimization, `options` those of `make_config`."""
    config = make_config("host", NO_DIRECTORY, **{"clipping": 0.5, **(options or {})})
    config["zero_optimization"].update({"stage": stage, **(zero or {})})
    config["offloadzero"]["placement"] = placement
    return RanksRun(make_model, script, config, **more)


def _no_patience(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientCollector, "LEASE_WITHIN_S", 0.01)


def _every_input(patch: pytest.MonkeyPatch) -> None:
    """Inputs of any size leave the device."""
    patch.setattr(activations, "MIN_BYTES", 1)


def _much_staging(patch: pytest.MonkeyPatch) -> None:
    """No input waits for a buffer, and so for the write of an earlier one."""
    patch.setattr(input_homes, "NUM_INPUT_STAGING", 16)


CODES = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
NEAR = {"zero_hpz_partition_size": 2}
ACCUMULATE = {"accumulation": 2}
ON_HOST = {"param": "host", "states": "host"}
STATES_ON_HOST = {"states": "host"}
ALL_ON_NVME = {"param": "nvme", "states": "nvme", "grad": "nvme"}


def in_parts(tier: str, **more: Any) -> RanksRun:
    """A run of ranks each of which keeps a part of the inputs of checkpointed units, on this tier."""
    return of(
        "host",
        options=ACCUMULATE,
        patches=(_every_input, _much_staging),
        only_simulated={
            "activation_checkpointing": {"partition_activations": True},
            "offloadzero": {"activation_checkpoints": {"tier": tier}},
        },
        is_tensor_parallel=True,
        **more,
    )


RUNS: dict[str, RanksRun] = {
    OF_RANKS + name: run
    for name, run in {
        "host, accumulation": of("host", options=ACCUMULATE),
        "nvme": of("nvme"),
        "device": of("device", slow=("default",)),
        "host, gathered slowly": of("host", slow=("weights",)),
        "host, computed slowly": of("host", slow=("default",)),
        "host, reduced slowly": of("host", slow=("gradients",)),
        "codes and copies": of("nvme", zero={**CODES, **NEAR}, options=ACCUMULATE, slow=("default",)),
        "codes between machines": of("host", zero=CODES, node_ranks=1, slow=("gradient-d2h",)),
        "stage 1, states on host": of(STATES_ON_HOST, stage=1, options=ACCUMULATE),
        "stage 2, device": of("device", stage=2, slow=("updates",)),
        "stage 0, updated slowly": of("device", stage=0, slow=("update-device",)),
        "old graphs": of(STATES_ON_HOST, stage=1, make_model=Shift, script=use_a_graph_from_before_the_step),
        "device, stepped again": of("device", stage=1, script=step_again, slow=("new-weights",)),
        "asked early, old graphs": of(
            STATES_ON_HOST,
            stage=1,
            make_model=Shift,
            script=use_a_graph_from_before_the_step,
            patches=(ask_early,),
        ),
        "old graphs, no room": of(
            "host", make_model=stack_of_frozen_weights, script=use_old_graphs_without_room, slow=("fetch",)
        ),
        "dropped gradients": of("host", script=drop_gradients, slow=("gradient-d2h",)),
        "edited gradients": of(ALL_ON_NVME, script=edit_gradients, slow=("gradient-d2h",)),
        "asked early": of("host", options=ACCUMULATE, patches=(ask_early,)),
        "asked early, dropped gradients": of("host", script=drop_gradients, patches=(ask_early,)),
        "a gradient that does not come": of(
            "host", make_model=OnceWithoutGradient, patches=(_no_patience,), slow=("gradient-d2h",)
        ),
        "states that are read": of("nvme", script=read_states),
        "a refused step": of("host", make_model=trained_at_the_end, script=notice_a_refused_step),
        "inputs in parts": in_parts("host", slow=("default",)),
        "inputs in parts, nvme": in_parts("nvme", slow=("activation-h2d",)),
    }.items()
}

# Those whose scripts end with what they are told, in place of numbers.
ENDING: dict[str, RanksRun] = {
    OF_RANKS + "one that failed": of("host", script=close_beside_one_that_failed),
}


# --- random ones ---

TIERS = ("device", "host", "nvme")
LANES = ("default", "fetch", "gradient-d2h", "landing", "new-weights", "update-device", "state-d2h")
DTYPES: tuple[dict[str, Any], ...] = (
    {},
    {"bf16": {"enabled": True}},
    {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
)


def draw_run(seed: int, world_size: int) -> RanksRun:
    """The run number `seed` of OddModel; on the CPU without copies among the ranks of a machine."""
    draw = random.Random(1000 * world_size + seed)
    stage = draw.choice((3, 3, 3, 2, 1, 0))
    zero: dict[str, Any] = {"stage3_max_live_parameters": draw.choice((1, 2_000, 6_000, 10**6))}
    near: dict[str, Any] = {}
    placement: dict[str, str] = {"states": draw.choice(TIERS)}
    if stage == 3:
        placement["param"] = draw.choice(TIERS)
        keys = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
        zero |= {key: True for key in keys if draw.random() < 0.5}
        if draw.random() < 0.6:
            near = {
                "zero_optimization": {"zero_hpz_partition_size": 2 if world_size % 2 == 0 else world_size}
            }
    own = {"placement": placement, "update": {"chunk_elements": draw.choice((4096, 8192))}}
    config = config_of(
        "host",
        stage,
        NO_DIRECTORY,
        world_size=world_size,
        accumulation=draw.choice((1, 2)),
        gradient_clipping=draw.choice((0.0, 1.0)),
        zero_optimization=zero,
        offloadzero=own,
        **draw.choice(DTYPES),
    )
    config["offloadzero"]["placement"] = placement
    return RanksRun(
        OddModel,
        Acts.draw(seed),
        config,
        world_size,
        node_ranks=2 if world_size % 2 == 0 else world_size,
        slow=draw.choice(((), *((name,) for name in (*ON_DEVICE[:3], *LANES)))),
        backward=draw.choice((Backward.CALLER, Backward.THREAD)),
        max_waiting=draw.choice((64 << 10, 64)),
        only_simulated=near,
    )


# --- those with scripts that write, evaluate and save ---


def odd(placement: dict[str, str], *, zero: dict[str, Any] | None = None, **more: Any) -> RanksRun:
    """A run of OddModel; `zero` are keys of zero_optimization, with the stage."""
    given = {"stage": 3, **(zero or {})}
    own = {key: more.pop(key) for key in ("accumulation", "bf16") if key in more}
    world_size = more.pop("world_size")
    config = config_of(
        "host", given["stage"], NO_DIRECTORY, world_size=world_size, zero_optimization=given, **own
    )
    config["offloadzero"]["placement"] = placement
    return RanksRun(OddModel, more.pop("acts"), config, world_size, **more)


SCRIPTS: dict[str, RanksRun] = {
    "inputs in parts": in_parts("host", slow=("activations",)),
    "inputs away": odd(
        {"param": "host", "states": "host"},
        accumulation=2,
        bf16={"enabled": True},
        world_size=2,
        acts=Acts(("", ""), (False, True), (False, False)),
        slow=("weights",),
        patches=(_every_input,),
        only_simulated={"offloadzero": {"activation_checkpoints": {"tier": "host"}}},
    ),
    "gathered": odd(
        {"param": "host", "states": "host"},
        zero={"zero_quantized_weights": True},
        bf16={"enabled": True},
        world_size=2,
        acts=Acts(("gather", "gather"), (False, True), (False, False)),
        slow=("update-device",),
    ),
    "codes and copies": odd(
        {"param": "nvme", "states": "host"},
        zero={**CODES, "zero_quantized_nontrainable_weights": True},
        bf16={"enabled": True},
        world_size=2,
        acts=Acts(("assign", "checkpoint"), (False, False), (False, True)),
        backward=Backward.THREAD,
        slow=("weights",),
        only_simulated={"zero_optimization": NEAR},
    ),
    "codes and copies, accumulation": odd(
        {"param": "nvme", "states": "host"},
        zero={**CODES, "zero_quantized_nontrainable_weights": True},
        accumulation=2,
        bf16={"enabled": True},
        world_size=2,
        acts=Acts(("frozen", "checkpoint"), (True, False), (False, True)),
        slow=("near_weights",),
        only_simulated={"zero_optimization": NEAR},
    ),
    "stage 2": odd(
        {"states": "nvme"},
        zero={"stage": 2},
        world_size=2,
        acts=Acts(("state", ""), (False, True), (True, False)),
        slow=("gradients",),
    ),
    "3 ranks": odd(
        {"param": "host", "states": "nvme"},
        world_size=3,
        acts=Acts(("checkpoint", "master"), (True, False), (False, False)),
    ),
}
