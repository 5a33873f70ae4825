"""`from_pretrained` of a model with parts that the files do not have, over ranks whose sets have another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from tests.support.ranks import run_ranks

transformers = pytest.importorskip("transformers")
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}


def losses(rank: int, folder: str, offloads: bool) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "offloadzero": {"device": "cpu", "placement": "host"},
    }
    torch.manual_seed(0)
    with offloadzero.zero.Init(config_dict_or_path=config, enabled=offloads):
        model = transformers.BertForMaskedLM.from_pretrained(folder)
    model.eval()  # without dropout
    engine = offloadzero.initialize(model=model, config=config)[0]
    found = []
    for _ in range(3):
        ids = torch.arange(2 * 10).view(2, 10) + rank
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.close()
    return found


def test_a_new_head_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    torch.manual_seed(1)
    transformers.BertModel(transformers.BertConfig(vocab_size=50, **SIZE)).save_pretrained(tmp_path / "base")
    by_rank: list[list[Any]] = []
    for offloads in (False, True):
        by_rank.append(
            run_ranks(
                losses, 2, tmp_path / str(offloads), str(tmp_path / "base"), offloads, own_interpreter=True
            )
        )
    assert by_rank[0] == by_rank[1]
