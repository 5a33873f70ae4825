"""Configurations as they are found, and what typos, tools and damage make of them."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS

REPOSITORY = Path(__file__).parents[2]
ALL_KEYS = sorted({key for table in (*DEEPSPEED_KEYS.values(), *OWN_KEYS.values()) for key in table})

Json = Any
# A container and the index or key of one of its members.
Place = tuple[Any, Any]


def seeds(directory: Path) -> dict[str, Json]:
    """Whole configurations by name; their nvme directory is `directory`."""
    examples = {
        file.stem: json.loads(file.read_text().replace("offload-files", str(directory)))
        for file in sorted((REPOSITORY / "examples" / "configs").glob("*.json"))
    }
    return {**examples, "deepspeed": _deepspeed(directory), "own": _own(directory), "fp16": _fp16()}


def _deepspeed(directory: Path) -> Json:
    """Every part of DeepSpeed's JSON that is taken."""
    nvme = {"device": "nvme", "nvme_path": [str(directory)], "pin_memory": True, "buffer_count": 5}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
        "wall_clock_breakdown": False,
        "prescale_gradients": False,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-3,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.1,
                "torch_adam": False,
            },
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-3,
                "warmup_num_steps": 5,
                "total_num_steps": 9,
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "buffer_size": 1e8, "max_in_cpu": 1e9},
            "offload_optimizer": {**nvme, "pipeline_read": True, "fast_init": False, "ratio": 0.5},
            "stage3_max_live_parameters": 1e9,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_prefetch_bucket_size": 5e7,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1e9,
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "zero_hpz_partition_size": 1,
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False},
        "activation_checkpointing": {"cpu_checkpointing": False, "number_checkpoints": None},
        "checkpoint": {"tag_validation": "Warn"},
        "tensorboard": {"enabled": False, "output_path": "x"},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "tensor_parallel": {"autotp_size": 0},
    }


def _own(directory: Path) -> Json:
    """Every part of our own block."""
    return {
        "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 3, "gamma": 0.5}},
        "bf16": {"enabled": True},
        "offloadzero": {
            "budgets": {"device": "1GiB", "host": "1GiB", "nvme": 2**30},
            "placement": [
                {"units": "*", "param": "host", "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "host"},
                {"units": "0", "param": "device", "grad": "host"},
            ],
            "nvme_path": str(directory),
            "frozen_weights": "in_place",
            "versions": "auto",
            "durable": True,
            "state_layout": "fp32",
            "placement_tokens": 4096,
            "units": {"patterns": ["0", "1*"], "min_leaf_elements": 16, "prefetch_units": 1},
            "activation_checkpoints": {"units": ["0"], "tier": "host", "input_bytes": "1MiB"},
            "update": {
                "in_backward": "auto",
                "on_nonfinite": "skip",
                "chunk_elements": 4096,
                "num_chunks_in_flight": 2,
                "num_threads": 1,
            },
            "aio": {"backend": "auto"},
            "observe": {"step_line": False, "run_dir": str(directory / "run"), "trace_steps": [1, "2-3"]},
            "device": "cpu",
            "poison_released_leases": True,
        },
    }


def _fp16() -> Json:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 4,
            "loss_scale_window": 10,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 4},
        },
        "zero_optimization": {"stage": 2, "cpu_offload": True},
    }


# --- mutations of the values -----------------------------------------------------------------------------

ODD_VALUES: tuple[Callable[[], Json], ...] = (
    *(lambda value=value: value for value in (None, True, False, 0, 1, -1, 2, 3, 4096, 65536, 7.5, -0.5)),
    *(lambda value=value: value for value in (1e9, 1e30, 1e300, 2**31, 2**63, 2**64, -(2**63), 10**300)),
    *(lambda value=value: value for value in (math.inf, -math.inf, math.nan, 1e-300, 0.1, 10**400, 10**5000)),
    *(lambda value=value: value for value in ("", "auto", "none", "cpu", "nvme", "host", "device", "true")),
    *(
        lambda value=value: value
        for value in ("1GiB", "16G", "9" * 5000, "cuda:99", "[", "*", "**[!", "~nobody/x")
    ),
    *(
        lambda value=value: value
        for value in ("/dev/null/x", "/proc/x/y", "a\0b", "\ud800", "x" * 300, "../..")
    ),
    *(
        lambda value=value: value
        for value in ("1-", "3-1", "0-0", "1-999999999999", "Adam", "WarmupLR", "StepLR")
    ),
    *(
        lambda value=value: copy.deepcopy(value)
        for value in ([], {}, [None], [[]], {"a": 1}, {"enabled": True})
    ),
    *(
        lambda value=value: copy.deepcopy(value)
        for value in ({"": ""}, [1, "a", None], [0.9, 0.99], ["*"] * 9)
    ),
    lambda: _nested(40),
    lambda: _nested(950),
)


def _nested(depth: int) -> Json:
    value: Json = 1
    for _ in range(depth):
        value = [value]
    return value


def places(value: Json) -> Iterator[Place]:
    """Every member of every object and list in `value`."""
    members = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, entry in list(members):
        yield value, key
        yield from places(entry)


def _typo(word: str, random_: random.Random) -> str:
    index = random_.randrange(len(word) + 1)
    letter = random_.choice("aeszt_. \0é\ud800A")
    return random_.choice(
        [word[:index] + letter + word[index:], word[:index] + word[index + 1 :], word.upper(), word + word]
    )


def mutate(config: Json, random_: random.Random) -> None:
    """One change to one member, in place."""
    container, key = random_.choice(list(places(config)))
    change = random_.choice(
        ("value", "value", "value", "scale", "delete", "name", "add", "wrap", "copy", "cycle")
    )
    if change == "value":
        container[key] = random_.choice(ODD_VALUES)()
    elif change == "scale" and isinstance(container[key], (int, float)):
        container[key] *= random_.choice((-1, 0, 0.5, 3, 1e3, 1e9))
    elif change == "delete":
        del container[key]
    elif change == "name" and isinstance(container, dict):
        new = random_.choice((_typo(str(key), random_), random_.choice(ALL_KEYS), 7, None, True))
        container[new] = container.pop(key)
    elif change == "add" and isinstance(container, dict):
        container[random_.choice(ALL_KEYS)] = random_.choice(ODD_VALUES)()
    elif change == "wrap":
        container[key] = random_.choice(([container[key]], {"enabled": container[key]}, (container[key],)))
    elif change == "copy":
        other, name = random_.choice(list(places(config)))
        container[key] = copy.deepcopy(other[name])
    elif change == "cycle" and random_.random() < 0.3:
        container[key] = container


def mutated(config: Json, random_: random.Random) -> Json:
    """A copy with one to four changes."""
    result = copy.deepcopy(config)
    for _ in range(random_.choice((1, 1, 1, 2, 3, 4))):
        if not _is_shallow(result) or next(places(result), None) is None:
            break  # a cycle, or nothing left to change
        mutate(result, random_)
    return result


def _is_shallow(value: Json, depth: int = 0) -> bool:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return depth < 30 and all(_is_shallow(entry, depth + 1) for entry in members)


# --- mutations of the text -------------------------------------------------------------------------------

_SNIPPETS = (b"//", b"/*", b"*/", b"#", b",", b",,", b"{", b"}", b"[", b"]", b":", b'"', b"\\", b"\\u0000")
_SNIPPETS += (b"\\ud800", b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b"1e999", b"NaN", b"-Infinity", b"null")
_SNIPPETS += (b"1" * 5000, b"[" * 1000, b"'", b"True", b"auto", b" " * 1000, b"\r", "٣".encode())


def mutated_text(config: Json, random_: random.Random) -> bytes:
    """The bytes of a file of `config` with one to four changes."""
    data = bytearray(json.dumps(config, indent=random_.choice((None, 2))).encode())
    for _ in range(random_.choice((1, 1, 2, 4))):
        start = random_.randrange(len(data) + 1)
        change = random_.choice(("flip", "insert", "insert", "delete", "repeat", "cut"))
        if change == "flip" and start < len(data):
            data[start] ^= 1 << random_.randrange(8)
        elif change == "insert":
            data[start:start] = random_.choice(_SNIPPETS)
        elif change == "delete":
            del data[start : start + random_.choice((1, 1, 3, 30))]
        elif change == "repeat":
            data[start:start] = data[start : start + random_.choice((1, 10, 300))]
        elif change == "cut":
            del data[start + len(data) // 2 :]
    return bytes(data)
