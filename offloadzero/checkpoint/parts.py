"""The directories of a model whose parts several groups of ranks train: each saves its part as a checkpoint of its own.

They are `mp_rank_00`, `mp_rank_01` and so on, by the number of the part, each with its tags and its `latest`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from offloadzero.checkpoint.names import LATEST
from offloadzero.errors import CheckpointError

_PART = re.compile(r"mp_rank_\d{2,}", re.ASCII)


def directory_of_part(directory: Path, part: int | None) -> Path:
    """Return the directory in which a part of the model is saved; None stands for the whole model."""
    return directory if part is None else directory / f"mp_rank_{part:02}"


def expect_parts(directory: Path, part: int | None, num_parts: int) -> None:
    """Raise CheckpointError where `directory` was saved by another number of parts, as far as its names show that."""
    try:
        names = sorted(name for name in os.listdir(directory) if _PART.fullmatch(name))
    except OSError:  # what loads from there says what is wrong
        return
    is_whole = os.path.lexists(directory / LATEST)
    if part is None and names and not is_whole:
        raise CheckpointError(
            f"{directory} has the checkpoints of {len(names)} parts of a model ({', '.join(names)}): load them with "
            "the mpu with which they were saved, each with that part of the model"
        )
    if part is not None and names and len(names) != num_parts:
        raise CheckpointError(
            f"{directory} has the checkpoints of {len(names)} parts of a model, and there are {num_parts} here"
        )
    if part is not None and not names and is_whole:
        raise CheckpointError(
            f"{directory} has the checkpoint of a whole model, and this rank trains part {part} of {num_parts}"
        )
