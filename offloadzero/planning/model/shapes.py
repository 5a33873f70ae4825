"""Models by their shape, `llama:13b` or `5120/40/40/32000`, which take no memory.

[Note: models of a shape]
A shape becomes a module with the parameters, names and operations that the models of `transformers` have: all facts
(units, records, the bytes that autograd saves, floating-point operations) come from a model, and not from a
formula. The model is made on the meta device and never computes a number.

A size that has no published shape gets one: heads of 128, the width at which there are 128 columns for each block, and
as many blocks as come nearest to the size.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offloadzero.errors import ConfigError
from offloadzero.planning.model.quantized import quantize

LLAMA, GPT = "llama", "gpt"
MAX_HIDDEN, MAX_LAYERS, MAX_VOCABULARY = 1 << 17, 10_000, 1 << 22
MIN_SIZE, MAX_SIZE = 1e6, 1e13
# A shape that is further from a size is none of it: the embedding alone is larger than small sizes.
_NEAR = 0.2
_HEAD = 128
_SIZE = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)([mbt])", re.ASCII)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, which tell one model of a kind from another."""

    kind: str
    hidden: int
    num_layers: int
    num_heads: int
    vocabulary: int
    intermediate: int
    num_kv_heads: int
    num_positions: int = 0  # learned ones; a llama has none

    def __str__(self) -> str:
        """Return the shape as `read_shape` accepts it."""
        sizes = (self.hidden, self.num_layers, self.num_heads, self.vocabulary)
        more: tuple[int, ...] = (self.intermediate, self.num_kv_heads)
        if self.kind == GPT:
            more = () if self.intermediate == 4 * self.hidden else (self.intermediate,)
        return f"{self.kind}:{'/'.join(map(str, (*sizes, *more)))}"

    def build(self) -> nn.Module:
        """Make the model, on torch's default device: [Note: models of a shape]."""
        return Llama(self) if self.kind == LLAMA else Gpt(self)

    def count(self) -> int:
        with torch.device("meta"):
            one, two = (
                sum(param.numel() for param in replace(self, num_layers=number).build().parameters())
                for number in (1, 2)
            )
        return one + (self.num_layers - 1) * (two - one)


def _llama(hidden: int, num_layers: int, num_heads: int, vocabulary: int, *rest: int) -> ModelShape:
    intermediate = rest[0] if rest else -(-8 * hidden // 3 // 256) * 256
    num_kv_heads = rest[1] if len(rest) > 1 else num_heads
    return ModelShape(LLAMA, hidden, num_layers, num_heads, vocabulary, intermediate, num_kv_heads)


def _gpt(hidden: int, num_layers: int, num_heads: int, vocabulary: int, *rest: int) -> ModelShape:
    intermediate = rest[0] if rest else 4 * hidden
    return ModelShape(GPT, hidden, num_layers, num_heads, vocabulary, intermediate, num_heads, 2048)


_KINDS = {LLAMA: _llama, GPT: _gpt}
_VOCABULARIES = {LLAMA: 32_000, GPT: 50_257}

PUBLISHED: Mapping[str, ModelShape] = MappingProxyType(
    {
        "llama:7b": _llama(4096, 32, 32, 32_000, 11_008),
        "llama:8b": _llama(4096, 32, 32, 128_256, 14_336, 8),
        "llama:13b": _llama(5120, 40, 40, 32_000, 13_824),
        "llama:33b": _llama(6656, 60, 52, 32_000, 17_920),
        "llama:65b": _llama(8192, 80, 64, 32_000, 22_016),
        "llama:70b": _llama(8192, 80, 64, 32_000, 28_672, 8),
        "llama:405b": _llama(16_384, 126, 128, 128_256, 53_248, 8),
        "gpt:125m": _gpt(768, 12, 12, 50_257),
        "gpt:350m": _gpt(1024, 24, 16, 50_257),
        "gpt:760m": _gpt(1536, 24, 16, 50_257),
        "gpt:1.3b": _gpt(2048, 24, 32, 50_257),
        "gpt:2.7b": _gpt(2560, 32, 32, 50_257),
        "gpt:6.7b": _gpt(4096, 32, 32, 50_257),
        "gpt:13b": _gpt(5120, 40, 40, 50_257),
        "gpt:175b": _gpt(12_288, 96, 96, 50_257),
    }
)


def read_shape(key: str, text: str) -> ModelShape | None:
    """Read `llama:13b`, `gpt:10b`, or sizes, `4096/32/32/32000[/intermediate[/kv heads]]`, with or without a kind.

    Returns None if the text is no shape. Raises ConfigError for a shape that is no model.
    """
    kind, has_kind, sizes = text.lower().rpartition(":")
    if "/" in sizes and re.fullmatch(r"[0-9]+(/[0-9]+)*", sizes, re.ASCII):
        return _read_sizes(key, text, kind if has_kind else LLAMA, sizes)
    match = _SIZE.fullmatch(sizes)
    if not has_kind or match is None or kind not in _KINDS:
        return None
    if text.lower() in PUBLISHED:
        return PUBLISHED[text.lower()]
    size = float(match[1]) * _UNITS[match[2]]
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ConfigError(key, text, "a size from 1m to 10t")
    shape = shape_of_size(kind, size)
    if not abs(shape.count() - size) <= _NEAR * size:
        raise ConfigError(
            key,
            text,
            f"hidden/layers/heads/vocabulary: with {shape.vocabulary:,} tokens and heads of {_HEAD} a size gives "
            f"{shape} here, of {shape.count():,} parameters",
        )
    return shape


def shape_of_size(kind: str, num_parameters: float) -> ModelShape:
    """Return the shape nearest to a size: [Note: models of a shape]."""
    hidden = num_blocks_of_size(num_parameters) * _HEAD
    shape = _KINDS[kind](hidden, 1, hidden // _HEAD, _VOCABULARIES[kind])
    one, two = shape.count(), replace(shape, num_layers=2).count()
    return replace(shape, num_layers=1 + max(0, round((num_parameters - one) / (two - one))))


def num_blocks_of_size(num_parameters: float) -> int:
    """Return the number of blocks, of 12 width² parameters each, that make up a size without its embeddings.

    Their width has 128 columns for each of them: [Note: models of a shape].
    """
    width: float = (num_parameters * _HEAD / 12) ** (1 / 3)
    return max(1, round(width / _HEAD))


def _read_sizes(key: str, text: str, kind: str, sizes: str) -> ModelShape:
    allowed = "hidden/layers/heads/vocabulary, then /intermediate, for a llama then /key-value heads"
    if kind not in _KINDS:
        raise ConfigError(key, text, f"a kind that is known: {', '.join(_KINDS)}", known_values=_KINDS)
    if any(len(size) > 9 for size in sizes.split("/")):
        raise ConfigError(key, text, allowed)
    numbers = [int(size) for size in sizes.split("/")]
    if not 4 <= len(numbers) <= (6 if kind == LLAMA else 5) or min(numbers) < 1:
        raise ConfigError(key, text, allowed)
    shape = _KINDS[kind](*numbers)
    if shape.hidden % shape.num_heads or shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            key, text, "a width that the heads divide, and heads that the key-value heads divide"
        )
    if kind == LLAMA and shape.hidden // shape.num_heads % 2:
        raise ConfigError(key, text, "an even width of each head, for rotary positions")
    limits = ((shape.hidden, MAX_HIDDEN), (shape.num_layers, MAX_LAYERS), (shape.vocabulary, MAX_VOCABULARY))
    if any(value > limit for value, limit in (*limits, (shape.intermediate, 8 * MAX_HIDDEN))):
        raise ConfigError(key, text, f"at most {MAX_HIDDEN}/{MAX_LAYERS}/heads/{MAX_VOCABULARY}")
    return shape


# --- llama ---


class RmsNorm(nn.Module):
    """RMS normalisation in fp32, as the models of `transformers` compute it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head = shape.hidden // shape.num_heads
        kv_width = shape.num_kv_heads * self.head
        self.is_grouped = shape.num_kv_heads != shape.num_heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projected.view(*x.shape[:2], -1, self.head).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin


class LlamaMlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = LlamaMlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden)
        self.post_attention_layernorm = RmsNorm(shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class LlamaBody(nn.Module):
    """The model without the head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head = shape.hidden // shape.num_heads
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        frequencies = 10_000.0 ** (-torch.arange(0, self.head, 2, device=ids.device).float() / self.head)
        angles = torch.arange(ids.shape[1], device=ids.device).float()[:, None] * frequencies.repeat(2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """`forward(ids)` gives the loss; parameters as in transformers.LlamaForCausalLM."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.model = LlamaBody(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return next_token_loss(self.lm_head(self.model(ids)), ids)


# --- gpt ---


class GptAttention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.c_attn = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.c_proj = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class GptMlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.hidden, shape.intermediate)
        self.c_proj = nn.Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


class GptBlock(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.hidden)
        self.attn = GptAttention(shape)
        self.ln_2 = nn.LayerNorm(shape.hidden)
        self.mlp = GptMlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GptBody(nn.Module):
    """The model without the head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.wpe = nn.Embedding(shape.num_positions, shape.hidden)
        self.h = nn.ModuleList(GptBlock(shape) for _ in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """`forward(ids)` gives the loss; parameters as in transformers.GPT2LMHeadModel, the head tied to the embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.transformer = GptBody(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        return next_token_loss(self.lm_head(self.transformer(ids)), ids)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean cross-entropy in fp32 of each token but the first."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


# --- adapters beside weights that are frozen ---

LORA_KEY = "--lora"


class LoraLinear(nn.Module):
    """A frozen projection and its adapter (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        """That of the projection, whose dtype some models ask for."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze the model, and put adapters on each `nn.Linear` but the head, as PEFT's "all-linear" does.

    Raises ConfigError where there is none.
    """
    model.requires_grad_(False)
    head = head_of(model)
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not head
    ]
    if not found:
        allowed = f"a model with nn.Linear beside its head: {type(model).__name__} has none"
        raise ConfigError(LORA_KEY, rank, allowed)
    for parent, name, child in found:
        setattr(parent, name, LoraLinear(child, rank))
    return model


def head_of(model: nn.Module) -> Any:
    """The projection onto the vocabulary; None where there is none."""
    of_transformers = getattr(model, "get_output_embeddings", None)
    return getattr(model, "lm_head", None) if of_transformers is None else of_transformers()


# --- the model that a command names: by its shape, its config.json, or a function ---

KEY = "--model"
_POSITIONS = re.compile(r"(^|\.)(wpe|[a-z_]*position[a-z_]*)$")  # the names of tables in transformers


@dataclass(frozen=True)
class ModelSource:
    """The model named by `--model`: `build` makes it on torch's default device."""

    text: str
    build: Callable[[], nn.Module]
    shape: ModelShape | None = None
    num_positions: int = 0  # the most tokens of a sample, as its configuration says; 0: it says none
    adapter_rank: int = 0  # of LoRA adapters, beside which its weights are frozen; 0: none

    @property
    def name(self) -> str:
        """Its shape, or what names it, and its adapters."""
        adapters = f" with adapters of rank {self.adapter_rank}" if self.adapter_rank else ""
        return f"{self.shape or self.text}{adapters}"

    @property
    def weight_files(self) -> list[Path]:
        """The files of its weights, beside its config.json."""
        path = Path(self.text)
        if self.shape is not None or not path.exists():
            return []
        return sorted((path if path.is_dir() else path.parent).glob("*.safetensors"))

    @property
    def num_blocks(self) -> int:
        """The number of equal blocks, of a model of a shape; of another 0, which says nothing."""
        return self.shape.num_layers if self.shape is not None and self.build == self.shape.build else 0

    @property
    def learns_positions(self) -> bool:
        """Whether it has a table of positions, beyond which there are none. Rotary ones have no such end."""
        if self.shape is not None:
            return bool(self.shape.num_positions)
        tables = (name for name, one in self.on_meta().named_modules() if isinstance(one, nn.Embedding))
        return any(_POSITIONS.search(name) for name in tables)

    def on_meta(self, num_blocks: int = 0) -> nn.Module:
        """Make the model without its numbers: [Note: a model that is nowhere].

        With another number of blocks where one is given, which a model of a shape allows.
        """
        build = self.build
        if self.shape is not None and num_blocks not in (0, self.shape.num_layers):
            build = replace(self.shape, num_layers=num_blocks).build
        with torch.device("meta"), _NoNumbers():
            model = build()
            return add_adapters(model, self.adapter_rank) if self.adapter_rank else model


class _NoNumbers(TorchFunctionMode):
    """Draws no random numbers for tensors that have no memory: torch would load its compiler to do nothing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def read_model(text: str) -> ModelSource:
    """Read a shape, a config.json of transformers (or its directory), or `module:function`. Raises ConfigError."""
    shape = read_shape(KEY, text)
    if shape is not None:
        return ModelSource(text, shape.build, shape, shape.num_positions)
    if os.path.exists(text):
        return _of_transformers(text)
    module, _, function = text.partition(":")
    if not (module.replace(".", "").isidentifier() and function.isidentifier()):
        allowed = (
            "a shape (llama:13b, gpt:10b, hidden/layers/heads/vocabulary), the path of a config.json of transformers, "
            "or module:function"
        )
        raise ConfigError(KEY, text, allowed, known_values=PUBLISHED)
    return ModelSource(text, _of_function(text, module, function))


def _of_transformers(path: str) -> ModelSource:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(KEY, path, "transformers, which reads it, is not installed here") from error
    models: Any = transformers
    try:
        config = models.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # its checks of the fields raise any error
        raise ConfigError(KEY, path, f"transformers does not read it: {_reason(error)}") from error

    quantised = getattr(config, "quantization_config", None)

    def build() -> nn.Module:
        try:
            model: nn.Module = _build_of_transformers(models, config)
        except Exception as error:  # any error of a model's constructor for wrong sizes
            raise ConfigError(KEY, path, f"transformers does not build it: {_reason(error)}") from error
        return model if quantised is None else quantize(model, dict(quantised), head_of(model))

    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return ModelSource(path, build, num_positions=positions if isinstance(positions, int) else 0)


def _build_of_transformers(models: Any, config: Any) -> Any:
    """Make the class that the file names, or the one of its type, with logits where the architecture has them."""
    for name in config.architectures or ():
        named = getattr(models, name, None)
        if isinstance(named, type) and issubclass(named, nn.Module):
            return named._from_config(config)  # type: ignore[attr-defined]  # as each auto class does
    causal = type(config) in models.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = models.AutoModelForCausalLM if causal else models.AutoModel
    return auto.from_config(config)


def _of_function(text: str, module: str, function: str) -> Callable[[], nn.Module]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:  # the module's own code runs here
        reason = error if isinstance(error, ImportError) else _reason(error)
        raise ConfigError(KEY, text, f"{module} cannot be imported from {Path.cwd()}: {reason}") from error
    if not callable(found):
        raise ConfigError(KEY, text, f"{module} has no function {function}")

    def build() -> nn.Module:
        try:
            model = found()
        except (Exception, SystemExit) as error:
            allowed = f"a function without arguments that returns the model; it raised {_reason(error)}"
            raise ConfigError(KEY, text, allowed) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(KEY, text, f"a function that returns an nn.Module, not {type(model).__name__}")
        return model

    return build


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
