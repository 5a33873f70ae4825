"""The answer of `offloadzero plan`: the named model, its plan, the bytes beside it, whether all fits, what would."""

from __future__ import annotations

import importlib
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from offloadzero.config import OffloadConfig, load_config
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import Loop, ModelPlanner, PlannedModel
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.memory.arena import ALIGN_BYTES
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.memory.nvme import STRIPE_BYTES
from offloadzero.memory.swap_file import MARK_BYTES, stale_bytes
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.engine_plan import (
    Beside,
    Change,
    More,
    Source,
    Verdict,
    goes_by_time,
    judge,
    memory_with,
    needed,
    smallest_change,
)
from offloadzero.planning.hardware import Hardware, Memory
from offloadzero.planning.homes import INPUTS_AHEAD, NUM_INPUT_STAGING
from offloadzero.planning.machine import MEMORY_FILESYSTEMS, describe_path, free_disk_bytes, nearest_directory
from offloadzero.planning.memory_plan import nvme_bytes_with_waiting, waits_on_nvme
from offloadzero.planning.model.shapes import MAX_LAYERS, PUBLISHED, ModelShape, read_shape
from offloadzero.planning.model.trace import MicroBatchTrace, TraceError, trace_blocks
from offloadzero.update.spec import DTYPES, AnySpec, UpdateForm
from offloadzero.update.specs import spec_of_type
from offloadzero.update.specs.adam import ADAM

NOTHING: More = MappingProxyType({})


@dataclass(frozen=True)
class Question:
    """The question, apart from the configuration."""

    model: ModelSource
    # Free memory of the machine; of its drives those that are configured.
    memory_of: Callable[[OffloadConfig], Memory]
    form_of: Callable[[AnySpec], UpdateForm]  # the form of the updates on its device
    loop: Loop = Loop.INITIALIZE
    sequence: int | None = None  # None: activations are not counted
    process_bytes: int = 0  # of Python and torch
    num_ranks: int = 1
    num_local_ranks: int = 1  # of a machine
    hardware: Hardware | None = None  # for "auto" by time
    elsewhere: bool = False  # the machine is not this one: directories are not looked for here
    # Those of some directories whose files are in the host's memory, with their filesystem.
    in_memory: Callable[[Sequence[Path]], Sequence[str]] = lambda _: ()


@dataclass(frozen=True)
class Answer:
    """A plan and the bytes beside it. `untraced` is the reason why activations are not counted."""

    planned: PlannedModel
    memory: Memory
    beside: Beside
    verdict: Verdict
    micro_batch: int
    trace: MicroBatchTrace | None
    untraced: str
    process_bytes: int  # of Python and torch
    # Directories of this machine whose files are in the host's memory, with their filesystem.
    files_in_memory: tuple[str, ...] = ()

    @property
    def needed(self) -> dict[TierName, int]:
        return needed(self.planned.plan, self.beside, self.memory)

    @property
    def waiting_bytes(self) -> int:
        """The most bytes on the drives where the model is built under zero.Init; 0 where none wait there."""
        return _waiting_bytes(self.planned)

    @property
    def whole_bytes(self) -> int:
        """The bytes of host memory while the script builds the model without zero.Init: it is whole there."""
        return self.planned.built_bytes + self.process_bytes

    @property
    def unknown(self) -> str:
        """The reason why the operations of a micro batch are not known; empty where they are."""
        if self.trace is None:
            return self.untraced
        names = ", ".join(self.trace.uncounted)
        return f"what {names} computes is not counted" if names else ""

    @property
    def device_room(self) -> int | None:
        """The room that activations and buffers leave on a device that is too small; None: another tier is short."""
        device = self.memory.device
        if device is None or TierName.DEVICE not in self.verdict.short:
            return None
        room = (device - self.beside.device) // ALIGN_BYTES * ALIGN_BYTES
        return room if room > 0 else None


class Planner:
    """Answers a question for one configuration after the other; models and traces are made once."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._model: nn.Module | None = None
        self._model_planner: ModelPlanner | None = None
        self._traces: dict[tuple[Any, ...], MicroBatchTrace | str] = {}

    def model(self) -> nn.Module:
        if self._model is None:
            self._model = self.question.model.on_meta()
        return self._model

    def _load(self, source: Source) -> OffloadConfig:
        return load_config(source, world_size=self.question.num_ranks, elsewhere=self.question.elsewhere)

    def plan(
        self, source: Source, more: More = NOTHING, *, by_time: bool = False
    ) -> tuple[PlannedModel, Memory]:
        """Plan a JSON, and return the machine's memory, too. Raises the engine's errors: ConfigError, BudgetError.

        `by_time`: "auto" may go by time, as the engine's does; it takes longer.
        """
        question, config = self.question, self._load(source)
        memory = memory_with(question.memory_of(config), more)
        # "auto" takes a share of what an engine finds: Python and torch are there before it.
        available = {TierName.HOST: max(0, memory.host - question.process_bytes)}
        if memory.device is not None:
            available[TierName.DEVICE] = memory.device
        if self._model_planner is None:
            self._model_planner = ModelPlanner(self.model())
        planned = self._model_planner.plan(
            config,
            loop=question.loop,
            available=available,
            form=question.form_of(spec_in(config)),
            hardware=question.hardware if by_time else None,
        )
        return planned, memory

    def answer(self, source: Source, more: More = NOTHING, *, by_time: bool = False) -> Answer:
        """Plan a JSON, and judge whether it fits. Raises the engine's errors: ConfigError, BudgetError."""
        planned, memory = self.plan(source, more, by_time=by_time)
        micro_batch, process_bytes = planned.config.batch.micro_batch_size or 1, self.question.process_bytes
        found = self._trace(planned, micro_batch, on_cpu=memory.device is None)
        trace, untraced = (None, found) if isinstance(found, str) else (found, "")
        _check_budgets(planned, trace)
        beside = _beside(planned, trace, process_bytes)
        if trace is not None and memory.device is None:
            beside = replace(beside, holes=trace.hole_bytes)
        in_memory = self.question.in_memory(planned.config.nvme_paths)
        if in_memory:  # each directory has as much
            of_files = planned.plan.tier_bytes(TierName.NVME) + beside.nvme
            beside = replace(beside, files=of_files * len(in_memory) // len(planned.config.nvme_paths))
        if planned.built_bytes + process_bytes > memory.host:  # it can only be built on the drives
            of_plan = planned.plan.tier_bytes(TierName.NVME) + beside.nvme
            beside = replace(beside, waiting=max(0, _waiting_bytes(planned) - of_plan))
        verdict = judge(planned.plan, beside, memory)
        return Answer(
            *(planned, memory, beside, verdict, micro_batch, trace, untraced, process_bytes),
            files_in_memory=tuple(in_memory),
        )

    def verdict(self, source: Source, more: More = NOTHING) -> Verdict:
        """Judge whether a JSON fits a machine that has so many more bytes."""
        try:
            found = self.answer(source, more)
            by_time = self.question.hardware is not None and goes_by_time(found.planned.config)
            if found.verdict.fits and by_time:
                found = self.answer(source, more, by_time=True)  # may take more: it is what the engine takes
            return found.verdict
        except BudgetError as error:
            return Verdict(refusal=str(error))

    def _verdict_of_candidate(self, source: Source, more: More) -> Verdict:
        """Judge a change that is only tried: it may make the configuration invalid."""
        try:
            return self.verdict(source, more)
        except ConfigError as error:
            return Verdict(refusal=str(error), is_mistake=True)

    def refusal(self, source: Source) -> BudgetError | None:
        """Return the refusal of the budgets of a JSON; None where they are enough."""
        try:
            self.answer(source)
        except BudgetError as error:
            return error
        return None

    def smallest_change(self, source: Source) -> Change:
        config = self._load(source)
        try:
            device_room = self.answer(source).device_room
        except BudgetError:
            device_room = None
        return smallest_change(
            source,
            config,
            self._load,
            self._verdict_of_candidate,
            refusal_of=self.refusal,
            can_be_compact=spec_in(config).codes is not None and config.precision.param_dtype == "bf16",
            has_activations=self.question.sequence is not None,
            device_room=device_room,
        )

    def _trace(self, planned: PlannedModel, micro_batch: int, *, on_cpu: bool) -> MicroBatchTrace | str:
        sequence, dtype = self.question.sequence, planned.config.precision.param_dtype
        if sequence is None:
            return "no --sequence is given"
        key = (micro_batch, planned.checkpointed, dtype, on_cpu)
        if key not in self._traces:
            try:
                self._traces[key] = trace_blocks(
                    self.question.model.on_meta,
                    self.question.model.num_blocks,
                    dtype=DTYPES[dtype],
                    micro_batch=micro_batch,
                    sequence=sequence,
                    checkpointed=planned.checkpointed,
                    on_cpu=on_cpu,
                )
            except TraceError as error:
                self._traces[key] = str(error)
        return self._traces[key]


def largest_model(question: Question, source: Source) -> ModelSource:
    """Find the model of the question's shape with the most blocks that fit. Raises ConfigError if one does not."""
    shape = question.model.shape
    if shape is None:
        allowed = "a shape (llama:13b, hidden/layers/heads/vocabulary)"
        raise ConfigError("--largest", question.model.text, allowed)

    def of(num_layers: int) -> ModelSource:
        return ModelSource.of_shape(replace(shape, num_layers=num_layers))

    def fits(num_layers: int) -> bool:
        return Planner(replace(question, model=of(num_layers))).verdict(source).fits

    if not fits(1):
        raise ConfigError("--largest", str(shape), "not even one block of this width fits: a smaller width")
    high = 2
    while high < MAX_LAYERS and fits(high):
        high *= 2
    low, high = high // 2, min(high, MAX_LAYERS + 1)
    return of(low + bisect_left(range(low + 1, high), 1, key=lambda number: not fits(number)))


def in_memory(paths: Sequence[Path]) -> list[str]:
    """Return those of this machine's directories whose files take the host's memory, with their filesystem."""
    found = {path: describe_path(str(nearest_directory(path)))["filesystem"] for path in paths}
    return [f"{path} ({name})" for path, name in found.items() if name in MEMORY_FILESYSTEMS]


def building_notes(answer: Answer) -> Iterator[str]:
    """Yield sentences about memory that no line of the plan has, and what is taken before training."""
    memory, waiting, whole = answer.memory, answer.waiting_bytes, answer.whole_bytes
    if answer.files_in_memory:
        paths = ", ".join(answer.files_in_memory)
        yield f"In memory, and on no drive: {paths}. The host's bytes have what lives there."
    if waiting:
        yield (
            "Built under zero.Init its parameters wait on the drives before that: "
            f"{format_bytes(waiting)} of nvme at the most, {_beside_has(waiting, memory.nvme or 0)}"
        )
    if whole > answer.needed[TierName.HOST]:
        yield (
            "Built without zero.Init the whole model is in host memory before that: "
            f"{format_bytes(whole)} with Python and torch, {_beside_has(whole, memory.host)}"
        )


def _beside_has(num_bytes: int, has: int) -> str:
    """Return the end of a sentence: what there is, and what that is too few."""
    lacking = num_bytes - has
    too_few = f", {format_bytes(lacking)} too few: so it cannot be built" if lacking > 0 else ""
    return f"{format_bytes(has)} are available{too_few}."


def spec_in(config: OffloadConfig) -> AnySpec:
    """Return the spec of the configuration's optimizer, or Adam's, which most scripts use."""
    return spec_of_type(config.optimizer.type) if config.optimizer is not None else ADAM


def _waiting_bytes(planned: PlannedModel) -> int:
    if not waits_on_nvme(planned.config):
        return 0
    return nvme_bytes_with_waiting(planned.records, planned.plan, planned.config)


def _beside(planned: PlannedModel, trace: MicroBatchTrace | None, process_bytes: int) -> Beside:
    """Return activations, buffers of the model, and inputs whose size the configuration leaves open."""
    beside = Beside(device=planned.buffer_bytes, host=process_bytes)
    if trace is None:
        return beside
    activations, checkpointing = trace.peak_bytes, planned.config.activation_checkpoints
    if checkpointing is None or checkpointing.tier.is_device:
        return replace(beside, device=beside.device + activations)
    num_there = 1 + INPUTS_AHEAD[checkpointing.tier]
    # Inputs may all be away where other things have their peak, at the gradients of a tied embedding, say.
    there = sum(sorted((call.own for call in trace.inputs), reverse=True)[:num_there])
    activations = min(activations, trace.peak_without_inputs + there)
    # Inputs that are planned on the device are a part of the traced bytes there.
    here = planned.plan.inputs.device if planned.plan.inputs is not None else 0
    taken = _inputs_beside(planned, trace)
    return Beside(
        device=beside.device + max(0, activations - here),
        host=beside.host + taken[TierName.HOST],
        nvme=taken[TierName.NVME],
    )


def _inputs_beside(planned: PlannedModel, trace: MicroBatchTrace) -> dict[TierName, int]:
    """Return the bytes, by tier, that the engine takes in its first step for inputs of a size left open."""
    checkpointing = planned.config.activation_checkpoints
    taken = {TierName.HOST: 0, TierName.NVME: 0}
    if checkpointing is None or checkpointing.tier.is_device or planned.plan.inputs is not None:
        return taken
    taken[checkpointing.tier] = trace.home_bytes
    if checkpointing.tier.is_file:
        taken[TierName.HOST] = 2 * NUM_INPUT_STAGING * trace.largest_input_bytes
        if planned.config.aio.checksums:
            taken[TierName.HOST] += checksum_bytes(trace.home_bytes)
    return taken


def _check_budgets(planned: PlannedModel, trace: MicroBatchTrace | None) -> None:
    """Raise BudgetError where the first step would find no room for inputs beside the plan."""
    if trace is None:
        return
    for tier, taken in _inputs_beside(planned, trace).items():
        budget, of_plan = getattr(planned.config.budgets, tier.value), planned.plan.tier_bytes(tier)
        if budget is not None and taken and of_plan + taken > budget:
            raise BudgetError(
                f"offloadzero.budgets.{tier.value}: {format_bytes(of_plan + taken)} are needed, "
                f"{format_bytes(budget)} are allowed: {format_bytes(of_plan)} are planned for states, and the inputs "
                f"of checkpointed units take {format_bytes(taken)} in the first step.\nWhat would make it fit: another "
                "offloadzero.activation_checkpoints.tier, a smaller micro batch, or a larger budget.",
                needed={tier.value: of_plan + taken},
            )


def drive_bytes(paths: Sequence[Path], *, free: Callable[[Path], int] = free_disk_bytes) -> int | None:
    """Return the bytes that the swap files in these directories can hold together; None without any.

    The files are of equal size, and directories on one filesystem share its space. What killed runs left there is
    removed by the next start, so it counts as free.
    """
    if not paths:
        return None
    drives: dict[int, list[Path]] = {}
    for path in paths:
        drives.setdefault(drive_of(path), []).append(path)
    per_file = min(
        # A directory may have two names here.
        (free(members[0]) + sum(map(stale_bytes, {path.resolve() for path in members}))) // len(members)
        for members in drives.values()
    )
    per_file -= MARK_BYTES
    if len(paths) > 1:
        per_file = per_file // STRIPE_BYTES * STRIPE_BYTES
    return max(0, per_file) * len(paths)


def drive_of(path: Path) -> int:
    """Return the filesystem of a directory, or the one that it would be made on, by `st_dev`."""
    return os.stat(nearest_directory(path)).st_dev


KEY = "--model"
_POSITIONS = re.compile(r"(^|\.)(wpe|[a-z_]*position[a-z_]*)$")  # the names of tables in transformers


@dataclass(frozen=True)
class ModelSource:
    """The model named by `--model`: `build` makes it on torch's default device."""

    text: str
    build: Callable[[], nn.Module]
    shape: ModelShape | None = None
    num_positions: int = 0  # the most tokens of a sample, as its configuration says; 0: it says none

    @staticmethod
    def of_shape(shape: ModelShape) -> ModelSource:
        return ModelSource(str(shape), shape.build, shape)

    @property
    def num_blocks(self) -> int:
        """The number of equal blocks, of a model of a shape; of another 0, which says nothing."""
        return self.shape.num_layers if self.shape is not None and self.build == self.shape.build else 0

    @property
    def learns_positions(self) -> bool:
        """Whether it has a table of positions, beyond which there are none. Rotary ones have no such end."""
        if self.shape is not None:
            return bool(self.shape.num_positions)
        tables = (name for name, one in self.on_meta().named_modules() if isinstance(one, nn.Embedding))
        return any(_POSITIONS.search(name) for name in tables)

    def on_meta(self, num_blocks: int = 0) -> nn.Module:
        """Make the model without its numbers: [Note: a model that is nowhere].

        With another number of blocks where one is given, which a model of a shape allows.
        """
        build = self.build
        if self.shape is not None and num_blocks not in (0, self.shape.num_layers):
            build = replace(self.shape, num_layers=num_blocks).build
        with torch.device("meta"), _NoNumbers():
            return build()


class _NoNumbers(TorchFunctionMode):
    """Draws no random numbers for tensors that have no memory: torch would load its compiler to do nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def read_model(text: str) -> ModelSource:
    """Read a shape, a config.json of transformers (or its directory), or `module:function`. Raises ConfigError."""
    shape = read_shape(KEY, text)
    if shape is not None:
        return ModelSource(text, shape.build, shape, shape.num_positions)
    if os.path.exists(text):
        return _of_transformers(text)
    module, _, function = text.partition(":")
    if not (module.replace(".", "").isidentifier() and function.isidentifier()):
        allowed = (
            "a shape (llama:13b, gpt:10b, hidden/layers/heads/vocabulary), the path of a config.json of transformers, "
            "or module:function"
        )
        raise ConfigError(KEY, text, allowed, known_values=PUBLISHED)
    return ModelSource(text, _of_function(text, module, function))


def _of_transformers(path: str) -> ModelSource:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(KEY, path, "transformers, which reads it, is not installed here") from error
    models: Any = transformers
    try:
        config = models.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # its checks of the fields raise any error
        raise ConfigError(KEY, path, f"transformers does not read it: {_reason(error)}") from error

    def build() -> nn.Module:
        try:
            model: nn.Module = _build_of_transformers(models, config)
        except Exception as error:  # any error of a model's constructor for wrong sizes
            raise ConfigError(KEY, path, f"transformers does not build it: {_reason(error)}") from error
        return model

    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return ModelSource(path, build, num_positions=positions if isinstance(positions, int) else 0)


def _build_of_transformers(models: Any, config: Any) -> Any:
    """Make the class that the file names, or the one of its type, with logits where the architecture has them."""
    for name in config.architectures or ():
        named = getattr(models, name, None)
        if isinstance(named, type) and issubclass(named, nn.Module):
            return named._from_config(config)  # type: ignore[attr-defined]  # as each auto class does
    causal = type(config) in models.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = models.AutoModelForCausalLM if causal else models.AutoModel
    return auto.from_config(config)


def _of_function(text: str, module: str, function: str) -> Callable[[], nn.Module]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:  # the module's own code runs here
        reason = error if isinstance(error, ImportError) else _reason(error)
        raise ConfigError(KEY, text, f"{module} cannot be imported from {Path.cwd()}: {reason}") from error
    if not callable(found):
        raise ConfigError(KEY, text, f"{module} has no function {function}")

    def build() -> nn.Module:
        try:
            model = found()
        except (Exception, SystemExit) as error:
            allowed = f"a function without arguments that returns the model; it raised {_reason(error)}"
            raise ConfigError(KEY, text, allowed) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(KEY, text, f"a function that returns an nn.Module, not {type(model).__name__}")
        return model

    return build


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
