"""The end of process groups whose collectives will not end.

[Note: collectives that never end]
On the host a wait for a collective looks up now and then, and ends when another rank has failed. On a device nobody
waits for the collective itself: lanes wait for events behind it, and neither these nor the end of NCCL's group come
before the timeout of the group, ten minutes by default with NCCL. So an engine that has failed aborts the groups of its
device before it joins its threads. What their collectives were to write is anything then, and nobody reads it: each use
of the engine raises its failure.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from offloadzero.core.torch_private import abort_process_group

log = logging.getLogger("offloadzero")

ABORT_WITHIN_S = 30.0  # what waits for a group then goes on as before, to the group's timeout


def abort_groups(groups: Mapping[str, Any]) -> None:
    """Abort groups, which have names for a warning, while other threads may use them: their calls are errors then.

    All at once: the end of one of NCCL's groups may wait for the device, where the collective of another one waits.
    """
    threads = [
        threading.Thread(target=functools.partial(_abort, name, group), daemon=True)
        for name, group in groups.items()
    ]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + ABORT_WITHIN_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


def _abort(name: str, group: Any) -> None:
    try:
        abort_process_group(group)
    except Exception as error:  # the engine has failed already, and raises that
        log.warning("the collectives of %s could not be aborted: %s", name, error)
