"""An optimizer as the engine sees it: its states, its hyperparameters and its step.

[Note: an optimizer spec]
A record's trainable elements keep, beside the parameter and its master, the states that the optimizer's spec names:
fp32 segments under the names of torch's state dict. Everything that handles states (the plan of memory, the update,
state dicts, checkpoints) asks the spec of the record. An optimizer is therefore one file in `specs/`, its kernel, its
entry in `specs.SPECS`, and what the configuration says of it: its arguments in `config/schema.py` and the names of
its states as keys of `offloadzero.placement`.

A step is arithmetic per element with scalars of the param group, so it may be cut anywhere and gives the same bits on
the host and on a device: [Note: one arithmetic] in arithmetic/device_math.py.

[Note: whole parameters]
A step that is no arithmetic per element (`takes_whole`: Muon's multiplies matrices) gets one parameter at a time, in
its shape, and runs on the device, wherever the states live: so it gives the same bits there too. What it asks of
others: each parameter begins at a file block and lies in one rank's shard (`make_record`), the chunks of an update are
whole parameters (`Record.chunks`), and those of records that live elsewhere go through scratch on the device and back
(`UpdatePipeline`). The ranks' shards are then as large as that of the rank with the most: the largest matrix of a unit
at least.

An optimizer may leave some param groups to another one, its `members`: Muon leaves what is no matrix to AdamW. A record
has the parameters of one.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from offloadzero.arithmetic.remainders import MASTER_DTYPES
from offloadzero.arithmetic.torch_steps import FP32_SCRATCH_BYTES, Fp32Piece, fp32_pieces
from offloadzero.core.constants import COMPACT_BLOCK
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError
from offloadzero.native.hyper import StepScalars

log = logging.getLogger("offloadzero.update")

SCRATCH_ELEMENTS = 1 << 21  # of a piece of an update in torch operations, at most

# By their names in a configuration.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


class UpdateForm(str, Enum):
    """The form of the update of a record on the device.

    NATIVE: the kernels of csrc/cpu_adam, where the device is the CPU. TRITON: one fused kernel. TORCH: torch operations
    in pieces, for optimizers that have no fused kernel and devices on which Triton does not run.
    """

    NATIVE = "native"
    TRITON = "triton"
    TORCH = "torch"


@dataclass(frozen=True)
class FormChoice:
    """A form and the reason for choosing it."""

    form: UpdateForm
    reason: str


class Hyper(Protocol):
    """The hyperparameters of one step of a param group: a frozen dataclass, compared with ==."""

    @property
    def lr(self) -> float:
        """The learning rate."""


H = TypeVar("H", bound=Hyper)
Buffers = Mapping[SegmentKind, Tensor]  # the same elements of each segment of a record, and of its gradient
CodeSpec = tuple[str, SegmentKind, torch.dtype, torch.Size]


class StateCodes(ABC):
    """The compact layout of an optimizer's states: codes of 8 bits, and fp32 scales per block of elements.

    `dtypes` are those of the segments except parameter, master and scales; `names` are their names in state dicts and
    checkpoints.
    """

    param_dtype: ClassVar[torch.dtype]
    master_dtype: ClassVar[torch.dtype]
    dtypes: ClassVar[Mapping[SegmentKind, torch.dtype]]
    names: ClassVar[Mapping[SegmentKind, str]]

    @abstractmethod
    def num_scales(self, num_elements: int) -> int:
        """The number of scales of so many elements."""

    @abstractmethod
    def scale_shape(self, num_elements: int) -> torch.Size:
        """The shape in which the scales of a parameter are stored."""

    @abstractmethod
    def decode(self, kind: SegmentKind, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the fp32 values of a parameter's flat codes and scales."""

    @abstractmethod
    def encode(self, kind: SegmentKind, values: Tensor, scales: Tensor) -> Tensor:
        """Return the codes of a parameter's flat fp32 state; its scales go into `scales`."""

    def specs(self, shape: torch.Size) -> tuple[CodeSpec, ...]:
        """The name, segment, dtype and shape of each stored array of a parameter's states."""
        codes = ((self.names[kind], kind, dtype, shape) for kind, dtype in self.dtypes.items())
        scales = SegmentKind.SCALES
        return (*codes, (scales.value, scales, torch.float32, self.scale_shape(shape.numel())))


class OptimizerSpec(ABC, Generic[H]):
    """An optimizer as the engine trains with it: [Note: an optimizer spec]."""

    name: ClassVar[str]
    types: ClassVar[tuple[str, ...]]  # names in the JSON
    classes: ClassVar[tuple[type[torch.optim.Optimizer], ...]]  # their param groups and states are continued
    states: ClassVar[tuple[SegmentKind, ...]]
    counts_steps: ClassVar[bool] = True  # whether torch's states have "step"
    begins_without: ClassVar[bool] = (
        False  # torch has no state before the first step, and a step asks for that
    )
    codes: ClassVar[StateCodes | None] = None  # the compact layout, where there is one
    # Options of param groups that change the numbers and are not built, and the values that they may have.
    refused_options: ClassVar[Mapping[str, object]] = MappingProxyType(
        {"maximize": False, "differentiable": False}
    )
    scratch_bytes_per_element: ClassVar[int]  # of a piece in torch operations
    takes_whole: ClassVar[bool] = False  # [Note: whole parameters]

    @property
    def members(self) -> tuple[OptimizerSpec[Any], ...]:
        """The specs that records of a model under this optimizer may have."""
        return (self,)

    def of_group(self, group: Mapping[str, Any]) -> OptimizerSpec[Any]:  # noqa: ARG002
        """The member that updates the parameters of a group."""
        return self

    # --- param groups ---

    def config_groups(
        self, groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any], names: Mapping[int, str]
    ) -> list[dict[str, Any]]:
        """Complete param groups by the configuration's arguments.

        Args:
            names: those of the model's parameters, by id.
        """
        del names
        return [{**defaults, **group, "params": list(group["params"])} for group in groups]

    def config_defaults(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration's arguments that torch gives to every group that lacks them."""
        return dict(defaults)

    def expect_param(self, name: str, param: Tensor) -> None:
        """Refuse a parameter that the update cannot take."""

    @abstractmethod
    def hyper(self, group: Mapping[str, Any], name: str) -> H:
        """Return the hyperparameters of a group as of now: scripts and schedulers change them between steps.

        Raises ConfigError for options that the update would not compute. `name` is the group's, for errors.
        """

    def hypers(self, groups: Iterable[Mapping[str, Any]], owner: str, *, state_layout: str) -> list[Any]:
        """Return the hyperparameters of all groups. `owner` is whose they are, for errors."""
        found = []
        for index, group in enumerate(groups):
            name = f"{owner}.param_groups[{index}]"
            member = self.of_group(group)
            member.expect_options(group, name)
            hyper = member.hyper(group, name)
            if state_layout == "compact":
                member.expect_compact(hyper, name)
            found.append(hyper)
        return found

    def expect_compact(self, hyper: H, name: str) -> None:
        """Refuse hyperparameters of the group called `name` with which compact states would be lost."""

    def expect_options(self, group: Mapping[str, Any], name: str) -> None:
        """Refuse options that the update would not compute."""
        for option, allowed in self.refused_options.items():
            if group.get(option, allowed) != allowed:
                raise ConfigError(f"{name}.{option}", group[option], f"allowed: {allowed}")

    def default_options(self, origin: torch.optim.Optimizer) -> dict[str, Any]:  # noqa: ARG002
        """The options that belong to the class of `origin` and may be missing in its groups."""
        return {}

    def fixed_options(self, origin: torch.optim.Optimizer | None) -> dict[str, Any]:  # noqa: ARG002
        """The options that a loaded group does not change."""
        return {}

    def counts_update(self, hyper: H) -> bool:  # noqa: ARG002
        """Whether an update under `hyper` adds to a parameter's step count."""
        return True

    # --- states ---

    @property
    def kinds(self) -> tuple[SegmentKind, ...]:
        """All segments that a record may have, the gradient among them, in the order of reports."""
        return (
            *(SegmentKind.PARAM, SegmentKind.MASTER),
            *self.states,
            *(SegmentKind.SCALES, SegmentKind.GRAD),
        )

    def step_scratch_bytes(self, shape: torch.Size) -> int:
        """The device bytes of a step of one parameter beside its segments and gradient: [Note: whole parameters]."""
        raise NotImplementedError(f"{self.name} takes parameters in pieces")

    @property
    def state_keys(self) -> tuple[str, ...]:
        """The names of the states in torch's state dict."""
        return (*self.states, *(("step",) if self.counts_steps else ()))

    def is_compact(self, dtype: torch.dtype) -> bool:
        """Whether states of parameters of that dtype can be compact."""
        return self.codes is not None and self.codes.param_dtype == dtype

    def state_dtypes(self, dtype: torch.dtype, *, compact: bool) -> dict[SegmentKind, torch.dtype]:
        """The dtypes that an element keeps beside a parameter of `dtype`, without scales."""
        if compact and self.codes is not None:
            return {SegmentKind.MASTER: self.codes.master_dtype, **self.codes.dtypes}
        master = MASTER_DTYPES[dtype]
        states = dict.fromkeys(self.states, torch.float32)
        return states if master is None else {SegmentKind.MASTER: master, **states}

    def expect_layout(self, state_layout: str) -> None:
        """Refuse a layout of the states that the optimizer lacks."""
        if state_layout == "compact" and self.codes is None:
            raise ConfigError(
                "offloadzero.state_layout",
                state_layout,
                f"{self.name} has the fp32 layout only; compact needs Adam or AdamW",
            )

    def expect_origin(self, origin: torch.optim.Optimizer, state_layout: str) -> None:  # noqa: ARG002
        """Refuse an optimizer whose states could not be continued, or one that has stepped already."""
        if origin.state:
            raise ConfigError(
                "optimizer",
                type(origin).__name__,
                "it has states already: pass a new optimizer, and load this one's state_dict() into the optimizer "
                "that is returned",
            )

    def initial_value(self, kind: SegmentKind, group: Mapping[str, Any]) -> float:  # noqa: ARG002
        """The value of every element of a state before the first step."""
        return 0.0

    # --- the step ---

    def choose_form(self, device: torch.device) -> FormChoice:
        """Choose the form of updates of records on `device`."""
        if device.type == "cpu":
            return FormChoice(UpdateForm.NATIVE, "the device is the CPU")
        return FormChoice(UpdateForm.TORCH, f"{self.name} has no fused kernel")

    def scratch_bytes(self, form: UpdateForm, num_elements: int, *, compact: bool) -> int:
        """The device bytes that an update of so many elements takes beside the record and the gradient."""
        if form is not UpdateForm.TORCH:
            return 0
        return piece_scratch_bytes(num_elements, self._piece_bytes(compact=compact))

    def _piece_bytes(self, *, compact: bool) -> int:  # noqa: ARG002
        return self.scratch_bytes_per_element

    @abstractmethod
    def step(
        self,
        buffers: Buffers,
        *,
        hyper: H,
        step: int,
        grad_scale: float,
        num_threads: int | None = None,
        form: UpdateForm = UpdateForm.NATIVE,
        scratch: Tensor | None = None,
    ) -> None:
        """Do one step in place on flat tensors of one memory, or on those of one parameter: [Note: whole parameters].

        Args:
            step: counts from 1.
            grad_scale: the factor of the gradient: 1 / loss scale, times that of clipping.
            scratch: uint8, for the form in torch operations; allocated if None.
        """


AnySpec = OptimizerSpec[Any]


def piece_scratch_bytes(num_elements: int, bytes_per_element: int) -> int:
    """The scratch for so many elements, or for the largest piece of them: a whole number of compact blocks."""
    blocks = -(-min(num_elements, SCRATCH_ELEMENTS) // COMPACT_BLOCK)
    return blocks * COMPACT_BLOCK * bytes_per_element


@functools.cache
def device_form(spec: AnySpec, device: torch.device) -> UpdateForm:
    """Return the form of updates on a device; tried and logged once."""
    choice = spec.choose_form(device)
    log.info("update of records on %s: %s (%s)", device, choice.form.value, choice.reason)
    return choice.form


# --- options of param groups ---


def number(group: Mapping[str, Any], key: str, name: str) -> float:
    """Read an option of the group called `name`: a number, or a tensor of one. Raises ConfigError."""
    return _number(group[key], f"{name}.{key}")


def betas(group: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Read the two decay rates of the group called `name`. Raises ConfigError."""
    values = group["betas"]
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise ConfigError(f"{name}.betas", values, "two numbers")
    return _number(values[0], f"{name}.betas[0]"), _number(values[1], f"{name}.betas[1]")


def _number(value: Any, name: str) -> float:
    if type(value) is float:
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements is a RuntimeError
        raise ConfigError(name, value, "a number, or a tensor of one element") from None


class Fp32Spec(OptimizerSpec[H]):
    """Base of optimizers with fp32 states whose step on a device is done by torch operations, piece by piece.

    They add the hyperparameters, the states, the kernel, and the operations on a piece.
    """

    scratch_bytes_per_element = FP32_SCRATCH_BYTES

    @abstractmethod
    def scalars(self, hyper: H, *, step: int, grad_scale: float) -> StepScalars:
        """Return the fp32 scalars of a step, which counts from 1."""

    @abstractmethod
    def native_step(
        self, buffers: Buffers, *, hyper: H, step: int, grad_scale: float, num_threads: int | None
    ) -> None:
        """Do one step in place by the kernels of csrc/cpu_adam."""

    @abstractmethod
    def torch_step(self, piece: Fp32Piece, scalars: StepScalars) -> None:
        """Do one step of a piece: the kernel's operations, one by one."""

    def step(
        self,
        buffers: Buffers,
        *,
        hyper: H,
        step: int,
        grad_scale: float,
        num_threads: int | None = None,
        form: UpdateForm = UpdateForm.NATIVE,
        scratch: Tensor | None = None,
    ) -> None:
        """Do one step in place on flat tensors of one memory."""
        if form is UpdateForm.TRITON:
            raise AssertionError(f"{self.name} has no fused kernel")
        if form is UpdateForm.NATIVE:
            self.native_step(buffers, hyper=hyper, step=step, grad_scale=grad_scale, num_threads=num_threads)
            return
        param = buffers[SegmentKind.PARAM]
        if scratch is None:
            num_bytes = piece_scratch_bytes(param.numel(), self.scratch_bytes_per_element)
            scratch = torch.empty(num_bytes, dtype=torch.uint8, device=param.device)
        scalars = self.scalars(hyper, step=step, grad_scale=grad_scale)
        for piece in fp32_pieces(
            param,
            buffers[SegmentKind.GRAD],
            [buffers[kind] for kind in self.states],
            master=buffers.get(SegmentKind.MASTER),
            scratch=scratch,
        ):
            self.torch_step(piece, scalars)
