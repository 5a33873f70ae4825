"""The answer of `offloadzero plan`: the plan, the bytes beside it, whether both fit, and a change that would.

[Note: the smallest change]
Changes are tried in one order, and the first that fits is the answer: the cheapest comes first, and no two are named
where one is enough.

1. A budget of the configuration that is too small, raised to the byte, where the machine has as much.
2. A budget of the device that leaves room for activations: fewer leases and fewer records there.
3. Activation checkpoints, then smaller micro batches: they cost computation, and only where activations are too large.
4. `"placement": "auto"`: slower tiers for segments that do not fit the faster ones; first with the directories that are
   configured, then with one.
5. The `compact` layout of the states: other numbers, so it comes after everything that leaves them alone.
6. Shorter chunks of the update, then several of these together.
7. More memory. The amount is given for the configuration that lacks least.

A budget of the configuration may be too small beside one of the others: then both are named. A configuration that is
invalid, checkpoints of a model without blocks, say, is no candidate.

Every change is planned again before it is named: the named configuration is accepted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from offloadzero.config import OffloadConfig, load_config
from offloadzero.core.constants import COMPACT_CHUNK_MULTIPLE
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import Loop, ModelPlanner, PlannedModel, uses_of
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.memory.arena import ALIGN_BYTES
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.checkpointed_inputs import INPUTS_AHEAD, NUM_INPUT_STAGING
from offloadzero.planning.cluster import Cluster, on_cluster
from offloadzero.planning.engine_plan import (
    Beside,
    Change,
    Keys,
    More,
    Source,
    Verdict,
    budget_keys,
    goes_by_time,
    judge,
    least_budgets,
    memory_with,
    needed,
    with_keys,
)
from offloadzero.planning.hardware import Hardware, Memory
from offloadzero.planning.machine import MEMORY_FILESYSTEMS, describe_path, nearest_directory
from offloadzero.planning.memory_plan import nvme_bytes_with_waiting, waits_on_nvme
from offloadzero.planning.model.shapes import MAX_LAYERS, ModelSource
from offloadzero.planning.model.trace import MicroBatchTrace, TraceError, trace_blocks
from offloadzero.planning.step.forecast import COMPACT, Step, plan_step
from offloadzero.planning.update_rules import updates_in_backward
from offloadzero.update.spec import DTYPES, AnySpec, UpdateForm
from offloadzero.update.specs import spec_of_type
from offloadzero.update.specs.adam import ADAM

NOTHING: More = MappingProxyType({})
GIB = 1 << 30
# Shares of a device's memory: what a plan may take of it, and what is too little to name a change for it.
MOST_OF_DEVICE, LITTLE_OF_DEVICE = 0.9, 0.1
MOST_STAGE = 3


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
        if memory.nvme is not None:
            available[TierName.NVME] = memory.nvme
        if self._model_planner is None:
            files = [] if question.elsewhere else question.model.weight_files
            self._model_planner = ModelPlanner(self.model(), files)
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

    def _verdict_of_candidate(self, source: Source, more: More = NOTHING) -> Verdict:
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
        """Return the first change with which a JSON that does not fit does: [Note: the smallest change]."""
        config = self._load(source)
        has_activations = self.question.sequence is not None
        steps = list(_steps(config, has_activations=has_activations))
        with suppress(BudgetError):
            room, budget = self.answer(source).device_room, config.budgets.device
            if room is not None and (budget is None or room < budget):
                steps.insert(0, {"offloadzero.budgets.device": room})
        least: tuple[int, Keys] | None = None
        for keys in _candidates(steps, self._raised(source), partial(self._raised_beside, source)):
            verdict = self._verdict_of_candidate(with_keys(source, keys))
            if verdict.fits:
                return Change(keys)
            if not verdict.refusal:
                lacking = sum(verdict.short.values())
                if least is None or lacking < least[0]:
                    least = lacking, keys
        if least is None:
            raise AssertionError("budgets that were raised are refused")
        return Change(least[1], self._lacking(with_keys(source, least[1])))

    def other_answers(self, source: Source, found: Answer) -> Iterator[tuple[Change, Answer]]:
        """Yield changes that might make the step of a plan that fits faster, and that fit, with the answers to them."""
        if found.trace is None or not found.verdict.fits:
            return
        config = found.planned.config
        budget = self._more_of_the_device(found)
        changes: list[Keys] = [{"offloadzero.budgets.device": budget}] if budget else []
        if config.placement.auto and config.placement_tokens is None and self.question.num_ranks == 1:
            by_time: Keys = {"offloadzero.placement_tokens": found.trace.num_tokens}
            changes += [by_time, *({**keys, **by_time} for keys in changes)]
        if config.zero_stage < MOST_STAGE and self.question.num_ranks > 1:
            changes.append({"zero_optimization.stage": MOST_STAGE})
        if can_be_compact(config) and config.state_layout != COMPACT:
            changes.append({"offloadzero.state_layout": COMPACT})
        for keys in changes:
            with suppress(BudgetError, ConfigError):
                answer = self.answer(with_keys(source, keys), by_time=True)
                if answer.verdict.fits:
                    yield Change(keys), answer

    def _more_of_the_device(self, found: Answer) -> str | None:
        """Return a budget with which "auto" takes memory of the device that its plan leaves; None: it leaves little."""
        device, planned = found.memory.device, found.planned
        if device is None or not planned.config.placement.auto:
            return None
        budget = (int(MOST_OF_DEVICE * device) - found.beside.device) // GIB
        has_more = budget * GIB >= planned.plan.tier_bytes(TierName.DEVICE) + LITTLE_OF_DEVICE * device
        return f"{budget}GiB" if has_more else None

    def _lacking(self, source: Source) -> More:
        """The bytes that a machine lacks. "auto" uses a share of all there is: with more it may want more."""
        more: dict[TierName, int] = {}
        while not (verdict := self._verdict_of_candidate(source, more)).fits:
            if verdict.refusal:
                raise AssertionError(f"refused with more memory: {verdict.refusal}")
            for tier, num_bytes in verdict.short.items():
                more[tier] = more.get(tier, 0) + num_bytes
        return more

    def _raised(self, source: Source) -> Keys:
        """Raise each budget that is too small to the least with which the engine plans on a machine of any size."""

        def refusal_with(budgets: Mapping[TierName, int]) -> BudgetError | None:
            return self.refusal(with_keys(source, budget_keys(budgets)))

        return budget_keys(least_budgets(self._load(source).budgets, refusal_with))

    def _raised_beside(self, source: Source, keys: Keys) -> Keys:
        """Raise the budgets that are too small when `keys` are set: these may be others than without the keys."""
        changed = with_keys(source, keys)
        verdict = self._verdict_of_candidate(changed)
        return {} if not verdict.refusal or verdict.is_mistake else self._raised(changed)

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


# --- the candidates: [Note: the smallest change] ---

NVME_PATH = "offload-files"  # where no directory is configured
SMALL_CHUNK = COMPACT_CHUNK_MULTIPLE  # elements; the fp32 layout accepts it, too
# Steps that are tried together with raised budgets: a search of its own for each of them.
MAX_BESIDE_BUDGETS = 2


def _candidates(
    steps: Sequence[Keys], budgets: Keys, raised_beside: Callable[[Keys], Keys]
) -> Iterator[Keys]:
    """Yield the candidates of [Note: the smallest change]: the budgets, then each step alone, then two, then more.

    The budgets are one of these changes, as they have to fit the others. The first candidate is one that the engine
    plans: without a budget to raise it is the configuration itself, for a machine that has more.
    """
    yield budgets
    for count in range(1, len(steps) + 1):
        yield from _combined(steps, count)
        if 1 < count <= MAX_BESIDE_BUDGETS + 1:
            yield from _with_budgets(_combined(steps, count - 1), raised_beside)
    yield from _with_budgets([_joined(steps)], raised_beside)
    yield {**_joined(steps), **budgets}


def _combined(steps: Sequence[Keys], count: int) -> Iterator[Keys]:
    for chosen in combinations(steps, count):
        if len({name for keys in chosen for name in keys}) == sum(map(len, chosen)):  # no key twice
            yield _joined(chosen)


def _with_budgets(candidates: Iterable[Keys], raised_beside: Callable[[Keys], Keys]) -> Iterator[Keys]:
    for keys in candidates:
        raised = raised_beside(keys)
        if raised:
            yield {**keys, **raised}


def _joined(steps: Iterable[Keys]) -> Keys:
    return {name: value for keys in steps for name, value in keys.items()}


def _steps(config: OffloadConfig, *, has_activations: bool) -> Iterator[Keys]:
    if has_activations and config.activation_checkpoints is None:
        yield {"offloadzero.activation_checkpoints": {}}
    batch = config.batch
    if has_activations and batch.micro_batch_size is not None:
        for size in _smaller(batch.micro_batch_size):
            of_rank = batch.micro_batch_size * batch.gradient_accumulation_steps
            yield {
                "train_batch_size": of_rank * config.world_size,
                "train_micro_batch_size_per_gpu": size,
                "gradient_accumulation_steps": of_rank // size,
            }
    yield from _auto(config)
    if can_be_compact(config) and config.state_layout != COMPACT:
        yield {"offloadzero.state_layout": "compact"}
    if config.update.chunk_elements > SMALL_CHUNK:
        yield {"offloadzero.update.chunk_elements": SMALL_CHUNK}


def _auto(config: OffloadConfig) -> Iterator[Keys]:
    auto: Keys = {} if config.placement.auto else {"offloadzero.placement": "auto"}
    if auto:
        yield auto
    if not config.nvme_paths:
        yield {**auto, "offloadzero.nvme_path": NVME_PATH}


def _smaller(micro: int) -> Iterator[int]:
    """Return the largest proper divisor and 1: of many sizes two are tried."""
    if micro > 1:
        half = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        yield from dict.fromkeys((half, 1))


# --- beside the plan ---


def step_of(answer: Answer, *, num_local_ranks: int | None = None, cluster: Cluster | None = None) -> Step:
    """Return the bytes and operations of a step of a planned model; `num_local_ranks` as in `plan_step`."""
    planned = answer.planned
    step = plan_step(
        planned.records,
        planned.plan,
        planned.config,
        uses=uses_of(planned.cut),
        trace=answer.trace,
        num_local_ranks=num_local_ranks,
    )
    if cluster is None or num_local_ranks is None:
        return step
    return on_cluster(step, num_local=num_local_ranks, node_ranks=planned.config.zero_plus_plus.node_ranks)


def of_largest(question: Question, source: Source) -> str:
    """Say why one block more than `largest_model` has does not fit."""
    shape = question.model.shape
    if shape is None:
        raise AssertionError(question.model.text)
    if shape.num_layers == MAX_LAYERS:
        return f"More than {MAX_LAYERS:,} blocks are not tried."
    larger = replace(shape, num_layers=shape.num_layers + 1)
    model = replace(question.model, text=str(larger), build=larger.build, shape=larger)
    verdict = Planner(replace(question, model=model)).verdict(source)
    short = ", ".join(f"{tier.value} {format_bytes(size)} short" for tier, size in verdict.short.items())
    return f"One block more does not fit: {short or verdict.refusal.partition(chr(10))[0]}."


def largest_model(question: Question, source: Source) -> ModelSource:
    """Find the model of the question's shape with the most blocks that fit. Raises ConfigError if one does not."""
    shape = question.model.shape
    if shape is None:
        allowed = "a shape (llama:13b, hidden/layers/heads/vocabulary)"
        raise ConfigError("--largest", question.model.text, allowed)

    def of(num_layers: int) -> ModelSource:
        of_layers = replace(shape, num_layers=num_layers)
        return replace(question.model, text=str(of_layers), build=of_layers.build, shape=of_layers)

    def fits(num_layers: int) -> bool:
        return Planner(replace(question, model=of(num_layers))).verdict(source).fits

    if not fits(1):
        allowed = "a smaller width, --micro-batch or --sequence: not even one block fits. Without --largest it says why"
        raise ConfigError("--largest", str(shape), allowed)
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
    if answer.planned.in_place_bytes:
        yield (
            f"{format_bytes(answer.planned.in_place_bytes)} of frozen weights count as read in place, from the model's "
            "own files, and take nothing more on nvme (offloadzero.frozen_weights)."
        )
    if waiting:
        yield (
            "Built under zero.Init its parameters wait on the drives until they are home, beside what is home already: "
            f"{format_bytes(waiting)} of nvme at the most, {_beside_has(waiting, memory.nvme or 0)}"
            + (" Without zero.Init it can." if (memory.nvme or 0) < waiting and whole <= memory.host else "")
        )
        if answer.planned.num_parameters > answer.planned.num_trainable and not answer.planned.in_place_bytes:
            yield (
                'Frozen weights from a folder of safetensors on that drive need not wait: with "frozen_weights": '
                '"in_place" they are read from there, and nvme has neither a copy nor this room for building.'
            )
    if whole > answer.needed[TierName.HOST]:
        yield (
            "Built without zero.Init the whole model is in host memory before that: "
            f"{format_bytes(whole)} with Python and torch, {_beside_has(whole, memory.host)}"
        )


def without_clipping(answer: Answer) -> Iterator[str]:
    """Yield a sentence about gradients that are kept for their norm alone. A search may not choose that."""
    config, kept = answer.planned.config, answer.planned.plan.kept_grad_bytes
    is_for_the_norm = config.gradient_clipping and config.batch.gradient_accumulation_steps == 1
    if kept and is_for_the_norm and updates_in_backward(replace(config, gradient_clipping=0.0)):
        yield (
            'If you train without clipping, which is another training: with "gradient_clipping": 0 initialize() keeps '
            f"none of the {format_bytes(kept)} of gradients."
        )


def _beside_has(num_bytes: int, has: int) -> str:
    """Return the end of a sentence: what there is, and what that is too few."""
    lacking = num_bytes - has
    too_few = f", {format_bytes(lacking)} too few: it cannot be built so" if lacking > 0 else ""
    return f"{format_bytes(has)} are available{too_few}."


def can_be_compact(config: OffloadConfig) -> bool:
    """Whether the optimizer's states have a compact layout."""
    return spec_in(config).codes is not None and config.precision.param_dtype == "bf16"


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
