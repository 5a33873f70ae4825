"""Updates that ranks try in backward, each for itself: tests/step/test_versions.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import run_ranks
from tests.support.sharded import config_of, digest, engine_of, micro_batch
from tests.support.versions import ADOPTED, AGAIN, NEVER_CLIPS, UNTRIED, counted, trials


def train_sharded(rank: int, directory: str) -> dict[str, Any]:
    """By case: losses, bits of weights and states, and what became of the trials."""
    found: dict[str, Any] = {}
    for stage, clipping in [(1, NEVER_CLIPS), (2, NEVER_CLIPS), (3, NEVER_CLIPS), (3, 0.05), (3, 0.0)]:
        for versions in (False, True):
            keys = {"gradient_clipping": clipping, "offloadzero": {"versions": versions}}
            config = config_of("nvme", stage, Path(directory), world_size=2, **keys)
            with counted() as counts:
                engine = engine_of(config)
                seen: list[Any] = []
                for seed in range(3):
                    loss = engine(micro_batch(seed, rank, 2))
                    engine.backward(loss)
                    for trial in trials(engine._runtime):
                        trial.ticket.wait()
                    engine.step()
                    seen += [loss.item(), engine.get_global_grad_norm()]
                states = digest(dict(engine.module.state_dict()))
                for number, of_one in engine.optimizer.state_dict()["state"].items():
                    states |= digest({f"{number} {name}": torch.as_tensor(v) for name, v in of_one.items()})
                engine.close()
            found[f"{stage} {clipping} {versions}"] = [seen, states, dict(counts)]
    return found


def test_ranks_adopt_trials_each_for_itself(tmp_path: Path) -> None:
    """Where each rank has a part of the weights; else all weights are on each, and no record is on nvme whole."""
    for found in run_ranks(train_sharded, 2, tmp_path, str(tmp_path)):
        for case in {name.rsplit(" ", 1)[0] for name in found}:
            (seen, states, before), (now, states_now, counts) = found[f"{case} False"], found[f"{case} True"]
            assert (now, states_now) == (seen, states), case
            assert set(before) == {UNTRIED}
            is_plain = case in (f"3 {NEVER_CLIPS}", "3 0.0")
            assert (counts.get(ADOPTED, 0) > 0) == is_plain, (case, counts)
            assert counts.get(AGAIN, 0) == 0 or not is_plain
