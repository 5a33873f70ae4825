"""The forecast of an engine's own step, for its log and its run directory.

[Note: a forecast while training]
It is the forecast that `offloadzero plan` makes, from the engine's own records and plan and from the rates that were
measured on this machine before: nothing is measured while a model trains. The operations of a micro batch are counted
as the plan counts them, on tensors without memory, when the first step has run: only then it is known how many tokens
a micro batch has. The count must touch nothing of the training, so it runs on a copy of the model without memory and
without hooks. Where something in the copy leads back to the model, a function set as `forward` that holds a module of
it say, the model's modules refuse to be called, and there is no forecast. Random numbers stay as they were, those of
Python and numpy too, compiled parts run as they are written.

Over several ranks the first one makes it, of its own step: with its share of the machine, and with its part of what the
ranks send. How fast that is depends on all of them and is in no measurement of one machine: the rate is the best that a
collective of the first step has shown. A collective in the model's own forward would wait for the other ranks, which do
not count: it is refused before it begins, and there is no forecast; nor in a mesh, where such are expected.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from offloadzero.config import OffloadConfig
from offloadzero.core.torch_private import current_autograd_node, skip_frame
from offloadzero.engine.planned_model import uses_of
from offloadzero.errors import ConfigError
from offloadzero.memory.device import Device
from offloadzero.observe.forecast import NoForecastError, PlannedStep, parts_alone
from offloadzero.observe.timeline import COLLECTIVES
from offloadzero.planning.hardware import Hardware, describe, kept_hardware, kept_share
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.planning.model.trace import CallForm, MicroBatchTrace, TraceError, trace_call
from offloadzero.planning.step.forecast import plan_step
from offloadzero.streaming.building.units import UnitCut
from offloadzero.update.spec import DTYPES

_HOOKS = (  # of a module, by their attributes
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class FirstStep:
    """The calls of a model in the first step that trains it: their number, and the form of the first."""

    def __init__(self, device: torch.device, *, is_over: Callable[[], bool]) -> None:
        self.form: CallForm | None = None  # None: there was no call yet
        self.autocast: torch.dtype | None = None  # of the script's torch.autocast around that call
        self.num_calls = 0
        self._device_type = device.type
        self._is_over = is_over

    def see(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Take in a call. Returns whether later ones may belong to the step."""
        if self._is_over():
            return False
        if current_autograd_node() is None:  # else a checkpoint around the model runs it again
            self.num_calls += 1
            if self.form is None:
                self.form = CallForm(args, kwargs)
                if torch.is_autocast_enabled(self._device_type):
                    self.autocast = torch.get_autocast_dtype(self._device_type)
        return True


skip_frame(FirstStep.see, with_calls=True)  # a compiled forward is what follows


def forecast_step(
    model: nn.Module,
    cut: UnitCut,
    plan: MemoryPlan,
    config: OffloadConfig,
    *,
    checkpointed: Collection[str],
    device: Device,
    first: FirstStep,
    num_local_ranks: int = 1,
    shown_rates: Mapping[str, float] = MappingProxyType({}),
) -> PlannedStep:
    """Forecast a step of an engine: [Note: a forecast while training].

    Args:
        checkpointed: names of the modules that keep only their inputs.
        first: the step that has run.
        num_local_ranks: the ranks that share this machine.
        shown_rates: bytes per second by lane, the best that the first step has shown; that between ranks is used.

    Raises:
        NoForecastError: the machine has not been measured, or the operations cannot be counted.
    """
    if config.mesh is not None:
        raise NoForecastError("in a mesh the model's own code sends between ranks, which is not counted")
    hardware = _measured(config, device, num_local_ranks)
    call = _call_of_micro_batch(first, config.batch.gradient_accumulation_steps)
    on_cpu = device.free_bytes() is None
    step = plan_step(
        cut.records,
        plan,
        config,
        uses=uses_of(cut),
        trace=_count(model, config, checkpointed, call, autocast=first.autocast, on_cpu=on_cpu),
        products=first.autocast,
        num_local_ranks=num_local_ranks,
    )
    if hardware.rates.collectives is None:
        shown = replace(hardware.rates, collectives=shown_rates.get(COLLECTIVES))
        hardware = replace(hardware, rates=shown)
    found = hardware.forecast(step)
    if found.seconds is None or found.lane is None:
        unknown = ", ".join(map(hardware.unknown_rate, found.unknown))
        raise NoForecastError(f"no rate or no count of {unknown or 'anything that moves'}")
    return PlannedStep(
        seconds=found.seconds,
        lanes_s=found.lanes_s,
        num_bytes=step.traffic.lanes,
        lane=found.lane,
        parts_s=parts_alone(found.parts_s, hardware.num_cores),
    )


def _measured(config: OffloadConfig, device: Device, num_local_ranks: int) -> Hardware:
    try:
        identity = describe(device, config.nvme_paths)
        found = kept_hardware(identity) if num_local_ranks == 1 else kept_share(identity, num_local_ranks)
    # A damaged file, a home that cannot be read or is not there.
    except (ConfigError, OSError, RuntimeError) as error:
        raise NoForecastError(f"what was measured of this machine is not used: {error}") from error
    if found is None:
        raise NoForecastError(
            "this machine has not been measured. `offloadzero plan --model SPEC --config FILE --hardware probe` does "
            "that once, in a minute or two, and forecasts the step; later runs are then compared by themselves"
        )
    return found


def _call_of_micro_batch(first: FirstStep, num_micro: int) -> CallForm:
    """Return the call of one of so many micro batches. Raises NoForecastError where the script has made others."""
    if first.form is None:
        raise NoForecastError("the model has not been called: its modules were, or a function of it")
    if first.num_calls != num_micro:
        raise NoForecastError(
            f"the first step has called the model {first.num_calls} times, and gradient_accumulation_steps is "
            f"{num_micro}: a forecast is of one call for each micro batch"
        )
    return first.form


def _count(
    model: nn.Module,
    config: OffloadConfig,
    checkpointed: Collection[str],
    call: CallForm,
    *,
    autocast: torch.dtype | None,
    on_cpu: bool,
) -> MicroBatchTrace:
    """Count a micro batch on a copy of the model: [Note: a forecast while training]."""
    try:
        bare = _without_memory(model)
    except Exception as error:  # any error of the model's code, or of an object in it that has no copy
        raise NoForecastError(f"the model has no copy: {type(error).__name__}: {error}") from error
    with ExitStack() as around:
        around.enter_context(_uncallable(model.modules()))
        around.enter_context(_random_numbers_kept())
        around.enter_context(torch.enable_grad())
        if autocast is not None:  # of the CPU, where tensors without memory seem to be
            around.enter_context(torch.autocast("cpu", autocast))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and loading it takes seconds
            around.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            dtype = DTYPES[config.precision.param_dtype]
            trace = trace_call(bare, call, dtype=dtype, checkpointed=checkpointed, on_cpu=on_cpu)
        except TraceError as error:
            raise NoForecastError(f"its operations are not counted: {error}") from error
    if trace.uncounted:
        raise NoForecastError(f"what {', '.join(trace.uncounted)} computes is not counted")
    return trace


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Leave the generators from which models draw on the host, to skip a layer say, as they were."""
    of_python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class _OnMeta(TorchFunctionMode):
    """Makes a copy of a tensor one without memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation; copies have no memory."""
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors are on the meta device, without its hooks. Raises any error."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None and id(param) not in memo:
                empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
                memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
        for buffer in module._buffers.values():
            if buffer is not None:
                memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
        for name in _HOOKS:
            memo[id(getattr(module, name))] = OrderedDict()
    with _OnMeta():
        return copy.deepcopy(model, memo)


@contextmanager
def _uncallable(modules: Iterator[nn.Module]) -> Iterator[None]:
    """Let these modules raise TraceError where they are called."""

    def refuse(module: nn.Module, _: Any) -> None:
        raise TraceError(f"a copy of the model calls the model itself: {type(module).__name__}")

    with ExitStack() as handles:
        for module in modules:
            handles.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)
        yield
