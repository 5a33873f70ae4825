"""A discrete-event simulation of tasks on lanes, which knows neither models nor devices.

[Note: lanes, queues and shares]
A lane does one task at a time. Its tasks stand in queues: within one they start in the order in which they were added,
even if a later one could begin before; of several queues that could go on, the one of the lowest rank does. A task
without a queue takes no time and ends when all that it waits for has.

Lanes may share something, the cores of a host or a drive's limit for both directions. While the same lanes run, each
goes on at a speed of its own, 1 where it has all that it needs; a lane that begins or ends changes the others' speeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Speeds = Callable[[Sequence[str]], Mapping[str, float]]  # of the lanes that run


class Queue(NamedTuple):
    """One of a lane's queues: [Note: lanes, queues and shares]."""

    lane: str
    rank: int = 0


class Choice(NamedTuple):
    """A choice between two tasks to wait for in addition, by what has begun when the task `asked` has ended.

    If `begun` has not, the task waits for `early` and takes no time. Else it waits for `late`.
    """

    asked: int
    begun: int
    early: int
    late: int


class Tasks:
    """Tasks by their number, in the order in which they were added."""

    def __init__(self) -> None:
        self.queues: list[Queue | None] = []
        self.seconds: list[float] = []
        self.labels: list[str] = []
        self.after: list[tuple[int, ...]] = []
        self.choices: dict[int, Choice] = {}

    def __len__(self) -> int:
        return len(self.seconds)

    def add(
        self,
        queue: Queue | None,
        seconds: float,
        after: Iterable[int | None],
        label: str = "",
        *,
        choice: Choice | None = None,
    ) -> int:
        """Add a task and return its number.

        `seconds` are those with all that its lane needs. Tasks in `after` that are None are none.
        """
        number = len(self.seconds)
        self.queues.append(queue)
        self.seconds.append(seconds)
        self.labels.append(label)
        self.after.append(tuple({one: None for one in after if one is not None}))
        if choice is not None:
            self.choices[number] = choice
        return number

    def join(self, after: Iterable[int | None]) -> int:
        return self.add(None, 0.0, after)


@dataclass(frozen=True)
class Outcome:
    """When each task began and ended, in seconds, and which one it waited for last (-1: for none)."""

    tasks: Tasks
    starts_s: Sequence[float]
    ends_s: Sequence[float]
    causes: Sequence[int]
    spared: Sequence[int]  # the tasks that took no time by their choice

    def critical_s(self, last: int, *, since_s: float = 0.0) -> dict[str, float]:
        """Return the seconds by lane of the chain of tasks that `last` ended, from `since_s` on."""
        found: dict[str, float] = {}
        task = last
        while task >= 0 and self.ends_s[task] > since_s:
            queue = self.tasks.queues[task]
            if queue is not None:
                lasted_s = self.ends_s[task] - max(self.starts_s[task], since_s)
                found[queue.lane] = found.get(queue.lane, 0.0) + lasted_s
            task = self.causes[task]
        return found


def simulate(tasks: Tasks, speeds: Speeds | None = None) -> Outcome:
    """Run all tasks: [Note: lanes, queues and shares]. `speeds` None: nothing is shared."""
    return _Run(tasks, speeds).outcome()


class _Lane:
    """The state of a lane: its running task (-1: none) and what is left of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queues: list[deque[int]] = []
        self.task = -1
        self.left_s = 0.0
        self.last = -1  # the task that it has ended last


class _Run:
    def __init__(self, tasks: Tasks, speeds: Speeds | None) -> None:
        count = len(tasks)
        self._tasks = tasks
        self._seconds = list(tasks.seconds)
        self._speeds = speeds
        self._known_speeds: dict[int, list[float]] = {}
        self._waiting = [len(after) for after in tasks.after]
        self._dependents: list[list[int]] = [[] for _ in range(count)]
        self._asked: dict[int, list[int]] = {}
        self._starts_s, self._ends_s, self._ready_s = [-1.0] * count, [-1.0] * count, [0.0] * count
        self._causes = [-1] * count
        self._now_s = 0.0
        self._spared: list[int] = []
        for number, after in enumerate(tasks.after):
            for earlier in after:
                self._dependents[earlier].append(number)
        for number, choice in tasks.choices.items():
            self._waiting[number] += 1
            self._asked.setdefault(choice.asked, []).append(number)
        self._lanes, self._lane_of = _lanes(tasks)

    def outcome(self) -> Outcome:
        gates = [number for number, queue in enumerate(self._tasks.queues) if queue is None]
        self._end([number for number in gates if not self._waiting[number]])
        running = self._start(self._lanes)
        while running:
            running = self._advance(running)
        open_tasks = [number for number, end_s in enumerate(self._ends_s) if end_s < 0]
        if open_tasks:
            names = [self._tasks.labels[number] or str(number) for number in open_tasks[:3]]
            raise AssertionError(f"{len(open_tasks)} tasks wait for each other: {', '.join(names)}")
        return Outcome(self._tasks, self._starts_s, self._ends_s, self._causes, self._spared)

    def _advance(self, running: list[int]) -> list[int]:
        """Go on to the next end of a task; return the lanes that run then, by their places."""
        lanes, speeds = self._lanes, self._speeds_of(running)
        step_s = min([lanes[place].left_s / speeds[place] for place in running])
        self._now_s += step_s
        ended, going_on = list[int](), list[int]()
        for place in running:
            lane, moved_s = lanes[place], step_s * speeds[place]
            if lane.left_s <= moved_s * (1 + 1e-12):
                ended.append(lane.task)
                lane.last, lane.task = lane.task, -1
            else:
                lane.left_s -= moved_s
                going_on.append(place)
        touched = {self._lane_of[task] for task in ended} | self._end(ended)
        return sorted([*going_on, *self._start([lanes[place] for place in touched])])

    def _speeds_of(self, running: list[int]) -> list[float]:
        key = sum(1 << place for place in running)
        if key not in self._known_speeds:
            names = [self._lanes[place].name for place in running]
            by_name = {} if self._speeds is None else self._speeds(names)
            self._known_speeds[key] = [by_name.get(lane.name, 1.0) for lane in self._lanes]
        return self._known_speeds[key]

    def _end(self, ended: Sequence[int]) -> set[int]:
        """End tasks, and all without a queue that waited for no more; return the lanes that others wait on."""
        touched, now_s, waiting = set[int](), self._now_s, self._waiting
        ending = list(ended)
        while ending:
            task = ending.pop()
            self._ends_s[task] = now_s
            for asking in self._asked.get(task, ()):
                self._choose(asking)
            for other in self._dependents[task]:
                waiting[other] -= 1
                if waiting[other]:
                    continue
                self._causes[other], self._ready_s[other] = task, now_s
                place = self._lane_of[other]
                if place < 0:
                    self._starts_s[other] = now_s
                    ending.append(other)
                else:
                    touched.add(place)
        return touched

    def _choose(self, asking: int) -> None:
        """Decide on a choice: the caller has not yet told the dependents of the task that was asked."""
        choice = self._tasks.choices[asking]
        chosen = choice.late
        if self._starts_s[choice.begun] < 0:
            chosen = choice.early
            self._seconds[asking] = 0.0
            self._spared.append(asking)
        if self._ends_s[chosen] < 0:
            self._dependents[chosen].append(asking)
        else:
            self._waiting[asking] -= 1

    def _start(self, lanes: Iterable[_Lane]) -> list[int]:
        """Start the next task of each lane that is idle; return the places of those that have one."""
        started = []
        for lane in lanes:
            queues = lane.queues if lane.task < 0 else ()
            queue = next((queue for queue in queues if queue and not self._waiting[queue[0]]), None)
            if queue is not None:
                task = queue.popleft()
                lane.task, lane.left_s = task, self._seconds[task]
                self._starts_s[task] = self._now_s
                if self._ready_s[task] < self._now_s:
                    self._causes[task] = lane.last
                started.append(self._lane_of[task])
        return started


def _lanes(tasks: Tasks) -> tuple[list[_Lane], list[int]]:
    """Return the lanes with all of their queues, and each task's place in that list (-1: it has no lane)."""
    queues: dict[Queue, deque[int]] = {}
    for number, queue in enumerate(tasks.queues):
        if queue is not None:
            queues.setdefault(queue, deque()).append(number)
    lanes: dict[str, _Lane] = {}
    for queue in sorted(queues):
        lanes.setdefault(queue.lane, _Lane(queue.lane)).queues.append(queues[queue])
    places = {name: place for place, name in enumerate(lanes)}
    return list(lanes.values()), [-1 if queue is None else places[queue.lane] for queue in tasks.queues]
