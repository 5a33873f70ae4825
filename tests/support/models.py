"""Small models, one for each way in which a model can be awkward to stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 24
VOCABULARY = 61  # odd on purpose
NUM_BLOCKS = 4
SMALL_GRADIENT_BYTES = (
    256  # in tests a gradient that is no larger waits for its unit; the package's own bound is 64 KiB
)


def features(seed: int, *, rows: int = 3, width: int = WIDTH) -> Tensor:
    """Random inputs: (rows, width) fp32."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, *, rows: int = 2, length: int = 8) -> Tensor:
    """Random token ids: (rows, length) int64."""
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """Residual MLP: (..., WIDTH) -> the same shape."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Front, blocks, out; the forward gives a loss. The base of most models below."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.run_blocks(self.front(x.to(self.out_dtype()))))

    def out_dtype(self) -> torch.dtype:
        return self.out.bias.dtype

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        return (self.out(x).float() - 1).pow(2).mean()


class TiedLM(nn.Module):
    """A language model whose head is its embedding; odd sizes. forward(tokens) gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.head(self.hidden(ids[:, :-1])), ids)

    @staticmethod
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


class FunctionalHeadLM(TiedLM):
    """No head module: the embedding's weight is used in the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(F.linear(self.hidden(ids[:, :-1]), self.emb.weight), ids)


class HiddenLM(FunctionalHeadLM):
    """The forward gives hidden states; the loss function outside uses the embedding's weight."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(ids[:, :-1])


class CheckpointedStack(Stack):
    """Non-reentrant activation checkpointing of every block."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class InnerCheckpointBlock(Block):
    """Checkpoints a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._mlp, x, use_reentrant=False)

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class LoraBlock(nn.Module):
    """A frozen matrix with a low-rank trainable correction, and a frozen matrix behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.before(x))
        return x + self.base(h) + self.up(self.down(h))


class FrozenMiddle(Stack):
    """Blocks 1 and 2 are frozen as a whole; gradients flow through them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class FrozenFront(Stack):
    """Only the last block and the output train: no gradient flows into the first blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)
        self.out.requires_grad_(True)


class PartlyUnusedBlock(Block):
    """Has a parameter and a module that take no part."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(5))


class WithUnusedBlock(Stack):
    """A whole block takes no part, others in part."""

    def __init__(self) -> None:
        super().__init__(PartlyUnusedBlock)
        self.spare = nn.ModuleList(Block() for _ in range(2))


class SometimesStack(Stack):
    """`forward(x, use)` runs the blocks in `use`, in that order."""

    def forward(self, x: Tensor, use: tuple[int, ...] = ()) -> Tensor:
        h = self.front(x.to(self.out_dtype()))
        for index in use:
            h = self.blocks[index](h)
        return self.loss(h)


class RunningNormBlock(nn.Module):
    """Batch norm: buffers that the forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offsets", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x) + self.offsets.to(x.dtype))


class SharedBlocks(Stack):
    """Each block runs twice in a forward (as in ALBERT)."""

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(super().run_blocks(x))


@dataclass
class BlockOutput:
    """What StructuredBlock returns as a dataclass."""

    hidden: Tensor
    extra: Tensor


class StructuredBlock(Block):
    """Returns a tuple, a dict or a dataclass in turn, with an extra output that also feeds the loss."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        extra = (h * self.norm.weight).float().mean()
        if self.form == "tuple":
            return h, (extra, None, "text")
        return {"hidden": h, "extra": extra} if self.form == "dict" else BlockOutput(h, extra)


class StructuredStack(Stack):
    """Blocks with three forms of output."""

    def __init__(self) -> None:
        forms = iter(("tuple", "dict", "dataclass", "tuple"))
        super().__init__(lambda: StructuredBlock(next(forms)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x.to(self.out_dtype()))
        total = torch.zeros(())
        for block in self.blocks:
            out = block(h)
            if isinstance(out, tuple):
                h, extra = out[0], out[1][0]
            elif isinstance(out, dict):
                h, extra = out["hidden"], out["extra"]
            else:
                h, extra = out.hidden, out.extra
            total = total + extra
        return self.loss(h) + 0.01 * total


class NoGradBlock(Block):
    """A second output without gradient, of an argmax."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = super().forward(x)
        return h, h.detach().argmax(dim=-1)


class NoGradOutputs(Stack):
    """Block outputs that need no gradient; one block runs without gradients altogether."""

    def __init__(self) -> None:
        super().__init__(NoGradBlock)

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x.to(self.out_dtype()))
        with torch.no_grad():
            target = self.blocks[0](h)[0]
        for block in self.blocks[1:]:
            h, index = block(h)
            h = h + F.one_hot(index, WIDTH).to(h.dtype) * 0.1
        return self.loss(h) + F.mse_loss(h.float(), target.float())


class NoModuleList(nn.Module):
    """Modules of different classes as attributes; a parameter and a scalar of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.recurrent = nn.LSTM(2 * WIDTH, WIDTH, batch_first=True)
        self.position = nn.Parameter(torch.randn(1, 4, 2 * WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.inner(x.to(self.scale.dtype)).unsqueeze(1)) + self.position
        h, _ = self.recurrent(h)
        return (self.out(h[:, -1]).float() * self.scale.float() - 1).pow(2).mean()


def mixed_sequential() -> nn.Module:
    """An nn.Sequential of different classes."""
    return nn.Sequential(
        nn.Linear(WIDTH, 3 * WIDTH),
        nn.GELU(),
        nn.LayerNorm(3 * WIDTH),
        nn.Linear(3 * WIDTH, WIDTH),
        nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        nn.Linear(WIDTH, 1),
    )


class OddSizes(nn.Module):
    """Parameters of 1, 511 and 4097 elements, alone and together; scalars in a streamed unit."""

    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))
            self.some = nn.Parameter(torch.randn(511))
            self.many = nn.Parameter(torch.randn(4097))
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.nothing = nn.Parameter(torch.empty(3, 0))

        def forward(self, x: Tensor) -> Tensor:
            h = x[:, :1] * self.one + x[:, 1:2] * self.some.mean()
            return x + self.scalar * torch.tanh(h * self.many[:WIDTH]) + self.many[-1]

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(self.Piece() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces:
            x = piece(x)
        return x.float().pow(2).mean()


class SharedReader(Stack):
    """Every block also reads a weight that belongs to another module."""

    class ReadingBlock(Block):
        shared: nn.Linear

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h + F.linear(h, self.__dict__["shared"].weight)

    def __init__(self) -> None:
        super().__init__(self.ReadingBlock)
        for block in self.blocks:
            block.__dict__["shared"] = self.front  # a reference, not a submodule


class TorchTransformer(nn.Module):
    """torch's own encoder layers, whose attention reads the weights of a child it never calls."""

    def __init__(self) -> None:
        super().__init__()
        # Without biases: the gradient of a key's bias is zero but for rounding, which Adam makes as large as any.
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, bias=False)
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.encoder(self.emb(ids[:, :-1])))
        return TiedLM.loss(logits, ids)
