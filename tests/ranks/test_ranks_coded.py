"""Frozen weights of codes over several ranks: each keeps a part of the codes, and all have the first one's scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import offloadzero
from offloadzero.errors import ConfigError
from tests.support.coded import VOCABULARY, CodedModel, bytes_of
from tests.support.ranks import run_ranks
from tests.support.training import make_config, merge, one_step

NUM_RANKS = 2


def train_coded(rank: int, directory: str) -> dict[str, Any]:
    """By case: the losses, those of the same values on one rank, and the codes; or the text of the refusal."""
    found: dict[str, Any] = {}
    for name, storage, zero in (
        ("bytes", torch.uint8, {"zero_quantized_weights": True}),
        ("floats", torch.bfloat16, {}),
        ("codes of codes", torch.bfloat16, {"zero_quantized_nontrainable_weights": True}),
    ):
        config = make_config("nvme", Path(directory), dtype="bf16")
        config = merge(config, {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero})
        for uses_init in (False, True):
            torch.manual_seed(rank)  # other weights on each
            try:
                with offloadzero.zero.Init(config_dict_or_path=config, enabled=uses_init):
                    model = CodedModel(storage)
                engine = offloadzero.initialize(model=model, config=config)[0]
            except ConfigError as error:
                found[name] = str(error)
                break
            seeds = torch.Generator().manual_seed(9)
            batches = torch.randint(0, VOCABULARY, (3, 2, 9), generator=seeds)
            losses = [one_step(engine, tokens) for tokens in batches]
            codes = [bytes_of(param).tolist() for param in model.codes()]
            found[f"{name} {uses_init}"] = losses, codes, [p.scales.scales.tolist() for p in model.codes()]
            engine.close()
    return found


def test_all_ranks_compute_with_the_codes_and_scales_of_the_first(tmp_path: Path) -> None:
    first, second = run_ranks(train_coded, NUM_RANKS, tmp_path / "ranks", str(tmp_path), timeout_s=120)
    torch.manual_seed(0)
    model = CodedModel()
    codes = [bytes_of(param).tolist() for param in model.codes()]
    scales = [param.scales.scales.tolist() for param in model.codes()]
    for name in ("bytes False", "bytes True", "floats False", "floats True"):
        assert first[name] == second[name]
        assert [*first[name][1:]] == [codes, scales], name
    assert first["bytes False"][0] == first["bytes True"][0]
    assert first["floats False"][0] == first["floats True"][0]
    for found in (first, second):
        assert "blocks.0.base.weight.dtype = 'bfloat16': codes in bytes" in found["codes of codes"]
