"""`initialize()` in DeepSpeed's full form: its arguments, process groups, no optimizer, the client's optimizers."""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero import ConfigError, StateError, zero
from offloadzero.ops.adagrad import DeepSpeedCPUAdagrad
from offloadzero.ops.adam import DeepSpeedCPUAdam
from offloadzero.ops.lion import DeepSpeedCPULion
from offloadzero.optim import CPUAdam
from tests.engine.on_host import config, losses_of, make_model
from tests.support.plain_form import plain_steps
from tests.support.tiny import TinyModel, make_engine, run_script, tokens, train

# DeepSpeed's, in its order.
SIGNATURE = (
    *("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port"),
    *("mpu", "dist_init_required", "collate_fn", "config", "mesh_param", "config_params"),
)


def offload_plain(model: nn.Module) -> Any:
    return offloadzero.offload(model, torch.optim.AdamW(model.parameters()), config(optimizer=None))


# --- initialize() ---


def test_the_full_positional_form() -> None:
    assert tuple(inspect.signature(offloadzero.initialize).parameters) == SIGNATURE
    data = torch.utils.data.TensorDataset(torch.arange(6))
    model = make_model()
    groups = [{"params": list(model.parameters()), "lr": 0.5}]

    def collate(items: list[Any]) -> int:
        return len(items)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    given = (None, model, None, groups, data, schedule, 29500, None, None, collate, config(), None, None)
    engine, optimizer, loader, scheduler = offloadzero.initialize(*given)
    assert loader is not None
    assert list(loader) == [2, 2, 2]
    assert engine.training_dataloader is loader
    assert engine.get_lr() == [0.5]
    losses_of(engine, 2)
    assert scheduler.get_last_lr() == [0.125]
    assert optimizer is engine.optimizer


def test_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh_param = \(1, 2\): None: sequence parallelism is not built"):
        offloadzero.initialize(model=make_model(), config=config(), mesh_param=(1, 2))
    with pytest.raises(ConfigError, match=r"mpu = 'object': None: there is no process group"):
        offloadzero.initialize(model=make_model(), config=config(), mpu=object())


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_one_of_several_ranks_knows_which_it_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Else each rank would train a model of its own, on its part of the data."""
    monkeypatch.setenv(name, "2")
    for call in (
        lambda: offloadzero.initialize(model=make_model(), config=config()),
        lambda: offload_plain(make_model()),
        offloadzero.init_distributed,
    ):
        with pytest.raises(ConfigError, match=f"{name} = 2: several ranks, and no RANK .* torchrun"):
            call()
    monkeypatch.setenv(name, "two")
    with pytest.raises(ConfigError, match=f"{name} = 'two': a whole number"):
        offloadzero.init_distributed()
    monkeypatch.setenv(name, "1")
    losses_of(make_engine(config(), make_model()), 1)


def test_two_configurations_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config()))
    args = argparse.Namespace(deepspeed_config=str(path))
    with pytest.raises(ConfigError, match=r"args\.deepspeed_config = .*: config is given too: give one"):
        offloadzero.initialize(args, make_model(), config=config())
    with pytest.raises(ConfigError, match="config_params"):
        offloadzero.initialize(model=make_model(), config=config(), config_params={"train_batch_size": 3})
    with pytest.raises(ConfigError, match=r"config = None: .*--deepspeed_config FILE"):
        offloadzero.initialize(argparse.Namespace(), make_model())
    engine, *_ = offloadzero.initialize(args, make_model(), config=str(path))
    losses_of(engine, 1)


def test_the_arguments_of_a_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config()))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert offloadzero.add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed is True
    engine, *_ = offloadzero.initialize(args=args, model=make_model(), model_parameters=None)
    plain = make_engine(config(), make_model())
    assert losses_of(engine) == losses_of(plain)
    empty = parser.parse_args([])
    assert (empty.deepspeed, empty.deepspeed_config, empty.deepscale_config) == (False, None, None)


# --- torch.distributed ---

GROUP = """
    import os, torch, torch.distributed as dist, offloadzero
    from tests.support.tiny import make_engine, settings

    def group(make):
        make()
        if not dist.is_initialized():
            return None
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1]
        found = dist.get_backend(), dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        return found

    def engine(required):
        make_engine(settings(placement="host"), dist_init_required=required).close()

    def init(*given, **keys):
        assert offloadzero.init_distributed(*given, **keys) is None

    one = ("gloo", 0, 1)
    assert group(lambda: init()) is None
    assert group(lambda: init(dist_backend="gloo")) is None
    assert group(lambda: engine(None)) is None
    assert group(lambda: engine(False)) is None
    assert group(lambda: engine(True)) == one
    assert group(lambda: init(dist_init_required=True)) == one
    if not torch.cuda.is_available():
        assert group(lambda: init("nccl", dist_init_required=True)) == one
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert group(lambda: init(dist_init_required=False)) is None
    assert group(lambda: (init("gloo"), init("gloo"))) == one
    init("gloo")
    print("up at the end:", dist.is_initialized())
"""


def test_a_process_group_only_where_it_is_asked_for() -> None:
    """By an argument or a launcher's environment; it needs no port, and does not disturb the end of the process."""
    done = run_script(GROUP, timeout_s=60)
    assert (done.returncode, done.stdout) == (0, "up at the end: True\n"), done.stderr


# --- without an optimizer ---


@pytest.mark.parametrize("placement", ["nvme", "host", "device"])
def test_an_engine_that_only_evaluates(tmp_path: Path, placement: str) -> None:
    plain = make_model()
    expected = [plain(tokens(seed)).item() for seed in range(3)]
    engine, optimizer, loader, scheduler = offloadzero.initialize(
        model=make_model(), config=config(tmp_path, placement=placement, optimizer=None, bf16=None)
    )
    assert (optimizer, loader, scheduler, engine.optimizer) == (None, None, None, None)
    engine.eval()
    with torch.no_grad():
        assert [engine(tokens(seed)).item() for seed in range(3)] == expected
    assert "exp_avg" not in engine.memory_table(), "no room for optimizer states"
    assert "grad" not in engine.memory_table()
    loss = engine(tokens(0))
    for call in (lambda: engine.backward(loss), engine.step, lambda: engine.scale(loss)):
        with pytest.raises(
            StateError, match="has no optimizer, so it only evaluates: pass one to initialize"
        ):
            call()
    engine.zero_grad()
    assert engine.get_lr() == []
    assert engine.get_global_grad_norm() is None
    assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (0, 0, False)
    engine.close()


def test_an_evaluation_takes_weights_of_a_training(tmp_path: Path) -> None:
    """Also of the compact layout, whose states it leaves alone."""
    keys = {"state_layout": "compact"}
    trained = make_engine(config(**keys), make_model())
    train(trained, num_steps=3)
    trained.save_checkpoint(tmp_path, client_state={"epoch": 2})
    with torch.no_grad():
        expected = trained(tokens(9)).item()
    trained.close()
    engine, *_ = offloadzero.initialize(model=make_model(7), config=config(optimizer=None, **keys))
    path, state = engine.load_checkpoint(tmp_path)
    assert path is not None
    assert state == {"epoch": 2}
    with torch.no_grad():
        assert engine(tokens(9)).item() == expected
    engine.close()


def test_a_scheduler_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr_scheduler = 'function': None: there is no optimizer"):
        offloadzero.initialize(
            model=make_model(), config=config(optimizer=None), lr_scheduler=lambda optimizer: optimizer
        )


# --- our own and DeepSpeed's optimizers as the client's ---


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 4e-3, "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.dim() < 2], "betas": (0.8, 0.95), "eps": 1e-6},
    ]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("form", ["offload", "initialize", "callable"])
def test_cpu_adam_is_adam(decoupled: bool, form: str) -> None:
    """Its groups' rates, betas, decays and mode are the engine's: the losses are those of torch's class, to the bit."""
    torch_class: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}

    def run(make: Any) -> list[float]:
        model = make_model()
        if form == "offload":
            offloaded, optimizer = offloadzero.offload(model, make(two_groups(model)), config())
            losses = plain_steps(offloaded, optimizer, range(4))
            optimizer.close()
            return losses
        given = make(two_groups(model)) if form == "initialize" else lambda _: make(two_groups(model))
        return losses_of(offloadzero.initialize(model=model, optimizer=given, config=config())[0])

    expected = run(lambda groups: torch_class(groups, **options))
    assert run(lambda groups: CPUAdam(groups, adamw_mode=decoupled, **options)) == expected
    assert run(lambda groups: DeepSpeedCPUAdam(groups, adamw_mode=decoupled, **options)) == expected
    other: Any = torch.optim.Adam if decoupled else torch.optim.AdamW
    assert run(lambda groups: other(groups, **options)) != expected


def test_cpu_adam_without_bias_correction_is_the_configs() -> None:
    params = {"lr": 1e-3, "bias_correction": False}
    expected = losses_of(make_engine(config(optimizer={"type": "AdamW", "params": params}), make_model()))
    model = make_model()
    given = DeepSpeedCPUAdam(model.parameters(), 1e-3, False)
    assert losses_of(make_engine(config(optimizer=None), model, optimizer=given)) == expected
    assert expected != losses_of(
        make_engine(config(optimizer={"type": "AdamW", "params": {"lr": 1e-3}}), make_model())
    )


def test_cpu_adam_on_a_model_that_was_built_in_pieces(tmp_path: Path) -> None:
    """zero.Init has taken the values away; the optimizer may be made, and not stepped by itself."""
    with zero.Init(config_dict_or_path=config(tmp_path, placement="nvme")):
        torch.manual_seed(1)
        model = TinyModel(width=80)
    given = CPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    model.emb.weight.grad = torch.ones_like(model.emb.weight)
    with pytest.raises(ConfigError, match=r"params\[0\] = \(96, 80\): its value has left memory"):
        given.step()
    given.zero_grad()
    engine = make_engine(config(tmp_path, placement="nvme"), model, optimizer=given)
    torch.manual_seed(1)
    plain = make_engine(config(tmp_path, placement="nvme"), TinyModel(width=80))
    assert losses_of(engine) == losses_of(plain)


def test_optimizers_that_the_engine_does_not_compute() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"optimizer = 'NAdam': allowed: .*CPUAdam"):
        make_engine(config(), model, optimizer=torch.optim.NAdam(model.parameters()))
    with pytest.raises(ConfigError, match=r"optimizer\.state_layout = 'compact': needs"):
        make_engine(config(), model, optimizer=CPUAdam(model.parameters(), state_layout="compact"))
    model = make_model()
    given = CPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1, state_layout="compact")
    compact = make_engine(config(state_layout="compact"), model, optimizer=given)
    assert losses_of(compact) == losses_of(make_engine(config(state_layout="compact"), make_model()))
    given = CPUAdam(model.parameters(), lr=1e-2)
    given.param_groups[0]["maximize"] = True
    with pytest.raises(ConfigError, match="maximize"):
        make_engine(config(), make_model(), optimizer=given)


def test_deepspeeds_optimizers_by_themselves() -> None:
    """DeepSpeed's arguments by position and its defaults; what is not computed is refused."""
    param = nn.Parameter(torch.ones(5))
    adam = DeepSpeedCPUAdam([param], 1e-2, True, (0.8, 0.9), 1e-7, 0.25, False, False)
    group = adam.param_groups[0]
    assert [group[key] for key in ("lr", "bias_correction", "betas", "eps", "weight_decay")] == [
        *(1e-2, True, (0.8, 0.9), 1e-7, 0.25)
    ]
    assert group["decoupled_weight_decay"] is False
    lion, adagrad = DeepSpeedCPULion([param]), DeepSpeedCPUAdagrad([param], 0.5, 1e-6, 0.1)
    assert [lion.param_groups[0][key] for key in ("lr", "betas")] == [1e-3, (0.9, 0.999)]
    assert [adagrad.param_groups[0][key] for key in ("lr", "eps", "weight_decay")] == [0.5, 1e-6, 0.1]
    for cls in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad):
        with pytest.raises(ConfigError, match="amsgrad = True: allowed: False"):
            cls([param], amsgrad=True)
    for any_class in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion):
        with pytest.raises(ConfigError, match="fp32_optimizer_states = False: allowed: True"):
            any_class([param], fp32_optimizer_states=False)
    plain = nn.Parameter(torch.ones(5))
    reference = torch.optim.Adam([plain], 1e-2, (0.8, 0.9), 1e-7, 0.25)
    for step in range(3):
        param.grad = plain.grad = torch.arange(5.0) - step
        adam.step()
        reference.step()
    torch.testing.assert_close(param, plain)
