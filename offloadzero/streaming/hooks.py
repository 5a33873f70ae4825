"""The hooks of an offloaded model on its modules, its parameters and autograd: all that stay are set here.

[Note: hooks]
A *site* is a module whose forward needs units. Its `forward` is wrapped: before it the units are pinned on the device
and saved-tensor hooks are pushed, after it, however it ends (the early stop of non-reentrant checkpointing is an
exception), they are popped and unpinned. It is `forward` and not a pair of module hooks because a checkpoint around
`module.forward` recomputes just that: transformers checkpoints its layers so. The compiler does not trace into the
wrapper, but into what it calls: each site's forward is a graph of its own.

A tensor that autograd saves for backward and that lies in a lease becomes a handle (unit, offset, size, stride), so a
lease can be given to another unit right after the forward. Unpacking the handle in backward fetches the unit again:
that is the pre-backward hook. It needs no hook on outputs, hence tuples, dicts, dataclasses, modules called twice and
outputs without gradient are no special cases.

Saved-tensor hooks do not nest: only the innermost pair runs. Under an outer pair of other code (activation
checkpointing, save_on_cpu) the pair here hands every tensor that is no weight on to it; otherwise checkpointing would
silently keep all activations.

Parameters read outside their sites are `AwayParameter`s: [Note: a parameter away] in offloadzero/access/parameter.py.
For operations that do not look at the class (an autograd Function in C++) `F.linear(x, self.wte.weight)` in another
module's forward is caught at the read as well: the dict behind `module.weight` brings the unit to the device. The
saved-tensor hooks turn the weight that autograd saves into a handle; under a foreign pair of hooks the read gets a
private copy, which autograd may keep as long as it likes.

[Note: casts of weights]
torch.autocast keeps the bf16 copies of fp32 weights until its block ends: those of the whole model, beside the plan.
Where no graph keeps them as well (without gradients, or in a checkpoint) they go with the forward of their site, in
every placement: the gradients of a weight that two forwards use then add up in fp32 and not in bf16.

[Note: checkpointed units]
A checkpointed unit's forward runs under torch's non-reentrant checkpointing, and the site's wrapper runs inside: the
recomputation pins the unit and pushes our saved-tensor hooks as the first run did. The order of the pairs, outermost
first: the model's own; the one that takes the unit's inputs; torch's, which drops what the unit saves and, in the
recomputation, catches it; the site's. torch saves the inputs it is given through the pair in force, so a tensor that
the store wants becomes a handle there. Under a foreign pair (a checkpoint around the model, save_on_cpu) inputs go to
that pair.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from offloadzero.access.gathered import ScriptBlocks
from offloadzero.access.parameter import PresentParameter
from offloadzero.access.state_dict import is_tensor_of, state_tensor
from offloadzero.access.weight_access import WeightAccess
from offloadzero.access.weight_value import weight_of
from offloadzero.activations.store import ActivationStore, Call
from offloadzero.core import interrupts
from offloadzero.core.interrupts import call_script, uninterrupted
from offloadzero.core.torch_private import (
    import_compiler,
    is_any_autocast_enabled,
    is_marked_by_fsdp,
    is_tracing,
    outside_of_transforms,
    pop_saved_tensors_default_hooks,
    push_saved_tensors_default_hooks,
    running_transform,
    skip_frame,
    top_saved_tensors_default_hooks,
)
from offloadzero.errors import ConfigError, StateError
from offloadzero.observe.timeline import Timeline
from offloadzero.streaming.building.units import Site, UnitCut
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.forwards import (
    EncoderForward,
    Forward,
    FoundTensors,
    expect_not_sharded,
    refuse_export,
)
from offloadzero.streaming.saved_tensor_hooks import InputHooks, SavedTensorHooks
from offloadzero.streaming.saved_weights import SavedWeights
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """The dict `module._parameters`, which brings a unit to the device when a forward reads a parameter of it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], hooks: ModelHooks) -> None:
        super().__init__(parameters)
        self._record_of = hooks.record_of
        self._pins = hooks.executor.pins
        self._on_read = hooks.on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        # `super()` takes as long as the look-up. The compiler goes in here, and to its own reader of a dict's items.
        param: nn.Parameter | None = dict.__getitem__(self, name)
        if param is not None and type(param) is not PresentParameter:  # else its module is in its forward
            index = self._record_of.get(id(param))
            if index is not None and not self._pins[index]:
                self._on_read(index, param)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class _SiteForward(Forward):
    """The forward of a site: [Note: hooks]."""

    def __init__(self, site: Site, hooks: ModelHooks) -> None:
        super().__init__(site.module)
        self._kind = type(site.module)
        self._records = site.records
        self.is_root = not site.name
        self._hooks = hooks
        self._timeline = hooks.timeline
        self._lap = f"forward {site.name or 'model'}"

    @uninterrupted
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if type(self._module).forward is not self._of_class:
            self._bind_anew()
        has_pushed = self._enter()
        try:
            return call_script(self._forward, *args, **kwargs)
        finally:
            self._leave(has_pushed)

    def _enter(self) -> bool:
        """Pin the units; return whether saved-tensor hooks were pushed. An error leaves everything as it was."""
        hooks = self._hooks
        if is_tracing():
            refuse_export()
        if type(self._module) is not self._kind or is_marked_by_fsdp(self._module):
            expect_not_sharded(self._module)
        if self.is_root:
            interrupts.install()  # the script may have set a handler since
        hooks.executor.expect_no_capture()  # before a mark would become a part of it
        if not self._timeline.is_on:
            return self._begin()
        self._timeline.enter_model()
        with self._timeline.launching():
            return self._begin()

    def _begin(self) -> bool:
        hooks = self._hooks
        if running_transform() is None:
            self._bring()
        else:
            with outside_of_transforms():
                self._bring()
        try:
            return torch.is_grad_enabled() and hooks.push_saved_tensor_hooks()
        except BaseException:
            with outside_of_transforms():
                hooks.executor.leave_forward(self._records)
            raise

    def _bring(self) -> None:
        self._hooks.commit_gathered(self._records)
        self._hooks.executor.enter_forward(self._records, is_root=self.is_root)

    def _leave(self, has_pushed: bool) -> None:
        if not self._timeline.is_on:
            self._end(has_pushed)
            return
        with self._timeline.launching():
            self._end(has_pushed)
            self._timeline.lap(self._lap, is_part=self._hooks.executor.is_in_forward)

    def _end(self, has_pushed: bool) -> None:
        if is_any_autocast_enabled() and self._records and self._hooks.keeps_no_casts():
            torch.clear_autocast_cache()
        if has_pushed:
            pop_saved_tensors_default_hooks()
        if running_transform() is None:
            self._give_up()
        else:
            with outside_of_transforms():
                self._give_up()

    def _give_up(self) -> None:
        try:
            self._hooks.commit_written(self._records)
        finally:
            self._hooks.executor.leave_forward(self._records)


class _CheckpointedForward(Forward):
    """The forward of a unit whose activations are computed again in backward: [Note: checkpointed units]."""

    def __init__(self, name: str, module: nn.Module, hooks: ModelHooks) -> None:
        super().__init__(module)
        self._name = name
        self._hooks = hooks

    @uninterrupted
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if type(self._module).forward is not self._of_class:
            self._bind_anew()
        if not torch.is_grad_enabled():
            return call_script(self._forward, *args, **kwargs)
        if running_transform() is not None:
            raise StateError(
                f"{self._name}: backward computes it again, outside of the transform of torch.func: leave it out of "
                "offloadzero.activation_checkpoints, or take an ordinary copy, copy.deepcopy(model)"
            )
        # Flat, so that tensors inside tuples and dicts are inputs too.
        leaves, structure = pytree.tree_flatten((args, kwargs))
        found = FoundTensors(self._module)
        is_recomputed = False
        failure: BaseException | None = None

        def run(*leaves: Any) -> Any:
            nonlocal failure
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            if is_recomputed:
                return found.call(self._forward, args, kwargs)
            try:
                return self._forward(*args, **kwargs)
            except BaseException as error:
                # Not through torch's frames: some versions leave its saved-tensor hooks in force until the error's
                # traceback is gone, and then pop the innermost pair, whichever it is.
                failure = error

        self._hooks.push_input_hooks(self._name)
        try:
            result = call_script(checkpoint, run, *leaves, use_reentrant=False)
        except Exception:
            if failure is None:  # else torch missed the frames after the error
                raise
        finally:
            pop_saved_tensors_default_hooks()
            is_recomputed = True
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # the reference would be a cycle
        return result


# The compiler goes from a site's wrapper to the wrapped forward. Of this package it sees nothing but the dict that a
# module's parameters come from: those of a present unit are then in the graph, and a read of another unit's ends it.
for _function in (_SiteForward.__call__, call_script):
    skip_frame(_function, with_calls=False)
for _function in (_SiteForward._enter, _SiteForward._leave):
    skip_frame(_function, with_calls=True)
skip_frame(_WatchedParameters.__getitem__, with_calls=True, inlined=True)


class _StateDictHook:
    """A hook of one module's state dict; in a copy of the module it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StateDictHook:
        return _StateDictHook()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _StateDictHook, ()


class ModelHooks:
    """Everything attached to a model; `remove()` takes it off again."""

    def __init__(
        self,
        model: nn.Module,
        cut: UnitCut,
        *,
        executor: Executor,
        gradient_hook: Callable[[Record, ParamSlot], Callable[[torch.Tensor], None]],
        weights: WeightAccess,
        blocks: ScriptBlocks,
        timeline: Timeline,
        checkpointed: Mapping[str, nn.Module],
        activations: ActivationStore | None,
    ) -> None:
        """Attach everything to `model`.

        Args:
            gradient_hook: makes the hook on a parameter's gradient. The hook must not hold the engine; `gradient_hook`
            itself
                may: as long as the model exists, its engine does.
            checkpointed: modules by their units' names.
            activations: takes the inputs of these.
        """
        self.executor = executor
        self._saved_weights = SavedWeights(executor)
        self.timeline = timeline
        self._gradient_hook = gradient_hook
        self._weights = weights
        self._blocks = blocks
        self._loaded: set[str] = set()
        self._records = cut.records
        self.record_of = {id(slot.param): r.index for r in cut.records for slot in r.slots}
        self._slot_of = {id(slot.param): slot for r in cut.records for slot in r.slots}
        self._handles: list[RemovableHandle] = []
        self._gradient_handles: list[RemovableHandle] = []
        self._owners = cut.owners
        places = Counter(
            id(p) for m in cut.owners for _, p in m.named_parameters(recurse=False, remove_duplicate=False)
        )
        self._tied = {param_id for param_id, number in places.items() if number > 1}
        self._activations = activations
        self._forwards: list[Forward] = []
        try:
            self._attach(model, cut, checkpointed)
        except BaseException:  # no one else could remove the hooks that are in place
            self.remove()
            raise

    def _attach(self, model: nn.Module, cut: UnitCut, checkpointed: Mapping[str, nn.Module]) -> None:
        if checkpointed:
            import_compiler()
        sites = list(cut.sites)
        if not any(site.module is model for site in sites):
            sites.insert(0, Site("", model, ()))  # for its saved-tensor hooks
        # One by one: if one fails, those in place must be known.
        for site in sites:
            self._forwards.append(_SiteForward(site, self))
        for name, module in checkpointed.items():
            self._forwards.append(_CheckpointedForward(name, module, self))
        needed = {id(site.module): set(site.records) for site in sites}
        for module in model.modules():
            if EncoderForward.is_needed(module, needed, self.record_of):
                self._forwards.append(EncoderForward(module))
        for module in cut.owners:
            module._parameters = _WatchedParameters(module._parameters, self)
            hooks: tuple[tuple[Callable[..., RemovableHandle], Callable[..., None]], ...] = (
                (module.register_state_dict_post_hook, self._fill_state_dict),
                (module.register_load_state_dict_pre_hook, self._take_state_dict),
                (module.register_load_state_dict_post_hook, self._forgive_missing),
            )
            for register, call in hooks:
                self._handles.append(register(_StateDictHook(call)))
        for record in cut.records:
            for slot in record.slots:
                if slot.param.requires_grad:
                    hook = self._gradient_hook(record, slot)
                    self._gradient_handles.append(slot.param.register_post_accumulate_grad_hook(hook))

    def tell_calls(self, tell: Callable[[Any, Any], bool]) -> None:
        """Show the arguments of the model's calls that train to `tell`, until it returns False."""
        (root,) = (one for one in self._forwards if isinstance(one, _SiteForward) and one.is_root)
        root.tell_calls(tell)

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
        for forward in reversed(self._forwards):
            forward.remove()
        self._forwards = []
        for module in self._owners:
            if isinstance(module._parameters, _WatchedParameters):
                module._parameters = dict(module._parameters)

    # --- reads ---

    def on_read(self, index: int, param: nn.Parameter) -> None:
        """Bring a unit to the device for the read of a module's parameter, unless a forward has pinned it."""
        if self.executor.is_running:
            may_be_kept = torch.is_grad_enabled() and self._own_innermost() is None
            with outside_of_transforms():
                self.executor.show(index, place=self._slot_of[id(param)].index, as_copy=may_be_kept)

    def _own_innermost(self) -> SavedTensorHooks | None:
        """The innermost saved-tensor hooks, if they are this engine's."""
        top = top_saved_tensors_default_hooks(False)
        owner = getattr(top[0], "__self__", None) if top is not None else None
        is_own = isinstance(owner, SavedTensorHooks) and owner.weights is self._saved_weights
        return owner if is_own else None

    # --- writes ---

    def commit_gathered(self, records: Sequence[int]) -> None:
        """Write home the changes of a script to gathered parameters, before a forward computes with them."""
        if self._blocks.open:
            self._blocks.commit(records)

    def commit_written(self, records: Sequence[int]) -> None:
        """Write home the changes of operations to parameters in their own forward."""
        for index in records:
            places = self.executor.written_in_forward(index)
            if places:
                self._weights.commit_forward(self._records[index], places)

    # --- saved tensors ---

    def push_saved_tensor_hooks(self) -> bool:
        """Push this engine's pair, which hands on to the innermost one; False if that is this engine's already."""
        if self._own_innermost() is not None:
            return False
        hooks = self._new_pair()
        _push(hooks.pack, hooks.unpack)
        return True

    def _new_pair(self) -> SavedTensorHooks:
        outer = top_saved_tensors_default_hooks(False)
        return SavedTensorHooks(self._saved_weights, outer, timeline=self.timeline)

    def push_input_hooks(self, name: str) -> None:
        """Push the pair that takes the inputs of unit `name`: [Note: checkpointed units]."""
        others = self._own_innermost() or self._new_pair()
        if others.is_under_foreign or self._activations is None:
            _push(others.pack, others.unpack)
        else:
            inputs = InputHooks(Call(name), self._activations, self._saved_weights, others)
            _push(inputs.pack, inputs.unpack)

    def keeps_no_casts(self) -> bool:
        """Whether the graph of the running forward keeps no weight that autocast has cast: [Note: casts of weights]."""
        if not torch.is_grad_enabled():
            return True
        own = self._own_innermost()
        return own is not None and own.is_under_foreign

    # --- state dict ---

    def _fill_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Replace the placeholders of one module's own parameters by tensors that stand for their values."""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            slot = self._slot_of.get(id(param))
            if slot is None or state_dict.get(prefix + name, param) is param:
                continue  # keep_vars=True asks for the parameters themselves
            record = self._records[self.record_of[id(param)]]
            if self._blocks.value(record, slot) is not None:
                continue  # an ordinary parameter, of which a script may ask one rank alone
            if slot.trainable:
                self.executor.changes.expect_step_taken(record.index)
            value = weight_of(param).alias()
            # Tied parameters share a value: a writer of files compares the memory to write them once.
            others = state_dict.values() if id(param) in self._tied else ()
            same = next((one for one in others if is_tensor_of(one, value)), None)
            state_dict[prefix + name] = (
                state_tensor(
                    value,
                    self._weights,
                    at_once=not self._weights.homes.reads_alone(record, record.param_home),
                )
                if same is None
                else same.detach()
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
        """Write one module's own weights to their homes; `_forgive_missing` then corrects torch's report."""
        if metadata.get("assign_to_params_buffers"):
            allowed = "an offloaded model keeps its parameters and takes the values: leave out assign=True"
            raise ConfigError("load_state_dict(assign)", True, allowed)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            self._loaded.discard(prefix + name)
            value = state_dict.get(prefix + name)
            slot = self._slot_of.get(id(param))
            if value is None or slot is None or value.shape != slot.shape:
                continue  # torch reports values that do not fit
            record = self._records[self.record_of[id(param)]]
            if self._blocks.value(record, slot) is not None:
                continue  # torch writes its memory, and the end of the block commits that
            self._weights.load(record, slot, value)
            weight_of(param).count_write()
            del state_dict[prefix + name]
            self._loaded.add(prefix + name)

    def _forgive_missing(self, module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in self._loaded]


def _push(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
    """Push a pair of saved-tensor hooks."""
    try:
        push_saved_tensors_default_hooks(pack, unpack)
    except RuntimeError as error:
        if running_transform() is None:
            raise
        raise StateError(
            "torch.func's transforms allow no saved-tensor hooks, which bring the weights of an offloaded model back "
            "in backward: give functional_call an ordinary copy, copy.deepcopy(model)"
        ) from error


# [Note: calls from C++] in offloadzero/streaming/saved_tensor_hooks.py
skip_frame(ModelHooks.on_read, with_calls=True)
