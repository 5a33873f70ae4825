"""Saving and loading of an engine: weights, states, counters, schedule and param groups.

Where several ranks train, the first one writes, and reads the others' parts through them; all ranks load, or none.
"""

from __future__ import annotations

import copy
import functools
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offloadzero.api.background_save import BackgroundSave
from offloadzero.api.optimizer import OffloadedOptimizer
from offloadzero.checkpoint.commits import random_states, set_random_states
from offloadzero.checkpoint.format.json_file import encode_plain
from offloadzero.checkpoint.format.meta import LossScaleState, Meta, PartOfModel, client_dict, encode_meta
from offloadzero.checkpoint.format.names import directory_of, tag_text
from offloadzero.checkpoint.latest import (
    Found,
    directory_of_part,
    expect_parts,
    expect_place,
    expect_room,
    find_checkpoint,
    open_found,
)
from offloadzero.checkpoint.loading import (
    LoadPlan,
    fit_param_groups,
    loss_scale_state,
    plan_load,
    schedule_name,
    try_schedule,
)
from offloadzero.checkpoint.states import States, begin_save, save_weights
from offloadzero.core import interrupts
from offloadzero.engine.lifetime import EngineState
from offloadzero.engine.runtime import Runtime
from offloadzero.errors import CheckpointError, ConfigError, StateError


def _digest(client_state: Mapping[str, Any]) -> int:
    """Of what a checkpoint keeps of it, whatever the order of names. Only the first rank's must be kept."""
    try:
        text = json.dumps(encode_plain(client_state, "client_state"), sort_keys=True)
    except (ConfigError, ValueError):  # an integer of more digits than Python converts
        return 0
    return zlib.crc32(text.encode())


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that fits the engine, and the parts of it that are taken over."""

    path: Path
    meta: Meta
    plan: LoadPlan
    with_counters: bool  # and the loss scale
    with_states: bool
    with_schedule: bool
    param_groups: Sequence[Mapping[str, Any]]


class EngineCheckpoints:
    """Saves and loads all that belongs to an engine."""

    def __init__(self, runtime: Runtime, optimizer: OffloadedOptimizer | None) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._coordinator = runtime.coordinator
        self._accumulation = runtime.accumulation
        self._has_resumed = False
        self.background = BackgroundSave(runtime)
        self._half_loaded: StateError | None = None  # the error of a load that left a mixture of states

    def expect_savable(self, call: str) -> None:
        """Raise StateError where the engine is closed, or a load did not come to its end."""
        self._expect_open(call)
        if self._half_loaded is not None:
            raise self._half_loaded

    def _expect_open(self, call: str) -> None:
        interrupts.install()  # the script may have set a handler for this call
        if self._runtime.state is EngineState.CLOSED:
            raise StateError(
                f"engine.{call}(): the engine of this model is closed, and the weights are gone with it"
            )
        if self._runtime.state is EngineState.RESTORED:
            raise StateError(
                f"engine.{call}(): restore_model() has made the model an ordinary one and closed this engine, and the "
                "optimizer's states are gone with it: save the model like any other, or make a new engine"
            )

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    def _states(self) -> States:
        runtime = self._runtime
        return States(runtime.model, runtime.records, runtime.weights, runtime.spec.name)

    # --- saving ---

    def save(
        self,
        save_dir: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        *,
        save_latest: bool,
        exclude_frozen: bool,
        lr_scheduler: Any,
        wait: bool,
    ) -> None:
        """Write a checkpoint as `Engine.save_checkpoint` says, and raise its errors."""
        self.expect_savable("save_checkpoint")
        self.expect_resumed("save_checkpoint")
        self.background.finish()
        whole = directory_of("save_dir", save_dir)
        partial_step = self._coordinator.partial_step
        if partial_step is not None:
            warnings.warn(f"save_checkpoint: {partial_step}", stacklevel=3)
        meta = self._meta(client_state, partial_step, lr_scheduler)
        name = f"global_step{self._coordinator.global_steps}" if tag is None else tag_text(tag)

        pinned = None if wait else self.background.pin(self._states())
        if pinned is not None:
            meta = copy.deepcopy(meta)  # the script goes on with what it is made of

        ends: list[Callable[[], object]] = []  # of the first rank, which writes

        def save(part: PartOfModel | None) -> None:
            end = begin_save(
                self._states(),
                directory_of_part(whole, self._runtime.part),
                tag=name,
                meta=replace(meta, part=part),
                save_latest=save_latest,
                exclude_frozen=exclude_frozen,
                later=pinned,
            )
            if pinned is None:
                end()
            else:
                ends.append(end)

        part = self._part_to_save(whole)
        try:
            with self._saving("save_checkpoint()"):
                self._runtime.read_by_first(functools.partial(save, part))
        except BaseException:
            if pinned is not None:
                self.background.release(pinned)
            raise
        if pinned is not None:
            self.background.begin(lambda: [end() for end in ends], pinned)
        # Behind it: that all ranks save is known.
        own = [_digest(meta.client_state)]
        if self._runtime.group.control.by_rank_unless_same(own, "client_state") is not None:
            warnings.warn(
                "save_checkpoint: client_state differs between the ranks, and rank 0's is saved. What each rank needs, "
                "such as its random state, collect in it by torch.distributed.all_gather_object()",
                stacklevel=3,
            )

    def _saving(self, call: str) -> AbstractContextManager[None]:
        """A block that fails on all ranks where it fails on one. Those of a part know that of each other."""
        return nullcontext() if self._runtime.part is None else self._runtime.group.together(call)

    def _part(self, *, save_number: int = 0) -> PartOfModel | None:
        """The part of the model that this rank has; None: all of it."""
        mesh = self._runtime.config.mesh
        if mesh is None or self._runtime.part is None:
            return None
        return PartOfModel(mesh.pipeline_rank, mesh.tensor_rank, self._runtime.group.num_parts, save_number)

    def _part_to_save(self, directory: Path) -> PartOfModel | None:
        """The same for a save into `directory`, whose number all parts have: [Note: parts of one save]."""
        if self._runtime.part is None:
            return None
        with self._saving("save_checkpoint(), before anything is written,"):
            number = self._runtime.group.agreed_number()
            expect_room(directory, self._runtime.group.num_parts)
        return self._part(save_number=number)

    def _meta(
        self, client_state: Mapping[str, Any] | None, partial_step: str | None, lr_scheduler: Any
    ) -> Meta:
        """What is no tensor, after the last step, for whose decision this waits."""
        scheduler = schedule_name(lr_scheduler)
        self._coordinator.was_applied()  # counts the last step if it was skipped
        return Meta(
            optimizer=self._runtime.spec.name,
            partial_step=partial_step,
            client_state=client_dict(client_state),
            global_steps=self._coordinator.global_steps,
            micro_steps=self._accumulation.num_micro_steps,
            global_samples=self._accumulation.num_samples(self._coordinator.global_steps),
            batch=self._accumulation.sizes_set,
            skipped_steps=self._coordinator.skipped_steps,
            loss_scale=self._dynamic_loss_scale(),
            lr_scheduler=lr_scheduler.state_dict() if scheduler is not None else None,
            lr_scheduler_type=scheduler,
            param_groups=[
                {key: value for key, value in group.items() if key != "params"}
                for group in self._param_groups
            ],
        )

    def _dynamic_loss_scale(self) -> LossScaleState | None:
        """The state of the dynamic loss scale; None without loss scaling, or with a scale that is fixed."""
        config = self._coordinator.policy.loss_scale
        if config is None or config.static:
            return None
        return loss_scale_state(self._coordinator.loss_scale_state())

    def save_weights(self, save_dir: str | Path, file_name: str) -> None:
        """Write the weights as `Engine.save_16bit_model` says, and raise its errors."""
        self.expect_savable("save_16bit_model")
        path = directory_of_part(directory_of("save_dir", save_dir), self._runtime.part) / file_name
        with self._saving("save_16bit_model()"):
            self._runtime.read_by_first(lambda: save_weights(self._states(), path))

    # --- durable runs: [Note: durable runs] in update/commits.py ---

    def expect_resumed(self, call: str) -> None:
        """Raise StateError where a durable run was found, and `resume` was not called."""
        run = self._runtime.durable
        if run is not None and run.found is not None and not self._has_resumed:
            raise StateError(
                f"engine.{call}(): the engine has loaded the durable run in {run.found.path}, which ended after step "
                f"{run.found.meta.global_steps}: call engine.resume() to continue it. To start a new run remove "
                f"{run.found.path.parent}* and make a new engine"
            )

    @contextmanager
    def committing(self, client_state: Mapping[str, Any]) -> Iterator[None]:
        """A block that takes a step which `commit` follows. Raises ConfigError for a state that it cannot keep."""
        run = self._runtime.durable
        if run is None:
            yield
            return
        encode_plain(client_dict(client_state), "client_state")
        run.is_committing = True
        try:
            yield
        finally:
            run.is_committing = False

    def commit(self, client_state: Mapping[str, Any], lr_scheduler: Any) -> None:
        """Begin to commit the step that was taken last, if the run is durable. All ranks make the same commits."""
        run = self._runtime.durable
        if run is None or self._coordinator.global_steps % self._runtime.config.durable:
            return
        if self.background.is_running():
            return
        with self._runtime.clock.waiting("commit"), self._runtime.failures.handed_over():
            run.wait_complete()
        # What the script may change meanwhile is taken now.
        meta = copy.deepcopy(self._meta(client_state, None, lr_scheduler))
        if self._runtime.failures.stop is not None:  # known now: some unit was not updated
            return
        encode_meta(meta)
        changes, records = self._runtime.changes, self._runtime.records
        updates = [changes.update_ticket(record.index) for record in records]
        run.commit(meta, random_states(self._runtime.accelerator.asynchronous), updates)

    def resume(self, lr_scheduler: Any) -> dict[str, Any] | None:
        """Go on with the run that was found, as `Engine.resume` says."""
        self._expect_open("resume")
        run = self._runtime.durable
        if run is None:
            raise ConfigError("offloadzero.durable", False, "engine.resume() needs true")
        found = run.found
        if found is None:
            return None
        written = [s.name for r in self._runtime.records for s in r.trainable_slots if s.num_writes.total()]
        if self._has_resumed or self._coordinator.global_steps or written:
            of_values = f", and before a write to the weights ({', '.join(written[:3])})" if written else ""
            raise StateError(f"engine.resume() must be called once, before the first step{of_values}")
        with self._runtime.group.together("resume()"):
            groups = fit_param_groups(self._param_groups, found)
            try_schedule(lr_scheduler, found, skip="a durable run goes on with the schedule that it had")
            if found.meta.batch is not None:
                self._accumulation.set_sizes(*found.meta.batch, global_steps=0)
            self._go_on_from(found.meta)
            for group, saved in zip(self._param_groups, groups, strict=True):
                group.update(saved)
            if found.meta.lr_scheduler is not None:
                lr_scheduler.load_state_dict(found.meta.lr_scheduler)
            set_random_states(found.random, self._runtime.accelerator.asynchronous)
            self._has_resumed = True
        return found.meta.client_state

    # --- loading ---

    def find(
        self,
        load_dir: str | Path,
        tag: str | None,
        *,
        strict: bool,
        with_counters: bool,
        with_states: bool,
        with_schedule: bool,
        lr_scheduler: Any,
    ) -> FoundCheckpoint | None:
        """Find the checkpoint for `load` and compare all of it with the engine, of which nothing changes.

        Returns None where `load_dir` has no checkpoint and no `tag` is given.

        Raises:
            ConfigError, StateError: as `Engine.load_checkpoint` says.
            CheckpointError: the same, and where ranks find different checkpoints or take different parts of one.
            RankError: another rank has failed in this.
        """
        self._expect_open("load_checkpoint")
        self.background.finish()
        self._runtime.failures.check_readable()  # after it no load lets training go on
        whole, part = directory_of("load_dir", load_dir), self._runtime.part
        directory = directory_of_part(whole, part)
        unchanged = "load_checkpoint(), before anything has changed,"
        self._runtime.announce("loads a checkpoint")
        with self._runtime.group.together(unchanged):
            expect_parts(whole, part, self._runtime.group.num_parts)
            found = find_checkpoint(directory, None if tag is None else tag_text(tag))
        with self._runtime.group.together(unchanged):
            if self._runtime.group.is_on_some(found is not None) and found is None:
                raise CheckpointError(
                    f"{directory}: another rank finds a checkpoint there, and this one does not"
                )
            if found is None:
                return None
            checkpoint = open_found(directory, found)
            own, saved = self._part(), checkpoint.meta.part
            if own is not None:
                expect_place(found.path, saved, own)
            plan = plan_load(self._states(), checkpoint, strict=strict, with_states=with_states)
            groups = fit_param_groups(self._param_groups, checkpoint) if with_states else []
            if with_schedule:
                try_schedule(lr_scheduler, checkpoint)
        taken = (
            strict,
            with_counters,
            with_states,
            with_schedule,
            None if own is None or saved is None else saved.save_number,
        )
        self._expect_same(found, taken, checkpoint.identity())
        return FoundCheckpoint(
            found.path, checkpoint.meta, plan, with_counters, with_states, with_schedule, groups
        )

    def _expect_same(self, found: Found, taken: object, identity: object) -> None:
        """Raise CheckpointError on all ranks unless they load the same.

        Args:
            taken: what each of them loads, and of which save: [Note: parts of one save].
            identity: that of the checkpoint, which is another for each part of the model.
        """
        odd = self._runtime.odd_ranks("checkpoints", repr((found.tag, taken)), of_part=repr(identity))
        if odd:
            raise CheckpointError(
                f"{found.path}: ranks {odd} load another checkpoint than rank 0, or other parts of it. All ranks must "
                "see one directory, or copies of it"
                + (
                    ""
                    if self._runtime.part is None
                    else "; parts of two saves are not loaded together, and a tag of which all parts are those of one "
                    "save is loaded where it is given"
                )
            )

    def load(self, found: FoundCheckpoint, *, lr_scheduler: Any) -> None:
        """Take over a checkpoint that `find` has found. Gradients of a step that was begun are dropped before."""
        meta = found.meta
        with self._loading(found.path), self._runtime.group.together("load_checkpoint()"):
            found.plan.apply()
            if found.with_counters:
                self._go_on_from(meta)
            if found.with_states:
                for group, saved in zip(self._param_groups, found.param_groups, strict=True):
                    group.update(saved)
            if found.with_schedule and meta.lr_scheduler is not None:
                lr_scheduler.load_state_dict(meta.lr_scheduler)
        self._coordinator.resolve(is_whole=found.with_states)

    def _go_on_from(self, meta: Meta) -> None:
        """Set the counters. A step that was begun when they were saved begins anew: its gradients were not saved."""
        self._accumulation.resume(
            meta.micro_steps, global_steps=meta.global_steps, num_samples=meta.global_samples
        )
        saved = None if self._dynamic_loss_scale() is None else meta.loss_scale
        scale = self._coordinator.loss_scale_state() if saved is None else asdict(saved)
        self._coordinator.restore(meta.global_steps, meta.skipped_steps, scale)

    @contextmanager
    def _loading(self, path: Path) -> Iterator[None]:
        """Inside the block values are written: after a failure the states are a mixture, and training cannot go on."""
        try:
            yield
        except BaseException as error:
            lost = StateError(
                f"loading {path} did not come to its end, so weights and states are a mixture: make the engine anew"
            )
            lost.__cause__ = error
            self._half_loaded = lost
            self._runtime.failures.spoil(lost)
            raise
