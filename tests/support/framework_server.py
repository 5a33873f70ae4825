"""What the process imports from which ranks of scripts are forked: `ranks.run_torchrun`. Each took seconds for it."""

from __future__ import annotations

import gc
import importlib
import importlib.util

for name in (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "peft",
    "lightning",
    "offloadzero.api.engine",
    "offloadzero.integrations.lightning",
    "offloadzero.integrations.transformers",
):
    importlib.import_module(name)
if importlib.util.find_spec("trl"):
    importlib.import_module("trl.trainer.sft_trainer")

# The collector of a rank would go through all of it, and so copy the pages that the ranks have in common.
gc.collect()
gc.freeze()
