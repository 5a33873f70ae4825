"""Awkward models and loops under small leases: bitwise as with everything on the device, and right.

Right means near plain torch in fp32. Released leases are full of NaN in all of these.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.access.parameter import AwayParameter
from offloadzero.errors import BudgetError, ConfigError
from tests.streaming.loops import MODELS, check_everywhere, steps, take_inputs
from tests.support import models
from tests.support.cases import each_pair
from tests.support.models import WIDTH, Stack, TiedLM, features, tokens
from tests.support.training import assert_same, make_config, run_engine, worst_relative_difference

pytestmark = pytest.mark.usefixtures("no_files_left")


class Gate(nn.Module):
    """One scalar trains; everything else is frozen and streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.1))
        self.stack = Stack().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x * self.gate)  # type: ignore[no-any-return]


class Quantized(nn.Module):
    """Frozen parameters of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(
            torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False
        )
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.002))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.codes.to(x.dtype)) * self.scale


ALL_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[str, Any]]] = {
    **MODELS,
    "no module list": (models.NoModuleList, features, {}),
    "one scalar trains": (Gate, features, {}),
    "integers": (lambda: Stack(Quantized), features, {}),
}


@pytest.mark.parametrize(
    ("name", "clipping", "dtype", "placement"),
    each_pair(ALL_MODELS, [0.0, 0.5], ["bf16", None], ["host", "nvme"]),
)
def test_model(name: str, clipping: float, dtype: str | None, placement: str, tmp_path: Path) -> None:
    make_model, make_input, over = ALL_MODELS[name]
    keys = {"clipping": clipping, "dtypes": (dtype,), "placements": (placement,), **over}
    check_everywhere(make_model, take_inputs(make_input), tmp_path, **keys)


def loss_of_output(engine: Any, seed: int) -> Tensor:
    x = features(seed).to(next(engine.module.parameters()).dtype)
    return (engine(x).float() - 1).pow(2).mean()  # type: ignore[no-any-return]


def test_sequential_of_different_classes(tmp_path: Path) -> None:
    check_everywhere(models.mixed_sequential, steps(loss_of_output), tmp_path)


# --- what is frozen or unused


def test_frozen_and_unused_parameters_do_not_move(tmp_path: Path) -> None:
    for make_model, still in (
        (models.FrozenMiddle, ("blocks.1.", "blocks.2.")),
        (lambda: Stack(models.LoraBlock), (".base.", ".before.")),
        (models.WithUnusedBlock, (".unused.", ".scale", "spare.")),
    ):
        torch.manual_seed(0)
        before = make_model().state_dict()
        config = make_config("nvme", tmp_path, dtype=None)
        after = run_engine(make_model, take_inputs(features), config).weights
        for name, value in after.items():
            assert torch.equal(value, before[name]) == any(part in name for part in still), name


def test_parameters_unused_in_some_micro_batches(tmp_path: Path) -> None:
    """Within a window and in whole steps; the step counts of Adam are per parameter, as in torch."""
    uses = [(0, 1, 2, 3), (0, 2), (3,), (1, 2), (2, 1), (2,), (), (), (), (0, 3), (3, 0), (1,)]

    loop = steps(lambda engine, seed: engine(features(seed), uses[seed]), len(uses))

    for clipping in (0.0, 0.5):
        for accumulation in (1, 3):
            outcome = check_everywhere(
                models.SometimesStack, loop, tmp_path, clipping=clipping, accumulation=accumulation
            )
            counts = {int(state["step"]) for state in outcome.states.values()}
            assert len(counts) > 1


def test_order_of_blocks_that_changes_every_step(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    uses = [tuple(torch.randperm(4, generator=generator)[: 1 + seed % 4].tolist()) for seed in range(12)]

    loop = steps(lambda engine, seed: engine(features(seed), (*uses[seed], uses[seed][0])), len(uses))

    check_everywhere(models.SometimesStack, loop, tmp_path, placements=("host", "nvme", "mixed"))


# --- weights used outside their module


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_weight_used_in_a_loss_function_outside_the_model(clipping: float, tmp_path: Path) -> None:
    def loss_outside(engine: Any, seed: int) -> Tensor:
        return TiedLM.loss(F.linear(engine(tokens(seed)), engine.module.emb.weight), tokens(seed))

    check_everywhere(models.HiddenLM, steps(loss_outside), tmp_path, clipping=clipping)


# --- evaluation between steps


def test_evaluation_between_steps_and_before_backward(tmp_path: Path) -> None:
    def evaluate(engine: Any, _seed: int) -> list[float]:
        engine.eval()
        with torch.no_grad():
            loss = engine(features(1000)).item()
        with torch.inference_mode():
            assert engine(features(1000)).item() == loss
        engine.train()
        return [loss]

    loop = steps(lambda engine, seed: engine(features(seed)), between=evaluate, after=evaluate)

    for clipping in (0.0, 0.5):
        check_everywhere(Stack, loop, tmp_path, clipping=clipping)
    # Evaluation leaves no trace in the training.
    config = make_config("nvme", tmp_path)
    with_evaluation = run_engine(Stack, loop, config)
    without = run_engine(Stack, take_inputs(features), config)
    assert all(torch.equal(without.weights[k], v) for k, v in with_evaluation.weights.items())


def test_evaluation_of_torchs_transformer_takes_its_fast_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = models.TorchTransformer().eval()
    torch.manual_seed(0)
    config = make_config("nvme", tmp_path, dtype=None)
    engine, *_ = offloadzero.initialize(model=models.TorchTransformer(), config=config)
    engine.eval()
    with torch.no_grad():
        assert engine(tokens(0)).item() == expected(tokens(0)).item()
    engine.close()


class OwnParameter(nn.Parameter):
    """A parameter of a script's own class."""


@pytest.mark.parametrize("kind", [nn.Parameter, OwnParameter])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_of_torchs_encoder_fills_the_padding_as_without_us(
    tmp_path: Path, kind: type[nn.Parameter]
) -> None:
    """A mean over all positions tells torch's nested tensors from what the layers make of padded positions."""
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False, False, True, True, True], [False] * 4 + [True]])
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16))
    for module in encoder.modules():
        for name, param in module._parameters.items():
            module._parameters[name] = None if param is None else kind(param.detach())
    expected = copy.deepcopy(encoder).eval()
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(16, 4)})
    for placement in ("resident", "host", "nvme"):
        engine, *_ = offloadzero.initialize(
            model=copy.deepcopy(model), config=make_config(placement, tmp_path, dtype=None)
        )
        for _ in range(2):
            engine.module["encoder"].eval()
            with torch.no_grad():
                found = engine.module["encoder"](x, src_key_padding_mask=padding)
                torch.testing.assert_close(found, expected(x, src_key_padding_mask=padding))
                broken = torch.ones(2, 3, dtype=torch.bool)
                with pytest.raises(RuntimeError, match=r"[Mm]ask"):  # no layer is called
                    engine.module["encoder"](x, src_key_padding_mask=broken)
            weight = engine.module["encoder"].layers[0].linear1.weight
            assert torch.equal(weight.clone(), expected.layers[0].linear1.weight)
            assert isinstance(weight, AwayParameter)
            engine.module["encoder"].train()
            trained = engine.module["encoder"](x, src_key_padding_mask=padding)
            assert not torch.equal(trained.detach()[padding], found[padding])
        engine.close()


# --- activation memory


class _Watch:
    """Weak references to the storages of activations."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Any]] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def num_alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.alive)


class _WatchedBlock(models.Block):
    watch: _Watch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.watch(self.up(self.norm(x)))))


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
@pytest.mark.parametrize("form", ["plain", "block", "inside"])
def test_checkpointing_frees_activations(form: str, placement: str, tmp_path: Path) -> None:
    """Inputs of GELU are kept by a plain forward and must be gone after a checkpointed one."""
    watch = _Watch()

    class Model(Stack):
        def run_blocks(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if form == "block":
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            return x

    class Inside(_WatchedBlock):
        def forward(self, x: Tensor) -> Tensor:
            if form == "inside":
                return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]
            return super().forward(x)

    engine, *_ = offloadzero.initialize(model=Model(Inside), config=make_config(placement, tmp_path))
    for block in engine.module.blocks:
        block.watch = watch
    loss = engine(features(0))
    assert len(watch.alive) == models.NUM_BLOCKS
    assert watch.num_alive() == (models.NUM_BLOCKS if form == "plain" else 0)
    engine.backward(loss)
    engine.step()
    assert len(watch.alive) == models.NUM_BLOCKS * (1 if form == "plain" else 2)
    assert watch.num_alive() == 0
    engine.close()


@pytest.mark.parametrize(
    ("form", "accumulation", "clipping"), each_pair(["block", "two blocks", "inside"], [1, 2], [0.0, 0.5])
)
def test_reentrant_checkpointing(form: str, accumulation: int, clipping: float, tmp_path: Path) -> None:
    """torch's older form: the forward saves nothing, a backward inside the backward runs it again."""

    def pair(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return second(first(x))  # type: ignore[no-any-return]

    class Reentrant(Stack):
        def run_blocks(self, x: Tensor) -> Tensor:
            if form == "two blocks":
                for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                    x = checkpoint(pair, first, second, x, use_reentrant=True)
                return x
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True) if form == "block" else block(x)
            return x

    class Inside(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            if form == "inside":
                return x + checkpoint(self.mlp, x, use_reentrant=True)  # type: ignore[no-any-return]
            return super().forward(x)

        def mlp(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]

    check_everywhere(
        lambda: Reentrant(Inside),
        take_inputs(features, num_steps=4),
        tmp_path,
        accumulation=accumulation,
        clipping=clipping,
    )


def test_save_on_cpu_around_the_model(tmp_path: Path) -> None:
    """A foreign pair of saved-tensor hooks sees activations, and weights stay right."""

    def forward(engine: Any, seed: int) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return engine(features(seed))

    check_everywhere(Stack, steps(forward), tmp_path)


# --- compilation, refusals


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_compiled_blocks(clipping: float, tmp_path: Path) -> None:
    """`block.forward = torch.compile(block.forward)`: bitwise over placements."""

    def compiled() -> nn.Module:
        model = Stack(num_blocks=3)
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager")
        return model

    outcomes = [
        run_engine(
            compiled, take_inputs(features, num_steps=3), make_config(placement, tmp_path, clipping=clipping)
        )
        for placement in ("resident", "host", "nvme")
    ]
    torch.compiler.reset()
    assert_same(outcomes[1], outcomes[0])
    assert_same(outcomes[2], outcomes[0])
    eager = run_engine(
        lambda: Stack(num_blocks=3),
        take_inputs(features, num_steps=3),
        make_config("nvme", tmp_path, clipping=clipping),
    )
    assert worst_relative_difference(outcomes[0].losses, eager.losses) < 2e-2


def test_trainable_parameters_of_an_unsupported_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"front\.weight.*float64"):
        offloadzero.initialize(model=Stack().double(), config=make_config("host", tmp_path, dtype=None))


def test_device_budget_that_is_too_small_is_refused_before_any_step(tmp_path: Path) -> None:
    over = {"offloadzero": {"budgets": {"device": "8KiB"}}}
    with pytest.raises(BudgetError, match=r"budgets\.device"):
        offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path, **over))


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_offloading_within_inference_mode(placement: str, tmp_path: Path) -> None:
    """The model trains outside of it as any other."""

    def losses(within: bool) -> list[float]:
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = make_config(placement, tmp_path, dtype=None)
        with torch.inference_mode(within):
            _, offloaded = offloadzero.offload(model, optimizer, config)
            found = [model(features(9)).item()]
        for seed in range(3):
            loss = model(features(seed))
            loss.backward()
            offloaded.step()
            offloaded.zero_grad()
            found.append(loss.item())
        offloaded.close()
        return found

    assert losses(within=True) == losses(within=False)
