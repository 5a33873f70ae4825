"""`offloadzero convert`: a checkpoint into a folder of weights and back, and DeepSpeed's into either."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadzero.cli.output import ProgressBar, print_lines
from offloadzero.config.readers import read_num_bytes
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.observe.texts import count_text

if TYPE_CHECKING:
    from offloadzero.checkpoint.convert.stored_model import StoredModel

CHECKPOINT, FOLDER = "checkpoint", "folder"
SAVED = "saved"
_DTYPES = ("bf16", "fp32", SAVED)
_MAX_SHARD_SIZE = "5GB"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="a checkpoint into a folder of weights, and back; DeepSpeed's into either",
        description="Converts what is in SRC, which is found out: a checkpoint of offloadzero, one of DeepSpeed's ZeRO "
        "stages 1 to 3 of any number of ranks (for both the directory with the file 'latest', or that of one tag), or "
        "a Hugging Face folder of safetensors. Memory does not grow with the model. SRC is checked before anything is "
        "written, and DST is there as a whole or not at all.",
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", metavar="DST", help="a name that is free, or an empty directory")
    parser.add_argument(
        "--to",
        choices=[CHECKPOINT, FOLDER],
        help="checkpoint: of offloadzero, for load_checkpoint(DST); folder: Hugging Face's, for from_pretrained(DST) "
        "(default: what SRC is not, and of DeepSpeed's a checkpoint)",
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
    from offloadzero.checkpoint.convert import folder, stored_model
    from offloadzero.checkpoint.partial import expect_new

    expect_new(destination)
    carried = [] if args.like is None else folder.files_to_carry(Path(args.like))
    started_s = time.monotonic()
    print(f"checking {source}", file=sys.stderr, flush=True)
    kind, model = _read(source)
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
        written = f"{destination / tag}: engine.{what}"
    else:
        adapted = next((name for name in model.weights if name.startswith("base_model.model.")), None)
        if adapted is not None:
            allowed = f"a checkpoint without adapters of PEFT ({adapted}): save_pretrained() of the model writes them"
            raise ConfigError("SRC", str(source), allowed)
        if lacking := model.meta.excluded:
            allowed = (
                f"a checkpoint with all weights. It was saved with exclude_frozen_parameters=True, without "
                f"{', '.join(lacking[:3])} ({len(lacking)} in all): load it into the model that has these by "
                "load_checkpoint(load_module_strict=False), and save_16bit_model() or save_checkpoint() writes all"
            )
            raise ConfigError("SRC", str(source), allowed)
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
        written = f"{destination}: weights" + (f" and {len(carried)} files of {args.like}" if carried else "")
    print_lines([f"{written} ({time.monotonic() - started_s:.1f} s)"])
    return 0


def _read(source: Path) -> tuple[str, StoredModel]:
    """Find out what `source` is, check and read it. Returns CHECKPOINT, FOLDER or "", and the model."""
    from offloadzero.checkpoint.convert import deepspeed, folder, stored_model
    from offloadzero.checkpoint.format.names import LATEST, META
    from offloadzero.checkpoint.latest import expect_parts, find_checkpoint, open_found, read_latest
    from offloadzero.checkpoint.verify import open_checkpoint

    if not source.is_dir():
        raise ConfigError("SRC", str(source), "a directory that is there")
    if deepspeed.is_deepspeed(source):
        return "", deepspeed.read_deepspeed(source)
    if (source / LATEST).exists() and deepspeed.is_deepspeed(tagged := source / read_latest(source)):
        return "", deepspeed.read_deepspeed(tagged)
    if folder.is_folder(source):
        return FOLDER, folder.read_folder(source)
    if (source / META).exists():
        return CHECKPOINT, stored_model.read_checkpoint(open_checkpoint(source))
    expect_parts(source, None, 1)
    found = find_checkpoint(source, None)
    if found is None:
        raise CheckpointError(
            f"{source} is no checkpoint of offloadzero, none of DeepSpeed's, and no folder with {folder.WEIGHTS}"
        )
    return CHECKPOINT, stored_model.read_checkpoint(open_found(source, found))


def _destination_kind(args: argparse.Namespace, source_kind: str) -> str:
    to: str = args.to or (FOLDER if source_kind == CHECKPOINT else CHECKPOINT)
    if to == source_kind:
        raise ConfigError("--to", to, "SRC is one already")
    for option in ("dtype", "max_shard_size", "like"):
        if to == CHECKPOINT and getattr(args, option) is not None:
            name = "--" + option.replace("_", "-")
            raise ConfigError(
                name, getattr(args, option), f"goes with --to {FOLDER}: it is about a folder's files"
            )
    return to
