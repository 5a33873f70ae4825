"""Room for the descriptors of process groups.

[Note: descriptors of ranks]
Each of gloo's groups has a connection to every other rank. An engine has some groups in host memory, so with a few
hundred ranks their connections alone are more descriptors than the 1,024 that a process may usually have at first. It
may raise that limit itself, up to a second one, which is higher as a rule. Where a connection has no descriptor, gloo
ends the process.
"""

from __future__ import annotations

import os
import resource

from offloadzero.errors import ConfigError

LEAST_GROUPS = 4  # of one engine, in host memory
MOST_GROUPS = 14  # of one engine, with its parts of the device: on the CPU these are gloo's, too
BESIDE_CONNECTIONS = 5  # of one group
SPARE = 256  # files of the script, of the drive, of checkpoints


def make_room_for_groups(num_ranks: int) -> None:
    """Raise the limit of this process as far as the groups of an engine need it, and as it may be raised.

    ConfigError: it may not be raised as far as any engine over so many ranks needs it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, of_group = len(os.listdir("/proc/self/fd")), num_ranks + BESIDE_CONNECTIONS
    least, needed = used + LEAST_GROUPS * of_group, used + MOST_GROUPS * of_group + SPARE
    if hard != resource.RLIM_INFINITY:
        if hard < least:
            allowed = f"{needed} or more for {num_ranks} ranks: the connections of their groups are {least} at least"
            raise ConfigError("ulimit -Hn", hard, allowed)
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
