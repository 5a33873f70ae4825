"""Shapes: what is read as one, that the model is that of transformers parameter by parameter, and that it computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from offloadzero.errors import ConfigError
from offloadzero.planning.model.shapes import GPT, LLAMA, PUBLISHED, ModelShape, read_shape, shape_of_size


def shape(text: str) -> ModelShape:
    found = read_shape("--model", text)
    assert found is not None
    return found


def sizes(model: nn.Module) -> dict[str, int]:
    return {name: param.numel() for name, param in model.named_parameters()}


# --- the model ---


def of_transformers(one: ModelShape) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if one.kind == GPT:
        config = transformers.GPT2Config(
            n_embd=one.hidden,
            n_layer=one.num_layers,
            n_head=one.num_heads,
            n_positions=one.num_positions,
            vocab_size=one.vocabulary,
        )
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    config = transformers.LlamaConfig(
        hidden_size=one.hidden,
        num_hidden_layers=one.num_layers,
        num_attention_heads=one.num_heads,
        num_key_value_heads=one.num_kv_heads,
        intermediate_size=one.intermediate,
        vocab_size=one.vocabulary,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "text", ["llama:64/3/4/101/96/2", "48/2/6/61", "llama:7b", "gpt:64/3/4/101", "gpt:1.3b"]
)
def test_a_model_has_the_parameters_of_transformers(text: str) -> None:
    one = shape(text)
    with torch.device("meta"):
        theirs, ours = of_transformers(one), one.build()
    assert sizes(ours) == sizes(theirs)
    assert one.kind == GPT or list(sizes(ours)) == list(sizes(theirs)), "units are laid out in this order"
    assert one.count() == sum(sizes(theirs).values())


@pytest.mark.parametrize("text", ["llama:64/2/4/101/96/2", "gpt:64/2/4/101"])
def test_it_learns(text: str) -> None:
    """The operations are those of a model: a wrong one would not bring the loss down on one batch."""
    torch.manual_seed(0)
    model = shape(text).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(30):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# --- the words ---


@pytest.mark.parametrize(
    ("text", "billions"),
    [
        ("llama:7b", 6.738),
        ("llama:13b", 13.016),
        ("llama:70b", 68.977),
        ("llama:8b", 8.030),
        ("gpt:175b", 174.6),
    ],
)
def test_published_sizes(text: str, billions: float) -> None:
    assert shape(text).count() / 1e9 == pytest.approx(billions, rel=1e-3)


@given(st.sampled_from([LLAMA, GPT]), st.floats(3e8, 1e12))
@hypothesis_settings(max_examples=30, deadline=None)
def test_a_size_without_a_name_gets_a_shape_near_it(kind: str, size: float) -> None:
    found = shape_of_size(kind, size)
    assert found.count() == pytest.approx(size, rel=0.04)
    assert found.hidden % found.num_heads == 0


def test_a_shape_is_written_as_it_is_read() -> None:
    for one in (*PUBLISHED.values(), shape("gpt:10b"), shape("64/3/4/101/96/2"), shape("gpt:64/3/4/101/100")):
        assert read_shape("--model", str(one)) == one


@pytest.mark.parametrize(
    "text", ["config.json", "module:function", "a/b/config.json", "llama", "7b", "bert:7b"]
)
def test_what_is_no_shape(text: str) -> None:
    assert read_shape("--model", text) is None


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("64/3/4", "hidden/layers/heads/vocabulary"),
        ("64/3/4/0", "hidden/layers/heads/vocabulary"),
        ("64/3/4/101/96/2/7", "hidden/layers/heads/vocabulary"),
        ("gpt:64/3/4/101/96/2", "hidden/layers/heads/vocabulary"),
        ("64/3/5/101", "a width that the heads divide"),
        ("64/3/4/101/96/3", "heads that the key-value heads divide"),
        ("12/3/4/101", "an even width of each head"),
        ("bert:64/3/4/101", "a kind that is known: llama, gpt"),
        ("999999990/3/9/101", "at most 131072/10000"),
        ("llama:99t", "a size from 1m to 10t"),
        ("llama:1m", "a size gives llama:256/1/2/32000/768/2 here, of 17,236,736 parameters"),
        ("gpt:30m", "a size gives gpt:640/1/5/50257 here, of 38,400,000 parameters"),
        ("9999999999/1/1/1", "hidden/layers/heads/vocabulary"),
    ],
)
def test_shapes_that_are_no_models(text: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=r"--model = ") as caught:
        read_shape("--model", text)
    assert allowed in str(caught.value)
