"""The parts of an engine that are different where several ranks train one model, and the settings refused there."""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from offloadzero import launch
from offloadzero.checkpoint.buffers import write_buffer
from offloadzero.config import OffloadConfig
from offloadzero.config.schema import ObserveConfig
from offloadzero.errors import ConfigError, RankError
from offloadzero.memory.device import make_current
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import Failures
from offloadzero.planning.homes import Placement
from offloadzero.segments import SegmentKind, TierName
from offloadzero.sharding.comparing import digest, machine
from offloadzero.sharding.group import Collectives
from offloadzero.sharding.mesh import expect_whole_gradient
from offloadzero.sharding.ranks import Ranks, make_ranks
from offloadzero.sharding.shard_spec import (
    WHOLE,
    ShardSpec,
    consecutive_groups,
    divides_params,
    divides_states,
    keeps_params_on_device,
)
from offloadzero.streaming.gathered_inputs import GatheredHomes
from offloadzero.streaming.spill import is_in_parts, spilled_weight
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

log = logging.getLogger("offloadzero")

_NUM_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # read by the driver when a process first uses the device
MOST_QUEUES = 32


class SeveralRanks:
    """Makes the parts of an engine that know the other ranks, in the place of those that do not."""

    def __init__(self, ranks: Ranks, config: OffloadConfig, failures: Failures) -> None:
        """Make the parts for these ranks, and have the other ranks told of the first one of `failures`."""
        self.ranks = ranks
        self._config = config
        board = ranks.board
        failures.tell_others(lambda error, has_failed: board.report(error, has_failed=has_failed))

    @property
    def shard(self) -> ShardSpec:
        """The part of gradients and states that this rank keeps: ZeRO's stages 1 to 3 divide them."""
        return self.ranks.spec if divides_states(self._config.zero_stage) else WHOLE

    @property
    def gathers_params(self) -> bool:
        """Whether parameters are divided, too."""
        return divides_params(self._config.zero_stage)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.ranks.is_first

    def abort(self) -> None:
        """End what waits for the other ranks on the device: this rank or another one has failed."""
        self.ranks.abort()

    def close(self) -> None:
        """Leave the other ranks."""
        self.ranks.close()

    def agree(self, values: torch.Tensor) -> None:
        """Overwrite a host tensor with that of the first rank that trains the same part of the model."""
        self.ranks.control.broadcast(values, "the first values")

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the least of each value on any rank."""
        negative = -torch.tensor(values, dtype=torch.int64, device="cpu")
        self.ranks.agreements.all_reduce(negative, "the least of all ranks", largest=True)
        return [-value for value in negative.tolist()]

    def agreed_number(self) -> int:
        """A number that all ranks have in common, and that no other call gives again."""
        number = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device="cpu")
        self.ranks.agreements.broadcast(number, "a number for all ranks")
        return int(number)

    def agree_on_buffers(self, model: nn.Module) -> None:
        """Overwrite the model's buffers with those of the first rank. Buffers without values (meta) are passed over.

        Raises ConfigError on all ranks where some have other buffers: no values would fit then.
        """
        self._expect_same_buffers(model)
        places = [(module, name) for module in model.modules() for name in module._buffers]
        done: dict[
            int, torch.Tensor
        ] = {}  # the replacement of a buffer, by its id: several modules may share one
        for module, name in places:
            buffer = module._buffers[name]
            if buffer is None or buffer.device.type == "meta":
                continue
            if id(buffer) not in done:
                done[id(buffer)] = self._agreed(buffer)
            module._buffers[name] = done[id(buffer)]

    def _expect_same_buffers(self, model: nn.Module) -> None:
        facts = [
            f"{name} {tuple(buffer.shape)} {buffer.dtype} {buffer.layout}{' meta' * (buffer.device.type == 'meta')}"
            for name, buffer in model.named_buffers(remove_duplicate=False)
        ]
        odd = self.departures(of_all={}, of_part={"buffers": repr(facts)})["buffers"]
        if odd:
            allowed = (
                "the same names, shapes and dtypes on all ranks, whose first values are those of rank "
                f"{self.ranks.control.members[0]}: ranks {odd} have others"
            )
            raise ConfigError("buffers", ", ".join(facts), allowed)

    def _agreed(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the buffer with the first rank's values. A sparse one whose values differ is replaced, not written."""
        is_dense = buffer.layout is torch.strided
        shown = buffer.detach() if is_dense else buffer.detach().to_dense()
        own = shown.to("cpu", copy=True).contiguous()
        agreed = own.clone()
        self.agree(agreed)
        if is_dense:
            with torch.no_grad():
                write_buffer(buffer, agreed)
            return buffer
        return (
            buffer if torch.equal(own, agreed) else agreed.to_sparse(layout=buffer.layout).to(buffer.device)
        )

    def expect_same(self, records: Sequence[Record]) -> None:
        """Raise ConfigError unless all ranks have the same configuration, and those of a group the same units.

        In a mesh also for a parameter whose gradients tensor-parallel ranks have in parts. And for one that was
        built in parts over other ranks than those of the engine.
        """
        self._expect_built_by_these([slot for record in records for slot in record.slots])
        if self._config.mesh is not None:
            for slot in (slot for record in records for slot in record.trainable_slots):
                expect_whole_gradient(slot.name, slot.param)
        units = [(record.name, record.dtype, [_facts(slot) for slot in record.slots]) for record in records]
        configuration, model = repr(_of_all_ranks(self._config)), repr(units)
        for name, odd in self.departures(
            of_all={"configuration": configuration}, of_part={"model": model}
        ).items():
            if odd:
                first = self.ranks.control.members[0] if name == "model" else 0
                allowed = f"the same on all ranks: ranks {odd} have another than rank {first}"
                raise ConfigError(name, f"that of rank {self.ranks.control.rank}", allowed)

    def expect_same_homes(self, placement: Placement) -> None:
        """Raise ConfigError unless "auto" has chosen the same homes on all ranks, which fetch in an order of them."""
        homes = repr(sorted((index, kind.value, tier.value) for (index, kind), tier in placement.items()))
        odd = self.departures(of_all={"homes": homes}, of_part={})["homes"]
        if odd:
            allowed = f"homes by name: ranks {odd}, on another device or with another torch, choose others than rank 0"
            raise ConfigError("offloadzero.placement", "auto", allowed)

    def _expect_built_by_these(self, slots: Sequence[ParamSlot]) -> None:
        """All ranks are asked, so that each one raises an error of its own, and none is told of another's first."""
        own = [*self.ranks.control.members]
        others = {slot.name: members for slot in slots if (members := _built_by(slot)) not in (None, own)}
        if not self.is_on_some(bool(others)):
            return
        name, members = next(iter(others.items()), ("a parameter of another rank", None))
        allowed = (
            f"the ranks along the data's axis, here {own}: {name} was built under "
            "zero.Init(data_parallel_group=...) over others"
        )
        raise ConfigError("data_parallel_group", members, allowed)

    def departures(self, *, of_all: Mapping[str, str], of_part: Mapping[str, str]) -> dict[str, list[int]]:
        """The ranks whose text differs from the first one's, by key. All ranks have the same keys.

        `of_part` are compared among the ranks that train the same part of the model alone.
        """
        if self.ranks.everyone is None:
            return _departures(self.ranks.control, {**of_all, **of_part})
        return _departures(self.ranks.everyone, of_all) | _departures(self.ranks.control, of_part)

    def is_on_some(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        flags = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        self.ranks.agreements.all_reduce(flags, "a question to all ranks", largest=True)
        return bool(flags)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise RankError at the end of the block where another rank has failed in it. All ranks have such a block."""
        channel = self.ranks.agreements
        spec = channel.spec
        failed = torch.zeros(spec.world_size, dtype=torch.uint8, device="cpu")
        failed[spec.rank] = 1
        try:
            yield
            failed[spec.rank] = 0
        finally:
            channel.all_reduce(failed, what)
        ranks = failed.nonzero().view(-1).tolist()
        if ranks:
            raise RankError(f"{what} has failed on ranks {ranks}, and not on rank {spec.rank}")

    # --- the parts ---

    def input_homes(self, store: TieredStore) -> Any:
        """The call that makes `InputHomes` whose inputs the ranks divide; None where each one keeps its own."""
        ranks = self.ranks
        if ranks.activations is None:
            return None
        return functools.partial(GatheredHomes, ranks=ranks, accelerator=store.accelerator)


def _built_by(slot: ParamSlot) -> list[int] | None:
    """Return the ranks that keep this parameter in parts since it was built; None where each one keeps it whole."""
    weight = spilled_weight(slot.param)
    return None if weight is None or weight.members is None else [*weight.members]


def _facts(slot: ParamSlot) -> tuple[object, ...]:
    """The facts of a parameter that all ranks must share: those in parts are gathered in the dtype that they have."""
    in_parts = (slot.param.dtype,) if is_in_parts(slot.param) else ()
    return slot.name, slot.shape, slot.group_index, *in_parts


def _departures(channel: Collectives, texts: Mapping[str, str]) -> dict[str, list[int]]:
    own = [digest(text) for text in texts.values()]
    by_rank = channel.by_rank_unless_same(own, f"the comparison of the ranks' {' and '.join(texts)}")
    if by_rank is None:
        return {key: [] for key in texts}
    return {key: channel.odd_ranks(said) for key, said in zip(texts, zip(*by_rank, strict=True), strict=True)}


def _of_all_ranks(config: OffloadConfig) -> OffloadConfig:
    """The configuration without the values that may differ from rank to rank."""
    return replace(
        config,
        update=replace(config.update, num_threads=None, cores=()),
        observe=ObserveConfig(),
        steps_per_print=None,
        device=None,
        mesh=None,
        notices=(),
        warnings=(),
        nvme_paths=(),
    )


def join_ranks(device: torch.device, config: OffloadConfig, failures: Failures) -> SeveralRanks:
    """Join the ranks of torch's default process group. Raises ConfigError for settings not built over several."""
    expect_built(config)
    shared_queues = expect_own_queues(device, launch.group_size())
    make_current(device)
    wire = config.zero_plus_plus
    ranks = make_ranks(
        device,
        mesh=config.mesh,
        node_ranks=wire.node_ranks,
        reduces_codes=wire.quantized_gradients,
        divides_inputs=config.partition_activations,
    )
    several = SeveralRanks(ranks, config, failures)
    for warning in filter(None, (shared_queues, _apart(ranks))):
        if several.is_first:
            log.warning("%s", warning)
    return several


def _apart(ranks: Ranks) -> str:
    """Return a warning where ranks that count as a machine are on several ones, or "". All ranks call this."""
    near = ranks.near_weights or ranks.near_gradients
    if near is None:
        return ""
    by_rank = ranks.control.by_rank_unless_same([digest(machine())], "which ranks are on a machine")
    if by_rank is None:
        return ""
    size = near.spec.world_size
    groups = consecutive_groups(ranks.control.spec, size)
    odd = next((members for members in groups if len({by_rank[rank][0] for rank in members}) > 1), None)
    if odd is None:
        return ""
    return (
        f"ZeRO++ takes {size} consecutive ranks for one machine, and ranks {odd} are on several: what was to stay "
        "within a machine goes over the network. Start the ranks of a machine one after the other (torchrun does, "
        "mpirun --map-by slot, srun --distribution=block)"
    )


def expect_own_queues(device: torch.device, world_size: int) -> str:
    """Refuse a single hardware queue for all of a GPU's streams; return a warning where streams may share one, or "".

    Weights are gathered and gradients reduced by different threads, each in its own order, so one rank may launch them
    in another order than the next. In one queue what waits for the first holds the second back: on one rank the gather
    behind what waits for a reduction, on the next the other way round, and neither goes on.
    """
    if device.type != "cuda" or world_size == 1:
        return ""
    value = os.environ.get(_NUM_QUEUES)
    if value == "1":
        raise ConfigError(
            _NUM_QUEUES,
            1,
            f"{MOST_QUEUES} where several ranks train: with one queue they could wait for each other",
        )
    if value == str(MOST_QUEUES):
        return ""
    return (
        f"{_NUM_QUEUES} is {value or 'not set'}: streams of an engine share hardware queues, and ranks could wait for "
        f"each other; set it to {MOST_QUEUES} before the script starts"
    )


def expect_built(config: OffloadConfig) -> None:
    """Refuse settings that would not be right over several ranks."""
    several = f"over {config.world_size} ranks" if config.mesh is None else "in a mesh of ranks"
    wire = config.zero_plus_plus
    if config.mesh is not None and wire.node_ranks > 1:
        raise ConfigError("zero_optimization.zero_hpz_partition_size", wire.node_ranks, f"{several}: 1")
    if config.mesh is not None and wire.quantized_gradients:
        raise ConfigError("zero_optimization.zero_quantized_gradients", True, f"{several}: false")
    if config.mesh is not None and config.placement.auto:
        raise ConfigError(
            "offloadzero.placement", "auto", f"homes by name: {several} the choice is not built"
        )
    rules = () if config.placement.auto else config.placement.rules
    tiers = {rule.tiers.get(SegmentKind.PARAM, TierName.DEVICE) for rule in rules}
    if keeps_params_on_device(config.zero_stage) and tiers - {TierName.DEVICE}:
        (tier_name, *_) = sorted(tier.value for tier in tiers - {TierName.DEVICE})
        allowed = f"{several} device, or zero_optimization.stage 3: stages 1 and 2 keep all parameters on each device"
        raise ConfigError("offloadzero.placement.param", tier_name, allowed)
    if config.placement.host_update_ratio < 1.0:
        ratio = config.placement.host_update_ratio
        raise ConfigError("zero_optimization.offload_optimizer.ratio", ratio, f"{several}: 1.0")
