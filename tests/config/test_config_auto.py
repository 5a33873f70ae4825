"""What a configuration leaves open: "auto" that nobody has resolved, clipping, directories that are not there."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.api.deepspeed.schedules import WarmupDecayLR, WarmupLR
from offloadzero.config import BatchConfig, OffloadConfig, PlacementConfig, load_config
from offloadzero.errors import ConfigError, StateError
from tests.support.tiny import TinyModel, settings, tokens

NOBODY = '"auto" is for the Hugging Face Trainer to fill in, and nobody has'


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def on_cpu(**top: Any) -> dict[str, Any]:
    return {"offloadzero": {"device": "cpu"}, **top}


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """What the test started; closed after it."""
    started: list[Any] = []
    yield started
    for engine in started:
        engine.close()


def start(opened: list[Any], config: Any, **given: Any) -> offloadzero.Engine:
    engine, *_ = offloadzero.initialize(model=given.pop("model", None) or linear(), config=config, **given)
    opened.append(engine)
    return engine


def big_step(engine_or_model: Any, backward: Any) -> None:
    """One backward whose gradient norm is far above 1."""
    backward((engine_or_model(torch.full((4, 5), 30.0)) ** 2).sum())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


# --- clipping --------------------------------------------------------------------------------------------


def clipped_moments(max_norm: float | None) -> list[torch.Tensor]:
    """exp_avg after one step of torch's own AdamW, clipped or not."""
    model = linear()
    optimizer = adamw(model)
    big_step(model, torch.Tensor.backward)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return [optimizer.state[param]["exp_avg"] for param in model.parameters()]


def moments(optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[number]["exp_avg"] for number in sorted(state)]


@pytest.mark.parametrize(("key", "max_norm"), [({}, None), ({"gradient_clipping": 0.25}, 0.25)])
def test_the_plain_form_clips_if_the_configuration_says_so(
    key: dict[str, Any], max_norm: float | None, opened: list[Any]
) -> None:
    model = linear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = offloadzero.offload(model, adamw(model), on_cpu(**key))
    opened.append(optimizer)
    big_step(model, torch.Tensor.backward)
    optimizer.step()
    torch.testing.assert_close(moments(optimizer), clipped_moments(max_norm), rtol=1e-5, atol=1e-7)


def test_the_plain_form_says_what_it_does_not_use(
    opened: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offloadzero")
    model = linear()
    blocks = {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0}},
    }
    counts = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    with pytest.warns(UserWarning, match=r"gradient_accumulation_steps = 4 has no effect: with offload\(\)"):
        _, optimizer = offloadzero.offload(model, adamw(model), on_cpu(**blocks, **counts))
    opened.append(optimizer)
    for key in blocks:
        assert f"{key}: not used: offload() trains with the optimizer that it is given" in caplog.text


def test_another_optimizer_on_the_parameters_is_told_of_once(
    opened: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = linear()
    _, optimizer = offloadzero.offload(model, adamw(model), on_cpu())
    opened.append(optimizer)
    others = linear()
    said = "this AdamW steps parameters of an offloaded model"
    for other, count in ((optimizer, 0), (adamw(others), 0), (adamw(model), 1), (adamw(model), 1)):
        big_step(model, torch.Tensor.backward)
        other.step()
        assert len([one for one in caplog.messages if one.startswith(said)]) == count
    optimizer.restore_model()
    caplog.clear()
    adamw(model).step()
    assert not caplog.messages


def test_initialize_says_which_block_it_does_not_use(
    opened: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offloadzero")
    blocks = {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0}},
    }
    start(opened, on_cpu(**blocks))
    assert "not used" not in caplog.text
    model = linear()
    start(opened, on_cpu(**blocks), model=model, optimizer=adamw(model))
    assert "optimizer: not used: initialize() is given an optimizer" in caplog.text
    assert "scheduler: not used" not in caplog.text
    start(opened, on_cpu(**blocks), lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1))
    assert "scheduler: not used: initialize() is given a scheduler" in caplog.text
    assert caplog.text.count("optimizer: not used") == 1
    del blocks["optimizer"]
    start(opened, on_cpu(**blocks))
    assert "scheduler: not used: there is no optimizer" in caplog.text


@pytest.mark.parametrize(("key", "max_norm"), [({}, 1.0), ({"gradient_clipping": 0}, None)])
def test_initialize_clips_as_deepspeed_does_and_says_so(
    key: dict[str, Any], max_norm: float | None, opened: list[Any]
) -> None:
    model = linear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        engine = start(opened, on_cpu(**key), model=model, optimizer=adamw(model))
    big_step(engine, engine.backward)
    engine.step()
    torch.testing.assert_close(moments(engine.optimizer), clipped_moments(max_norm), rtol=1e-5, atol=1e-7)
    assert len(seen) == (not key)
    if seen:
        assert seen[0].category is UserWarning  # shown by default
        text = str(seen[0].message)
        assert "gradient_clipping" in text
        assert "clipped at a norm of 1.0" in text
        assert "0 for no clipping" in text


def test_the_warning_points_at_the_callers_line() -> None:
    model = linear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        engine, *_ = offloadzero.initialize(model=model, config=on_cpu(), optimizer=adamw(model))
        engine.close()
    assert [warning.filename for warning in seen] == [__file__]


def test_an_engine_that_only_evaluates_has_nothing_to_settle(opened: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(opened, on_cpu(gradient_accumulation_steps="auto"))


@pytest.mark.parametrize("form", ["offload", "initialize"])
def test_clipping_left_at_auto_is_deepspeeds_default_and_said(form: str, opened: list[Any]) -> None:
    model = linear()
    config = on_cpu(gradient_clipping="auto")
    call = offloadzero.offload if form == "offload" else offloadzero.initialize
    with pytest.warns(UserWarning, match='gradient_clipping is "auto", which nobody has resolved'):
        optimizer = call(model=model, optimizer=adamw(model), config=config)[1]  # type: ignore[operator]
    opened.append(optimizer)
    assert optimizer.runtime.config.gradient_clipping == 1.0


def test_a_finished_configuration_keeps_what_is_not_given_apart() -> None:
    assert OffloadConfig().gradient_clipping is None
    assert load_config({}).gradient_clipping is None
    assert load_config({"gradient_clipping": None}).gradient_clipping is None
    assert load_config({"gradient_clipping": 0}).gradient_clipping == 0.0


# --- "auto" ----------------------------------------------------------------------------------------------


def test_a_rate_left_at_auto_is_needed_where_the_optimizer_is_built(opened: list[Any]) -> None:
    config = on_cpu(
        gradient_clipping=0.0, optimizer={"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}}
    )
    with pytest.raises(ConfigError, match=rf"^optimizer\.params\.lr = 'auto': write a number: {NOBODY}"):
        offloadzero.initialize(model=linear(), config=config)
    model = linear()
    groups = [{"params": list(model.parameters()), "lr": 0.5}]
    engine = start(opened, config, model=model, model_parameters=groups)
    assert engine.get_lr() == [0.5]
    model = linear()
    assert start(opened, config, model=model, optimizer=adamw(model)).get_lr() == [0.1]
    assert any(line.startswith('optimizer.params.eps: "auto"') for line in load_config(config).notices)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("auto", 2, 3), BatchConfig(6, 2, 3)),
        ((6, "auto", 3), BatchConfig(6, 2, 3)),
        ((6, 2, "auto"), BatchConfig(6, 2, 3)),
        (("auto", 2, "auto"), BatchConfig(2, 2, 1, unresolved=("gradient_accumulation_steps",))),
        ((6, "auto", "auto"), BatchConfig(6, 6, 1, unresolved=("gradient_accumulation_steps",))),
        (
            ("auto", "auto", 3),
            BatchConfig(None, None, 3, unresolved=("train_batch_size", "train_micro_batch_size_per_gpu")),
        ),
        ((None, 2, None), BatchConfig(2, 2, 1)),
    ],
)
def test_batch_sizes_left_at_auto(
    sizes: tuple[Any, Any, Any], expected: BatchConfig, opened: list[Any]
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = on_cpu(gradient_clipping=0.0, **dict(zip(keys, sizes, strict=True)))
    assert load_config(config).batch == expected
    model = linear()
    if "gradient_accumulation_steps" in expected.unresolved:
        with pytest.raises(
            ConfigError, match=rf"^gradient_accumulation_steps = 'auto': write a number: {NOBODY}"
        ):
            offloadzero.initialize(model=model, config=config, optimizer=adamw(model))
        # In the plain form the loop says when it steps.
        opened.append(offloadzero.offload(model, adamw(model), config)[1])
    else:
        assert start(opened, config, model=model, optimizer=adamw(model)).gradient_accumulation_steps() == (
            expected.gradient_accumulation_steps
        )


def test_one_error_names_all_that_is_left_at_auto(opened: list[Any]) -> None:
    """The configuration of the transformers documentation, without its Trainer."""
    config = on_cpu(
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        fp16={"enabled": "auto"},
        gradient_accumulation_steps="auto",
        gradient_clipping=1.0,
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
    )
    model = linear()
    says = (
        rf"^gradient_accumulation_steps = 'auto': write a number: {NOBODY}; or give train_batch_size and .* follows\. "
        r"So it is with optimizer\.params\.lr, scheduler\.params\.warmup_num_steps$"
    )
    with pytest.raises(ConfigError, match=says):
        offloadzero.initialize(model=model, config=config, model_parameters=model.parameters())
    says = rf"^optimizer\.params\.lr = 'auto': write a number: {NOBODY}; or pass an optimizer\. So it is with sched"
    config["gradient_accumulation_steps"] = 2
    with pytest.raises(ConfigError, match=says):
        offloadzero.initialize(model=model, config=config)
    config["optimizer"]["params"]["lr"] = 0.25
    config["scheduler"]["params"]["warmup_num_steps"] = 10
    assert start(opened, config, model=model, model_parameters=model.parameters()).get_lr() == [0.0]


@pytest.mark.parametrize("micro", ["auto", None])
def test_a_data_loader_needs_its_batch_size(micro: object, opened: list[Any]) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 5))
    config = on_cpu(gradient_clipping=0.0, train_micro_batch_size_per_gpu=micro)
    model = linear()
    with pytest.raises(
        ConfigError, match=f"train_micro_batch_size_per_gpu = {micro!r}: a number: the DataLoader"
    ):
        offloadzero.initialize(model=model, config=config, optimizer=adamw(model), training_data=data)
    config["train_micro_batch_size_per_gpu"] = 4
    engine, _, loader, _ = offloadzero.initialize(
        model=model, config=config, optimizer=adamw(model), training_data=data
    )
    opened.append(engine)
    assert loader is not None
    assert loader.batch_size == 4


def scheduled(params: dict[str, Any], name: str = "WarmupLR") -> dict[str, Any]:
    return on_cpu(
        gradient_clipping=0.0,
        optimizer={"type": "AdamW", "params": {"lr": 0.5}},
        scheduler={"type": name, "params": params},
    )


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR"])
def test_a_warmup_left_at_auto_rises_to_the_optimizers_rate(name: str, opened: list[Any]) -> None:
    params: dict[str, Any] = {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": 4,
        **({"total_num_steps": 100} if name == "WarmupDecayLR" else {}),
    }
    schedule = start(opened, scheduled(params, name)).lr_scheduler
    assert isinstance(schedule, WarmupDecayLR if name == "WarmupDecayLR" else WarmupLR)
    assert (schedule.min_lrs, schedule.max_lrs) == ([0.0], [0.5])


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": "auto"}),
        ("WarmupDecayLR", {"total_num_steps": "auto"}),
        ("StepLR", {"step_size": "auto"}),
    ],
)
def test_a_schedule_left_at_auto_says_what_it_needs(name: str, params: dict[str, Any]) -> None:
    (key,) = params
    with pytest.raises(ConfigError, match=rf"^scheduler\.params\.{key} = 'auto': write a number: {NOBODY}"):
        offloadzero.initialize(model=linear(), config=scheduled(params, name))
    # A scheduler that is passed takes its place.
    engine, *_ = offloadzero.initialize(
        model=linear(),
        config=scheduled(params, name),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    engine.close()


@pytest.mark.parametrize("block", ["optimizer", "scheduler"])
def test_auto_where_nothing_stands_for_it(block: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({block: {"type": "auto"}})
    assert caught.value.key == f"{block}.type"


def test_auto_with_a_meaning_of_its_own_gives_no_notice() -> None:
    own = {"placement": "auto", "update": {"in_backward": "auto"}, "aio": {"backend": "auto"}}
    config = load_config({"offloadzero": own})
    assert config == replace(OffloadConfig(), placement=PlacementConfig(auto=True))


def test_a_cuda_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = {"offloadzero": {"device": "cuda:1"}, "gradient_clipping": 0}
    model = linear()
    with pytest.raises(
        ConfigError, match=r"offloadzero\.device = 'cuda:1': CUDA devices that torch finds here: 0"
    ):
        offloadzero.initialize(model=model, config=config, optimizer=adamw(model))


# --- who says when a step is complete --------------------------------------------------------------------


def test_unmanaged_accumulation_steps_whenever_it_is_called(opened: list[Any]) -> None:
    """As DeepSpeed: backward divides by the accumulation steps, and step() takes all since the last."""
    keys = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}
    config = on_cpu(managed_gradient_accumulation=False, gradient_clipping=0.0, **keys)
    model, resident = linear(), linear()
    engine = start(opened, config, model=model, optimizer=adamw(model))
    optimizer = adamw(resident)
    for num_micro_batches in (1, 3, 2):
        for micro in range(num_micro_batches):
            x = torch.full((2, 5), float(micro + 1))
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward((engine(x) ** 2).sum())
            ((resident(x) ** 2).sum() / 2).backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_steps == 3
    state = model.state_dict()
    for name, value in resident.state_dict().items():
        torch.testing.assert_close(state[name], value)
    with pytest.raises(StateError, match="managed_gradient_accumulation is false"):
        engine.set_gradient_accumulation_boundary(True)


def test_unmanaged_accumulation_and_the_update_in_backward_exclude_each_other() -> None:
    config = on_cpu(managed_gradient_accumulation=False, gradient_clipping=0.0)
    config["offloadzero"]["update"] = {"in_backward": True}
    model = linear()
    with pytest.raises(ConfigError, match="impossible with managed_gradient_accumulation = false"):
        offloadzero.initialize(model=model, config=config, optimizer=adamw(model))


# --- DeepSpeed's keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "word"), [(0, False), (1, True), (0.0, False), (1.0, True)])
def test_numbers_for_booleans(number: float, word: bool) -> None:
    for config in (
        lambda value: {"bf16": {"enabled": value}},
        lambda value: {"offloadzero": {"poison_released_leases": value}},
        lambda value: {"zero_optimization": {"stage": 1, "cpu_offload": value}},
        lambda value: {"wall_clock_breakdown": value},
    ):
        assert load_config(config(number)) == load_config(config(word))
    if word:
        with pytest.raises(ConfigError, match=r"aio\.use_gds = 1"):
            load_config({"aio": {"use_gds": number}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"tensor_parallel": {"tp": {"tp_size": 2}}},
            r"tensor_parallel\.tp = .*the model is not divided here",
        ),
        (
            {"weight_quantization": {"a": {"num_bits": 4}}},
            "weight_quantization = .*quantized weights are not",
        ),
        ({"data_types": {"param_dtype": "bf16"}}, "contradicts fp16 and bf16, which say neither"),
    ],
)
def test_deepspeeds_keys_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def test_deepspeeds_keys_that_ask_for_nothing_are_taken() -> None:
    config = load_config(
        {
            "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}},
            "weight_quantization": {},
            "bf16": {"enabled": True},
            "data_types": {"param_dtype": "bfloat16"},
        }
    )
    assert config.notices == ()


# --- directories -----------------------------------------------------------------------------------------


def test_an_nvme_path_is_created_where_its_parent_exists(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: list[Any]
) -> None:
    drives = [tmp_path / "one", tmp_path / "two"]
    config = settings(drives[0])
    config["offloadzero"]["nvme_path"] = [str(drive) for drive in drives]
    assert load_config(config).nvme_paths == tuple(drives)
    assert list(tmp_path.iterdir()) == []  # reading a configuration makes nothing
    with caplog.at_level(logging.INFO, logger="offloadzero"):
        engine = start(opened, config, model=TinyModel())
    assert all(drive.is_dir() for drive in drives)
    lines = [record.getMessage() for record in caplog.records if "is created" in record.getMessage()]
    assert lines == [f"nvme_path {drive}: there was no such directory, it is created" for drive in drives]
    engine.backward(engine(tokens(0)))
    engine.step()


def test_zero_init_creates_it_too(tmp_path: Path) -> None:
    with offloadzero.zero.Init(config_dict_or_path=settings(tmp_path / "new")):
        model = TinyModel(width=128)
    assert (tmp_path / "new").is_dir()
    assert sum(param.numel() for param in model.parameters()) > 0


def test_an_unmounted_drive_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such directory, nor '.*drive' to create it in"):
        offloadzero.initialize(model=TinyModel(), config=settings(tmp_path / "drive" / "train"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_nothing_is_put_into_is_not_created(tmp_path: Path, opened: list[Any]) -> None:
    start(opened, settings(tmp_path / "unused", placement="host"), model=TinyModel())
    assert list(tmp_path.iterdir()) == []
