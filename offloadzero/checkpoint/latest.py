"""The choice of a checkpoint: by tag, or by the file `latest`.

[Note: the file latest]
`latest` is DeepSpeed's: a text file with the newest checkpoint's tag and nothing else. So its content cannot show
whether it is intact: one flipped bit makes global_step5 of global_step4. Therefore the checkpoint that it names has a
mark as well, an empty file `is_latest`, which is removed from the one before when `latest` has changed. A kill between
the two leaves two marks, and either is right. A `latest` that names a checkpoint without one was damaged, or changed by
hand: loading raises an error, and the tag can be given. (None, {}) is returned only where no checkpoint of ours is;
everything else is an error, as a script that takes it for a fresh start would train from step 0 and save over its own
run.

[Note: which is the newest]
When `latest` cannot be used, an error offers the checkpoint with the most steps, and of these the one saved last. Steps
come first because a machine's clock may go back between two saves, and another machine's clock differs. If training was
resumed from an earlier checkpoint under new tags, the most steps may be those of the older run: the others are named as
well.

[Note: parts of one save]
Several groups of ranks may train the parts of a model. Each saves its part as a checkpoint of its own, in a directory
`mp_rank_00`, `mp_rank_01` and so on by the number of the part, each with its tags and its `latest`.
A kill between two parts leaves one of them as the save before wrote it, be it under the same tag. So each save has a
number that all of its parts keep, and the parts that are loaded must have the same. They also keep the place of the
part, which must be that of the ranks that load it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offloadzero.checkpoint.format.manifest import HashingPool, read_bytes, read_manifest, write_file
from offloadzero.checkpoint.format.meta import PartOfModel, read_mark, read_meta
from offloadzero.checkpoint.format.names import (
    IS_LATEST,
    LATEST,
    REPLACED,
    is_part_directory,
    is_unit_file,
    name_problem,
    parse_unfinished,
    part_directory,
)
from offloadzero.checkpoint.partial import alone_in, new_file, not_ours
from offloadzero.checkpoint.verify import Checkpoint, check_sizes, open_checkpoint
from offloadzero.core.fail_points import through
from offloadzero.errors import CheckpointError

log = logging.getLogger("offloadzero.checkpoint")

_MAX_LATEST_BYTES = 4096
# A file, a dangling link, another user's.
_NO_DIRECTORY = (errno.ENOTDIR, errno.ENOENT, errno.ELOOP, errno.EACCES)


@dataclass(frozen=True)
class Found:
    """A directory that is, or was, a checkpoint."""

    tag: str
    path: Path


# --- the choice ---


def find_checkpoint(directory: Path, tag: str | None) -> Found | None:
    """Return the checkpoint of `tag`, or the one that `latest` names: [Note: the file latest].

    None when no tag is given and no checkpoint of ours is there. CheckpointError for any other that is not found.
    """
    if tag is not None:
        return _find_tag(directory, tag)
    if not os.path.lexists(directory / LATEST):
        if not list_checkpoints(directory):
            if _looks_like_checkpoint(directory):
                raise CheckpointError(
                    f"{directory} is a checkpoint itself: load {directory.parent} with tag={directory.name!r}"
                )
            log.warning("%s: there is no checkpoint, and nothing is loaded", directory)
            return None
        raise CheckpointError(f"{directory / LATEST} is missing. {offer(directory)}")
    try:
        return _find_latest(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {offer(directory)}") from error


def _find_tag(directory: Path, tag: str) -> Found:
    problem = name_problem(tag)
    path = None if problem is not None else _path_of(directory, tag)
    if path is None:
        reason = f" ({problem})" if problem is not None else ""
        raise CheckpointError(f"there is no checkpoint {tag!r} in {directory}{reason}. {_known(directory)}")
    if not _looks_like_checkpoint(path):
        raise CheckpointError(f"{path} is not a checkpoint of this package. {_known(directory)}")
    return Found(tag, path)


def read_latest(directory: Path) -> str:
    """Return the tag that the file `latest` names. CheckpointError unless it can be one."""
    file = directory / LATEST
    raw = read_bytes(file, max_bytes=_MAX_LATEST_BYTES)
    try:
        tag = raw.decode().strip()
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is damaged: not UTF-8") from None
    problem = name_problem(tag)
    if problem is not None:
        raise CheckpointError(f"{file} is damaged: it holds {tag[:80]!r}, but a tag {problem}")
    return tag


def _find_latest(directory: Path) -> Found:
    file, tag = directory / LATEST, read_latest(directory)
    path = _path_of(directory, tag)
    if path is None:
        raise CheckpointError(f"{file} is damaged: it names {tag!r}, which is not there")
    if not _looks_like_checkpoint(path):
        raise CheckpointError(f"{file} names {tag!r}, which is not a checkpoint of this package")
    if not os.path.lexists(path / IS_LATEST):
        raise CheckpointError(
            f"{file} names {tag!r}, which was not saved as the latest: damaged, or changed by hand (then pass "
            f"tag={tag!r})"
        )
    return Found(tag, path)


def _path_of(directory: Path, tag: str) -> Path | None:
    """Return the checkpoint's path: under its name, or where a kill left it between two renames."""
    if os.path.lexists(directory / tag):
        return directory / tag
    for path in _entries(directory):
        unfinished = parse_unfinished(path.name)
        if unfinished is not None and (unfinished.stem, unfinished.kind) == (tag, REPLACED):
            return path
    return None


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: {error.strerror}") from error


def _looks_like_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint of ours, or was one before it was damaged."""
    try:
        if any(is_unit_file(name) for name in os.listdir(path)):
            return True
    except OSError as error:
        if error.errno not in _NO_DIRECTORY:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        return False
    for read in (read_mark, read_manifest):
        try:
            read(path)
            return True
        except CheckpointError:
            pass  # the other file may show it
    return False


def list_checkpoints(directory: Path) -> list[Found]:
    """List all directories that are, or were, checkpoints of ours; the newest first: [Note: which is the newest]."""
    found: dict[str, Found] = {}
    for path in _entries(directory):
        unfinished = parse_unfinished(path.name)
        if unfinished is None and not path.name.startswith(".") and _looks_like_checkpoint(path):
            found[path.name] = Found(path.name, path)
    for path in _entries(directory):
        unfinished = parse_unfinished(path.name)
        if unfinished is not None and unfinished.kind == REPLACED and _looks_like_checkpoint(path):
            found.setdefault(unfinished.stem, Found(unfinished.stem, path))
    return sorted(found.values(), key=_age)


def _age(found: Found) -> tuple[int, int, str]:
    """Return a sort key that is smaller for newer checkpoints: [Note: which is the newest]."""
    try:
        meta = read_meta(found.path)
    except CheckpointError:
        return 0, 0, found.tag  # damaged: another one is offered
    return -meta.global_steps, -meta.saved_unix_ns, found.tag


# --- messages ---


def offer(directory: Path, *, besides: Path | None = None) -> str:
    """Return sentences that name the newest checkpoint that is intact, and the others that seem to be.

    Reads enough to be sure of the first; the others get only the quick checks.
    """
    candidates = [found for found in list_checkpoints(directory) if found.path != besides]
    for index, found in enumerate(candidates):
        try:
            step = open_checkpoint(found.path).meta.global_steps
        except CheckpointError:
            continue  # this one is damaged
        text = f"{found.tag!r} (step {step}) is intact: pass tag={found.tag!r} to load it"
        others = _complete(candidates[index + 1 :])
        return f"{text}. Complete by their sizes: {', '.join(others)}" if others else text
    other = "other " if besides is not None else ""
    return f"No {other}checkpoint in {directory} is intact"


def _complete(candidates: Iterable[Found]) -> list[str]:
    texts = []
    for found in candidates:
        with suppress(CheckpointError):
            texts.append(f"{found.tag!r} (step {check_sizes(found.path).global_steps})")
    return texts


def _known(directory: Path) -> str:
    """Return a sentence that names all checkpoints, after quick checks only."""
    good, damaged = [], []
    for found in list_checkpoints(directory):
        try:
            check_sizes(found.path)
            good.append(found.tag)
        except CheckpointError as error:
            damaged.append(f"{found.tag!r} ({error})")
    text = f"Complete checkpoints there: {', '.join(map(repr, good)) or 'none'}"
    return text + (f"; damaged: {', '.join(damaged)}" if damaged else "")


def open_found(directory: Path, found: Found) -> Checkpoint:
    """Open a checkpoint after all checks; the CheckpointError offers another that is intact."""
    try:
        return open_checkpoint(found.path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {offer(directory, besides=found.path)}") from error


# --- changing `latest` ---


def expect_latest_replaceable(directory: Path) -> None:
    """Raise CheckpointError when `latest` exists without a checkpoint of ours, or is no file."""
    path = directory / LATEST
    if not os.path.lexists(path):
        return
    if not stat.S_ISREG(os.lstat(path).st_mode):
        reason = "not a regular file"
    elif list_checkpoints(directory):
        return
    else:
        reason = "no checkpoint of this package is beside it"
    raise CheckpointError(
        f"{path} is not the file of this package ({reason}). It is left alone: save into another directory, move it "
        "away, or pass save_latest=False"
    )


def point_latest_to(directory: Path, tag: str) -> None:
    """Let `latest` name a checkpoint, and give that the mark. CheckpointError where `latest` is another program's."""
    expect_latest_replaceable(directory)
    with alone_in(directory):
        (directory / tag / IS_LATEST).touch()
        through("checkpoint.point", write_latest, tag)(directory, tag)
        for path in sorted(directory.iterdir()):
            marker = path / IS_LATEST
            if path.name != tag and os.path.lexists(marker) and not_ours(path) is None:
                marker.unlink(missing_ok=True)


def write_latest(directory: Path, tag: str) -> None:
    """Let the file `latest` name a checkpoint, and nothing else of the directory change."""
    with new_file(directory / LATEST) as partial, HashingPool() as pool:
        write_file(partial, tag.encode(), pool, is_there=True)


# --- parts of a model ---


def directory_of_part(directory: Path, part: int | None) -> Path:
    """Return the directory in which a part of the model is saved; None stands for the whole model."""
    return directory if part is None else directory / part_directory(part)


def _part_names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if is_part_directory(name))


def expect_room(directory: Path, num_parts: int) -> None:
    """Raise CheckpointError where a model of more parts was saved: what is saved beside them could not be loaded."""
    try:
        names = _part_names(directory)
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
        names = _part_names(directory)
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
