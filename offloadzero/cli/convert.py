"""`offloadzero convert`: a checkpoint into a folder of weights and back, DeepSpeed's or a durable run into either."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadzero.cli.output import ProgressBar, print_lines
from offloadzero.config.readers import read_num_bytes
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.observe.texts import count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offloadzero.checkpoint.convert.stored_model import StoredModel

CHECKPOINT, FOLDER, RUN = "checkpoint", "folder", "durable run"
SAVED = "saved"
_DTYPES = ("bf16", "fp32", SAVED)
_MAX_SHARD_SIZE = "5GB"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="a checkpoint into a folder of weights, and back; DeepSpeed's or a durable run into either",
        description="Converts what is in SRC, which is found out: a checkpoint of offloadzero, one of DeepSpeed's ZeRO "
        "stages 1 to 3 of any number of ranks (for both the directory with the file 'latest', or that of one tag), a "
        "durable run (the first directory of its nvme_path), or a Hugging Face folder of safetensors. Memory does not "
        "grow with the model. SRC is checked before anything is written, and DST is there as a whole or not at all.",
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", metavar="DST", help="a name that is free, or an empty directory")
    parser.add_argument(
        "--to",
        choices=[CHECKPOINT, FOLDER],
        help="checkpoint: of offloadzero, for load_checkpoint(DST); folder: Hugging Face's, for from_pretrained(DST) "
        "(default: what SRC is not; of DeepSpeed's a checkpoint, of a durable run a folder)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help=f"of a folder's weights: fp32 are the masters of what was trained, bf16 those rounded as in training "
        f"(default: {SAVED}, as SRC has them)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help=f"of a folder's files (default: {_MAX_SHARD_SIZE})"
    )
    parser.add_argument(
        "--like", metavar="DIR", help="a folder whose config.json, tokenizer and other small files DST gets"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OffloadError."""
    source, destination = Path(args.source).absolute(), Path(args.destination).absolute()
    max_shard_bytes = read_num_bytes("--max-shard-size", args.max_shard_size or _MAX_SHARD_SIZE, minimum=1)
    from offloadzero.checkpoint.convert import folder
    from offloadzero.checkpoint.partial import expect_new

    expect_new(destination)
    carried = [] if args.like is None else folder.files_to_carry(Path(args.like))
    started_s = time.monotonic()
    print(f"checking {source}", file=sys.stderr, flush=True)
    with ExitStack() as held:
        kind, model = _read(source, held)
        written = _write(args, kind, model, destination, carried, max_shard_bytes=max_shard_bytes)
    print_lines([f"{written} ({time.monotonic() - started_s:.1f} s)"])
    return 0


def _write(
    args: argparse.Namespace,
    kind: str,
    model: StoredModel,
    destination: Path,
    carried: Sequence[Path],
    *,
    max_shard_bytes: int,
) -> str:
    """Write the destination. Returns what it is."""
    from offloadzero.checkpoint.convert import folder, stored_model

    source = Path(args.source).absolute()
    to = _destination_kind(args, kind)
    print_lines([f"{source}: {model.description}, {count_text(model.num_parameters)} parameters"])
    if model.left_out:
        print_lines([f"left out: {', '.join(model.left_out)}"])
    if to == CHECKPOINT:
        if kind == FOLDER:
            folder.expect_names_of_model(source, model)
        with ProgressBar(stored_model.bytes_of_checkpoint(model)) as bar:
            tag = stored_model.write_checkpoint(model, destination, bar.add)
        what = f'load_checkpoint("{destination}"' + (")" if model.states else ", load_module_only=True)")
        return f"{destination / tag}: engine.{what}"
    _expect_whole(source, kind, model)
    dtype = folder.DTYPES.get(args.dtype)
    with ProgressBar(folder.bytes_of_folder(model, dtype)) as bar:
        folder.write_folder(
            model,
            destination,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            carried=carried,
            on_bytes=bar.add,
        )
    return f"{destination}: weights" + (f" and {len(carried)} files of {args.like}" if carried else "")


def _expect_whole(source: Path, kind: str, model: StoredModel) -> None:
    """Raise ConfigError unless `from_pretrained()` would find all weights of the model in a folder."""
    adapted = next((name for name in model.weights if name.startswith("base_model.model.")), None)
    if adapted is not None:
        allowed = (
            f"a checkpoint without adapters of PEFT ({adapted}): save_pretrained() of the model writes them"
        )
        raise ConfigError("SRC", str(source), allowed)
    if lacking := model.meta.excluded:
        why, load = (
            ("A durable run has what is trained alone", "resume() it with")
            if kind == RUN
            else ("It was saved with exclude_frozen_parameters=True", "load it into")
        )
        allowed = (
            f"a checkpoint with all weights. {why}, without {', '.join(lacking[:3])} ({len(lacking)} in all): "
            f"{load} the model that has these"
            + ("" if kind == RUN else " by load_checkpoint(load_module_strict=False)")
            + ", and save_16bit_model() or save_checkpoint() writes all"
        )
        raise ConfigError("SRC", str(source), allowed)


def _read(source: Path, held: ExitStack) -> tuple[str, StoredModel]:
    """Find out what `source` is, check and read it. Returns CHECKPOINT, FOLDER, RUN or "", and the model.

    It stays as it is until `held` is closed.
    """
    from offloadzero.checkpoint.commits import run_name
    from offloadzero.checkpoint.convert import deepspeed, durable_run, folder, stored_model
    from offloadzero.checkpoint.format.names import COMMIT, LATEST, META
    from offloadzero.checkpoint.latest import expect_parts, find_checkpoint, open_found, read_latest
    from offloadzero.checkpoint.verify import open_checkpoint

    if not source.is_dir():
        raise ConfigError("SRC", str(source), "there is no such directory")
    if (source / COMMIT).exists():
        allowed = f"{source.parent.parent}, the directory of the run of which this is one commit: its states lie there"
        raise ConfigError("SRC", str(source), allowed)
    if deepspeed.is_deepspeed(source):
        return "", deepspeed.read_deepspeed(source)
    if (source / LATEST).exists() and deepspeed.is_deepspeed(tagged := source / read_latest(source)):
        return "", deepspeed.read_deepspeed(tagged)
    if folder.is_folder(source):
        return FOLDER, folder.read_folder(source)
    if (source / META).exists():
        return CHECKPOINT, stored_model.read_checkpoint(open_checkpoint(source))
    run_directory = source.parent if source.name == run_name(0) else source
    if durable_run.is_run(run_directory) and not (source / LATEST).exists():
        return RUN, durable_run.read_run(run_directory, held)
    expect_parts(source, None, 1)
    found = find_checkpoint(source, None)
    if found is None:
        raise CheckpointError(
            f"{source} is no checkpoint of offloadzero, none of DeepSpeed's, no durable run, and no folder with "
            f"{folder.WEIGHTS}"
        )
    return CHECKPOINT, stored_model.read_checkpoint(open_found(source, found))


def _destination_kind(args: argparse.Namespace, source_kind: str) -> str:
    to: str = args.to or (FOLDER if source_kind in (CHECKPOINT, RUN) else CHECKPOINT)
    if to == source_kind:
        raise ConfigError("--to", to, "SRC is one already")
    for option in ("dtype", "max_shard_size", "like"):
        if to == CHECKPOINT and getattr(args, option) is not None:
            name = "--" + option.replace("_", "-")
            raise ConfigError(
                name, getattr(args, option), f"goes with --to {FOLDER}: it is about a folder's files"
            )
    return to
