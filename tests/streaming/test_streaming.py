"""Awkward models and loops under small leases: bitwise as with everything on the device, and right.

Right means near plain torch in fp32. Released leases are full of NaN in all of these.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offloadzero
from offloadzero.errors import BudgetError, ConfigError, NonFiniteError, StateError
from tests.support import models
from tests.support.faults import delays
from tests.support.models import WIDTH, Stack, TiedLM, features, tokens
from tests.support.training import (
    Config,
    Loop,
    Outcome,
    PlainEngine,
    assert_same,
    make_config,
    run_engine,
    run_plain,
    snapshot,
    worst_relative_difference,
)

NUM_STEPS = 4


def take_inputs(make_input: Callable[[int], Tensor], num_steps: int = NUM_STEPS) -> Loop:
    """The plain training loop over `make_input(0)`, `make_input(1)`, ..."""

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(num_steps):
            loss = engine(make_input(seed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    return loop


def check_everywhere(
    make_model: Callable[[], nn.Module],
    loop: Loop,
    directory: Path,
    *,
    placements: tuple[str, ...] = ("host", "nvme"),
    dtypes: tuple[str | None, ...] = ("bf16", None),
    tolerance: float = 2e-5,
    **options: Any,
) -> Outcome:
    """Bitwise equal in every dtype and near plain torch in the last, fp32; gives the fp32 outcome."""
    reference = Outcome([], {}, {})
    for dtype in dtypes:
        reference = run_engine(make_model, loop, make_config("resident", directory, dtype=dtype, **options))
        for placement in placements:
            config = make_config(placement, directory, dtype=dtype, **options)
            assert_same(run_engine(make_model, loop, config), reference)
    expected = run_plain(make_model, loop, make_config("resident", directory, dtype=None, **options))
    assert worst_relative_difference(reference.losses, expected.losses) < tolerance
    for name, value in expected.weights.items():
        torch.testing.assert_close(reference.weights[name], value, rtol=1e-4, atol=1e-5)
    return reference


LIVE = {"zero_optimization": {"stage3_max_live_parameters": 12_000}}  # two or three units
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[str, Any]]] = {
    "plain blocks": (Stack, features, {}),
    "tied head": (TiedLM, tokens, {}),
    "functional head": (models.FunctionalHeadLM, tokens, {}),
    "shared reader": (models.SharedReader, features, LIVE),
    "checkpointing": (models.CheckpointedStack, features, {}),
    "checkpointing inside": (lambda: Stack(models.InnerCheckpointBlock), features, {}),
    "lora": (lambda: Stack(models.LoraBlock), features, {}),
    "frozen middle": (models.FrozenMiddle, features, {}),
    "frozen front": (models.FrozenFront, features, {}),
    "unused parameters": (models.WithUnusedBlock, features, {}),
    "blocks used twice": (models.SharedBlocks, features, {}),
    "structured outputs": (models.StructuredStack, features, {}),
    "outputs without gradient": (models.NoGradOutputs, features, {}),
    "odd sizes": (models.OddSizes, features, {}),
    "torch's transformer": (models.TorchTransformer, tokens, {}),
}


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, clipping: float, tmp_path: Path) -> None:
    make_model, make_input, over = MODELS[name]
    check_everywhere(make_model, take_inputs(make_input), tmp_path, clipping=clipping, **over)


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_model_without_a_module_list(clipping: float, tmp_path: Path) -> None:
    check_everywhere(models.NoModuleList, take_inputs(features), tmp_path, clipping=clipping)


def loss_of_output(engine: Any) -> list[float]:
    losses = []
    for seed in range(NUM_STEPS):
        x = features(seed).to(next(engine.module.parameters()).dtype)
        loss = (engine(x).float() - 1).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_sequential_of_different_classes(tmp_path: Path) -> None:
    check_everywhere(models.mixed_sequential, loss_of_output, tmp_path)


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

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed, use in enumerate(uses):
            loss = engine(features(seed), use)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    for clipping in (0.0, 0.5):
        for accumulation in (1, 3):
            outcome = check_everywhere(
                models.SometimesStack, loop, tmp_path, clipping=clipping, accumulation=accumulation
            )
            steps = {int(state["step"]) for state in outcome.states.values()}
            assert len(steps) > 1


def test_order_of_blocks_that_changes_every_step(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    uses = [tuple(torch.randperm(4, generator=generator)[: 1 + seed % 4].tolist()) for seed in range(12)]

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed, use in enumerate(uses):
            loss = engine(features(seed), (*use, use[0]))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    check_everywhere(models.SometimesStack, loop, tmp_path, placements=("host", "nvme", "mixed"))


def test_frozen_model_without_optimizer_states(tmp_path: Path) -> None:
    """One trainable scalar, everything else frozen and streamed."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.tensor(0.1))
            self.stack = Stack().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.stack(x * self.gate)

    check_everywhere(Gate, take_inputs(features), tmp_path)


def test_frozen_integer_parameters_are_streamed(tmp_path: Path) -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.002))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(x, self.codes.to(x.dtype)) * self.scale

    check_everywhere(lambda: Stack(Quantized), take_inputs(features), tmp_path)


# --- weights used outside their module


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_weight_used_in_a_loss_function_outside_the_model(clipping: float, tmp_path: Path) -> None:
    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            hidden = engine(tokens(seed))
            loss = TiedLM.loss(F.linear(hidden, engine.module.emb.weight), tokens(seed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    check_everywhere(models.HiddenLM, loop, tmp_path, clipping=clipping)


# --- accumulation, in three ways


def test_accumulation_counted_set_and_suppressed_agree(tmp_path: Path) -> None:
    """The engine's counting, set_gradient_accumulation_boundary and no_sync give the same bits."""
    counted = take_inputs(features, num_steps=9)

    def with_boundary(engine: Any) -> list[float]:
        losses = []
        for seed in range(9):
            engine.set_gradient_accumulation_boundary(seed % 3 == 2)
            losses += take_inputs(lambda _, seed=seed: features(seed), num_steps=1)(engine)
        return losses

    def with_no_sync(engine: Any) -> list[float]:
        losses = []
        for seed in range(9):
            one = take_inputs(lambda _, seed=seed: features(seed), num_steps=1)
            if seed % 3 == 2:
                engine.set_gradient_accumulation_boundary(True)
                losses += one(engine)
            else:
                with engine.no_sync():
                    losses += one(engine)
        return losses

    for clipping in (0.0, 0.5):
        reference = check_everywhere(Stack, counted, tmp_path, accumulation=3, clipping=clipping)
        for placement in ("resident", "host", "nvme"):
            config = make_config(placement, tmp_path, dtype=None, accumulation=3, clipping=clipping)
            assert_same(run_engine(Stack, with_boundary, config), reference)
            assert_same(run_engine(Stack, with_no_sync, config), reference)


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_plain_loop_is_the_engine(clipping: float, accumulation: int, tmp_path: Path) -> None:
    """offload(): backward, step, zero_grad as in any script, with a scheduler on the optimizer."""

    def run(placement: str) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        config = make_config(placement, tmp_path, accumulation=accumulation, clipping=clipping)
        model, offloaded = offloadzero.offload(model, optimizer, config)
        losses = []
        for step in range(NUM_STEPS):
            offloaded.zero_grad()
            for micro in range(accumulation):
                loss = model(features(step * accumulation + micro))
                (loss / accumulation).backward()
                losses.append(loss.item())
            assert all(param.grad is not None for param in model.parameters())
            offloaded.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        offloaded.close()
        return losses, weights

    loop = take_inputs(features, num_steps=NUM_STEPS * accumulation)
    config = make_config("resident", tmp_path, accumulation=accumulation, clipping=clipping)
    expected = run_engine(Stack, loop, config)
    for placement in ("resident", "host", "nvme"):
        losses, weights = run(placement)
        assert losses == expected.losses
        assert all(torch.equal(weights[name], value) for name, value in expected.weights.items())


def test_accumulation_without_homes_for_gradients_is_refused_not_awaited(tmp_path: Path) -> None:
    for placement in ("host", "nvme", "resident"):
        engine, *_ = offloadzero.initialize(
            model=Stack(num_blocks=6), config=make_config(placement, tmp_path, accumulation=1)
        )
        with engine.no_sync():
            loss = engine(features(0))
            with pytest.raises(StateError, match="gradient_accumulation_steps"):
                engine.backward(loss)
        engine.close()


# --- param groups, schedules, closures, dropped gradients


def test_param_groups_with_their_own_hyperparameters(tmp_path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        return [
            {"params": matrices, "lr": 2e-3, "weight_decay": 0.2},
            {"params": vectors, "lr": 5e-4, "weight_decay": 0.0, "betas": (0.8, 0.95)},
        ]

    def loop(engine: Any) -> list[float]:
        """The learning rates change after every step."""
        losses = []
        for seed in range(NUM_STEPS):
            losses += take_inputs(lambda _, seed=seed: features(seed), num_steps=1)(engine)
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.7
        return losses

    outcomes = []
    for placement in ("resident", "host", "nvme"):
        torch.manual_seed(0)
        model = Stack()
        engine, *_ = offloadzero.initialize(
            model=model,
            model_parameters=groups(model),
            config=make_config(placement, tmp_path, dtype=None),
        )
        losses = loop(engine)
        outcomes.append(snapshot(engine, losses))
        engine.close()
    assert_same(outcomes[1], outcomes[0])
    assert_same(outcomes[2], outcomes[0])
    torch.manual_seed(0)
    model = Stack()
    plain = PlainEngine(model, make_config("resident", tmp_path, dtype=None), groups(model))
    assert worst_relative_difference(outcomes[0].losses, loop(plain)) < 2e-5
    for name, value in plain.module.state_dict().items():
        torch.testing.assert_close(outcomes[0].weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_learning_rate_schedulers_on_the_param_groups(tmp_path: Path) -> None:
    def run(form: str) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = make_config("nvme", tmp_path, dtype=None)
        close = None
        if form == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if form != "plain":
            model, optimizer = offloadzero.offload(model, optimizer, config)  # type: ignore[assignment]
            close = optimizer.close  # type: ignore[attr-defined]
        if form != "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        losses, rates = [], []
        for seed in range(NUM_STEPS):
            loss = model(features(seed))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
        if close is not None:
            close()
        return losses, rates

    losses, rates = run("plain")
    assert rates == pytest.approx([5e-3, 2.5e-3, 1.25e-3, 6.25e-4])
    for form in ("after", "before"):
        offloaded = run(form)
        assert offloaded[1] == rates
        assert worst_relative_difference(offloaded[0], losses) < 2e-5


def test_hyperparameters_changed_too_late_are_refused(tmp_path: Path) -> None:
    """An update in backward has used the old learning rate already."""
    engine, optimizer, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path))
    engine.backward(engine(features(0)))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StateError, match="in_backward"):
        engine.step()
    engine.close()


def test_hyperparameters_set_between_backward_and_step_are_used(tmp_path: Path) -> None:
    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            loss = engine(features(seed))
            engine.backward(loss)
            for group in engine.optimizer.param_groups:
                group["lr"] = 1e-3 * (seed + 1)
            engine.step()
            losses.append(loss.item())
        return losses

    check_everywhere(Stack, loop, tmp_path, clipping=0.5)


def test_step_with_a_closure(tmp_path: Path) -> None:
    for clipping in (0.0, 0.5):
        config = make_config("nvme", tmp_path, clipping=clipping)

        def loop(engine: Any) -> list[float]:
            losses = []
            for seed in range(NUM_STEPS):

                def closure(seed: int = seed) -> float:
                    assert torch.is_grad_enabled()
                    loss = engine.module(features(seed))
                    loss.backward()
                    return loss.item()

                losses.append(engine.optimizer.step(closure))
            return losses

        assert_same(run_engine(Stack, loop, config), run_engine(Stack, take_inputs(features), config))


def test_zero_grad_drops_gradients(tmp_path: Path) -> None:
    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            (engine(features(100 + seed)) * 1000).backward()
            engine.zero_grad()
            losses += take_inputs(lambda _, seed=seed: features(seed), num_steps=1)(engine)
        return losses

    for placement in ("resident", "host", "nvme", "mixed"):
        config = make_config(placement, tmp_path, clipping=0.5)
        assert_same(run_engine(Stack, loop, config), run_engine(Stack, take_inputs(features), config))


def test_a_backward_that_raised_can_be_dropped(tmp_path: Path) -> None:
    """Gradients of the half that ran are gone after zero_grad()."""

    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, _grad: Tensor) -> Tensor:
            raise RuntimeError("by design")

    class Model(Stack):
        explode = False

        def run_blocks(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = Explodes.apply(x) if self.explode and index == 2 else x
                x = block(x)
            return x

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            engine.module.explode = True
            loss = engine(features(50 + seed))
            with pytest.raises(RuntimeError, match="by design"):
                engine.backward(loss)
            with pytest.raises(StateError):
                engine.step()
            engine.zero_grad()
            engine.module.explode = False
            losses += take_inputs(lambda _, seed=seed: features(seed), num_steps=1)(engine)
        return losses

    for placement in ("host", "nvme"):
        config = make_config(placement, tmp_path, clipping=0.5)
        # A refused engine.step() counts as a micro step only when it is not refused.
        assert_same(run_engine(Model, loop, config), run_engine(Model, take_inputs(features), config))


# --- evaluation between steps


def test_evaluation_between_steps_and_before_backward(tmp_path: Path) -> None:
    def evaluate(engine: Any) -> float:
        engine.eval()
        with torch.no_grad():
            loss = engine(features(1000)).item()
        with torch.inference_mode():
            assert engine(features(1000)).item() == loss
        engine.train()
        return loss

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            loss = engine(features(seed))
            losses.append(evaluate(engine))
            engine.backward(loss)
            engine.step()
            losses += [loss.item(), evaluate(engine)]
        return losses

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


# --- clipping


def test_global_norm_is_exact(tmp_path: Path) -> None:
    """Against clip_grad_norm_ on a plain fp32 copy, over unused parameters and micro batches."""

    def loop_of(norms: list[float]) -> Loop:
        def loop(engine: Any) -> list[float]:
            losses = []
            for seed in range(6):
                loss = engine(features(seed), (0, 2, 3))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                if seed % 2:
                    plain = isinstance(engine, PlainEngine)
                    norms.append(engine.norm if plain else engine.get_global_grad_norm())
            return losses

        return loop

    expected: list[float] = []
    options = {"dtype": None, "clipping": 0.01, "accumulation": 2}
    plain = run_plain(models.SometimesStack, loop_of(expected), make_config("resident", tmp_path, **options))
    found: dict[str, list[float]] = {}
    for placement in ("resident", "host", "nvme", "mixed"):
        norms = found.setdefault(placement, [])
        outcome = run_engine(
            models.SometimesStack, loop_of(norms), make_config(placement, tmp_path, **options)
        )
        assert worst_relative_difference(outcome.losses, plain.losses) < 2e-5
    assert found["resident"] == found["host"] == found["nvme"] == found["mixed"]
    assert found["host"] == pytest.approx(expected, rel=2e-5)
    assert min(expected) > 0.05  # clipping did something


def test_global_norm_without_clipping(tmp_path: Path) -> None:
    """Updates in backward know the norm too, after the fact."""
    torch.manual_seed(0)
    plain = Stack()
    plain(features(0)).backward()
    expected = float(
        torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    )
    for placement in ("resident", "host", "nvme"):
        torch.manual_seed(0)
        engine, *_ = offloadzero.initialize(
            model=Stack(), config=make_config(placement, tmp_path, dtype=None)
        )
        engine.backward(engine(features(0)))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-6)
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


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("form", ["block", "two blocks", "inside"])
def test_reentrant_checkpointing(form: str, accumulation: int, tmp_path: Path) -> None:
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

    for clipping in (0.0, 0.5):
        check_everywhere(
            lambda: Reentrant(Inside),
            take_inputs(features, num_steps=4),
            tmp_path,
            accumulation=accumulation,
            clipping=clipping,
        )


def test_save_on_cpu_around_the_model(tmp_path: Path) -> None:
    """A foreign pair of saved-tensor hooks sees activations, and weights stay right."""

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            with torch.autograd.graph.save_on_cpu():
                loss = engine(features(seed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    check_everywhere(Stack, loop, tmp_path)


# --- state dicts


def test_state_dict_has_plain_torchs_names_shapes_and_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Stack(models.RunningNormBlock).state_dict()
    torch.manual_seed(0)
    config = make_config("nvme", tmp_path, dtype=None)
    engine, *_ = offloadzero.initialize(model=Stack(models.RunningNormBlock), config=config)
    found = engine.module.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    part = engine.module.blocks[1].linear.state_dict()
    assert torch.equal(part["weight"], expected["blocks.1.linear.weight"])
    engine.close()


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_running_statistics_are_those_of_torch(clipping: float, tmp_path: Path) -> None:
    def make_model() -> nn.Module:
        return Stack(models.RunningNormBlock)

    # torch wants statistics in the parameters' dtype, and buffers keep theirs: fp32.
    outcome = check_everywhere(
        make_model,
        take_inputs(features),
        tmp_path,
        clipping=clipping,
        dtypes=(None,),
        placements=("nvme", "mixed"),
    )
    assert int(outcome.weights["blocks.0.norm.num_batches_tracked"]) == NUM_STEPS
    assert not any(name.endswith("offsets") for name in outcome.weights)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
def test_training_goes_on_from_state_dicts_under_another_placement(
    dtype: str | None, clipping: float, tmp_path: Path
) -> None:
    def config(placement: str) -> Config:
        return make_config(placement, tmp_path, dtype=dtype, clipping=clipping)

    def make_input(seed: int) -> Tensor:
        return features(seed)

    whole = run_engine(Stack, take_inputs(make_input, num_steps=6), config("resident"))
    chain = ["nvme", "resident", "mixed", "host"]
    for first, second in zip(chain, chain[1:] + chain[:1], strict=True):
        torch.manual_seed(0)
        engine, *_ = offloadzero.initialize(model=Stack(), config=config(first))
        losses = take_inputs(make_input, num_steps=3)(engine)
        # Right after the step, which has not waited for the updates.
        optimizer_state, model_state = engine.optimizer.state_dict(), engine.module.state_dict()
        engine.close()
        torch.manual_seed(99)
        engine, *_ = offloadzero.initialize(model=Stack(), config=config(second))
        engine.backward(engine(features(77)))  # leaves other weights, moments and leases behind
        engine.step()
        engine.module.load_state_dict(model_state)
        engine.optimizer.load_state_dict(optimizer_state)
        losses += take_inputs(lambda seed: make_input(seed + 3), num_steps=3)(engine)
        assert_same(snapshot(engine, losses), whole)
        engine.close()


def test_optimizer_state_dict_is_torchs(tmp_path: Path) -> None:
    """It loads into torch.optim.AdamW, and AdamW's loads here."""
    loop = take_inputs(features)
    config = make_config("nvme", tmp_path, dtype=None)
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    loop(engine)
    torch.manual_seed(0)
    plain = Stack()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer.load_state_dict(engine.optimizer.state_dict())
    plain.load_state_dict(engine.module.state_dict())
    torch.manual_seed(5)
    other, *_ = offloadzero.initialize(model=Stack(), config=config)
    other.module.load_state_dict(plain.state_dict())
    other.optimizer.load_state_dict(optimizer.state_dict())
    for seed in range(10, 13):
        losses = []
        for candidate in (engine, other):
            loss = candidate(features(seed))
            candidate.backward(loss)
            candidate.step()
            losses.append(loss.item())
        optimizer.zero_grad()
        loss = plain(features(seed))
        loss.backward()
        optimizer.step()
        assert losses[0] == losses[1]
        assert losses[0] == pytest.approx(loss.item(), rel=2e-5)
    engine.close()
    other.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_submodule_loads_a_state_dict(placement: str, dtype: str | None, tmp_path: Path) -> None:
    """The masters follow: the next update starts from the loaded weights."""
    config = make_config(placement, tmp_path, dtype=dtype, lr=1e-6)
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    block = engine.module.blocks[1]
    loaded = {name: torch.full_like(value, 0.25) for name, value in block.state_dict().items()}
    assert str(block.load_state_dict(loaded)) == "<All keys matched successfully>"
    loss = engine(features(0))
    engine.backward(loss)
    engine.step()
    for name, value in block.state_dict().items():
        assert torch.allclose(value.float(), torch.tensor(0.25), atol=1e-3), name
    incomplete = {name: value for name, value in loaded.items() if name != "up.bias"}
    assert block.load_state_dict(incomplete, strict=False).missing_keys == ["up.bias"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        block.load_state_dict({**loaded, "up.bias": torch.zeros(3)})
    engine.close()


def test_optimizer_state_right_after_step_is_the_steps(tmp_path: Path, faults: ExitStack) -> None:
    """`step()` returns before the update thread has decided; the state dict must wait for it."""
    faults.enter_context(delays("decider.decide", 0.1))
    engine, *_ = offloadzero.initialize(model=Stack(), config=make_config("host", tmp_path, clipping=0.5))
    engine.backward(engine(features(0)))
    engine.step()
    state = engine.optimizer.state_dict()["state"]
    assert {int(values["step"]) for values in state.values()} == {1}
    assert all(bool(values["exp_avg"].any()) for values in state.values())
    engine.close()


# --- misuse of graphs


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_backward_through_a_graph_from_before_the_step(
    placement: str, clipping: float, tmp_path: Path
) -> None:
    engine, *_ = offloadzero.initialize(
        model=Stack(), config=make_config(placement, tmp_path, clipping=clipping)
    )
    old = engine(features(1))
    engine.backward(engine(features(0)))
    engine.step()
    with pytest.raises(StateError, match="updated between this forward and its backward"):
        engine.backward(old)
    engine.close()


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_second_backward_before_step_with_updates_in_backward(placement: str, tmp_path: Path) -> None:
    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            loss, again = engine(features(seed)), engine(features(seed + 50))
            engine.backward(loss)
            with pytest.raises(StateError, match=r"gradient_accumulation_steps|updated between this forward"):
                engine.backward(again)
            with pytest.raises(StateError, match=r"updated in backward.*in_backward"):
                engine(features(seed + 50))  # with the weights after the step
            with pytest.raises(StateError, match=r"updated in backward.*in_backward"):
                next(engine.module.parameters()).sum()
            engine.step()
            losses.append(loss.item())
        return losses

    config = make_config(placement, tmp_path)
    # What the refused backward had computed is in no later step.
    assert_same(run_engine(Stack, loop, config), run_engine(Stack, take_inputs(features), config))


@pytest.mark.parametrize("update", ["in_backward", "at_step"])
def test_retained_graph_twice(update: str, tmp_path: Path) -> None:
    """Two backward passes through one graph add up, as in torch."""

    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            loss = engine(features(seed))
            (loss / 2).backward(retain_graph=True)
            (loss / 2).backward()
            if isinstance(engine, PlainEngine):
                engine.step_now()
            else:
                engine.optimizer.step()
            losses.append(loss.item())
        return losses

    options: dict[str, Any] = {"clipping": 0.5 if update == "at_step" else 0.0}
    if update == "in_backward":
        # The engine's counter would call every backward a boundary; the optimizer's own counting is used.
        def counted(engine: Any) -> list[float]:
            if not isinstance(engine, PlainEngine):
                engine.optimizer.runtime.accumulation.ends_with_step = False
            return loop(engine)

        check_everywhere(Stack, counted, tmp_path, accumulation=2, **options)
    else:
        check_everywhere(Stack, loop, tmp_path, **options)


def test_detached_use_of_a_weight(tmp_path: Path) -> None:
    """Exact when updates come after backward; refused, not wrong, when they come in it."""

    class Detaching(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h + F.linear(torch.tanh(h) * x, self.up.weight.detach()[:WIDTH])

    check_everywhere(lambda: Stack(Detaching), take_inputs(features), tmp_path, clipping=0.5)


# --- loss scaling


@pytest.mark.parametrize("placement", ["resident", "host", "nvme", "mixed"])
def test_overflow_skips_the_step(placement: str, tmp_path: Path) -> None:
    scale = {"loss_scale": 0, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}
    config = make_config(
        placement,
        tmp_path,
        dtype="fp16",
        fp16=scale,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
    )
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    take_inputs(features, num_steps=2)(engine)
    before, rate = snapshot(engine, []), engine.get_lr()
    assert engine.loss_scale == 256.0
    loss = engine(features(5)) * 1e6  # overflows fp16 on its way back
    engine.backward(loss)
    engine.step()
    assert not engine.was_step_applied()
    assert engine.loss_scale == 128.0
    assert (engine.skipped_steps, engine.global_steps) == (1, 3)
    assert engine.get_lr() == rate
    assert math.isnan(engine.get_global_grad_norm())
    after = snapshot(engine, [])
    after.norm = before.norm
    assert_same(after, before)
    loss = engine(features(6))
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied()
    assert engine.get_lr() != rate
    assert not torch.equal(engine.module.state_dict()["out.weight"], before.weights["out.weight"])
    engine.close()


def test_training_over_overflows_is_the_same_everywhere(tmp_path: Path) -> None:
    """A scale that starts far too high: most of the first steps are skipped."""
    scale = {"loss_scale": 0, "initial_scale_power": 30, "hysteresis": 2, "loss_scale_window": 3}

    def loop(engine: Any) -> list[float]:
        losses = take_inputs(features, num_steps=40)(engine)
        skipped.append(engine.skipped_steps)
        return losses

    skipped: list[int] = []
    outcomes = [
        run_engine(Stack, loop, make_config(placement, tmp_path, dtype="fp16", fp16=scale, clipping=0.5))
        for placement in ("resident", "host", "nvme", "mixed")
    ]
    assert len(set(skipped)) == 1
    assert 10 < skipped[0] < 38
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])


def test_fp16_without_scaling_is_refused(tmp_path: Path) -> None:
    config = make_config("host", tmp_path, dtype="fp16")
    engine, *_ = offloadzero.initialize(model=Stack(), config=config)
    loss = engine(features(0))
    with pytest.raises(StateError, match="scale"):
        loss.backward()
    engine.close()


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_gradient_that_is_not_finite_stops_the_training(
    placement: str, clipping: float, tmp_path: Path
) -> None:
    engine, *_ = offloadzero.initialize(
        model=Stack(), config=make_config(placement, tmp_path, clipping=clipping)
    )
    take_inputs(features, num_steps=1)(engine)

    def step() -> None:
        """The failure shows at the next use after another thread has met it."""
        engine.backward(engine(features(1)) * float("nan"))
        engine.step()
        engine.synchronize()

    with pytest.raises(NonFiniteError, match="step 2: the gradient of"):
        step()
    with pytest.raises(NonFiniteError, match="step 2: the gradient of"):
        engine(features(2))
    engine.close()  # it was raised: not again


def test_gradient_that_is_not_finite_can_be_skipped(tmp_path: Path) -> None:
    def loop(engine: Any) -> list[float]:
        losses = []
        for seed in range(NUM_STEPS):
            engine.backward(engine(features(seed + 30)) * float("inf"))
            engine.step()
            losses += take_inputs(lambda _, seed=seed: features(seed), num_steps=1)(engine)
        return losses

    over = {"offloadzero": {"update": {"on_nonfinite": "skip"}}}
    for placement in ("host", "nvme"):
        config = make_config(placement, tmp_path, **over)
        assert_same(run_engine(Stack, loop, config), run_engine(Stack, take_inputs(features), config))


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


@pytest.fixture(autouse=True)
def _no_files_left(tmp_path: Path) -> Iterator[None]:
    """Engines that were closed leave nothing behind."""
    yield
    assert not list(tmp_path.rglob("*.bin"))
