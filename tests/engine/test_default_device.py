"""torch.set_default_device(): the engine's own tensors are where the engine needs them, whatever the script has set.

Under `set_default_device("cuda")` a tensor made without a device has an address that no code on the host may touch. The
tests take "meta", which has no addresses at all.
"""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from tests.support.tiny import TinyModel, all_states, make_engine, settings, tokens

PACKAGE = Path(offloadzero.__file__).parent
MAKERS = (
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "scalar_tensor", "tensor", "zeros"),
)
ON_THE_SCRIPTS = {
    "planning/model/trace.py": "a model's forward makes its tensors there, and meets those of the trace",
    "planning/model/shapes.py": "its models are made where they are asked for",
    "planning/model/quantized.py": "and the codes of their weights",
}


def without_device(text: str) -> list[int]:
    """The lines with a call of torch's that makes a tensor on the default device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
        and "device" not in [keyword.arg for keyword in node.keywords]
    ]


def test_no_tensor_of_the_engine_is_on_the_default_device() -> None:
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    found = {
        str(file): without_device((PACKAGE / file).read_text()) for file in files if file.parts[0] != "cli"
    }
    assert {file for file, lines in found.items() if lines} == set(ON_THE_SCRIPTS), found


PLACEMENTS: dict[str, Any] = {
    "host": "host",
    "nvme": "nvme",
    "gradients on nvme": {"param": "nvme", "master": "host", "exp_avg": "host", "exp_avg_sq": "host", "grad": "nvme"},
}  # fmt: skip


def trained(
    directory: Path, placement: Any, layout: str, default: str | None
) -> list[dict[str, torch.Tensor]]:
    """Losses and gradients, all states, and the weights of the model as it is given back."""
    batches = [tokens(seed) for seed in range(3)]
    torch.manual_seed(1)
    model = TinyModel()
    config = settings(directory, placement=placement, gradient_clipping=0.5, state_layout=layout)
    seen: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        if default is not None:
            stack.enter_context(torch.device(default))
        engine = make_engine(config, model)
        for number, batch in enumerate(batches):
            loss = engine(batch)
            engine.backward(loss)
            for name, param in model.named_parameters():
                assert param.grad is not None
                seen[f"{name}, {number}"] = param.grad.clone()
            engine.step()
            seen[f"loss {number}"] = loss.detach()
        engine.save_checkpoint(directory / "saved")
        engine.load_checkpoint(directory / "saved")
    states = all_states(engine)
    with torch.device(default) if default is not None else contextlib.nullcontext():
        engine.restore_model()
    return [seen, states, {name: param.detach() for name, param in model.named_parameters()}]


@pytest.mark.parametrize("layout", ["fp32", "compact"])
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_training_is_the_same(placement: str, layout: str, tmp_path: Path) -> None:
    found = []
    for default in (None, "meta"):
        directory = tmp_path / str(default)
        directory.mkdir()
        found.append(trained(directory, PLACEMENTS[placement], layout, default))
    for expected, values in zip(*found, strict=True):
        assert expected.keys() == values.keys()
        for name, value in expected.items():
            assert torch.equal(value, values[name]), name
