"""The choice of a backend of AioEngine that this machine allows, and its reason."""

from __future__ import annotations

import logging
from typing import NamedTuple

from offloadzero.errors import ConfigError
from offloadzero.io.backends import AioBackend, EngineCore, EngineOptions, errno_name

logger = logging.getLogger("offloadzero.aio")


class _BackendRefused(Exception):  # noqa: N818 (a signal inside this file)
    """The machine does not allow a backend; the text says why."""


class Choice(NamedTuple):
    """An engine core, its backend, and the reason for that choice."""

    core: EngineCore
    backend: AioBackend
    reason: str


_AUTO_ORDER = (AioBackend.IO_URING, AioBackend.NATIVE_AIO, AioBackend.AIOFILES)
_is_choice_logged = False


def _make_core(backend: AioBackend, options: EngineOptions) -> EngineCore:
    try:
        if backend is AioBackend.AIOFILES:
            from offloadzero.io.aiofiles_backend import AiofilesEngine

            return AiofilesEngine(options)
        from offloadzero.io._aio import Engine

        return Engine(
            backend is AioBackend.IO_URING,
            options.block_size,
            options.queue_depth,
            options.num_threads,
            options.transfer_timeout_s,
        )
    except ImportError as error:
        raise _BackendRefused(f"{backend.value}: {error}") from error
    except OSError as error:
        raise _BackendRefused(f"{backend.value}: {errno_name(error.errno or 0)}") from error


def choose_backend(asked: AioBackend, options: EngineOptions) -> Choice:
    """Return the backend asked for, or under AUTO the first that works, logged once per process.

    Raises ConfigError: that backend, or under AUTO each of them, is not available here.
    """
    if asked is not AioBackend.AUTO:
        try:
            return Choice(_make_core(asked, options), asked, "asked for")
        except _BackendRefused as refusal:
            raise ConfigError("backend", asked.value, f"not available here ({refusal})") from refusal
    refusals: list[str] = []
    for backend in _AUTO_ORDER:
        try:
            core = _make_core(backend, options)
        except _BackendRefused as refusal:
            refusals.append(str(refusal))
            continue
        choice = Choice(core, backend, "; ".join(refusals) or "the kernel allows it")
        _log_choice(choice, is_fallback=bool(refusals))
        return choice
    raise ConfigError("backend", asked.value, f"none is available here ({'; '.join(refusals)})")


def _log_choice(choice: Choice, *, is_fallback: bool) -> None:
    global _is_choice_logged
    if _is_choice_logged:
        return
    _is_choice_logged = True
    level = logging.WARNING if is_fallback else logging.INFO
    logger.log(level, "aio backend: %s (%s)", choice.backend.value, choice.reason)
