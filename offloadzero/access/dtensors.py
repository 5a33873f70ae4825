"""Parameters that are DTensors, which tensor parallelism divides over some ranks (`parallelize_module`).

[Note: shards as parameters]
The engine keeps of a DTensor what this rank has of it: the model gets an ordinary parameter with the local tensor, of
which home, gradient and states are like those of any other. The module's own forward sees a DTensor again, made of the
local parameter for the length of the call, so its operations communicate as they would without the engine; its backward
gives the local gradient. Reads outside of that forward, `state_dict()` and checkpoints have the local tensor.

What autograd saves of such a DTensor lies in the unit's lease, like a weight that is saved by itself: the
saved-tensor hooks keep its place in the unit, and make a DTensor of it again when backward asks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from offloadzero.core.torch_private import memory_of_dtensor
from offloadzero.errors import ConfigError, StateError


def dtensor_type() -> Any:
    """torch's class DTensor; None where nothing has imported it, and so there are none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


@dataclass(frozen=True)
class Form:
    """The form of a DTensor, without its values."""

    mesh: Any
    placements: Sequence[Any]
    shape: torch.Size
    stride: Sequence[int]

    @staticmethod
    def of(tensor: Any) -> Form:
        """The form of a DTensor."""
        return Form(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def around(self, local: Tensor) -> Tensor:
        """Return a DTensor of this form over the memory of `local`, for autograd a function of it."""
        around: Tensor = dtensor_type().from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return around


def expect_no_dtensors(model: nn.Module) -> None:
    """Raise ConfigError where a parameter is a DTensor."""
    kind = dtensor_type()
    for name, param in model.named_parameters():
        if kind is not None and isinstance(param, kind):
            allowed = (
                "an ordinary tensor: initialize(mpu=...) takes a model that ranks divide, offload() does not"
            )
            raise ConfigError(name, "a DTensor", allowed)


def local_tensor(tensor: Any) -> Tensor:
    """Return the part of a DTensor that this rank has."""
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


class _ShardedForward:
    """The forward of a module whose own parameters are local tensors, and DTensors while it runs."""

    def __init__(self, module: nn.Module, forms: dict[str, Form]) -> None:
        self._module = module
        self._forms = forms
        self._own = module.__dict__.get("forward")
        self._forward = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seen = self._module.__dict__  # is looked into before the parameters
        for name, form in self._forms.items():
            param = self._module._parameters[name]
            if param is None:
                raise AssertionError(f"{name} is None")
            seen[name] = form.around(param)
        try:
            return self._forward(*args, **kwargs)
        finally:
            for name in self._forms:
                seen.pop(name, None)

    def remove(self) -> None:
        """Give the module its forward back, unless a script has put another in the place of this object.

        That one may call this object, which then does what the module's forward did.
        """
        self._forms = {}
        if self._module.__dict__.get("forward") is not self:
            return
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise StateError(
            "a model with DTensors cannot be copied while it is offloaded: save_checkpoint() keeps it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__({})


class LocalParameters:
    """The local parameters that stand for a model's DTensors: [Note: shards as parameters]."""

    def __init__(self, model: nn.Module, data_ranks: Sequence[int]) -> None:
        """Replace the DTensors of `model`; nothing happens where it has none.

        Args:
            data_ranks: the ranks over which the engine divides what it keeps.

        Raises:
            ConfigError: a DTensor is divided over `data_ranks`, its values are partial sums, or it has hooks.
        """
        self._forwards: list[_ShardedForward] = []
        self._local: dict[int, nn.Parameter] = {}  # by the id of the DTensor
        # The DTensor and its memory, by the id of the local one.
        self._originals: dict[int, tuple[Any, Tensor]] = {}
        self._groups: list[tuple[MutableMapping[str, Any], Any]] = []  # with the parameters that scripts gave
        kind = dtensor_type()
        if kind is None:
            return
        for name, param in model.named_parameters():
            if isinstance(param, kind):
                _expect_built(name, param, data_ranks)
        for module in model.modules():
            forms = {
                name: Form.of(param) for name, param in module._parameters.items() if isinstance(param, kind)
            }
            if not forms:
                continue
            for name in forms:
                module._parameters[name] = self._local_of(module._parameters[name])
            self._forwards.append(_ShardedForward(module, forms))

    def _local_of(self, param: Any) -> nn.Parameter:
        if id(param) not in self._local:
            memory = memory_of_dtensor(param)
            local = nn.Parameter(memory.detach(), requires_grad=param.requires_grad)
            # Scripts tell parameters apart by attributes of their own, a callable that makes the groups say.
            vars(local).update(
                {name: value for name, value in vars(param).items() if name not in vars(local)}
            )
            local.tensor_model_parallel = any(not place.is_replicate() for place in param.placements)  # type: ignore[attr-defined]
            memory.data = memory.new_empty(()).expand(memory.shape)  # else the DTensor would keep it
            self._local[id(param)] = local
            self._originals[id(local)] = (param, memory)
        return self._local[id(param)]

    def exchange(self, params: Iterable[Any]) -> Iterable[Any]:
        """Return parameters or param groups with local parameters in the places of DTensors; groups are changed."""
        return [self._exchanged(each) for each in params] if self._local else params

    def _exchanged(self, given: Any) -> Any:
        if not isinstance(given, MutableMapping):
            return self._local.get(id(given), given)
        params = given["params"]
        self._groups.append((given, params))
        given["params"] = self.exchange([params] if isinstance(params, Tensor) else params)
        return given

    def remove(self) -> None:
        """Put the DTensors back, with the present values of the local parameters."""
        for group, params in self._groups:
            group["params"] = params
        for forward in self._forwards:
            module = forward._module
            for name in forward._forms:
                local = module._parameters[name]
                original, memory = self._originals[id(local)]
                memory.data = local.data  # type: ignore[union-attr]
                module._parameters[name] = original
            forward.remove()
        self._forwards = []


def _expect_built(name: str, param: Any, data_ranks: Sequence[int]) -> None:
    ranks = set(param.device_mesh.mesh.flatten().tolist())
    if len(ranks.intersection(data_ranks)) > 1:
        raise ConfigError(
            name,
            f"a DTensor over the ranks {sorted(ranks)}",
            f"tensors divided over other ranks than those that share the data, {list(data_ranks)}: the stages of ZeRO "
            "divide it over these (initialize(mpu=...) says which they are)",
        )
    if any(place.is_partial() for place in param.placements):
        raise ConfigError(name, "a DTensor of partial sums", "one that is replicated or sharded")
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ConfigError(
            name,
            "a DTensor with hooks on its gradient",
            "hooks that are put on after initialize(), where they get the local gradient",
        )
