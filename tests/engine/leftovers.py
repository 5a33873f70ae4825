"""What an engine leaves behind: on its model, in the process, and for the collector; handlers that a test leaves."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offloadzero.core import interrupts
from offloadzero.engine.lifetime import wait_for_collected
from tests.support.tiny import TinyModel, tokens

Forms = dict[str, tuple[torch.Tensor, torch.dtype, bool]]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def forms(model: nn.Module) -> Forms:
    """Values, dtypes and requires_grad."""
    return {
        name: (param.detach().clone(), param.dtype, param.requires_grad)
        for name, param in model.named_parameters()
    }


def hooks_on(model: nn.Module) -> list[str]:
    """What is attached to modules and parameters."""
    found = []
    for name, module in model.named_modules():
        for kind in HOOKS:
            found += [f"{name}.{kind}"] * len(getattr(module, kind))
        if type(module._parameters) is not dict:
            found.append(f"{name}._parameters")
        if "forward" in module.__dict__:
            found.append(f"{name}.forward")
    for name, param in model.named_parameters():
        found += [name] * len(param._post_accumulate_grad_hooks or ())
        if type(param) is not nn.Parameter:
            found.append(f"{name}: {type(param).__name__}")
    return found


def assert_as_before(model: nn.Module, before: Forms) -> None:
    after = forms(model)
    assert after.keys() == before.keys()
    for name, (value, dtype, requires_grad) in after.items():
        assert (dtype, requires_grad) == before[name][1:], name
        assert torch.equal(value, before[name][0]), name
    assert hooks_on(model) == []
    assert torch.isfinite(model(tokens(0)))


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("offloadzero-")]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def fresh_model() -> TinyModel:
    torch.manual_seed(1)
    return TinyModel()


def collect(is_done: Callable[[], bool] = lambda: True) -> None:
    """Transfers in flight hold their engine until they end: the collector may have to look again."""
    deadline_s = time.monotonic() + 10
    gc.collect()
    while not is_done() and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
        gc.collect()
    wait_for_collected()


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """Inside, a signal has this handler, which is held back as those that a script has set."""
    before = signal.signal(number, handler)
    try:
        interrupts.install()
        yield
    finally:
        signal.signal(number, before)
