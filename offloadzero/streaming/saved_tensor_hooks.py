"""The pairs of saved-tensor hooks: saved weights become handles, inputs of checkpointed units go to a store.

What they are for is told in [Note: hooks] and [Note: checkpointed units] in hooks.py.

[Note: calls from C++]
The compiler also compiles functions that C++ calls back, where a compiled frame has called it. The results of these
depend on addresses that differ at each call, so it is kept out of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offloadzero.access.dtensors import Form, dtensor_type, local_tensor
from offloadzero.access.parameter import AwayParameter, PresentParameter, recorded
from offloadzero.access.tensor import RemoteTensor
from offloadzero.activations.store import ActivationStore, Call, KeptInput
from offloadzero.core.torch_private import skip_frame
from offloadzero.observe.timeline import Timeline
from offloadzero.streaming.saved_weights import SavedShard, SavedWeight, SavedWeights

_data_ptr = Tensor.data_ptr  # without the look at the caller that the method of a parameter's class takes


class SavedTensorHooks:
    """One pair of saved-tensor hooks; `outer` is a foreign pair for tensors that are no weights of the engine."""

    def __init__(
        self, weights: SavedWeights, outer: Sequence[Callable[[Any], Any]] | None, *, timeline: Timeline
    ) -> None:
        self._timeline = timeline
        self.weights = weights
        self._low, self._high = weights.address_range
        self._save = weights.save
        self._load = weights.load
        if outer is not None and timeline.is_on:
            outer = [functools.partial(_call_elsewhere, timeline, hook) for hook in outer]
        self._outer = outer
        self._dtensor = dtensor_type()

    # Called for every saved tensor: their timing costs nothing when the timeline is off. These are no attributes: a
    # bound method in its own object is a cycle, and the collector would decide when a checkpoint's inputs, held by
    # `_outer`, go.

    @property
    def pack(self) -> Callable[[Tensor], Any]:
        """The hook that autograd calls when it saves a tensor."""
        return self._timed_pack if self._timeline.is_on else self._pack

    @property
    def unpack(self) -> Callable[[Any], Tensor]:
        """The hook that gives the tensor back."""
        return self._timed_unpack if self._timeline.is_on else self._unpack

    @property
    def is_under_foreign(self) -> bool:
        """Whether a foreign pair gets tensors that are no weights."""
        return self._outer is not None

    def _timed_pack(self, tensor: Tensor) -> Any:
        with self._timeline.launching():
            return self._pack(tensor)

    def _timed_unpack(self, packed: Any) -> Tensor:
        with self._timeline.launching():
            return self._unpack(packed)

    def _pack(self, tensor: Tensor) -> Any:
        kind = type(tensor)  # takes a tenth of the time of isinstance()
        if kind is not Tensor and kind is not PresentParameter:
            if isinstance(tensor, RemoteTensor | AwayParameter):
                return recorded(tensor)
            if kind is self._dtensor:
                return self._pack_dtensor(tensor)
        address = _data_ptr(tensor)
        if self._low <= address < self._high:
            return self._save(tensor, address)
        if self._outer is not None:
            return self._outer[0](tensor)
        # An output that kept its grad_fn here would keep its own graph alive. `data` is a `detach()` that does not
        # release the interpreter's lock; autograd does not look at the version of tensors that hooks return.
        return tensor.data if tensor.requires_grad else tensor

    def _pack_dtensor(self, tensor: Tensor) -> Any:
        """Pack a DTensor, whose local tensor may be a weight: [Note: shards as parameters]."""
        local = local_tensor(tensor)
        if type(local) is Tensor and self._low <= local.data_ptr() < self._high:
            return SavedShard(self._save(local, local.data_ptr()), Form.of(tensor))
        if self._outer is not None:
            return self._outer[0](tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    def _unpack(self, packed: Any) -> Tensor:
        kind = type(packed)
        if kind is Tensor and self._outer is None:  # as it was saved
            return packed  # type: ignore[no-any-return]
        if kind is SavedWeight and packed.owner == self._low:
            weight = self._load(packed, may_recompute=self._outer is not None)
            # A backward that records its own graph (create_graph=True) saves its inputs without these hooks.
            return weight.clone() if torch.is_grad_enabled() else weight
        if kind is SavedShard and packed.weight.owner == self._low:
            with torch.no_grad():
                weight = self._load(packed.weight, may_recompute=self._outer is not None)
                return packed.form.around(weight)  # type: ignore[no-any-return]
        if self._outer is not None and not isinstance(packed, RemoteTensor):
            return self._outer[1](packed)  # type: ignore[no-any-return]
        return packed  # type: ignore[no-any-return]


def _call_elsewhere(timeline: Timeline, hook: Callable[[Any], Any], value: Any) -> Any:
    """Call a foreign hook: a checkpoint's recomputes a forward, which is no Python of ours."""
    with timeline.elsewhere():
        return hook(value)


class InputHooks:
    """Saved-tensor hooks for the inputs of one call of a checkpointed unit."""

    def __init__(
        self, call: Call, activations: ActivationStore, weights: SavedWeights, others: SavedTensorHooks
    ) -> None:
        """Take the inputs of `call`. `others` gets tensors that do not move: weights, indices, small tensors."""
        self._call = call
        self._activations = activations
        self._is_weight = weights.is_weight
        self._others = others

    def pack(self, tensor: Tensor) -> Any:
        if self._activations.wants(tensor) and not self._is_weight(tensor):
            return self._activations.keep(self._call, tensor)
        return self._others.pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        return (
            self._activations.load(packed) if isinstance(packed, KeptInput) else self._others.unpack(packed)
        )


# [Note: calls from C++]
for _hook in (
    SavedTensorHooks._pack,
    SavedTensorHooks._pack_dtensor,
    SavedTensorHooks._timed_pack,
    SavedTensorHooks._unpack,
    SavedTensorHooks._timed_unpack,
    InputHooks.pack,
    InputHooks.unpack,
):
    skip_frame(_hook, with_calls=True)
