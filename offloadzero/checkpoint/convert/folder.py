"""Folders of weights as Hugging Face's libraries have them: safetensors in one file, or in shards that an index names.

The index is `model.safetensors.index.json`: `weight_map` has the file of each tensor. Configuration and tokenizer lie
beside the weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offloadzero.checkpoint.convert.stored_model import Entry, OnBytes, StoredModel, divided, tensors_of
from offloadzero.checkpoint.format.file_tensor import FileTensor
from offloadzero.checkpoint.format.json_file import parse_json
from offloadzero.checkpoint.format.manifest import HashingPool, read_bytes, write_file
from offloadzero.checkpoint.format.meta import Meta
from offloadzero.checkpoint.format.names import name_problem
from offloadzero.checkpoint.format.safetensors_file import SafetensorsReader, SafetensorsWriter
from offloadzero.checkpoint.partial import new_folder
from offloadzero.checkpoint.verify import OpenDirectory
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.planning.model.shapes import read_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MAX_INDEX_BYTES = 256 * 1024 * 1024
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")
_ROUNDED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # those that a --dtype replaces


def is_folder(path: Path) -> bool:
    """Whether a directory has weights under the names that such folders use."""
    return (path / WEIGHTS).exists() or (path / INDEX).exists()


def read_folder(path: Path) -> StoredModel:
    """Return the weights of a folder. CheckpointError where headers and index are not whole, or do not agree."""
    files = _shards(path) if (path / INDEX).exists() else {WEIGHTS: None}
    weights: dict[str, FileTensor] = {}
    for file, listed in files.items():
        with SafetensorsReader(path / file) as reader:
            found = tensors_of(reader)
        if listed is not None and (odd := sorted(found.keys() ^ listed)):
            raise CheckpointError(f"{path / INDEX} and {file} do not agree about {odd[0]}")
        weights.update(found)
    return StoredModel(
        description=f"a folder of weights in {len(files)} file{'s' if len(files) > 1 else ''}",
        directory=OpenDirectory(path),
        tag="global_step0",
        meta=Meta(global_steps=0, micro_steps=0, skipped_steps=0, param_groups=[]),
        weights=weights,
    )


def expect_names_of_model(path: Path, model: StoredModel) -> None:
    """Raise ConfigError where the model of a folder's config.json has parameters that the folder has not.

    So it is where transformers renames or merges weights when it loads them. Where it does not build the model here,
    nothing is said.
    """
    if not (path / "config.json").is_file():
        return
    try:
        built = read_model(str(path)).on_meta()
    except ConfigError:
        return
    names = {name for name, _ in built.named_parameters()}
    missing, others = sorted(names - model.weights.keys()), sorted(model.weights.keys() - names)
    if missing:
        also = f", and the folder {others[0]}" if others else ""
        allowed = (
            f"a folder with the names that {type(built).__name__} has: {missing[0]} ({len(missing)} in all){also}. "
            "transformers renames or merges weights when it loads: from_pretrained(), initialize() and "
            "save_checkpoint() make a checkpoint of it"
        )
        raise ConfigError("SRC", str(path), allowed)


def _shards(path: Path) -> dict[str, set[str] | None]:
    """Return the names of the files, each with those of its tensors."""
    index = path / INDEX
    weight_map = parse_json(read_bytes(index, max_bytes=_MAX_INDEX_BYTES), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is not an object with the file of each tensor")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or name_problem(file) is not None:
            raise CheckpointError(f"{index}: weight_map[{name!r}] is not the name of a file beside it")
        tensors = files.setdefault(file, set())
        if tensors is not None:
            tensors.add(name)
    return dict(sorted(files.items()))


def files_to_carry(like: Path) -> list[Path]:
    """Return the files of a folder that are no weights: configuration, tokenizer, code. Raises ConfigError."""
    if not (like / CONFIG).is_file():
        raise ConfigError("--like", str(like), "must be a folder with a config.json")
    return sorted(
        file
        for file in like.iterdir()
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_OF_WEIGHTS)
    )


def bytes_of_folder(model: StoredModel, dtype: torch.dtype | None) -> int:
    """Return the bytes of tensors that `write_folder` writes."""
    return sum(entry.num_bytes for entry in _entries(model, dtype))


def _entries(model: StoredModel, dtype: torch.dtype | None) -> list[Entry]:
    weights = [
        Entry(weight, dtype if dtype is not None and weight.dtype in _ROUNDED else weight.dtype)
        for weight in model.weights.values()
    ]
    return [*weights, *(Entry(buffer, buffer.dtype) for buffer in model.buffers.values())]


def write_folder(
    model: StoredModel,
    path: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    carried: Sequence[Path],
    on_bytes: OnBytes,
) -> None:
    """Write a folder of weights and the files that it carries along. Raises ConfigError, CheckpointError, AioError.

    Args:
        dtype: of the weights; None: as they are stored. Buffers are as they are stored.
        max_shard_bytes: of a file, unless one tensor is larger.
        carried: files to be copied.
        on_bytes: is told of what is written.
    """
    entries = _entries(model, dtype)
    shards = divided(entries, max_shard_bytes)
    names = [WEIGHTS] if len(shards) == 1 else _shard_names(len(shards))
    with new_folder(path) as folder, HashingPool() as pool:
        for name, shard in zip(names, shards, strict=True):
            specs = [entry.spec for entry in shard]
            with SafetensorsWriter(folder / name, specs, metadata={"format": "pt"}, pool=pool) as writer:
                for entry in shard:
                    writer.add_pieces(entry.pieces(on_bytes))
                writer.close()
        if len(shards) > 1:
            write_file(folder / INDEX, _as_json(_index(names, shards)), pool)
        for file in carried:
            if file.name == CONFIG and dtype is not None:
                write_file(folder / CONFIG, _as_json(_with_dtype(file, dtype)), pool)
                continue
            shutil.copyfile(file, folder / file.name)
            with (folder / file.name).open("rb") as copied:
                os.fsync(copied.fileno())
        model.directory.expect_same()


def _as_json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2).encode()


def _with_dtype(config: Path, dtype: torch.dtype) -> dict[str, Any]:
    """A configuration that names the dtype which the weights have got, as `from_pretrained(dtype="auto")` reads it."""
    values = parse_json(read_bytes(config, max_bytes=_MAX_INDEX_BYTES), config)
    return {
        key: str(dtype).removeprefix("torch.") if key in ("dtype", "torch_dtype") else value
        for key, value in values.items()
    }


def _shard_names(num_shards: int) -> list[str]:
    return [f"model-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]


def _index(names: Sequence[str], shards: Sequence[Sequence[Entry]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(entry.num_bytes for shard in shards for entry in shard)},
        "weight_map": {
            entry.tensor.name: name for name, shard in zip(names, shards, strict=True) for entry in shard
        },
    }
