"""Where a step's time goes: each blocking wait of the training thread has a name (floor 1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: its wall time and the seconds the training thread lost, by the wait's name."""

    step: int
    step_s: float
    waits_s: dict[str, float] = field(default_factory=dict)

    @property
    def total_wait_s(self) -> float:
        """Seconds lost in all waits of the step."""
        return sum(self.waits_s.values())


class StepClock:
    """Collects named waits; `finish_step` closes the step's account and opens the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits_s: dict[str, float] = {}
        self._step = 0
        self._started_s = time.perf_counter()
        self.last = StepReport(step=0, step_s=0.0)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Count the time spent inside under `name`."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            waited_s = time.perf_counter() - start_s
            with self._lock:
                self._waits_s[name] = self._waits_s.get(name, 0.0) + waited_s

    def finish_step(self) -> StepReport:
        """Close the account of this step."""
        now_s = time.perf_counter()
        with self._lock:
            self._step += 1
            self.last = StepReport(self._step, now_s - self._started_s, dict(self._waits_s))
            self._waits_s.clear()
            self._started_s = now_s
        return self.last
