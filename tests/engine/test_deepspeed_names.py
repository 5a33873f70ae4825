"""The engine under DeepSpeed's names: what scripts written for DeepSpeed ask of it and call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offloadzero
from offloadzero import ConfigError, StateError
from offloadzero.api.deepspeed import engine_names as deepspeed_names
from offloadzero.api.deepspeed.missing_names import ENGINE_NAMES, PACKAGE_NAMES
from offloadzero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tests.engine.on_host import config, make_model
from tests.support.tiny import TinyModel, make_engine, tokens, train

DOC = Path(__file__).parents[2] / "docs" / "engine.md"


# --- the engine ---


@pytest.fixture(scope="module")
def asked() -> Any:
    """An engine that is only asked."""
    made = make_engine(config(gradient_accumulation_steps=2, optimizer=None, bf16=None), **client())
    yield made
    made.close()


@pytest.fixture
def engine() -> Any:
    made = make_engine(config(gradient_accumulation_steps=2, optimizer=None, bf16=None), **client())
    yield made
    made.close()


def client() -> dict[str, Any]:
    model = make_model()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))}


EXPECTED: dict[str, Any] = {
    "bfloat16_enabled": False,
    "fp16_enabled": False,
    "get_data_types": (torch.float32, torch.float32),
    "dynamic_loss_scale": True,
    "initial_dynamic_scale": 65536.0,
    "zero_optimization": True,
    "zero_optimization_stage": 3,
    "zero_optimization_partition_gradients": True,
    "zero_optimization_partition_weights": True,
    "zero_cpu_offload": True,
    "zero_use_cpu_optimizer": True,
    "zero_nvme_offload_optimizer": False,
    "zero_gather_16bit_weights_on_model_save": False,
    "gradient_clipping": 0.0,
    "gradient_accumulation_steps": 2,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "get_batch_info": (4, 2, 2),
    "get_lr": [1e-2],
    "get_mom": [(0.8, 0.9)],
    "get_type": [0.0],
    "optimizer_name": "AdamW",
    "optimizer_params": None,
    "scheduler_name": None,
    "scheduler_params": None,
    "steps_per_print": None,
    "get_data_parallel_rank": 0,
    "get_global_grad_norm": None,
    "get_pld_theta": None,
    "get_wall_clock_timers": {},
    "empty_partition_cache": None,
    "allreduce_gradients": None,
    "wall_clock_breakdown": False,
    "flops_profiler_enabled": False,
    "pld_enabled": False,
    "loss_scale": 1.0,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_answer(asked: offloadzero.Engine, name: str) -> None:
    assert getattr(asked, name)() == EXPECTED[name]


def test_values(asked: offloadzero.Engine) -> None:
    assert (asked.local_rank, asked.global_rank, asked.world_size) == (0, 0, 1)
    assert (asked.dp_world_size, asked.mp_world_size, asked.mpu) == (1, 1, None)
    assert asked.communication_data_type is torch.float32
    assert asked.loss_scale == 1.0
    assert asked.is_compiled is False
    assert isinstance(asked, offloadzero.DeepSpeedEngine)


def test_every_row_of_the_tables_answers(asked: offloadzero.Engine) -> None:
    for name in (*deepspeed_names.ANSWERS, *deepspeed_names.OFF):
        getattr(asked, name)()
        assert name in dir(asked)
    for name in deepspeed_names.VALUES:
        assert hasattr(asked, name)
    answers = (*deepspeed_names.ANSWERS, *deepspeed_names.OFF, *deepspeed_names.VALUES)
    rows = (*answers, *deepspeed_names.MOVES, *ENGINE_NAMES)
    assert len(rows) == len(set(rows))
    assert not {name for name in rows if name in vars(offloadzero.Engine)}, (
        "the engine has it: the row is dead"
    )


def test_the_page_names_every_row() -> None:
    text = DOC.read_text()
    names = (*deepspeed_names.NAMES, *deepspeed_names.MOVES, *ENGINE_NAMES, *PACKAGE_NAMES)
    assert [name for name in names if f"`{name}`" not in text and f"`{name}()`" not in text] == []


def test_a_local_rank_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    engine = make_engine(config(), make_model())
    assert engine.local_rank == 3
    engine.close()


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_where_things_live(tmp_path: Path, placement: str) -> None:
    mixed = [
        {
            "exp_avg": placement,
            "exp_avg_sq": placement,
            "master": placement,
            "param": "device",
            "grad": "device",
        }
    ]
    engine = make_engine(config(tmp_path, placement=mixed), make_model())
    found = engine.zero_offload_optimizer()
    assert engine.zero_offload_param() is None
    assert engine.zero_nvme_offload_optimizer() is (placement == "nvme")
    assert engine.zero_cpu_offload() is (placement == "host")
    if placement == "device":
        assert found is None
    else:
        assert (found.device, found.ratio) == ("nvme" if placement == "nvme" else "cpu", 1.0)
        assert found.nvme_path == (tmp_path if placement == "nvme" else None)
    engine.close()


def test_precision_answers() -> None:
    fp16 = {"enabled": True, "loss_scale": 32.0}
    engine = make_engine(config(bf16=None, fp16=fp16, data_types={"grad_accum_dtype": "fp32"}), make_model())
    assert engine.fp16_enabled() is True
    assert engine.dynamic_loss_scale() is False
    assert engine.get_data_types() == (torch.float16, torch.float32)
    assert engine.loss_scale == engine.loss_scale() == 32.0
    assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == 32.0
    assert engine.optimizer.overflow is False
    loss = engine(tokens(0))
    engine.backward(loss * float("inf"))
    engine.step()
    assert engine.optimizer.overflow is True
    assert engine.skipped_steps == 1
    train(engine, num_steps=1)
    assert engine.optimizer.overflow is False
    engine.close()


def test_the_parameters_of_a_schedule_are_a_dict() -> None:
    """Scripts write it into a JSON file, and change it, which changes nothing here."""
    params = {"warmup_num_steps": 4, "warmup_max_lr": 0.01}
    engine = make_engine({**config(), "scheduler": {"type": "WarmupLR", "params": params}}, make_model())
    assert json.loads(json.dumps(engine.scheduler_params())) == params
    engine.scheduler_params().clear()
    assert engine.scheduler_params() == params
    engine.close()


def test_after_loading_there_is_no_last_step(tmp_path: Path) -> None:
    engine = make_engine(config(), make_model())
    train(engine, num_steps=2)
    assert engine.get_global_grad_norm() > 0
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine = make_engine(config(), make_model())
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 2
    assert engine.get_global_grad_norm() is None
    assert engine.optimizer.overflow is False
    train(engine, num_steps=1)
    assert engine.get_global_grad_norm() > 0
    engine.close()


def test_an_unknown_attribute_names_the_engine_and_its_module(asked: offloadzero.Engine) -> None:
    with pytest.raises(AttributeError) as caught:
        asked.save_chekpoint  # noqa: B018
    assert str(caught.value) == (
        "Engine has no attribute 'save_chekpoint', and neither has its module, a TinyModel "
        "(did you mean 'save_checkpoint'?)"
    )
    with pytest.raises(
        AttributeError, match=r"'zero_optimization_stages'.*did you mean 'zero_optimization_stage'"
    ):
        asked.zero_optimization_stages  # noqa: B018
    with pytest.raises(AttributeError, match=r"'blocs'.* a TinyModel \(did you mean 'blocks'\?\)"):
        asked.blocs  # noqa: B018
    for name, reason in ENGINE_NAMES.items():
        assert not hasattr(asked, name)
        with pytest.raises(AttributeError) as caught:
            getattr(asked, name)
        assert reason in str(caught.value)
    assert asked.blocks is asked.module.blocks


def test_the_modules_own_property_that_fails_is_the_cause() -> None:
    class Broken(TinyModel):
        @property
        def size(self) -> int:
            return self.sizes  # type: ignore[return-value]

    engine = make_engine(config(), Broken(width=16, num_blocks=1))
    with pytest.raises(AttributeError, match="'size'") as caught:
        engine.size  # noqa: B018
    assert "sizes" in str(caught.value.__cause__) or "size" in str(caught.value.__cause__)
    engine.close()


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_has_deepspeeds_order_of_arguments(adam_w_mode: bool) -> None:
    def weights(make: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = make_model()
        settings = {key: value for key, value in config().items() if key != "optimizer"}
        engine, *_ = offloadzero.initialize(model=model, optimizer=make(model.parameters()), config=settings)
        train(engine, num_steps=2)
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        engine.close()
        return values

    found = weights(lambda params: FusedAdam(params, 1e-2, False, (0.8, 0.9), 1e-6, adam_w_mode, 0.3))
    expected = weights(
        lambda params: DeepSpeedCPUAdam(
            params, 1e-2, False, (0.8, 0.9), 1e-6, weight_decay=0.3, adamw_mode=adam_w_mode
        )
    )
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_fused_adam_refuses_what_it_does_not_do() -> None:
    for option in ({"amsgrad": True}, {"set_grad_none": False}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            FusedAdam([torch.nn.Parameter(torch.zeros(2))], **option)


def test_the_reason_for_comm_speaks_of_several_ranks_too() -> None:
    with pytest.raises(AttributeError, match=r"'comm': torch\.distributed has the same functions; init_dist"):
        _ = offloadzero.comm


def test_an_unknown_name_of_the_package() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'offloadzero' has no attribute 'initialise' \(did you mean"
    ):
        offloadzero.initialise  # type: ignore[attr-defined]  # noqa: B018
    for name, reason in PACKAGE_NAMES.items():
        with pytest.raises(AttributeError) as caught:
            getattr(offloadzero, name)
        assert reason in str(caught.value)
    assert offloadzero.ops.adam.DeepSpeedCPUAdam is DeepSpeedCPUAdam


def test_forward_is_the_engines(tmp_path: Path) -> None:
    """`engine.forward(...)` runs the hooks of the model itself, which `module.forward` would leave out."""
    engine = make_engine(config(tmp_path, placement="nvme"), make_model())
    seen: list[str] = []
    engine.module.register_forward_pre_hook(lambda *_: seen.append("root"))
    assert engine.forward(tokens(0)).item() == engine(tokens(0)).item()
    assert seen == ["root", "root"]
    engine.close()


def test_moving_and_casting(asked: offloadzero.Engine) -> None:
    """What it is already gives the engine back, not the module; anything else says what to set."""
    for same in (
        *(asked.to("cpu"), asked.to(torch.device("cpu")), asked.cpu(), asked.to(dtype=torch.float32)),
        *(
            asked.float(),
            asked.to("cpu", torch.float32, True),
            asked.to(torch.zeros(1)),
            asked.type(torch.float32),
        ),
        *(asked.to(device="cpu", non_blocking=True), asked.to(None), asked.train(), asked.eval()),
    ):
        assert same is asked
    for move in (asked.cuda, lambda: asked.cuda(0), lambda: asked.to("cuda:0"), lambda: asked.to("meta")):
        with pytest.raises(StateError, match=r"the engine computes on cpu and moves the weights by itself"):
            move()
    for cast in (
        asked.half,
        asked.bfloat16,
        asked.double,
        lambda: asked.to(torch.zeros(1, dtype=torch.half)),
    ):
        with pytest.raises(
            StateError, match=r"the parameters are torch\.float32: the configuration's bf16 or fp16"
        ):
            cast()


def test_destroy(tmp_path: Path) -> None:
    engine = make_engine(config(tmp_path, placement="nvme"), make_model())
    train(engine, num_steps=1)
    engine.destroy()
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


def test_weights_in_and_out(engine: offloadzero.Engine) -> None:
    engine.module.blocks[0].requires_grad_(False)
    weights = engine.module_state_dict()
    assert weights.keys() == make_model().state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in make_model().state_dict().items())
    trainable = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert trainable.keys() == {name for name in weights if not name.startswith("blocks.0.")}
    others = make_model(5).state_dict()
    for checkpoint in (others, {"module": others}):
        engine.load_module_state_dict(weights)
        engine.load_module_state_dict(checkpoint)
        assert all(torch.equal(value, others[name]) for name, value in engine.module_state_dict().items())
    with pytest.raises(RuntimeError, match="nothing"):
        engine.load_module_state_dict({"nothing": torch.ones(1)})
    engine.load_module_state_dict({"nothing": torch.ones(1)}, strict=False)
    seen: list[Any] = []
    engine.load_module_state_dict(
        {"module": weights}, custom_load_fn=lambda src, dst: seen.append((len(src), dst))
    )
    assert seen == [(len(weights), engine.module)]


def test_the_old_name_of_saving(tmp_path: Path, engine: offloadzero.Engine) -> None:
    assert engine.save_fp16_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_compile_passes_the_keywords_on(engine: offloadzero.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **keys: seen.append((module, keys)))
    engine.compile(backend="eager", compile_kwargs={"dynamic": True})
    assert seen == [(engine.module, {"backend": "eager", "dynamic": True})]
    with pytest.raises(ConfigError, match="schedule"):
        engine.compile(schedule=[(0, [])])


def test_the_order_of_the_data_is_deepspeeds(engine: offloadzero.Engine) -> None:
    """For training a permutation of seed 0, every epoch the same; for evaluation as it lies."""
    data = list(range(11))
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0)).tolist()
    loader = engine.deepspeed_io(data)  # type: ignore[arg-type]
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == order
    assert [len(batch) for batch in loader] == [2, 2, 2, 2, 2, 1]
    assert torch.cat(list(engine.deepspeed_io(data, 4, route="eval"))).tolist() == data  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [None, "auto"])
def test_data_needs_a_batch_size(size: str | None) -> None:
    """And it is said before the model is touched."""
    model = make_model()
    before = model.emb.weight.untyped_storage().nbytes()
    with pytest.raises(ConfigError, match=rf"train_micro_batch_size_per_gpu = {size!r}: a number"):
        offloadzero.initialize(
            model=model, config=config(train_micro_batch_size_per_gpu=size), training_data=torch.zeros(4, 3)
        )
    assert model.emb.weight.untyped_storage().nbytes() == before


# --- the batch size ---


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int]) -> list[float]:
    """Plain torch: steps of so many micro batches."""
    losses, seed = [], 0
    for size in sizes:
        for _ in range(size):
            loss = model(tokens(seed))
            (loss / size).backward()
            losses.append(loss.item())
            seed += 1
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_gradients_dropped_before_the_boundary_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that drops them before each micro batch takes no step: with DeepSpeed it trains."""
    engine = make_engine(config(gradient_accumulation_steps=2))
    train(engine, num_steps=2)
    engine.zero_grad()  # behind the boundary, as loops for torch have it
    assert not [record for record in caplog.records if "zero_grad" in record.message]
    for seed in range(3):
        engine.zero_grad()
        engine.backward(engine(tokens(seed)))
        engine.step()
    assert engine.global_steps == 1
    (told,) = (record.message for record in caplog.records if "zero_grad" in record.message)
    assert told.startswith(
        "engine.zero_grad() has dropped the gradients of 1 of the 2 micro batches of a step"
    )


def test_setting_the_train_batch_size(tmp_path: Path) -> None:
    """Windows of 2, then 3, then 1 micro batches: the losses of plain torch with the same windows."""
    model = make_model()
    expected = accumulate(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9)), [2, 2, 3, 3, 1, 1]
    )
    engine = make_engine(config(gradient_accumulation_steps=2, optimizer=None, bf16=None), **client())
    losses = train(engine, num_steps=4)
    assert (engine.global_steps, engine.global_samples) == (2, 8)
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    losses += train(engine, num_steps=6, first_seed=4)
    assert (engine.global_steps, engine.global_samples) == (4, 20)
    engine.set_train_batch_size(2)
    losses += train(engine, num_steps=2, first_seed=10)
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (6, 24, 12)
    assert losses == pytest.approx(expected, rel=1e-5)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (5, 5, 1)
    engine.save_checkpoint(tmp_path)
    engine.close()
    # As in DeepSpeed a checkpoint has the samples, and the configuration the batch size.
    engine = make_engine(config(gradient_accumulation_steps=2, optimizer=None, bf16=None), **client())
    engine.load_checkpoint(tmp_path)
    assert (engine.get_batch_info(), engine.global_samples) == ((4, 2, 2), 24)
    train(engine, num_steps=2, first_seed=12)
    assert engine.global_samples == 28
    engine.close()


def test_batch_sizes_that_cannot_be_set() -> None:
    engine = make_engine(config(gradient_accumulation_steps=2), make_model())
    with pytest.raises(ConfigError, match="not a multiple of 2"):
        engine.set_train_batch_size(5)
    train(engine, num_steps=1)
    with pytest.raises(StateError, match="changes between steps: 1 of 2 micro batches"):
        engine.set_train_batch_size(8)
    with pytest.raises(StateError, match="changes between steps"):
        engine.set_train_micro_batch_size(8)
    train(engine, num_steps=1, first_seed=1)
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 4
    engine.close()
    engine = make_engine(config(train_micro_batch_size_per_gpu=None), make_model())
    with pytest.raises(
        ConfigError, match=r"train_micro_batch_size_per_gpu = None: set_train_batch_size\(\) needs it"
    ):
        engine.set_train_batch_size(8)
    engine.close()


@pytest.mark.parametrize("size", [0, -2, 2.5, "x", None, True, 1 << 40], ids=repr)
def test_what_is_no_batch_size_is_refused_and_changes_nothing(size: Any) -> None:
    engine = make_engine(config(), make_model())
    train(engine, num_steps=1)
    with pytest.raises(ConfigError, match=r"train_batch_size = .*a whole number"):
        engine.set_train_batch_size(size)
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu = .*a whole number"):
        engine.set_train_micro_batch_size(size)
    assert (engine.get_batch_info(), engine.global_samples) == ((2, 2, 1), 2)
    engine.set_train_micro_batch_size(np.int64(4))
    assert engine.get_batch_info() == (4, 4, 1)
    engine.close()


def test_accumulation_needs_gradients_that_are_kept() -> None:
    """With one micro batch per step the update may run in backward, and then there is nothing to add to."""
    engine = make_engine(config(update={"in_backward": True}), make_model())
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps = 4: 1: gradients are not kept"):
        engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (2, 2, 1)
    train(engine, num_steps=2)
    engine.close()


# --- the loop ---


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_backward_twice_through_one_graph(tmp_path: Path, placement: str) -> None:
    """`retain_graph`: the two gradients add up as in torch."""
    plain = make_model()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.8, 0.9))
    engine = make_engine(
        config(tmp_path, placement=placement, gradient_accumulation_steps=2, optimizer=None, bf16=None),
        **client(),
    )
    losses, expected = [], []
    for seed in range(3):
        loss, plain_loss = engine(tokens(seed)), plain(tokens(seed))
        engine.backward(loss, retain_graph=True)
        engine.step()
        engine.backward(loss)
        engine.step()
        (plain_loss / 2).backward(retain_graph=True)
        (plain_loss / 2).backward()
        reference.step()
        reference.zero_grad()
        losses.append(loss.item())
        expected.append(plain_loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    engine.close()


def test_backward_without_the_scale_of_accumulation() -> None:
    """DeepSpeed's `scale_wrt_gas=False`, and `scale()` for a backward of the caller's own."""
    runs: list[list[float]] = []
    for form in ("backward", "scale", "plain"):
        engine = make_engine(config(gradient_accumulation_steps=2, optimizer=None, bf16=None), **client())
        losses = []
        for seed in range(6):
            loss = engine(tokens(seed))
            if form == "backward":
                assert engine.backward(loss, scale_wrt_gas=False) is loss
            elif form == "scale":
                engine.scale(loss).backward()
            else:
                loss.backward()
            engine.step()
            losses.append(loss.item())
        runs.append(losses)
        engine.close()
    assert runs[0] == runs[1] == runs[2]


def test_arguments_for_the_schedule() -> None:
    """`step(lr_kwargs)` hands them to the schedule's step."""
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
    engine = make_engine({**config(), "scheduler": scheduler}, make_model())
    engine.backward(engine(tokens(0)))
    engine.step({"last_batch_iteration": 4})
    assert engine.get_lr() == [pytest.approx(0.4)]
    engine.close()
