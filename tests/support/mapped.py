"""A model whose memory is the files of its weights, as libraries load it, and what an engine reads of those files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import offloadzero
from tests.support.tiny import TinyModel

WIDTH = 67  # parameters of odd sizes


def saved(folder: Path, dtype: torch.dtype, seed: int = 1) -> Path:
    """Write the weights of a TinyModel into two files of a new folder."""
    folder.mkdir()
    torch.manual_seed(seed)
    weights = TinyModel(width=WIDTH).to(dtype).state_dict()
    del weights["head.weight"]  # tied
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in part}, folder / f"{number}.safetensors", {"odd": "x" * 5})
    return folder


def loaded(folder: Path) -> TinyModel:
    """The model with the files as its memory; norms alone train."""
    with torch.device("meta"):
        model = TinyModel(width=WIDTH)
    weights = {name: value for file in sorted(folder.iterdir()) for name, value in load_file(file).items()}
    model.load_state_dict(weights, assign=True, strict=False)
    model.head.weight = model.emb.weight
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    return model


def in_place_bytes(engine: offloadzero.Engine) -> int:
    in_place = engine.optimizer.runtime.store.in_place
    return 0 if in_place is None else sum(in_place.num_bytes.values())


def frozen_bytes(engine: offloadzero.Engine) -> int:
    records = engine.optimizer.runtime.records
    return sum(
        slot.num_elements * record.dtype.itemsize
        for record in records
        for slot in record.slots
        if not slot.trainable and not record.resident
    )
