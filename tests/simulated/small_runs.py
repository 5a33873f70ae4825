"""A few short trainings that together go through every way of the data; what each gives, and what it is accused of."""

from __future__ import annotations

import gc
import hashlib
import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.activations import store as activations
from offloadzero.memory import device_clock as marks
from offloadzero.memory import lanes
from offloadzero.memory.tickets import Promise
from offloadzero.observe.monitor import STEPS_FILE
from offloadzero.step import collect
from offloadzero.step.landing import Landing
from tests.simulated.checked import checked
from tests.simulated.device import simulated
from tests.simulated.edges import Transfer
from tests.simulated.order import RaceError
from tests.simulated.rare_scripts import (
    InTurns,
    LateStack,
    Running,
    Shift,
    ask_for_norms,
    ask_for_scales,
    ask_while_turning,
    break_half_a_step,
    break_on_another_stream,
    breaking_stack,
    drop_graphs,
    edit_before_the_step,
    edit_on_another_stream,
    interrupt_lease_waits,
    interrupt_steps,
    keeping_stack,
    read_what_is_kept,
    restore,
    skip_blocks,
    stack_of_chunks,
    stack_of_frozen_weights,
    step_twice,
    tailed_stack,
    train_turning,
    train_unseen,
    turning_stack,
    use_a_graph_from_before_the_step,
    use_old_graphs_without_room,
    write_from_the_host,
)
from tests.simulated.small_loops import (
    FailingStack,
    OnceWithoutGradient,
    drop_gradients,
    evaluate_before_the_step,
    evaluate_on_two_streams,
    evaluate_up_to_the_end,
    fail_beside_another_graph,
    fail_in_backward,
    many_partly_unused,
    one_partly_unused,
    script,
    torchs_way,
    train,
    train_beside_the_step,
    train_in_turns,
    train_on_its_own_stream,
    train_on_tokens,
    write_before_the_step,
)
from tests.support.models import NUM_BLOCKS, SMALL_GRADIENT_BYTES, SometimesStack, Stack, TiedLM
from tests.support.training import Outcome, make_config, merge, run_engine

LAST_ON_HOST = [
    {"param": "nvme", "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"},
    {"units": "*.0", "param": "device", "master": "device", "exp_avg": "device", "exp_avg_sq": "device"},
    {
        "units": f"*.{NUM_BLOCKS - 1}",
        "param": "device",
        "master": "host",
        "exp_avg": "device",
        "exp_avg_sq": "host",
    },
]
GRADIENTS_ON_DEVICE = [
    {"param": "host", "master": "host", "exp_avg": "nvme", "exp_avg_sq": "host", "grad": "device"}
]
# The device is sure to write what it reads: only the host has the rest of the states.
WEIGHTS_ON_DEVICE = [
    {"param": "device", "master": "host", "exp_avg": "host", "exp_avg_sq": "host", "grad": "host"}
]
ALL_ON_DEVICE = dict.fromkeys(("param", "master", "exp_avg", "exp_avg_sq", "grad"), "device")
ONE_STATE_ON_NVME = [
    {"param": "device", "master": "device", "exp_avg": "device", "exp_avg_sq": "device", "grad": "device"},
    {
        "units": "(rest)",
        "param": "device",
        "master": "device",
        "exp_avg": "nvme",
        "exp_avg_sq": "device",
        "grad": "device",
    },
]
EARLY = {"early": True}
DYNAMIC = {"dtype": "fp16", "json": {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale": 0}}}
LATE_FILES = {"late files": True}
LATE_LANDINGS = {"late landings": True}
OBSERVED = {"observed": True}
ALL_WAIT = {"max waiting": 64 << 10}  # bytes: no gradient of these models is larger
SMALL_CHUNKS = {"offloadzero": {"update": {"chunk_elements": 4096}}}
FEW_SLOTS = {"offloadzero": {"update": {"num_chunks_in_flight": 3}}}  # each is used again
MANY_SLOTS = {"offloadzero": {"update": {"num_chunks_in_flight": 16}}}  # each unit has one of its own
AHEAD = {"max live": 9000}  # there is room for two blocks beside the one that computes
KEEP = {"offloadzero": {"update": {"in_backward": False}}}
FREE = {"offloadzero": {"poison_released_leases": False}}


def checkpoints(tier: str) -> dict[str, Any]:
    return {"offloadzero": {"activation_checkpoints": {"tier": tier}}}


def slow(*streams: str) -> dict[str, Any]:
    """These streams run when nothing else can."""
    return {"slow": streams}


Run = tuple[Callable[[], nn.Module], Callable[[Any], list[float]], str | Any, dict[str, Any]]
RUNS: dict[str, Run] = {
    "mixed, in backward, accumulation": (Stack, train, "mixed", {"accumulation": 2}),
    "mixed, clipping, accumulation": (Stack, train, "mixed", {"clipping": 0.5, "accumulation": 2}),
    "host, in backward": (Stack, train, "host", {}),
    "host, clipping, accumulation": (Stack, train, "host", {"clipping": 0.5, "accumulation": 2}),
    "host, nothing poisoned": (Stack, train, "host", {**FREE, "clipping": 0.5}),
    "nvme, in backward": (Stack, train, "nvme", {}),
    "nvme, clipping, accumulation": (Stack, train, "nvme", {"clipping": 0.5, "accumulation": 2}),
    "some on the device": (Stack, train, LAST_ON_HOST, {**FREE, "clipping": 0.5}),
    "gradients on the device": (Stack, train, GRADIENTS_ON_DEVICE, {"clipping": 0.5}),
    "resident": (Stack, train, "resident", {"clipping": 0.5}),
    "two streams": (Stack, evaluate_on_two_streams, "host", {"clipping": 0.5}),
    "two streams, nothing poisoned": (Stack, evaluate_on_two_streams, "mixed", FREE),
    "evaluated up to the end": (Stack, evaluate_up_to_the_end, "resident", {**FREE, **slow("side")}),
    "own stream, host": (Stack, train_on_its_own_stream, "host", {"clipping": 0.5, "accumulation": 2}),
    "own stream, mixed": (Stack, train_on_its_own_stream, "mixed", {"accumulation": 2}),
    "own stream, resident": (Stack, train_on_its_own_stream, "resident", {"clipping": 0.5}),
    "activations on host": (Stack, train, "host", checkpoints("host")),
    "activations on nvme": (Stack, train, "mixed", {**checkpoints("nvme"), "clipping": 0.5}),
    "unused parameters": (one_partly_unused, train, "host", {"accumulation": 2}),
    "activations on host, slow": (Stack, train, "host", {**checkpoints("host"), **slow("activation-h2d")}),
    "activations on nvme, slow": (Stack, train, "host", {**checkpoints("nvme"), **slow("activation-h2d")}),
    "activations sent slowly": (Stack, train, "host", {**checkpoints("host"), **slow("activation-d2h")}),
    "activations, failing": (
        FailingStack,
        fail_in_backward,
        "host",
        {"clipping": 0.5, **checkpoints("host"), **slow("activation-h2d")},
    ),
    "activations, failing, asked early": (
        FailingStack,
        fail_in_backward,
        "host",
        {"clipping": 0.5, **checkpoints("host"), **EARLY, **slow("activation-h2d")},
    ),
    "evaluation before the step": (Stack, evaluate_before_the_step, "mixed", {"clipping": 0.5}),
    "evaluation before the step, resident": (Stack, evaluate_before_the_step, "resident", {"clipping": 0.5}),
    "without gradient in the last micro batch": (OnceWithoutGradient, train, "resident", {"accumulation": 2}),
    "slow fetches": (Stack, train, "nvme", slow("fetch")),
    "slow landing": (Stack, train, "host", slow("gradient-d2h")),
    "slow states": (
        Stack,
        train,
        LAST_ON_HOST,
        {"clipping": 0.5, **slow("state-d2h", "state-h2d", "update-device")},
    ),
    "unused parameters, nvme": (one_partly_unused, train, "nvme", {"clipping": 0.5}),
    "dropped gradients": (Stack, drop_gradients, "host", {"clipping": 0.5, **slow("gradient-d2h")}),
    "dropped gradients, mixed": (Stack, drop_gradients, "mixed", {"clipping": 0.5}),
    "asked early, dropped gradients": (Stack, drop_gradients, "host", {"clipping": 0.5, **EARLY}),
    "asked early, nvme": (Stack, train, "nvme", {"clipping": 0.5, **EARLY}),
    "asked early, mixed": (Stack, train, "mixed", EARLY),
    "activations, failing beside another graph": (
        FailingStack,
        fail_beside_another_graph,
        "host",
        {"clipping": 0.5, **checkpoints("host"), **EARLY, **slow("activation-h2d")},
    ),
    "activations that grow, in turns": (
        Stack,
        train_in_turns,
        "resident",
        {"accumulation": 4, **checkpoints("host")},
    ),
    "activations, asked early": (Stack, train, "host", {**checkpoints("host"), **EARLY}),
    "states that begin at a value": (
        Stack,
        train,
        "nvme",
        {
            "json": {"optimizer": {"type": "Adagrad", "params": {"initial_accumulator_value": 0.1}}},
            **LATE_FILES,
        },
    ),
    "one state on nvme": (Stack, train_unseen, ONE_STATE_ON_NVME, {"clipping": 0.5, **LATE_FILES}),
    "old graphs, no room": (
        stack_of_frozen_weights,
        use_old_graphs_without_room,
        "host",
        {"clipping": 0.5, **EARLY},
    ),
    "old graphs, no room, nvme": (
        stack_of_frozen_weights,
        use_old_graphs_without_room,
        "nvme",
        {"clipping": 0.5, **LATE_FILES},
    ),
    "written from the host": (Stack, write_from_the_host, "resident", {"clipping": 0.5}),
    "observed": (InTurns, train_unseen, "resident", {**OBSERVED, **slow("update-device")}),
    "observed by a slow clock": (Stack, train, "host", {**OBSERVED, "new references": True, **slow("clock")}),
    "observed beside the step": (
        Stack,
        train_beside_the_step,
        "resident",
        {"accumulation": 2, **OBSERVED, **slow("beside")},
    ),
    "kept views": (keeping_stack, read_what_is_kept, "resident", {"clipping": 0.5, **slow("update-device")}),
    "turning streams": (turning_stack, train_turning, "host", {"clipping": 0.5, **EARLY}),
    "turning streams, resident": (turning_stack, train_turning, "resident", {"clipping": 0.5}),
    "turning streams, all wait": (
        turning_stack,
        train_turning,
        "host",
        {"clipping": 0.5, **EARLY, **ALL_WAIT},
    ),
    "turning streams, resident, all wait": (
        turning_stack,
        train_turning,
        "resident",
        {"clipping": 0.5, **ALL_WAIT},
    ),
    "turning streams, asked in backward": (
        turning_stack,
        ask_while_turning,
        "host",
        {"clipping": 0.5, **ALL_WAIT},
    ),
    "all wait, in backward, accumulation": (Stack, train, "mixed", {"accumulation": 2, **ALL_WAIT}),
    "all wait, unused parameters": (many_partly_unused, train, "host", {"clipping": 0.5, **ALL_WAIT}),
    "broken on another stream": (
        breaking_stack,
        break_on_another_stream,
        WEIGHTS_ON_DEVICE,
        {"clipping": 0.5},
    ),
    "old graphs": (
        Shift,
        use_a_graph_from_before_the_step,
        "resident",
        {"clipping": 0.5, **slow("update-device")},
    ),
    "old graphs, host": (
        Shift,
        use_a_graph_from_before_the_step,
        "host",
        {"clipping": 0.5, **EARLY},
    ),
    "delivered in part": (
        tailed_stack,
        train,
        "nvme",
        {"clipping": 0.5, "json": SMALL_CHUNKS, "max live": 40_000},
    ),
    "unused parameters, many": (many_partly_unused, train, "host", {"clipping": 0.5}),
    "late": (LateStack, train, "resident", {"accumulation": 2}),
    "interrupted waits for leases": (
        Stack,
        interrupt_lease_waits,
        "host",
        {"clipping": 0.5, **EARLY},
    ),
    "forwards without backwards": (
        Stack,
        drop_graphs,
        "host",
        {**checkpoints("host"), **slow("activation-d2h")},
    ),
    "forwards without backwards, nvme": (
        Stack,
        drop_graphs,
        "host",
        {**checkpoints("nvme"), **slow("activation-d2h")},
    ),
    "edits before the step": (Stack, edit_before_the_step, "nvme", {**KEEP, "clipping": 0.5}),
    "two steps in a row": (Stack, step_twice, "nvme", {**KEEP, **LATE_FILES, "json": MANY_SLOTS}),
    "two steps in a row, mixed": (Stack, step_twice, "mixed", KEEP),
    "edited on another stream": (Stack, edit_on_another_stream, "host", {**KEEP, **slow("side")}),
    "edited on another stream, all wait": (
        Stack,
        edit_on_another_stream,
        "host",
        {**KEEP, **ALL_WAIT, **slow("side")},
    ),
    "half a step": (breaking_stack, break_half_a_step, "host", LATE_LANDINGS),
    "norms at once": (Stack, ask_for_norms, "host", LATE_LANDINGS),
    "scales at once": (Stack, ask_for_scales, "host", {**DYNAMIC, **LATE_LANDINGS}),
    "skipped blocks, nvme": (SometimesStack, skip_blocks, "nvme", {"clipping": 0.5}),
    "interrupted steps": (
        SometimesStack,
        interrupt_steps,
        "host",
        {"clipping": 0.5, **AHEAD, **slow("fetch")},
    ),
    "restored": (Stack, restore, "mixed", {"clipping": 0.5}),
    "restored, resident": (Stack, restore, "resident", {"clipping": 0.5, **slow("update-device")}),
    "tied": (TiedLM, train_on_tokens, "nvme", {"clipping": 0.5}),
    "script, host": (Stack, script, "host", KEEP),
    "script, mixed": (Stack, script, "mixed", KEEP),
    "script, resident": (Stack, script, "resident", KEEP),
    "script, gradients on the device": (Stack, script, GRADIENTS_ON_DEVICE, KEEP),
    "edits before the step, in chunks": (
        stack_of_chunks,
        edit_before_the_step,
        "nvme",
        {**KEEP, "clipping": 0.5, "json": SMALL_CHUNKS, "max live": 40_000, **LATE_FILES},
    ),
    "script, writing before the step": (Stack, write_before_the_step, "nvme", {"clipping": 0.5}),
    "torch's way, mixed": (Stack, torchs_way, "mixed", KEEP),
    "torch's way, resident": (Stack, torchs_way, "resident", {**KEEP, **slow("update-device")}),
}


def run(name: str, *, seed: int = 0) -> tuple[str, list[str]]:
    """The digest of all numbers of a run, or its error, and the races in it."""
    make_model, loop, placement, over = RUNS[name]
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "MIN_BYTES", 1)
        patch.setattr(collect, "MAX_WAITING_BYTES", over.get("max waiting", SMALL_GRADIENT_BYTES))
        options = {key: over[key] for key in ("clipping", "accumulation", "dtype") if key in over}
        config = merge(merge(make_config("host", directory, **options), FEW_SLOTS), over.get("json", {}))
        placed = (
            placement
            if isinstance(placement, list)
            else make_config(placement, directory)["offloadzero"]["placement"]
        )
        config = merge(config, {"offloadzero": {**over.get("offloadzero", {}), "placement": placed}})
        if "max live" in over:
            config = merge(config, {"zero_optimization": {"stage3_max_live_parameters": over["max live"]}})
        if "observed" in over:
            config = merge(config, {"offloadzero": {"observe": {"run_dir": f"{directory}/run"}}})
        digest, races = "", []
        try:
            with checked() as order, simulated(patch, seed, slow=over.get("slow", ())) as device:
                patch.setattr(Running, "machine", device.machine)
                patch.setattr(Running, "order", order)
                if "early" in over:
                    ask_early(patch)
                if "new references" in over:  # each time that somebody looks
                    patch.setattr(marks, "MAX_REFERENCE_AGE_S", -1.0)
                if "late landings" in over:
                    _land_late(patch)
                if "late files" in over:  # nobody learns that a file transfer is over but who waits for it
                    patch.setattr(Transfer, "done", lambda transfer: transfer.was_waited_for)
                try:
                    digest = _digest(_train(make_model, loop, config), _recorded_losses(Path(directory)))
                    gc.collect()  # what the engine has leased goes back here
                finally:
                    order.settle()
                    races = [str(race) for race in order.races]
        except RaceError:
            digest = digest or "an error"
        except Exception as error:
            digest = f"{type(error).__name__}: {error}"[:300]
    return digest, races


def _land_late(patch: pytest.MonkeyPatch) -> None:
    """A gradient lands when the script's thread waits for something, or much later."""
    is_waiting, waiting = threading.Event(), Promise.wait_fulfilled
    measure = Landing._measure

    def wait(promise: Promise) -> None:
        if threading.current_thread() is threading.main_thread():
            is_waiting.set()
        waiting(promise)
        is_waiting.clear()

    def measuring(*args: Any) -> None:
        is_waiting.wait(0.3)
        measure(*args)

    patch.setattr(Promise, "wait_fulfilled", wait)
    patch.setattr(Landing, "_measure", measuring)


def ask_early(patch: pytest.MonkeyPatch) -> None:
    """Who asks a ticket first hears that it is not done: what follows must not count on anything else."""

    def asking(done: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def asked(ticket: Any) -> bool:
            was_asked = getattr(ticket, "was_asked", False)
            ticket.was_asked = True
            return was_asked and done(ticket)

        return asked

    for kind in (lanes.LaneTicket, Promise):
        patch.setattr(kind, "done", asking(kind.done))


def _train(
    make_model: Callable[[], nn.Module], loop: Callable[[Any], list[float]], config: dict[str, Any]
) -> Outcome:
    if loop not in (torchs_way, step_twice, restore):
        return run_engine(make_model, loop, config)
    torch.manual_seed(0)
    model = make_model()
    if loop is restore:
        engine, *_ = offloadzero.initialize(model=model, config=config)
        losses = loop(engine)
        return Outcome(losses, {name: value.clone() for name, value in model.state_dict().items()}, {})
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    block = {key: config[key] for key in ("zero_optimization", "offloadzero", "bf16")}
    module, optimizer = offloadzero.offload(model, plain, block)
    losses = loop(SimpleNamespace(module=module, optimizer=optimizer))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer.close()
    return Outcome(losses, weights, {})


def _recorded_losses(directory: Path) -> list[float]:
    """Those that an observed run has written."""
    steps = directory / "run" / STEPS_FILE
    return [json.loads(line)["loss"] for line in steps.read_text().splitlines()] if steps.exists() else []


def _digest(outcome: Outcome, recorded: list[float]) -> str:
    found = hashlib.sha256(json.dumps([outcome.losses, repr(outcome.norm), recorded]).encode())
    for name, tensor in sorted(outcome.weights.items()):
        found.update(name.encode() + _bytes(tensor))
    for number, state in sorted(outcome.states.items()):
        for name, tensor in sorted(state.items()):
            found.update(f"{number}{name}".encode() + _bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    """Of any tensor, also one that is read when it is looked at."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()
