"""What the process imports from which ranks are forked: `ranks.run_ranks`. Each rank took a second for it by itself."""

from __future__ import annotations

import gc
import importlib

for name in (
    "torch._dynamo",  # the first optimizer of a process imports it, which takes most of a second
    "torch.distributed.tensor",  # autograd looks it up in the first backward
    "offloadzero.api.engine",
    "offloadzero.engine.join",
    "tests.support.ranks",
    "tests.support.sharded",
    "tests.support.tiny",
):
    importlib.import_module(name)

# The collector of a rank would go through all of it, and so copy the pages that the ranks have in common.
gc.collect()
gc.freeze()
