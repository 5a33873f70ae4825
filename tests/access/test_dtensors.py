"""A model of DTensors and its local parameters: what stands where, what comes back, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import offloadzero
from offloadzero.access.dtensors import LocalParameters
from offloadzero.core.torch_private import memory_of_dtensor
from offloadzero.errors import ConfigError, StateError
from offloadzero.streaming import saved_tensor_hooks
from tests.support import meshes
from tests.support.training import make_config


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """The first rank of two, along the tensor-parallel axis; the other is not there."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def parameter(mesh: DeviceMesh, local: Tensor, placement: Any) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(local, mesh["tp"], [placement], run_check=False))


class Layer(nn.Linear):
    """Tells which weight its forward sees."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[type] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(type(self.weight))
        if self.fails:
            raise ZeroDivisionError
        return x


def make_model(mesh: DeviceMesh) -> nn.Sequential:
    """Two layers that share a bias; the weights of the first are divided."""
    model = nn.Sequential(Layer(6, 6), Layer(6, 6))
    model[0].weight = parameter(mesh, torch.arange(18.0).view(3, 6), Shard(0))
    model[1].bias = model[0].bias = parameter(mesh, torch.ones(6), Replicate())
    return model


def test_local_parameters_stand_in_the_model_and_dtensors_in_forward(mesh: DeviceMesh) -> None:
    model = make_model(mesh)
    divided, shared = model[0].weight, model[0].bias
    local = LocalParameters(model, [0])
    assert [type(param) for param in model.parameters()] == [nn.Parameter] * 3
    assert model[0].weight.shape == (3, 6)
    assert model[0].bias is model[1].bias
    marks = [getattr(param, "tensor_model_parallel", None) for param in model.parameters()]
    assert marks == [True, False, None]
    groups = [{"params": [divided, model[1].weight]}]
    assert local.exchange([shared, model[1].weight]) == [model[0].bias, model[1].weight]
    local.exchange(groups)
    assert groups[0]["params"][0] is model[0].weight

    with torch.no_grad():
        assert divided.to_local().untyped_storage().nbytes() == 4, "the memory is the local parameter's alone"

    model(torch.ones(2, 6))
    assert model[0].seen == [DTensor]
    assert type(model[0].weight) is nn.Parameter
    model[0].fails = True
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 6))
    assert type(model[0].weight) is nn.Parameter

    model[0].weight.data = model[0].weight.data + 1
    local.remove()
    assert model[0].weight is divided
    assert model[0].bias is model[1].bias is shared
    assert groups[0]["params"][0] is divided
    assert torch.equal(divided.to_local(), torch.arange(18.0).view(3, 6) + 1)
    assert "forward" not in vars(model[0])


def test_a_local_parameter_has_the_attributes_that_a_script_gave_the_dtensor(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    model = make_model(mesh)
    model[0].weight.no_decay = True

    def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for param in params:
            groups[getattr(param, "no_decay", False)].append(param)
        return torch.optim.AdamW(
            [{"params": groups[False]}, {"params": groups[True], "weight_decay": 0.0}], lr=1e-3
        )

    config = config_of(tmp_path)
    del config["optimizer"]
    engine, optimizer, *_ = offloadzero.initialize(
        model=model, optimizer=make_optimizer, config=config, mpu=mesh
    )
    assert optimizer is not None
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert model[0].weight.tensor_model_parallel
    engine.close()


def test_an_ordinary_model_is_left_alone(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    local = LocalParameters(model, [0])
    params = [*model.parameters()]
    assert local.exchange(params) is params
    assert "forward" not in vars(model)
    assert mesh.size() == 2


def config_of(directory: Path) -> dict[str, Any]:
    return make_config("host", directory, dtype=None)


def test_a_start_that_fails_and_a_restored_model_have_their_dtensors(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    model = make_model(mesh)
    before = [*model.parameters()]
    values = [param.to_local().clone() if isinstance(param, DTensor) else param.clone() for param in before]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match="lr_scheduler"):
        offloadzero.initialize(
            model=model, optimizer=optimizer, config=config_of(tmp_path), mpu=mesh, lr_scheduler=3
        )
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    engine, *_ = offloadzero.initialize(
        model=model, optimizer=optimizer, config=config_of(tmp_path), mpu=mesh
    )
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    with pytest.raises(StateError, match="a model with DTensors cannot be copied while it is offloaded"):
        copy.deepcopy(model)
    engine.restore_model()
    for one, other, value in zip(model.parameters(), before, values, strict=True):
        assert one is other
        assert torch.equal(one.to_local() if isinstance(one, DTensor) else one, value)


@pytest.mark.parametrize("is_taken_away", [False, True])
def test_a_forward_that_a_script_sets_stays_when_dtensors_come_back(
    is_taken_away: bool, mesh: DeviceMesh
) -> None:
    model = make_model(mesh)
    layer: Any = model[0]
    local = LocalParameters(model, [0])
    standing = layer.forward

    def doubled(x: Tensor) -> Tensor:
        return 2 * standing(x)

    if is_taken_away:
        del layer.forward
    else:
        layer.forward = doubled
    local.remove()
    x = torch.ones(2, 6)
    assert layer.__dict__.get("forward") is (None if is_taken_away else doubled)
    assert torch.equal(layer(x), x if is_taken_away else 2 * x)
    assert layer.seen == [DTensor]
    assert "weight" not in layer.__dict__


def test_what_autograd_saves_of_a_weight_is_fetched_with_its_unit(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no view that stands for a weight away, which each node of backward would read by itself."""
    model = meshes.make_model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    engine, *_ = offloadzero.initialize(model=model, config=meshes.config_of("host", 3, tmp_path), mpu=mesh)
    kinds = []
    own = saved_tensor_hooks.SavedTensorHooks._unpack

    def unpack(saved: Any, packed: Any) -> Tensor:
        tensor = own(saved, packed)
        if isinstance(tensor, DTensor):
            kinds.append(type(memory_of_dtensor(tensor)))
        return tensor

    monkeypatch.setattr(saved_tensor_hooks.SavedTensorHooks, "_unpack", unpack)
    inputs, targets = meshes.batch_of(0, 0, 1)
    engine.backward(meshes.loss_of(engine(inputs), targets))
    assert kinds == [Tensor] * 4 * meshes.NUM_BLOCKS
    engine.close()


@pytest.mark.parametrize("placement", [Partial(), Shard(0)])
def test_what_is_refused(mesh: DeviceMesh, tmp_path: Path, placement: Any) -> None:
    model = make_model(mesh)
    model[1].weight = parameter(mesh, torch.ones(6, 6), placement)
    is_partial = placement.is_partial()
    allowed = (
        "one that is replicated or sharded"
        if is_partial
        else "divided over other ranks than those that share"
    )
    with pytest.raises(
        ConfigError, match=rf"1\.weight = .*{allowed}" if is_partial else rf"0\.weight = .*{allowed}"
    ):
        offloadzero.initialize(model=model, config=config_of(tmp_path), mpu=mesh if is_partial else None)
    assert isinstance(model[0].weight, DTensor)


def test_offload_refuses_a_model_that_ranks_divide(mesh: DeviceMesh) -> None:
    model = make_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"0\.weight = 'a DTensor': an ordinary tensor: initialize\(mpu"):
        offloadzero.offload(model, optimizer, {})
    assert isinstance(model[0].weight, DTensor)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_not_be_called_are_refused(mesh: DeviceMesh, tmp_path: Path, register: str) -> None:
    model = make_model(mesh)
    handle = getattr(model[0].weight, register)(lambda _: None)
    with pytest.raises(
        ConfigError, match=r"0\.weight = .*a DTensor with hooks on its gradient.*after initialize"
    ):
        offloadzero.initialize(model=model, config=config_of(tmp_path), mpu=mesh)
    handle.remove()
    assert isinstance(model[0].weight, DTensor)
    offloadzero.initialize(model=model, config=config_of(tmp_path), mpu=mesh)[0].close()
