"""`zero.Init`: what a model that is built in pieces holds, what is left to it, and what is refused."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from offloadzero import ConfigError, zero
from offloadzero.streaming.building.waiting_parameters import spill, spilled_weight
from tests.engine.built import build, masters, reference_split, stored_bytes
from tests.support.faults import fails
from tests.support.tiny import TinyModel, all_states, make_engine, run_script, settings, tokens, train


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_init_gives_the_values_of_an_ordinary_construction(tmp_path: Path, tier: str) -> None:
    config = settings(tmp_path, placement=tier, gradient_clipping=1.0)
    ordinary = build()
    values = {name: value.clone() for name, value in ordinary.state_dict().items()}
    plain = make_engine(config, ordinary)
    with zero.Init(config_dict_or_path=config):
        model = build()
    assert not list(tmp_path.glob("*spill*")), "spilled values have no name in the directory"
    assert model.head.weight is model.emb.weight
    built = make_engine(config, model)
    for name, master in masters(built).items():
        assert torch.equal(master, values[name]), name
    for name, value in built.module.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, reference_split(values[name])), name
    assert train(built, num_steps=3) == train(plain, num_steps=3)
    one, other = all_states(built), all_states(plain)
    assert all(torch.equal(one[name], other[name]) for name in one)
    built.close()
    plain.close()
    assert os.listdir(tmp_path) == []


def test_a_model_larger_than_memory_can_be_built(tmp_path: Path) -> None:
    script = """
        import sys
        import torch._dynamo  # the first optimizer imports it: not the model's memory
        from torch import nn
        import offloadzero
        from offloadzero import zero
        from tests.support.tiny import settings

        def peak_mib():
            line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
            return int(line.split()[1]) / 1024

        config = settings(sys.argv[1], poison_released_leases=False, update={"chunk_elements": 1 << 20})
        with zero.Init(config_dict_or_path=config):
            nn.Linear(1024, 1024)  # what the first use of torch's kernels takes is not the model's
        open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
        base = peak_mib()
        with zero.Init(config_dict_or_path=config):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(60)))
        model_mib = 4 * sum(param.numel() for param in model.parameters()) / 2**20
        print(model_mib, peak_mib() - base)
        engine, *_ = offloadzero.initialize(model=model, config=config)
        print(engine.memory_table())
        print(model_mib, peak_mib() - base)
        engine.close()
    """
    done = run_script(script, tmp_path, timeout_s=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    model_mib, built_mib = map(float, lines[0].split())
    assert model_mib == 240
    assert built_mib < 170, done.stdout  # what is freed goes back to the machine every 128 MiB
    _, offloaded_mib = map(float, lines[-1].split())
    assert offloaded_mib < 270, done.stdout  # its states take 720


def test_apply_inside_init(tmp_path: Path) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.constant_(module.bias, 0.5)

    torch.manual_seed(3)
    ordinary = TinyModel(width=80)
    ordinary.apply(fill)
    config = settings(tmp_path)
    with zero.Init(config_dict_or_path=config):
        torch.manual_seed(3)
        model = TinyModel(width=80)
        assert model.apply(fill) is model
        stored = sum(stored_bytes(param) for param in model.parameters())
    assert stored < 30_000, "apply() left the weights in memory"
    engine = make_engine(config, model)
    for name, master in masters(engine).items():
        assert torch.equal(master, ordinary.state_dict()[name]), name
    engine.close()


def test_init_disabled(tmp_path: Path) -> None:
    original = nn.Linear.__init__
    with zero.Init(config_dict_or_path=settings(tmp_path), enabled=False):
        assert nn.Linear.__init__ is original
        model = build()
    ordinary = build()
    for (name, param), other in zip(model.named_parameters(), ordinary.parameters(), strict=True):
        assert torch.equal(param, other), name


def test_init_leaves_no_trace(tmp_path: Path) -> None:
    register = nn.Module.register_parameter
    before = (nn.Linear.__init__, nn.Module.apply, nn.Module.__init_subclass__.__func__
              if hasattr(nn.Module.__init_subclass__, "__func__") else None)  # fmt: skip

    def fails() -> None:
        with zero.Init(config_dict_or_path=settings(tmp_path)):
            raise ValueError("a model that cannot be built")

    with pytest.raises(ValueError, match="cannot be built"):
        fails()
    with zero.Init(config_dict_or_path=settings(tmp_path)):
        pass
    assert nn.Linear.__init__ is before[0]
    assert nn.Module.apply is before[1]
    assert nn.Module.register_parameter is register
    assert "__init_subclass__" not in nn.Module.__dict__
    assert nn.Linear(100, 100).weight.untyped_storage().nbytes() == 40_000

    class Later(nn.Linear):
        pass

    assert Later(100, 100).weight.untyped_storage().nbytes() == 40_000


def test_what_is_loaded_over_the_meta_device_leaves_memory_unless_it_lies_in_a_file(tmp_path: Path) -> None:
    """As `from_pretrained` does, which maps weights, and makes new ones of those that it merges or casts."""
    mapped, merged = torch.ones(100, 100), torch.full((100, 100), 2.0)
    save_file({"mapped": mapped}, tmp_path / "file")
    with zero.Init(config_dict_or_path=settings(tmp_path)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
        model[0].weight = nn.Parameter(load_file(tmp_path / "file")["mapped"])
        model[1].weight = nn.Parameter(merged)
        assert spilled_weight(model[0].weight) is None
        assert spilled_weight(model[1].weight) is not None
    assert torch.equal(model[0].weight.data, mapped)
    assert torch.equal(model[1].weight.data.clone(), merged)


def test_init_inside_init_does_nothing_more(tmp_path: Path) -> None:
    """As in DeepSpeed, the outermost block decides, and is still in force when an inner one has ended."""
    before = nn.Linear.__init__
    with zero.Init(config_dict_or_path=settings(tmp_path, placement="host")):
        wrapped = nn.Linear.__init__
        with zero.Init(config_dict_or_path=settings(tmp_path), dtype=torch.float16) as inner:
            assert isinstance(inner, zero.Init)
            assert nn.Linear.__init__ is wrapped
            model = build()
        with zero.Init(enabled=False), pytest.raises(RuntimeError, match="from inside"):
            raise RuntimeError("from inside")
        late = nn.Linear(100, 100)
    assert {param.dtype for param in model.parameters()} == {torch.float32}, "the inner block's dtype"
    assert stored_bytes(late.weight) < 10
    assert os.listdir(tmp_path) == []
    assert nn.Linear.__init__ is before
    assert nn.Linear(100, 100).weight.untyped_storage().nbytes() == 40_000
    plain = build()
    engine = make_engine(settings(tmp_path), model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in masters(engine).items())
    train(engine, num_steps=1)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every parameter has it, large or small, so that a model offloaded without a precision block works."""
    with zero.Init(config_dict_or_path=settings(tmp_path, bf16=None), dtype=dtype):
        model = build()
    assert {param.dtype for param in model.parameters()} == {dtype}
    engine = make_engine(settings(tmp_path, bf16=None), model)
    assert {value.dtype for value in engine.module.state_dict().values()} == {dtype}
    assert engine(tokens(0)).isfinite()
    engine.close()


def test_init_on_an_existing_module(tmp_path: Path) -> None:
    model = build()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    zero.Init(module=model, config_dict_or_path=settings(tmp_path))
    assert sum(stored_bytes(param) for param in model.parameters()) < 30_000
    engine = make_engine(settings(tmp_path), model)
    assert all(torch.equal(master, values[name]) for name, master in masters(engine).items())
    engine.close()


@pytest.mark.parametrize("nth", [1, 3])
def test_a_module_that_cannot_be_released_whole_keeps_its_values(tmp_path: Path, nth: int) -> None:
    model = build()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    full = fails("spill.write", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), at=nth)
    with full, pytest.raises(OSError, match="No space left"):
        zero.Init(module=model, config_dict_or_path=settings(tmp_path))
    for name, param in model.named_parameters():
        assert spilled_weight(param) is None, name
        assert torch.equal(param, values[name]), name


def test_classes_that_are_defined_inside_the_block(tmp_path: Path) -> None:
    registered: list[bool] = []
    with zero.Init(config_dict_or_path=settings(tmp_path)):

        class WithConstructor(nn.Linear):
            def __init__(self) -> None:
                super().__init__(100, 100)
                self.extra = nn.Parameter(torch.full((80, 80), 2.0))
                assert self.extra[0, 0] == 2.0, "released before its constructor was through"

        class Without(WithConstructor):
            pass

        class Registering(Without):
            def __init_subclass__(cls, flag: bool = False, **keys: Any) -> None:
                super().__init_subclass__(**keys)
                registered.append(flag)

        class Odd(Registering, flag=True):
            def __init__(self) -> None:
                super().__init__()
                self.more = nn.Parameter(torch.ones(80, 80))

        modules = [WithConstructor(), Without(), Odd()]
    assert registered == [True]
    for module in modules:
        for name, param in module.named_parameters():
            if param.numel() >= 4096:
                assert stored_bytes(param) < 10, f"{type(module).__name__}.{name} is in memory"


def test_a_class_without_a_constructor_of_its_own(tmp_path: Path) -> None:
    class Renamed(nn.Linear):
        pass

    with zero.Init(config_dict_or_path=settings(tmp_path)):
        module = Renamed(100, 100)
    assert stored_bytes(module.weight) < 10


def test_a_model_that_was_built_and_dropped_leaves_nothing(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with zero.Init(config_dict_or_path=settings(tmp_path)):
        model = build()
        assert len(os.listdir("/proc/self/fd")) > before
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_errors_of_init(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        zero.Init(remote_device="nvme")
    with pytest.raises(ConfigError, match="data_parallel_group"):
        zero.Init(data_parallel_group=object())
    with pytest.raises(ConfigError, match="placment"):
        zero.Init(config_dict_or_path={"offloadzero": {"placment": "host"}})
    with pytest.raises(ConfigError, match=str(tmp_path / "nowhere" / "train")):
        zero.Init(config_dict_or_path=settings(tmp_path / "nowhere" / "train"))


def test_a_full_disk_gets_the_space_of_a_spilled_parameter_back(tmp_path: Path) -> None:
    full = fails("spill.write", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    before = os.listdir("/proc/self/fd")
    with full, pytest.raises(OSError, match="No space left"):
        spill(nn.Parameter(torch.ones(1000)), name="weight", directory=tmp_path)
    assert os.listdir("/proc/self/fd") == before
