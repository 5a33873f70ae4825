"""The `optimizer` and `scheduler` blocks."""

from __future__ import annotations

from types import MappingProxyType

from offloadzero.config.block import AUTO, Block
from offloadzero.config.keys import DEEPSPEED_KEYS
from offloadzero.config.parse import read_bool, read_float, read_mapping, read_str
from offloadzero.config.schema import OptimizerConfig, SchedulerConfig
from offloadzero.errors import ConfigError

AVAILABLE_OPTIMIZERS = ("Adam", "AdamW")
# DeepSpeed's own and torch.optim's (2.13): names a script may carry over.
KNOWN_OPTIMIZERS = (
    *(
        "Adagrad",
        "Lion",
        "Lamb",
        "Muon",
        "OneBitAdam",
        "ZeroOneAdam",
        "OneBitLamb",
        "MuAdam",
        "MuAdamW",
        "MuSGD",
    ),
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    "SparseAdam",
)


def read_optimizer(top: Block, notices: list[str]) -> OptimizerConfig | None:
    """None without an `optimizer` block. Raises ConfigError."""
    if "optimizer" not in top:
        return None
    block = top.sub_block("optimizer", table=DEEPSPEED_KEYS["optimizer"], notices=notices)
    name = _read_type(block)
    params = block.sub_block("params", table=DEEPSPEED_KEYS["optimizer.params"], notices=notices)
    default = OptimizerConfig()
    adam_w_mode = params.read("adam_w_mode", read_bool, True)
    if name == "AdamW" and not adam_w_mode:
        raise ConfigError(params.dotted("adam_w_mode"), False, 'contradicts the type "AdamW": write "Adam"')
    return OptimizerConfig(
        type=name,
        lr=params.read("lr", read_float, default.lr, minimum=0),
        betas=params.read("betas", _read_betas, default.betas),
        eps=params.read("eps", read_float, default.eps, minimum=0),
        weight_decay=params.read("weight_decay", read_float, default.weight_decay, minimum=0),
        decoupled_weight_decay=adam_w_mode,
        bias_correction=params.read("bias_correction", read_bool, default.bias_correction),
    )


def _read_type(block: Block) -> str:
    """The canonical spelling; DeepSpeed compares these names without regard to case."""
    key = block.dotted("type")
    if block.raw("type") is None and "type" not in block:
        return OptimizerConfig().type
    given = read_str(key, block.raw("type"))
    by_lower = {name.lower(): name for name in (*AVAILABLE_OPTIMIZERS, *KNOWN_OPTIMIZERS)}
    name = by_lower.get(given.lower())
    available = ", ".join(AVAILABLE_OPTIMIZERS)
    if name is None:
        raise ConfigError(
            key, given, f"unknown optimizer: available are {available}", known_values=AVAILABLE_OPTIMIZERS
        )
    if name not in AVAILABLE_OPTIMIZERS:
        raise ConfigError(key, given, f"known, not built yet: available are {available}")
    return name


def _read_betas(key: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigError(key, value, "two numbers, each at least 0 and below 1")
    first, second = (read_float(f"{key}[{index}]", beta, minimum=0) for index, beta in enumerate(value))
    if first >= 1 or second >= 1:
        raise ConfigError(key, value, "two numbers, each at least 0 and below 1")
    return first, second


def read_scheduler(top: Block, notices: list[str]) -> SchedulerConfig | None:
    """None without a `scheduler` block. The schedule's own parameters are checked where it is built."""
    if "scheduler" not in top:
        return None
    block = top.sub_block("scheduler", table=DEEPSPEED_KEYS["scheduler"], notices=notices)
    if "type" not in block:
        raise ConfigError(block.dotted("type"), None, "the name of a learning-rate schedule")
    params = block.read("params", read_mapping, {})
    known = {name: entry for name, entry in params.items() if not _is_auto(entry)}
    return SchedulerConfig(
        type=read_str(block.dotted("type"), block.raw("type")), params=MappingProxyType(known)
    )


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO
