"""TRL's trainers for an offloaded model; of its others `class Trainer(CollectiveSaving, trl.KTOTrainer): ...`."""

from __future__ import annotations

import trl

from offloadzero.integrations.transformers import CollectiveSaving


class SFTTrainer(CollectiveSaving, trl.SFTTrainer):  # type: ignore[name-defined, misc]  # trl exports no names
    """TRL's, as `offloadzero.integrations.transformers.Trainer` is that of transformers."""


class DPOTrainer(CollectiveSaving, trl.DPOTrainer):  # type: ignore[name-defined, misc]  # trl exports no names
    """TRL's, as `offloadzero.integrations.transformers.Trainer` is that of transformers."""
