"""The directories of a model whose parts several groups of ranks train: each saves its part as a checkpoint of its own.

They are `mp_rank_00`, `mp_rank_01` and so on, by the number of the part, each with its tags and its `latest`.

[Note: parts of one save]
A kill between two parts leaves one of them as the save before wrote it, be it under the same tag. So each save has a
number that all of its parts keep, and the parts that are loaded must have the same. They also keep the place of the
part, which must be that of the ranks that load it.
"""

from __future__ import annotations

import os
from pathlib import Path

from offloadzero.checkpoint.format.meta import PartOfModel
from offloadzero.checkpoint.format.names import LATEST, is_part_directory, part_directory
from offloadzero.errors import CheckpointError


def directory_of_part(directory: Path, part: int | None) -> Path:
    """Return the directory in which a part of the model is saved; None stands for the whole model."""
    return directory if part is None else directory / part_directory(part)


def _names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if is_part_directory(name))


def expect_room(directory: Path, num_parts: int) -> None:
    """Raise CheckpointError where a model of more parts was saved: what is saved beside them could not be loaded."""
    try:
        names = _names(directory)
    except OSError:  # what saves there says what is wrong, or makes it
        return
    if len(names) > num_parts:
        raise CheckpointError(
            f"{directory} has the checkpoints of {len(names)} parts of a model, and there are {num_parts} here: save "
            "into another directory"
        )


def expect_place(path: Path, saved: PartOfModel | None, own: PartOfModel) -> None:
    """Raise CheckpointError where the checkpoint at `path` is of another part of the model than `own`."""
    if saved is not None and _place(saved) != _place(own):
        raise CheckpointError(f"{path} is of {_place(saved)}, and this rank trains {_place(own)}")


def _place(part: PartOfModel) -> str:
    return (
        f"the part at pipeline rank {part.pipeline_rank} and tensor-parallel rank {part.tensor_rank}, of "
        f"{part.num_parts}"
    )


def expect_parts(directory: Path, part: int | None, num_parts: int) -> None:
    """Raise CheckpointError where `directory` was saved by another number of parts, as far as its names show that."""
    try:
        names = _names(directory)
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
