"""DeepSpeed's checkpoints become ours bit by bit, and training goes on from them as DeepSpeed's does.

Those in deepspeed_files were written by DeepSpeed 0.19.8 itself, by `python -m tests.support.deepspeed_checkpoints`,
which also noted what it makes of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offloadzero
from offloadzero.checkpoint.verify import open_checkpoint
from offloadzero.cli.main import FAILURE, main
from tests.support.checkpoints import bits, contents
from tests.support.deepspeed_checkpoints import NUM_STEPS, batch, ds_config, odd_model, param_groups, parse
from tests.support.tiny import REPOSITORY, script_environment

FILES = Path(__file__).parent / "deepspeed_files"
# What was asked of the script, and the number of ranks. Each has two parameter groups.
CASES = {
    "stage-1-bf16-fp32-gradients": (2, "--stage 1 --grad-accum-dtype fp32"),
    "stage-2-bf16-reordered-and-aligned": (2, "--stage 2 --true round_robin_gradients parameter_alignment"),
    "stage-2-bf16-offload-lion": (2, "--stage 2 --optimizer Lion --offload"),
    "stage-2-fp16": (1, "--stage 2 --dtype fp16"),
    "stage-3-bf16-sub-groups": (2, "--stage 3 --sub-group-size 60"),
    "stage-3-fp32": (2, "--stage 3 --dtype fp32"),
}
MORE_CASES = {
    **{
        f"stage-{stage}-{dtype}-{ranks}-ranks{'-offload' if offload else ''}": (
            ranks,
            f"--stage {stage} --dtype {dtype} {offload}",
        )
        for stage in (1, 2, 3)
        for dtype in ("bf16", "fp16", "fp32")
        for ranks, offload in ((1, ""), (2, "--offload"))
    },
    "elastic": (2, "--stage 2 --true elastic_checkpoint"),
}


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def same_values(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit by bit, and fp32 for any floating dtype: so DeepSpeed's zero_to_fp32 gives buffers and frozen weights."""
    one, other = (value.float() if value.is_floating_point() else value for value in (found, expected))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)


def expect_as_deepspeed_says(case: Path, converted: Path) -> None:
    """Every weight, moment and buffer; DeepSpeed's reader leaves out buffers and frozen weights in some cases."""
    tag = converted / "global_step3"
    stored = {name: value for file in tag.glob("*.safetensors") for name, value in load_file(file).items()}
    expected = load_file(case / "expected.safetensors")
    assert [name for name, value in expected.items() if not same_values(stored[name], value)] == []
    trained = {name for name, param in odd_model().named_parameters() if param.requires_grad}
    assert trained <= expected.keys() <= stored.keys()
    model = odd_model()
    for name in ("seen", "mask", "scale", "frozen"):
        value = model.state_dict()[name]
        assert torch.equal(stored[name], value.to(stored[name].dtype)), name
    assert set(open_checkpoint(tag).meta.steps) == trained


@pytest.mark.parametrize("name", CASES)
def test_all_of_a_checkpoint_is_that_of_deepspeed(name: str, tmp_path: Path) -> None:
    case = FILES / name
    assert convert(case / "checkpoint", tmp_path / "out") == 0
    expect_as_deepspeed_says(case, tmp_path / "out")
    meta = open_checkpoint(tmp_path / "out" / "global_step3").meta
    assert (meta.global_steps, meta.skipped_steps, set(meta.steps.values())) == (3, 0, {3})
    assert meta.client_state == {"epoch": 4, "name": "odd"}
    assert [group["weight_decay"] for group in meta.param_groups] == [0.1, 0.0]
    assert meta.optimizer == ("Lion" if "lion" in name else "Adam")
    scale = meta.loss_scale
    assert (scale is not None) == ("fp16" in name)
    assert scale is None or (scale.scale, scale.good_steps, scale.hysteresis_left) == (1024.0, 3, 2)
    assert "deepspeed" not in sys.modules


def test_a_folder_has_the_masters_in_fp32(tmp_path: Path) -> None:
    case = FILES / "stage-3-bf16-sub-groups"
    words = ("--to", "folder", "--dtype", "fp32", "--max-shard-size", "1KB")
    assert convert(case / "checkpoint" / "global_step3", tmp_path / "out", *words) == 0
    found = {
        name: v for file in (tmp_path / "out").glob("*.safetensors") for name, v in load_file(file).items()
    }
    expected = {k: v for k, v in load_file(case / "expected.safetensors").items() if "exp_avg" not in k}
    assert found.keys() == expected.keys()
    assert all(same_values(found[name], value) for name, value in expected.items())
    assert found["frozen"].dtype == torch.float32


# --- going on ---


def linear_of_stage_3(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """DeepSpeed's under stage 3 (runtime/zero/linear.py), which in 16 bits rounds before it adds the bias."""
    product = x.matmul(self.weight.t())
    return product if self.bias is None else product + self.bias


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_as_deepspeed_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit from one rank. Two sum what is here two micro batches: in bf16 a weight may then round otherwise."""
    num_ranks, words = CASES[name]
    args = parse([str(tmp_path), *words.split()])
    if args.stage == 3:
        monkeypatch.setattr(torch.nn.Linear, "forward", linear_of_stage_3)
    assert convert(FILES / name / "checkpoint", tmp_path / "out") == 0
    config = ds_config(args)
    config["zero_optimization"] = {"stage": 0}
    config["gradient_accumulation_steps"] = num_ranks
    config["optimizer"]["params"].pop("torch_adam", None)
    model = odd_model()
    engine, *_ = offloadzero.initialize(model=model, model_parameters=param_groups(model), config=config)
    path, client_state = engine.load_checkpoint(tmp_path / "out")
    assert (path, client_state) == (str(tmp_path / "out" / "global_step3"), {"epoch": 4, "name": "odd"})
    losses = []
    for step in range(NUM_STEPS, 2 * NUM_STEPS):
        of_ranks = []
        for rank in range(num_ranks):
            loss = engine(batch(step, rank))
            engine.backward(loss)
            engine.step()
            of_ranks.append(loss.item())
        losses.append(sum(of_ranks) / num_ranks)
    engine.close()
    expected = json.loads((FILES / name / "losses.json").read_text())
    if num_ranks == 1:
        assert losses == expected
    else:
        assert losses == pytest.approx(expected, rel=2e-4 if args.dtype == "bf16" else 3e-7)


# --- what is refused ---


def _rename(directory: Path, old: str, new: str) -> None:
    (directory / old).rename(directory / new)


def _flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


MODEL = "mp_rank_00_model_states.pt"
OPTIMIZERS = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
REFUSED: dict[str, Callable[[Path], object]] = {
    "not a whole file of torch.save()": lambda tag: os.truncate(tag / OPTIMIZERS[1], 3000),
    "is damaged: ": lambda tag: _flip(tag / OPTIMIZERS[0]),
    "was saved by 2 ranks": lambda tag: (tag / OPTIMIZERS[1]).unlink(),
    "has the states of ranks [1] alone": lambda tag: (tag / OPTIMIZERS[0]).unlink(),
    "is of a model in parts": lambda tag: shutil.copy(tag / MODEL, tag / "mp_rank_01_model_states.pt"),
    "is of a model in parts (": lambda tag: shutil.copy(
        tag / MODEL, tag / "layer_01-model_00-model_states.pt"
    ),
    "it was saved without ZeRO": lambda tag: [(tag / name).unlink() for name in OPTIMIZERS],
    "had on NVMe are not converted": lambda tag: (tag / "offloaded_tensors").mkdir(),
    "is not laid out as DeepSpeed does: KeyError": lambda tag: torch.save({"module": {}}, tag / MODEL),
    "group 0 has 297 elements, and its parameters 19": lambda tag: _with_shapes(tag),
}


def _with_shapes(tag: Path) -> None:
    """The model states of a run with another model."""
    values = torch.load(tag / MODEL, weights_only=True)
    values["param_shapes"][0] = {"other": torch.Size([4, 4])}
    torch.save(values, tag / MODEL)


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_whole_or_not_known_is_refused_before_anything_is_written(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "src"
    shutil.copytree(FILES / "stage-2-bf16-reordered-and-aligned" / "checkpoint", source)
    REFUSED[message](source / "global_step3")
    before = contents(tmp_path)
    assert convert(source, tmp_path / "out") == FAILURE
    error = capsys.readouterr().err
    assert message in error
    assert str(source / "global_step3") in error
    assert contents(tmp_path) == before


class Runs:
    """Pickled, it is a call of any function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


def test_no_code_of_a_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, written = tmp_path / "src", tmp_path / "written"
    shutil.copytree(FILES / "stage-2-fp16" / "checkpoint", source)
    file = source / "global_step3" / MODEL
    values = torch.load(file, weights_only=True)
    torch.save({**values, "arguments": Runs(shutil.copy, str(file), str(written))}, file)
    assert convert(source, tmp_path / "out") == 0
    assert "left out: client_state['arguments']" in capsys.readouterr().out
    expect_as_deepspeed_says(FILES / "stage-2-fp16", tmp_path / "out")
    assert not written.exists()
    torch.load(file, weights_only=False)
    assert written.exists()
    torch.save({**values, "arguments": Runs(os.mkdir, str(tmp_path / "made"))}, file)
    assert convert(source, tmp_path / "again") == FAILURE
    assert "posix.mkdir whose module posix is blocked" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


# --- where DeepSpeed is installed ---


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_what_deepspeed_writes_now(name: str, tmp_path: Path) -> None:
    num_ranks, words = {**CASES, **MORE_CASES}[name]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    script = ["-m", "tests.support.deepspeed_checkpoints", str(tmp_path), *words.split()]
    environment = {**script_environment(), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, *launch, *script], cwd=REPOSITORY, env=environment, check=True)
    assert convert(tmp_path / "checkpoint", tmp_path / "out") == 0
    expect_as_deepspeed_says(tmp_path, tmp_path / "out")
