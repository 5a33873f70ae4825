"""The only file that touches nn.Module and autograd hooks (floor 5).

[Note: hooks]
A *site* is a module whose forward needs units. Its pre-forward hook pins them on the device and pushes
saved-tensor hooks; its forward hook (`always_call`, so that it also runs when the forward raises, as the early
stop of non-reentrant checkpointing does) pops and unpins.

What autograd saves for backward and lies in a lease becomes a handle (unit, offset, size, stride), so a lease can
be given to another unit right after the forward. Unpacking the handle in backward fetches the unit again: that is
the pre-backward hook. It needs no hook on outputs, hence tuples, dicts, dataclasses, modules called twice and
outputs without gradient are no special cases.

Saved-tensor hooks do not nest: only the innermost pair runs. Under an outer pair that is not ours (activation
checkpointing, save_on_cpu) ours hands everything that is no weight on to it; without that, checkpointing would
silently keep all activations.

Parameters read outside their sites (`F.linear(x, self.wte.weight)` in another module) are caught at the read:
the dict behind `module.weight` touches the unit. Inside the root's forward our saved-tensor hooks turn what
autograd saves of it into a handle. Where they do not reach (a loss function outside the model, a foreign pair of
hooks) the read gets a private copy, which autograd may keep as long as it likes.

[Note: checkpointed units]
A checkpointed unit's forward runs under torch's non-reentrant checkpointing, and its site's hooks run inside: the
recomputation pins the unit and pushes our saved-tensor hooks as the first run did. The order of the pairs, outermost
first: the model's own; the one that takes the unit's inputs; torch's, which drops what the unit saves and, in the
recomputation, catches it; the site's. torch saves the inputs it is given through the pair in force, so a tensor that
the store wants becomes a handle there. Under a foreign pair (a checkpoint around the model, save_on_cpu) inputs go to
that pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from offloadzero.observe.timeline import Timeline
from offloadzero.optim.records import ParamSlot, Record
from offloadzero.streaming.activations import ActivationStore, Call, KeptInput
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.leased_unit import SavedWeight
from offloadzero.streaming.stepping import Stepper
from offloadzero.streaming.units import Site, UnitCut

_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


def _innermost() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """`module._parameters` that touches a unit when one of its parameters is read."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], touch: Callable[[int], None]) -> None:
        super().__init__(parameters)
        self._touch = touch

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self._touch(id(param))
        return param


class _SiteHooks:
    """The two forward hooks of one site."""

    def __init__(self, site: Site, hooks: ModelHooks) -> None:
        self._site = site
        self._hooks = hooks
        self._timeline = hooks.timeline
        self._lap = f"forward {site.name or 'model'}"
        self._entered: list[bool] = []  # one entry a running forward: whether hooks were pushed

    def pre_forward(self, module: nn.Module, args: Any) -> None:
        self._timeline.enter_model()
        with self._timeline.launching():
            self._enter()

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        with self._timeline.launching():
            self._leave()

    def _enter(self) -> None:
        executor = self._hooks.executor
        evaluating = self._hooks.is_evaluating()
        if evaluating and not self._hooks.depth and not self._site.name:
            executor.begin_evaluation()
        pinned: list[int] = []
        try:
            for index in self._site.records:
                executor.pin(index, evaluating=evaluating)
                pinned.append(index)
        except BaseException:
            for index in pinned:
                executor.unpin(index)
            raise
        self._entered.append(torch.is_grad_enabled() and self._hooks.push_saved_tensor_hooks())
        if not self._hooks.depth:
            self._hooks.outermost_evaluates = evaluating
        self._hooks.depth += 1

    def _leave(self) -> None:
        if not self._entered:
            return  # the pre-forward hook raised
        self._hooks.depth -= 1
        if self._entered.pop():
            _pop()
        for index in self._site.records:
            self._hooks.executor.unpin(index)
        self._timeline.lap(self._lap)


class _CheckpointedForward:
    """Stands for a unit's `forward`: [Note: checkpointed units]."""

    def __init__(self, name: str, module: nn.Module, site: _SiteHooks | None, hooks: ModelHooks) -> None:
        """`site`: the hooks of the module as a site, which are not registered with it."""
        functools.update_wrapper(self, module.forward)
        self._name = name
        self._module = module
        self._site = site
        self._hooks = hooks
        self._own = module.__dict__.get("forward")  # set on the instance: a compiled one, say
        self._forward = module.forward
        module.forward = self

    def remove(self) -> None:
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(args, kwargs)
        # Flat, so that tensors inside tuples and dicts are inputs too.
        leaves, structure = pytree.tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            return self._run(*pytree.tree_unflatten(leaves, structure))

        self._hooks.push_input_hooks(self._name)
        try:
            return checkpoint(run, *leaves, use_reentrant=False)
        finally:
            _pop()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._site is None:
            return self._forward(*args, **kwargs)
        self._site.pre_forward(self._module, args)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._site.post_forward(self._module, args, None)


class ModelHooks:
    """Everything attached to a model; `remove()` takes it off again."""

    def __init__(
        self,
        model: nn.Module,
        cut: UnitCut,
        *,
        executor: Executor,
        stepper: Stepper,
        read_weight: Callable[[Record, ParamSlot], torch.Tensor],
        write_weight: Callable[[Record, ParamSlot, torch.Tensor], None],
        timeline: Timeline,
        checkpointed: Mapping[str, nn.Module],
        activations: ActivationStore | None,
    ) -> None:
        """`read_weight` gives a parameter's value as a new host tensor in its shape, `write_weight` sets it.

        `checkpointed` are modules by their units' names; `activations` takes their inputs.
        """
        self.executor = executor
        self._pins = executor.pins
        self.timeline = timeline
        self._stepper = stepper
        self._read_weight = read_weight
        self._write_weight = write_weight
        self.depth = 0  # of sites in their forward
        self.outermost_evaluates = False
        self._loaded: set[str] = set()
        self._records = cut.records
        self._record_of = {id(slot.param): r.index for r in cut.records for slot in r.slots}
        self._slot_of = {id(slot.param): slot for r in cut.records for slot in r.slots}
        self._handles: list[RemovableHandle] = []
        self._gradient_handles: list[RemovableHandle] = []
        self._owners = cut.owners
        self._activations = activations
        self._forwards: list[_CheckpointedForward] = []
        self._attach(model, cut, checkpointed)

    def _attach(self, model: nn.Module, cut: UnitCut, checkpointed: Mapping[str, nn.Module]) -> None:
        sites = list(cut.sites)
        if not any(site.module is model for site in sites):
            sites.insert(0, Site("", model, ()))  # for its saved-tensor hooks
        inside = {id(module) for module in checkpointed.values()}
        site_hooks: dict[int, _SiteHooks] = {}
        for site in sites:
            hooks = site_hooks[id(site.module)] = _SiteHooks(site, self)
            if id(site.module) in inside:
                continue  # inside the checkpoint
            self._handles += [
                site.module.register_forward_pre_hook(hooks.pre_forward),
                site.module.register_forward_hook(hooks.post_forward, always_call=True),
            ]
        self._forwards = [
            _CheckpointedForward(name, module, site_hooks.get(id(module)), self)
            for name, module in checkpointed.items()
        ]
        for module in cut.owners:
            module._parameters = _WatchedParameters(module._parameters, self._on_read)
            # torch marks the hook with an attribute, which a bound method does not take.
            fill = functools.partial(self._fill_state_dict)
            self._handles += [
                module.register_state_dict_post_hook(fill),
                module.register_load_state_dict_pre_hook(self._take_state_dict),
                module.register_load_state_dict_post_hook(self._forgive_missing),
            ]
        for record in cut.records:
            for slot in record.slots:
                if slot.param.requires_grad:
                    hook = self._gradient_hook(record, slot)
                    self._gradient_handles.append(slot.param.register_post_accumulate_grad_hook(hook))

    def remove_gradient_hooks(self) -> None:
        """Take the hooks on gradients off: Python's collector does not see the cycle that they close."""
        for handle in self._gradient_handles:
            handle.remove()
        self._gradient_handles = []

    def remove(self) -> None:
        """Take all hooks off."""
        self.remove_gradient_hooks()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for forward in self._forwards:
            forward.remove()
        self._forwards = []
        for module in self._owners:
            module._parameters = dict(module._parameters)

    # --- reads ---

    def is_evaluating(self) -> bool:
        """Whether a use now is no part of a training step: the outermost forward runs without gradients.

        A forward without gradients inside one with them (a teacher, a target) is part of the step.
        """
        return self.outermost_evaluates if self.depth else not torch.is_grad_enabled()

    def _on_read(self, param_id: int) -> None:
        index = self._record_of.get(param_id)
        if index is None or self._pins[index]:
            return
        with_grad = torch.is_grad_enabled()
        self.executor.touch(index, guard=True, evaluating=self.is_evaluating())
        if with_grad and self._own_innermost() is None:
            self.executor.lend_copy(index, self._slot_of[param_id])

    @staticmethod
    def _own_innermost() -> _SavedTensorHooks | None:
        """The innermost saved-tensor hooks if they are ours."""
        top = _innermost()
        owner = getattr(top[0], "__self__", None) if top is not None else None
        return owner if isinstance(owner, _SavedTensorHooks) else None

    # --- saved tensors ---

    def push_saved_tensor_hooks(self) -> bool:
        """Ours become the innermost pair and hand on to the pair that was; False if they are it already."""
        if self._own_innermost() is not None:
            return False
        hooks = _SavedTensorHooks(self.executor, _innermost(), timeline=self.timeline)
        _push(hooks.pack, hooks.unpack)
        return True

    def push_input_hooks(self, name: str) -> None:
        """The pair that takes the inputs of unit `name`: [Note: checkpointed units]."""
        others = self._own_innermost() or _SavedTensorHooks(
            self.executor, _innermost(), timeline=self.timeline
        )
        if others.is_under_foreign or self._activations is None:
            _push(others.pack, others.unpack)
        else:
            inputs = _InputHooks(Call(name), self._activations, self.executor, others)
            _push(inputs.pack, inputs.unpack)

    # --- gradients ---

    def _gradient_hook(self, record: Record, slot: ParamSlot) -> Callable[[torch.Tensor], None]:
        add, index = self._stepper.collector.add, record.index

        def take(_: torch.Tensor) -> None:
            add(index, slot)

        def timed_take(_: torch.Tensor) -> None:
            with self.timeline.launching():
                add(index, slot)

        def drop(param: torch.Tensor) -> None:
            param.grad = None

        if not slot.trainable:
            return drop
        return timed_take if self.timeline.is_on else take

    # --- state dict ---

    def _fill_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Replace the placeholders of one module's own parameters by their values, in host memory."""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if prefix + name in state_dict and id(param) in self._slot_of:
                state_dict[prefix + name] = self._read_weight(
                    self._records[self._record_of[id(param)]], self._slot_of[id(param)]
                )

    def _take_state_dict(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Write one module's own weights to their homes; torch finds them gone and reports them missing."""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            self._loaded.discard(prefix + name)
            value = state_dict.get(prefix + name)
            slot = self._slot_of.get(id(param))
            if value is None or slot is None or value.shape != slot.shape:
                continue  # torch reports what does not fit
            self._write_weight(self._records[self._record_of[id(param)]], slot, value)
            del state_dict[prefix + name]
            self._loaded.add(prefix + name)

    def _forgive_missing(self, module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in self._loaded]


class _SavedTensorHooks:
    """One pair of saved-tensor hooks; `outer` is a foreign pair that gets what is no weight of ours."""

    def __init__(
        self, executor: Executor, outer: Sequence[Callable[[Any], Any]] | None, *, timeline: Timeline
    ) -> None:
        self._timeline = timeline
        self._low, self._high = executor.address_range
        self._save = executor.save
        self._load = executor.load
        self._outer = outer

    # Called for every saved tensor: what times them costs nothing when nobody looks. Not attributes: a method of its
    # own in an object is a cycle, and the collector would decide when a checkpoint's inputs, which `_outer` holds, go.

    @property
    def pack(self) -> Callable[[torch.Tensor], Any]:
        """The hook that autograd calls when it saves a tensor."""
        return self._timed_pack if self._timeline.is_on else self._pack

    @property
    def unpack(self) -> Callable[[Any], torch.Tensor]:
        """The hook that gives the tensor back."""
        return self._timed_unpack if self._timeline.is_on else self._unpack

    @property
    def is_under_foreign(self) -> bool:
        """Whether a pair that is not ours gets what is no weight."""
        return self._outer is not None

    def _timed_pack(self, tensor: torch.Tensor) -> Any:
        with self._timeline.launching():
            return self._pack(tensor)

    def _timed_unpack(self, packed: Any) -> torch.Tensor:
        with self._timeline.launching():
            return self._unpack(packed)

    def _pack(self, tensor: torch.Tensor) -> Any:
        address = tensor.data_ptr()
        if self._low <= address < self._high:
            return self._save(tensor, address)
        if self._outer is not None:
            return self._outer[0](tensor)
        # An output that kept its grad_fn here would keep its own graph alive. `data` is a `detach()` that does not let
        # go of the interpreter's lock; autograd does not look at the version of what hooks give back.
        return tensor.data if tensor.requires_grad else tensor

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is SavedWeight:
            return self._load(packed)
        if self._outer is not None:
            return self._outer[1](packed)  # type: ignore[no-any-return]
        return packed  # type: ignore[no-any-return]


class _InputHooks:
    """Saved-tensor hooks for the inputs of one call of a checkpointed unit."""

    def __init__(
        self, call: Call, activations: ActivationStore, executor: Executor, others: _SavedTensorHooks
    ) -> None:
        """`others` gets what does not move: weights of ours, indices, small tensors."""
        self._call = call
        self._activations = activations
        self._is_weight = executor.is_weight
        self._others = others

    def pack(self, tensor: torch.Tensor) -> Any:
        if self._activations.wants(tensor) and not self._is_weight(tensor):
            return self._activations.keep(self._call, tensor)
        return self._others.pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        return (
            self._activations.load(packed) if isinstance(packed, KeptInput) else self._others.unpack(packed)
        )
