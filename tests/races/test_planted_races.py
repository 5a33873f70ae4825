"""Bugs, each a wait left out, planted one at a time: the comparisons of tests/races/test_races.py catch every one.

All but the first are planted under random schedules, of which one of the first few must show the bug.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero.access.home_access import HomeAccess
from offloadzero.errors import OffloadError
from offloadzero.memory.arena import Lease
from offloadzero.memory.lanes import LaneTicket
from offloadzero.memory.tickets import FINISHED
from offloadzero.memory.transfer import Fetcher
from offloadzero.step.collect import GradientCollector
from offloadzero.step.coordinator import StepCoordinator
from offloadzero.step.decider import Decider
from offloadzero.step.job import UpdateJob
from offloadzero.step.landing import Landing
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.unit_leases import UnitLeases
from offloadzero.update.pipeline import UpdatePipeline
from offloadzero.update.staging import ChunkStager, StagedChunk
from tests.races.test_races import SCENARIOS, make_reference, scenario_config
from tests.support.schedules import Schedule, disturbed, draw_schedule, reference
from tests.support.training import differences, run_engine


def test_states_read_ahead_and_edited_since_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update would start from the states as they were during backward."""

    def same_chunk(chunk: StagedChunk, record: Any, start: int, stop: int) -> bool:
        return (chunk.record, chunk.start, chunk.stop) == (record, start, stop)

    name = "edited before the step"
    make_model, loop, _ = SCENARIOS[name]
    monkeypatch.setattr(StagedChunk, "matches", same_chunk)
    found = run_engine(make_model, loop, scenario_config(name, "nvme", tmp_path))
    assert differences(found, make_reference(tmp_path)(name))


# --- under random schedules

MAX_SCHEDULES = 30  # within which a bug must show


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute replaced for a while."""
    own = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def release_of_a_lease_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is protected: the next fetch takes the lease of the unit that is computing."""
    pin = Executor.pin

    def pin_and_forget(executor: Executor, index: int, **options: Any) -> None:
        pin(executor, index, **options)
        unit = executor.units[index]
        if unit.lease is not None:
            unit.lease.release()  # poisons
            unit.lease = executor.leases.arena.try_lease(unit.record.param_bytes, "again")

    monkeypatch.setattr(Executor, "pin", pin_and_forget)


def fetch_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    start_fetch = UnitLeases.start_fetch

    def impatient(leases: UnitLeases, unit: Any, lease: Lease) -> None:
        with swapped(unit, "updated", FINISHED):
            start_fetch(leases, unit, lease)

    monkeypatch.setattr(UnitLeases, "start_fetch", impatient)


def use_before_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneTicket, "order_compute", lambda _: None)


def use_of_a_resident_unit_before_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    touch = Executor.touch

    def impatient(executor: Executor, index: int, **options: Any) -> None:
        with swapped(executor.units[index], "updated", FINISHED):
            touch(executor, index, **options)

    monkeypatch.setattr(Executor, "touch", impatient)


def update_before_its_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = ChunkStager.stage

    def forgetful(stager: ChunkStager, record: Any, start: int, stop: int, **options: Any) -> StagedChunk:
        chunk = stage(stager, record, start, stop, **options)
        chunk.reads.clear()
        return chunk

    monkeypatch.setattr(ChunkStager, "stage", forgetful)


def update_before_its_gradient_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    start_reads = UpdatePipeline._start_reads

    def forgetful(pipeline: UpdatePipeline, chunk: Any) -> None:
        start_reads(pipeline, chunk)
        num_states = len(chunk.data.staged)
        del chunk.data.reads[num_states:]

    monkeypatch.setattr(UpdatePipeline, "_start_reads", forgetful)


def slot_before_its_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    write_back = ChunkStager.write_back

    def forgetful(stager: ChunkStager, chunk: StagedChunk, **options: Any) -> Any:
        slot = chunk.slot
        writes = write_back(stager, chunk, **options)
        if slot is not None:
            slot.users = FINISHED
        return writes

    monkeypatch.setattr(ChunkStager, "write_back", forgetful)


def update_done_before_its_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = UpdatePipeline._finish

    def forgetful(_pipeline: UpdatePipeline, update: Any, _writes: Any = ()) -> None:
        finish(update)

    monkeypatch.setattr(UpdatePipeline, "_finish", forgetful)


def gradient_copied_over_one_that_the_last_update_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_to_host = Landing._copy_to_host

    def impatient(landing: Landing, brought: Any, place: Any, _before: Any) -> Any:
        return copy_to_host(landing, brought, place, FINISHED)

    monkeypatch.setattr(Landing, "_copy_to_host", impatient)


def gradient_on_the_device_over_one_that_the_last_update_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = GradientCollector._begin

    def impatient(collector: GradientCollector, state: Any) -> None:
        with swapped(collector, "_previous_update", lambda _: FINISHED):
            begin(collector, state)

    monkeypatch.setattr(GradientCollector, "_begin", impatient)


def landing_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    land = Landing._land

    def impatient(
        landing: Landing, gradient: Any, done: Any, _after: Any, *rest: Any, **options: Any
    ) -> None:
        land(landing, gradient, done, [], *rest, **options)

    monkeypatch.setattr(Landing, "_land", impatient)


def gradient_lease_before_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_to_host = Landing._copy_to_host

    def early(landing: Landing, brought: Any, place: Any, before: Any) -> Any:
        lease = brought.lease
        if not lease.temporary:
            brought.leases.give_back(lease)
            flat = brought.flat.clone()[:0].set_(brought.flat)
            brought = brought._replace(flat=flat)  # the lease is another's; the copy still reads that memory
        own, lease.temporary = lease.temporary, True  # the copy does not give it back again
        try:
            return copy_to_host(landing, brought, place, before)
        finally:
            lease.temporary = own

    monkeypatch.setattr(Landing, "_copy_to_host", early)


def staging_buffer_before_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    unstage = Fetcher._unstage

    def early(fetcher: Fetcher, staging: Any, staged: Any, read: Any, target: torch.Tensor) -> None:
        read.wait()
        staging.give_back(staged.buffer)
        staged.buffer = None
        unstage(fetcher, staging, staged, read, target)

    monkeypatch.setattr(Fetcher, "_unstage", early)


def decision_before_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Decider._decide

    def impatient(decider: Decider, step: Any) -> Any:
        for gradient in step.gradients:
            gradient.landed = FINISHED
        return decide(decider, step)

    monkeypatch.setattr(Decider, "_decide", impatient)


def read_of_a_weight_before_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    read = HomeAccess.read

    def impatient(homes: HomeAccess, record: Any, slot: Any, kind: Any) -> torch.Tensor:
        with swapped(homes._changes, "update_ticket", lambda _: FINISHED):
            return read(homes, record, slot, kind)

    monkeypatch.setattr(HomeAccess, "read", impatient)


def states_read_ahead_of_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = StepCoordinator._begin_backward

    def impatient(coordinator: StepCoordinator) -> None:
        with swapped(coordinator._changes, "update_ticket", lambda _: FINISHED):
            begin(coordinator)

    monkeypatch.setattr(StepCoordinator, "_begin_backward", impatient)
    monkeypatch.setattr(Decider, "trial_scale", lambda _: None)  # else they are not read ahead


def passing_gradient_before_the_update_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = UpdateJob.begin

    def early(job: UpdateJob, *, grad_scale: float) -> None:
        begin(job, grad_scale=grad_scale)
        job.release_gradient()

    monkeypatch.setattr(UpdateJob, "begin", early)


# Each with the part of the engine that is always slow then.
PLANTS = {
    release_of_a_lease_in_use: "compute",
    fetch_before_the_update: "compute",
    use_before_the_fetch: "lane fetch",
    use_of_a_resident_unit_before_its_update: "compute",
    update_before_its_reads: "late read",
    update_before_its_gradient_is_read: "late read",
    slot_before_its_writes: "late write",
    update_done_before_its_writes: "late write",
    gradient_copied_over_one_that_the_last_update_reads: "compute",
    gradient_on_the_device_over_one_that_the_last_update_reads: "lane update-device",
    landing_before_the_copy: "lane gradient-d2h",
    gradient_lease_before_its_copy: "lane gradient-d2h",
    staging_buffer_before_its_copy: "lane fetch",
    decision_before_the_gradients: "land",
    read_of_a_weight_before_its_update: "compute",
    states_read_ahead_of_the_last_update: "late write",
    passing_gradient_before_the_update_has_read_it: "compute",
}
# Schedules that do not have what these need are passed over. Without a backward through a graph from before the last
# step the forward has waited for the update.
NEEDS: dict[Any, Callable[[Schedule], bool]] = {
    gradient_copied_over_one_that_the_last_update_reads: lambda s: s.outlives and s.updates_at_step,
    gradient_on_the_device_over_one_that_the_last_update_reads: lambda s: s.outlives,
    states_read_ahead_of_the_last_update: lambda s: s.outlives and s.updates_at_step,
    passing_gradient_before_the_update_has_read_it: lambda s: not s.updates_at_step,
}


def shows(seed: int, *, slowest: str) -> bool:
    """Whether a random schedule gives other numbers or stops with an error of the engine."""
    expected = reference(seed)
    try:
        return bool(differences(disturbed(seed, slowest=slowest), expected))
    except OffloadError:
        return True


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_random_schedules_catch(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    suits = NEEDS.get(plant, lambda _: True)
    suitable = (seed for seed in itertools.count() if suits(draw_schedule(seed)))
    assert any(shows(seed, slowest=PLANTS[plant]) for seed in itertools.islice(suitable, MAX_SCHEDULES))
