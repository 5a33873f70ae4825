"""A small GPT and the text of Python's standard library, for trainings whose loss is to fall."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt_model

SIZE = gpt_model.GPTSize(num_layers=2, width=64, num_heads=4)
SEQ_LEN = 64
TEXT_BYTES = 1 << 20


def text_model(seed: int = 0) -> gpt_model.GPT:
    """The model with the weights of a seed."""
    torch.manual_seed(seed)
    return gpt_model.GPT(SIZE, seq_len=SEQ_LEN)


@functools.cache
def _text() -> gpt_model.Text:
    return gpt_model.Text(gpt_model.read_files(gpt_model.stdlib_sources(), max_bytes=TEXT_BYTES))


def text_batch(seed: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and their targets."""
    generator = torch.Generator().manual_seed(seed)
    return _text().batch(batch_size=batch_size, seq_len=SEQ_LEN, generator=generator)
