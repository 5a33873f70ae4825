"""Traced micro batches against runs of the same models: bytes by torch's profiler, operations by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offloadzero.planning.model.shapes import ModelShape, read_shape
from offloadzero.planning.model.trace import (
    CallForm,
    Event,
    MicroBatchTrace,
    TraceError,
    TraceLog,
    trace_call,
    trace_micro_batch,
    trace_of,
)
from tests.support.models import Stack
from tests.support.tiny import TinyModel

ROWS, LENGTH, VOCABULARY = 2, 96, 997


def shape(text: str) -> ModelShape:
    found = read_shape("--model", text)
    assert found is not None
    return found


LLAMA, GPT = shape(f"llama:128/4/4/{VOCABULARY}/256/2"), shape(f"gpt:128/4/4/{VOCABULARY}")
BLOCKS = {LLAMA: [f"model.layers.{i}" for i in range(4)], GPT: [f"transformer.h.{i}" for i in range(4)]}


def trace(build: Callable[[], nn.Module], **given: Any) -> MicroBatchTrace:
    with torch.device("meta"):
        model = build()
    return trace_micro_batch(
        model, **{"dtype": torch.bfloat16, "micro_batch": ROWS, "sequence": LENGTH, **given}
    )


def peak_by_profiler(one: ModelShape, checkpointed: Collection[str]) -> int:
    """Of the bytes that the CPU's allocator has given out in forward and backward, gradients dropped when complete."""
    model = one.build().to(torch.bfloat16)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    for name in checkpointed:
        module = model.get_submodule(name)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    model(ids).backward()  # what is made once
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=activities) as profile:
        model(ids).backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert live == 0, "every byte was given back: none was missed"
    return peak


@pytest.mark.parametrize("one", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_peak_is_the_profilers(one: ModelShape, is_checkpointed: bool) -> None:
    names = BLOCKS[one] if is_checkpointed else ()
    found = trace(one.build, checkpointed=names)
    # A checkpoint keeps the state of the generator, 5 KiB, where it is not told to leave that out.
    beside = len(names) * (5 << 10)
    assert found.peak_bytes == pytest.approx(peak_by_profiler(one, names) - beside, rel=0.01)


def test_operations_are_those_of_the_products() -> None:
    num_tokens = ROWS * LENGTH
    per_block = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    head = 128 * VOCABULARY
    products = 2 * num_tokens * (4 * per_block + head)
    attention = 4 * 4 * ROWS * LENGTH * LENGTH * 128  # four blocks, two products of length^2 x width
    plain, again = trace(LLAMA.build), trace(LLAMA.build, checkpointed=BLOCKS[LLAMA])
    assert plain.forward_flops == again.forward_flops == products + attention
    assert plain.backward_flops == 2 * products + 5 * attention // 2
    # Recomputation stops at the last tensor that is saved: of a block it leaves the last product out.
    last = 2 * num_tokens * 4 * 128 * 256
    assert again.backward_flops - plain.backward_flops == products - 2 * num_tokens * head + attention - last


def test_checkpoints_keep_inputs_alone() -> None:
    plain, again = trace(LLAMA.build), trace(LLAMA.build, checkpointed=BLOCKS[LLAMA])
    hidden, rotary = ROWS * LENGTH * 128 * 2, LENGTH * 32 * 2
    assert (plain.inputs, plain.input_bytes) == ((), 0)
    first, *others = again.inputs
    assert (first.sent, first.fetched, first.own) == (hidden + 2 * rotary, hidden + 2 * rotary, hidden)
    assert [(call.sent, call.home) for call in others] == [(hidden, hidden)] * 3, "both tables leave once"
    assert again.home_bytes == 4 * hidden + 2 * 8192
    assert again.input_bytes == hidden + 2 * 8192, "as input_bytes of the configuration has it"
    assert again.largest_input_bytes == hidden
    assert again.kept_bytes < 0.5 * plain.kept_bytes


def test_bytes_grow_with_the_batch_and_not_with_frozen_gradients() -> None:
    one, two = trace(GPT.build), trace(GPT.build, micro_batch=2 * ROWS)
    assert two.kept_bytes == pytest.approx(2 * one.kept_bytes, rel=0.02)
    assert trace(GPT.build, dtype=torch.float32).kept_bytes > 1.5 * one.kept_bytes

    def frozen() -> nn.Module:
        model = GPT.build().requires_grad_(False)
        model.get_submodule("transformer.h.3").requires_grad_(True)
        return model

    assert trace(frozen).backward_flops < 0.5 * one.backward_flops


class Dropping(nn.Module):
    """Attention with dropout, called as scripts do and as transformers does."""

    def __init__(self, dropout: float, *, named: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 32)
        self.dropout, self.named = dropout, named

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids).unflatten(-1, (2, 16)).transpose(1, 2)
        if self.named:
            x = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout, is_causal=True)
        else:
            x = nn.functional.scaled_dot_product_attention(x, x, x, None, self.dropout, True)
        return x.float().sum()


@pytest.mark.parametrize("named", [True, False])
def test_a_device_keeps_no_probabilities_for_dropout(named: bool) -> None:
    def traced(dropout: float, *, on_cpu: bool) -> MicroBatchTrace:
        return trace(lambda: Dropping(dropout, named=named), on_cpu=on_cpu)

    without = traced(0.0, on_cpu=True)
    assert traced(0.1, on_cpu=False) == traced(0.0, on_cpu=False) == without
    probabilities = ROWS * 2 * LENGTH**2 * torch.bfloat16.itemsize
    assert traced(0.1, on_cpu=True).kept_bytes > without.kept_bytes + probabilities


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=256, vocab_size=VOCABULARY)
    theirs, ours = trace(lambda: transformers.LlamaForCausalLM(config)), trace(LLAMA.build)
    assert theirs.flops == pytest.approx(ours.flops, rel=0.001)
    assert theirs.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.15)


def test_the_products_of_experts_are_counted_by_the_tokens_that_reach_them() -> None:
    """Each token has two of eight experts: of three products each, forward once and backward twice."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
    config = transformers.MixtralConfig(**sizes, **experts, intermediate_size=256, vocab_size=VOCABULARY)
    found = trace(lambda: transformers.MixtralForCausalLM(config))
    num_tokens = ROWS * LENGTH
    per_block = 4 * 128 * 128 + 128 * 8 + 2 * 3 * 128 * 256
    products = 2 * num_tokens * (2 * per_block + 128 * VOCABULARY)
    attention = 2 * 4 * ROWS * LENGTH * LENGTH * 128
    assert found.uncounted == ()
    assert found.forward_flops == products + attention
    assert found.backward_flops == 2 * products + 5 * attention // 2


@torch.library.custom_op("offloadzero_tests::twisted_matmul", mutates_args=())
def twisted_matmul(left: Tensor, right: Tensor) -> Tensor:
    """A product of which nobody has a formula."""
    return left @ right


@twisted_matmul.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def test_a_product_without_a_formula_is_said() -> None:
    class Twisted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 32)
            self.head = nn.Linear(32, VOCABULARY, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.embed(ids)
            with torch.no_grad():
                twisted: Tensor = twisted_matmul(hidden, torch.ones(32, 32, dtype=hidden.dtype))
            return self.head(hidden + twisted)  # type: ignore[no-any-return]

    found = trace(Twisted)
    assert found.uncounted == ("offloadzero_tests.twisted_matmul",)
    assert trace(LLAMA.build).uncounted == trace(GPT.build).uncounted == ()


def test_a_tied_model_that_gives_its_loss() -> None:
    assert trace(TinyModel).flops > 0


def test_what_takes_no_token_ids_is_an_error_with_its_reason() -> None:
    with pytest.raises(TraceError, match=r"Stack: \w+: "):
        trace(Stack)

    class TellsNothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            return {"nothing": ids + self.weight.sum()}

    with pytest.raises(TraceError, match="TellsNothing gives dict for token ids: no loss and no logits"):
        trace(TellsNothing)


def test_an_operation_that_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """torch logs a traceback of many lines beside its error."""

    class Mismatched(TinyModel):
        def forward(self, ids: Tensor) -> Tensor:
            del ids
            weight = next(self.parameters())
            return (weight.new_empty(4, 25) + weight.new_empty(1, 26)).sum()

    with pytest.raises(TraceError, match=r"Mismatched: RuntimeError: .* broadcast"):
        trace(Mismatched)
    assert not caplog.records


def test_an_error_in_a_checkpointed_module_leaves_nothing_to_the_next_trace() -> None:
    """In torch 2.11 hooks stayed in force while someone held the error: "Mixing fake modes NYI"."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(f"of {len(x)} rows")

    def build_failing() -> nn.Module:
        model = TinyModel()
        model.blocks[1].up = Failing()
        return model

    names = [f"blocks.{i}" for i in range(4)]
    with pytest.raises(TraceError, match="TinyModel: ValueError: of 2 rows") as held:
        trace(build_failing, checkpointed=names)
    assert trace(TinyModel, checkpointed=names).flops > 0
    del held


def test_a_model_that_refuses_its_dtype_is_an_error_with_its_reason() -> None:
    """As quantized ones of transformers do."""

    class Quantized(TinyModel):
        def to(self, *args: Any, **_: Any) -> Any:
            raise ValueError(f"no cast to {args}")

    with pytest.raises(TraceError, match=r"Quantized: ValueError: no cast to \(torch.bfloat16,\)"):
        trace(Quantized)


# --- a call as a script makes it ---


def trace_of_call(build: Callable[[], nn.Module], *args: Any, **kwargs: Any) -> MicroBatchTrace:
    with torch.device("meta"):
        model = build()
    return trace_call(model, CallForm(args, kwargs), dtype=torch.bfloat16)


def test_a_call_with_token_ids_has_the_operations_of_a_micro_batch() -> None:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    expected = trace(LLAMA.build)
    found = trace_of_call(LLAMA.build, ids)
    assert (found.num_tokens, found.forward_flops, found.backward_flops) == (
        ROWS * LENGTH,
        expected.forward_flops,
        expected.backward_flops,
    )
    assert found.uncounted == ()


class Named(nn.Module):
    """Gives what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, pair: tuple[Tensor, list[Tensor]], *, what: str, factor: float) -> Any:
        x = self.linear(pair[0]) * factor + pair[1][0]
        return {"tensor": x, "detached": x.detach(), "nested": {"sum": x.sum(), "input": pair[0]}}[what]


@pytest.mark.parametrize("what", ["tensor", "nested"])
def test_arguments_and_results_may_have_any_form(what: str) -> None:
    x = torch.zeros(4, 16, dtype=torch.bfloat16)
    found = trace_of_call(Named, (x, [x]), what=what, factor=2.0)
    assert (found.forward_flops, found.backward_flops) == (2 * 4 * 16 * 16, 2 * 4 * 16 * 16)
    assert found.num_tokens == 0
    x.requires_grad_()
    found = trace_of_call(Named, (x, [x]), what=what, factor=2.0)
    assert found.backward_flops == 2 * 2 * 4 * 16 * 16, "the input has a gradient, too"


def test_a_call_that_cannot_be_made_again_is_named() -> None:
    x = torch.zeros(4, 16, dtype=torch.bfloat16)
    with pytest.raises(TraceError, match="Named gives nothing that has a backward"):
        trace_of_call(Named, (x, [x]), what="detached", factor=2.0)
    with pytest.raises(TraceError, match="Named is called with an object: object"):
        trace_of_call(Named, (x, [x]), what=object(), factor=2.0)
    with pytest.raises(TraceError, match="Named is called with an object: Tensor"):
        trace_of_call(Named, (x, [torch.nested.nested_tensor([x, x[1:]])]), what="nothing", factor=2.0)
    with pytest.raises(TraceError, match="TypeError"):
        trace_of_call(Named, (x, [x]))


def test_holes_lie_between_what_comes_from_the_heap() -> None:
    """glibc maps blocks of 32 MiB by themselves, and gives them back whole."""
    mib = 1 << 20
    made = [(Event.MADE, size * mib) for size in (*[1] * 24, 40)]
    gone = [(event, -size) for event, size in reversed(made)]
    ends = (Event.FORWARD_ENDS, 0)
    found = trace_of(TraceLog(8, [*made, *gone, (Event.MADE, 2 * mib), ends], [], frozenset()))
    assert (found.peak_bytes, found.heap_bytes, found.hole_bytes) == (64 * mib, 24 * mib, 12 * mib)
    found = trace_of(TraceLog(8, [*made, *gone, (Event.MADE, 20 * mib), ends], [], frozenset()))
    assert found.hole_bytes == 5 * 20 * mib, "no hole is room for a large one"
