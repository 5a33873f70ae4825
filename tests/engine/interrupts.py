"""Interrupts at random places of a training run, and what became of it.

[Note: where an interrupt can come]
CPython looks for signals where a Python function begins, after a call of a C function, and where a loop jumps back.
An injected interrupt is a real signal to the process itself (so handlers, and sections that hold it back, do what they
do) sent at a chosen one of these places: `sys.setprofile` stops at the first two kinds. A line of code is no such
place: an exception raised between a `with` block's last line and its exit, say, is one that Python never raises.
(One call that blocks is interrupted before it returns; a C function that takes a lock stops before it too.)

The signal is SIGINT, or SIGALRM with a handler of the script's that raises an error of its own.

[Note: what a script does after Ctrl-C]
It decides by `engine.global_steps` whether the step it was in was taken. If so it goes on with the next; if not it
drops the gradients and does the step again, or calls `step()` where it is told that backward has updated all weights.
Any other error of the package on the way means that the engine refuses: then the script saves what can be saved,
closes and ends.

Run as a program it plays one case after another, each in a forked child, and prints what became of them as JSON:
`python -m tests.engine.interrupts KIND SIGNAL[,SIGNAL] NUMBER SEED [FILE]`.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch

import offloadzero
from offloadzero.core.interrupts import uninterrupted
from tests.support.tiny import TinyModel, settings, tokens

PACKAGE = str(Path(offloadzero.__file__).parent) + os.sep
STARTED, PLAYED = "started\n", "played"
NUM_STEPS = int(os.environ.get("OFFLOADZERO_TEST_INTERRUPTED_STEPS", "3"))
ACCUMULATION = 2
PATIENCE_S = float(os.environ.get("OFFLOADZERO_TEST_INTERRUPT_PATIENCE_S", "30"))


@dataclass(frozen=True)
class Case:
    """One interrupt in one run. `at` is a place's number (injected) or a fraction of the run's time (real)."""

    placement: str
    clipping: float
    form: str  # "engine" or "plain"
    kind: str  # "injected" or "real"
    at: float
    signal: int = signal.SIGINT

    @property
    def configuration(self) -> str:
        """What the reference depends on."""
        return f"{self.placement}, {'clipped' if self.clipping else 'not clipped'}, {self.form}"


CONFIGURATIONS = [
    (placement, clipping, form)
    for placement, clipping, form in itertools.product(("host", "nvme"), (0.0, 0.05), ("engine", "plain"))
]

# --- the script ---


class TimedOutError(Exception):
    """What the script's handler of SIGALRM raises."""


def raise_timed_out(_number: int, _frame: FrameType | None) -> None:
    raise TimedOutError


class Run:
    """A training run in either form, step by step."""

    def __init__(self, case: Case, directory: str) -> None:
        torch.manual_seed(1)
        model = TinyModel(width=24, num_blocks=3)
        self.form = case.form
        accumulation = ACCUMULATION if case.form == "engine" and case.clipping else 1
        config = settings(
            directory,
            placement=case.placement,
            gradient_clipping=case.clipping,
            gradient_accumulation_steps=accumulation,
            units={"min_leaf_elements": 256},
            update={"chunk_elements": 4096},
        )
        # A schedule that is one step off shows in the weights.
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 9}}
        self.num_micro = accumulation
        if case.form == "engine":
            self.engine, self.optimizer, _, _ = offloadzero.initialize(model=model, config=config)
        else:
            plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
            model, self.optimizer = offloadzero.offload(model, plain, config)
        self.model = model

    @property
    def steps(self) -> int:
        return self.optimizer.runtime.coordinator.global_steps

    def step(self, number: int) -> None:
        """All micro batches of step `number`, and the step."""
        for micro in range(self.num_micro):
            batch = tokens(number * self.num_micro + micro)
            if self.form == "engine":
                self.engine.backward(self.engine(batch))
                self.engine.step()
            else:
                self.optimizer.zero_grad()
                self.model(batch).backward()
                self.optimizer.step()

    def again(self) -> None:
        """After an interrupt: drop what the unfinished step has left, or close the step that backward has taken."""
        one = self.engine if self.form == "engine" else self.optimizer
        try:
            one.zero_grad()
        except offloadzero.StateError as error:
            if "backward has already updated the weights: call step() first" not in str(error):
                raise
            one.step()

    def result(self) -> dict[str, torch.Tensor]:
        """Weights, masters and moments."""
        values = dict(self.model.state_dict())
        values["lr"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        for number, state in self.optimizer.state_dict()["state"].items():
            values.update({f"{number}.{key}": value for key, value in state.items()})
        return values


def play(case: Case, directory: str, interrupt: Interrupt) -> tuple[str, dict[str, torch.Tensor] | None]:
    """What became of a run with one interrupt, and its result if it went on to the end."""
    where = "start"
    run: Run | None = None
    try:
        run = Run(case, directory)
        where = "training"
        interrupt.arm()
        train(run)
        interrupt.disarm()
    except (KeyboardInterrupt, TimedOutError) as error:
        interrupt.disarm()
        interrupt.note(error)
        if run is None:
            return "ended at start", None
        try:
            if run.steps < NUM_STEPS:
                run.again()
            train(run)
        except offloadzero.OffloadError as refusal:
            interrupt.refusal = f"{type(refusal).__name__}: {refusal}"
            interrupt.saved = save(run, directory)
            return end_refused(run, where), None
    result = run.result()  # with as many places as training, which would take half of the interrupts
    if not interrupt.came:
        interrupt.go_on()
    run.optimizer.close()
    interrupt.disarm()
    return ("went on" if interrupt.came else "never came"), result


def train(run: Run) -> None:
    while run.steps < NUM_STEPS:
        run.step(run.steps)


def save(run: Run, directory: str) -> str:
    """The emergency save of an engine that cannot go on: "saved", or the error."""
    path = f"{directory}.saved"
    try:
        if run.form == "engine":
            run.engine.save_checkpoint(path)
        else:
            torch.save((run.model.state_dict(), run.optimizer.state_dict()), path)
    except offloadzero.OffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def end_refused(run: Run, where: str) -> str:
    """The engine cannot go on, and closes."""
    with suppress(offloadzero.OffloadError):  # the failure, once more
        run.optimizer.close()
    return f"refused after an interrupt in {where}"


# --- the interrupt ---


class Interrupt:
    """One signal; `came` when the script has caught what its handler raised."""

    def __init__(self) -> None:
        self.came = False
        self.place = ""  # where it came: file:line function
        self.stack: list[str] = []  # the package's functions it went through
        self.refusal = ""
        self.saved = ""  # what became of an emergency save

    def arm(self) -> None: ...

    def disarm(self) -> None: ...

    def go_on(self) -> None:
        """Be armed again after `disarm`."""

    def note(self, error: BaseException) -> None:
        self.came = True
        self.stack = [
            place_of(one.filename, one.lineno, one.name)
            for one in traceback.extract_tb(error.__traceback__)
            if PACKAGE in one.filename and not one.filename.endswith("interrupts.py")
        ]
        if not self.place:
            self.place = self.stack[-1] if self.stack else "outside"


def place_of(file: str, line: int | None, function: str) -> str:
    return f"{file.removeprefix(PACKAGE)}:{line} {function}"


class Injected(Interrupt):
    """A signal at the `countdown`th place inside the package: [Note: where an interrupt can come]."""

    # Blocking calls, which are interrupted before they have done anything.
    BLOCKING = ("acquire", "get", "join", "wait")

    def __init__(self, countdown: int, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.num_places = 0
        self._countdown = countdown
        self._signal = number

    def arm(self) -> None:
        sys.setprofile(self._look)

    def disarm(self) -> None:
        sys.setprofile(None)

    def go_on(self) -> None:
        self.arm()

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event in ("return", "c_exception") or (
            event == "c_call" and getattr(argument, "__name__", "") not in self.BLOCKING
        ):
            return
        self.num_places += 1
        if self.num_places == self._countdown:
            code = frame.f_code
            self.place = f"{place_of(code.co_filename, frame.f_lineno, code.co_name)} ({event})"
            self._strike(frame)

    def _strike(self, frame: FrameType) -> None:
        """Python's handler runs inside this call, and what it raises is raised at the place."""
        handler = signal.getsignal(self._signal)
        assert callable(handler)
        handler(self._signal, frame)


class InjectedBehindCall(Injected):
    """A signal behind the `countdown`th call of a Python function inside the package.

    There, too, CPython looks for signals where another function than its own evaluates frames: inside compiled ones.
    """

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        caller = frame.f_back
        if event == "return" and caller is not None:
            super()._look(caller, "call", argument)


class InjectedError(RuntimeError):
    """What a function may raise at any time, memory that is not there say."""


class InjectedFault(Injected):
    """An error in the place of an interrupt: nothing holds it back."""

    # The end of an uninterrupted function calls nothing and takes no memory: no error can come there.
    _END = uninterrupted(len).__code__

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is not self._END:
            super()._look(frame, event, argument)

    def _strike(self, frame: FrameType) -> None:
        if frame.f_code.co_name != "__del__":  # Python swallows it there
            raise InjectedError(self.place)


class Real(Interrupt):
    """The signal comes from outside, some time after the parent has been told that training begins."""

    def __init__(self, pipe: TextIO) -> None:
        super().__init__()
        self._pipe = pipe

    def arm(self) -> None:
        self._pipe.write(STARTED)
        self._pipe.flush()


# --- many cases ---


def in_child(case: Case, directory: str, reference: str, write: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if case.signal == signal.SIGALRM:
        signal.signal(signal.SIGALRM, raise_timed_out)
    torch.set_num_threads(1)
    pipe = os.fdopen(write, "w")
    interrupt: Interrupt = Injected(int(case.at), case.signal) if case.kind == "injected" else Real(pipe)
    outcome, result = play(case, directory, interrupt)
    different = [] if result is None else differences(result, torch.load(reference, weights_only=True))
    report = {
        "outcome": outcome,
        "different": different[:5],
        "place": interrupt.place,
        "stack": interrupt.stack,
        "refusal": interrupt.refusal,
        "saved": interrupt.saved,
        "num_places": getattr(interrupt, "num_places", 0),
    }
    pipe.write(json.dumps(report) + "\n")
    pipe.flush()
    print(PLAYED, file=sys.stderr, flush=True)


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(one.keys() ^ other.keys())
    return names + [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]


def play_in_child(case: Case, folder: str, number: int, reference: str) -> dict[str, Any]:
    """The case in a process of its own, which gets the signal if it is a real one, and its end.

    `reference` is the file of the uninterrupted run's result; beside it is one with the seconds it trained.
    """
    directory = f"{folder}/{number}"
    os.mkdir(directory)
    read, write = os.pipe()
    output = f"{folder}/output{number}"
    started_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        # A line for the parent when it hangs.
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        import faulthandler

        faulthandler.register(signal.SIGUSR1, all_threads=True)
        status = 1
        try:
            try:
                in_child(case, directory, reference, write)
                status = 0
            except BaseException:
                traceback.print_exc()
            # What the interpreter does at its end, without the second it takes to take torch apart.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stderr.flush()
        except BaseException:  # an interrupt that comes then must not unwind what is the parent's
            status = 1
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    if case.kind == "real":
        os.read(read, len(STARTED))
        time.sleep(case.at * float(Path(reference + ".seconds").read_text()))
        os.kill(pid, case.signal)
    status = wait_for(pid, started_s + PATIENCE_S)
    with os.fdopen(read) as pipe:
        lines = [line for line in pipe.read().splitlines() if line.startswith("{")]
    report: dict[str, Any] = json.loads(lines[0]) if lines else {}
    error_output = Path(output).read_text()
    report |= {
        "case": asdict(case),
        "status": status,
        "files": os.listdir(directory),
        "output": error_output[-3000:],
        "duration_s": time.monotonic() - started_s,
    }
    report["verdict"] = verdict(report)
    return report


def wait_for(pid: int, deadline_s: float) -> int | None:
    """The exit status; None for a process that hangs, which prints where, and is killed."""
    while True:
        done, raw = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(raw)
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


FINE = ("went on and equal", "refused", "ended", "never came")


def verdict(report: dict[str, Any]) -> str:
    """One of FINE, or what is wrong."""
    if report["status"] is None:
        return "hung"
    if report["files"]:
        return "left a file"
    if report["status"] < 0:
        return f"crashed ({signal.Signals(-report['status']).name})"
    if report["status"]:
        raised = "KeyboardInterrupt" if report["case"]["signal"] == signal.SIGINT else "TimedOutError"
        if not report["output"].rstrip().endswith(raised):
            return "failed"
        if report.get("outcome") == "never came":  # but when the interpreter went, behind all training
            return "never came"
        return "failed" if "outcome" in report else "ended"
    outcome = report["outcome"]
    # One that was sent and that the script has not caught is lost, whether Python says so or not.
    is_lost = outcome == "never came" and bool(report["place"])
    if is_lost or is_swallowed(report["output"].split(PLAYED)[0]):
        return "swallowed"
    if report["different"]:
        return "different numbers in silence"
    if outcome.startswith("refused"):
        return "refused"
    if outcome == "ended at start":
        return "ended"
    return "went on and equal" if outcome == "went on" else outcome


def is_swallowed(output: str) -> bool:
    """Whether Python has dropped what a handler raised: in the callback of a weak reference, or in a `__del__`.

    Python's own callback does not count, which removes the lock of an imported module: it drops Ctrl-C in any script.
    """
    frames = [
        text.partition('File "')[2].partition("\n")[0] for text in output.split("Exception ignored")[1:]
    ]
    return any(
        not (frame.startswith("<frozen importlib._bootstrap>") and frame.endswith(", in cb"))
        for frame in frames
    )


@contextmanager
def scratch() -> Iterator[str]:
    """A folder that the exit of a forked child leaves alone, as it would not a TemporaryDirectory."""
    folder = tempfile.mkdtemp(prefix="interrupts-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Player:
    """Plays cases beside the run without an interrupt. It has loaded torch already, which makes a child cheap."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._references: dict[str, str] = {}
        self._num_played = 0

    def play(self, case: Case) -> dict[str, Any]:
        """The report of a case."""
        if case.configuration not in self._references:
            reference = make_reference(case, f"{self._folder}/reference{len(self._references)}")
            self._references[case.configuration] = reference
        self._num_played += 1
        return play_in_child(case, self._folder, self._num_played, self._references[case.configuration])

    def count_places(self, configuration: tuple[str, float, str]) -> int:
        """Places inside the package in a whole run."""
        report = self.play(Case(*configuration, kind="injected", at=-1))
        assert report["verdict"] == "never came", report
        return int(report["num_places"])


def make_reference(case: Case, path: str) -> str:
    """The file of the result of the run without an interrupt."""
    if (pid := os.fork()) == 0:
        torch.set_num_threads(1)
        directory = f"{path}.nvme"
        os.mkdir(directory)
        run = Run(case, directory)
        started_s = time.monotonic()
        train(run)
        Path(path + ".seconds").write_text(str(time.monotonic() - started_s))
        torch.save(run.result(), path)
        run.optimizer.close()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, status
    return path


def choose(player: Player, kind: str, number: int, *, seed: int, of_signals: Sequence[int]) -> list[Case]:
    """`number` cases of each signal at random places, spread over the configurations."""
    if kind == "injected":
        ends: dict[tuple[str, float, str], float] = {}
        for configuration in CONFIGURATIONS[: max(1, min(number, len(CONFIGURATIONS)))]:
            ends[configuration] = player.count_places(configuration)
    cases = []
    for of_signal in of_signals:
        draw = random.Random(seed)
        for index in range(number):
            configuration = CONFIGURATIONS[index % len(CONFIGURATIONS)]
            at = 1 + draw.randrange(int(ends[configuration])) if kind == "injected" else draw.random()
            cases.append(Case(*configuration, kind=kind, at=at, signal=of_signal))
    return cases


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """Verdicts with their numbers; of those that are wrong, the places."""
    verdicts = Counter(report["verdict"] for report in reports)
    lines = [f"{count:5}  {name}" for name, count in verdicts.most_common()]
    saves = Counter(report["saved"] or "" for report in reports if report["verdict"] == "refused")
    lines += [f"{count:5}  emergency save of a refused one: {what}" for what, count in saves.most_common()]
    wrong: dict[str, Counter[str]] = {}
    for report in reports:
        if report["verdict"] not in FINE:
            wrong.setdefault(report["verdict"], Counter())[
                f"{report.get('place') or last_place(report)}  [{Case(**report['case']).configuration}]"
            ] += 1
    for name, places in sorted(wrong.items()):
        lines += ["", name, *(f"{count:5}  {place}" for place, count in sorted(places.items()))]
    return "\n".join(lines)


def last_place(report: dict[str, Any]) -> str:
    """From the output of one that hung or failed."""
    lines = [line.strip() for line in report["output"].splitlines() if PACKAGE in line]
    return lines[-1].replace(PACKAGE, "") if lines else "unknown"


def main() -> None:
    """KIND SIGNAL[,SIGNAL] NUMBER SEED [FILE]: what became of NUMBER cases of each signal, and the reports as JSON."""
    kind, names, number, seed = sys.argv[1:5]
    of_signals = [signal.Signals[name] for name in names.split(",")]
    reports = []
    with scratch() as folder:
        player = Player(folder)
        for case in choose(player, kind, int(number), seed=int(seed), of_signals=of_signals):
            report = player.play(case)
            reports.append(report)
            if len(sys.argv) > 5:
                with open(sys.argv[5], "a") as file:
                    file.write(json.dumps(report) + "\n")
    print(summary(reports))


if __name__ == "__main__":
    import torch._dynamo  # else every child would spend a second on it

    main()
