"""`offloadzero report --live`: the page follows the run, is for this machine alone, and ends quietly."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from offloadzero.cli.main import USER_ERROR, main
from offloadzero.observe.monitor import RunDirectory, is_written, trace_events
from offloadzero.observe.timeline import Span
from tests.cli.test_report import Page, own_forecast, plan_file, run_of, step_record, write_run
from tests.support.tiny import make_engine, settings, train

LIMIT_S = 60.0
# A shell starts what runs in the background without Ctrl-C.
RUN = """
import signal, sys
from offloadzero.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""
GOES_ON = "The run goes on, and this page follows it."
ENDED = "The run has ended."


class Live:
    """The command, and what it answers."""

    def __init__(self, directory: Path, *options: str) -> None:
        command = [sys.executable, "-c", RUN, "report", "--live", str(directory), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()
        address = self.process.stdout.readline()
        assert address.startswith("http://127.0.0.1:"), self.process.communicate()
        self.port = int(address.split(":")[2].split("/")[0])

    def get(self, path: str = "/data", *, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        """Return the status and the body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def data(self) -> dict[str, Any]:
        status, body = self.get()
        assert status == 200, body
        data: dict[str, Any] = json.loads(body)
        return data

    def interrupt(self) -> tuple[int, str]:
        """Press Ctrl-C; return the status and what was said on standard error."""
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, err


@contextmanager
def live(directory: Path, *options: str) -> Iterator[Live]:
    server = Live(directory, *options)
    try:
        yield server
        assert server.interrupt() == (0, "")
    finally:
        server.process.kill()
        server.process.communicate()


def test_it_follows_a_run_from_before_its_begin_to_its_end(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with live(directory) as server:
        not_begun = f"The run has not begun: there is no run.json in {directory}."
        assert server.said == server.data()["live"] == not_begun
        run = RunDirectory(directory)
        run.write_run({"tiers": {}, "device": "a device"})
        data = server.data()
        assert (data["live"], data["summary"]) == (GOES_ON, "No step has been recorded yet.")
        for step in (1, 2):
            run.write_step(step_record(step))
        assert server.data()["steps"]["step"] == [1, 2]
        run.write_step(step_record(3))
        run.write_trace(3, [Span("h2d", "a", 0.0, 1.0)], start_s=0.0, end_s=2.0)
        data = server.data()
        assert data["steps"]["step"] == [1, 2, 3]
        assert ["device", "a device"] in data["facts"]
        assert [trace["names"] for trace in data["traces"]] == [["a"]]
        other = trace_events(3, [Span("h2d", "b", 0.0, 1.0)], start_s=0.0, end_s=4.0)
        (directory / "trace_step_3.json").write_text(json.dumps(other))
        assert [trace["names"] for trace in server.data()["traces"]] == [["b"]]
        run.close()
        assert server.data()["live"] == ENDED
        resumed = RunDirectory(directory)
        assert server.data()["live"] == GOES_ON
        resumed.close()


def test_half_a_line_is_being_written_or_was_the_last(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [step_record(1)])
    run = RunDirectory(directory)
    line = json.dumps(step_record(2)) + "\n"
    with live(directory) as server, (directory / "steps.jsonl").open("a") as steps:
        steps.write(line[:40])
        steps.flush()
        data = server.data()
        assert (data["live"], data["steps"]["step"], data["notes"]) == (GOES_ON, [1], [])
        steps.write(line[40:])
        steps.flush()
        assert server.data()["steps"]["step"] == [1, 2]
        steps.write(line[:40])
        steps.flush()
        run.close()
        data = server.data()
        assert data["live"] == "The run was killed while it wrote a line of steps.jsonl."
        assert data["notes"] == ["Lines of steps.jsonl that cannot be read (a run that was killed?): 1."]
        resumed = RunDirectory(directory)
        resumed.write_step(step_record(3))
        resumed.close()
        assert server.data()["steps"]["step"] == [1, 2, 3], "the half line takes no other with it"


RUNS = """
import os, sys, time
from pathlib import Path
from offloadzero.observe.monitor import RunDirectory, is_written
run = RunDirectory(Path(sys.argv[1]))
worker = os.fork()
if not worker:
    time.sleep(100)
run.close()
print(is_written(run.path), flush=True)
os.kill(worker, 9)
run = RunDirectory(run.path)
print(is_written(run.path), flush=True)
time.sleep(100)
"""


def test_a_run_has_its_directory_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    engine = make_engine(settings(tmp_path, observe={"run_dir": str(run_dir)}))
    train(engine, num_steps=1)
    assert is_written(run_dir)
    engine.close()
    assert is_written(run_dir) is False
    first, second = RunDirectory(run_dir), RunDirectory(run_dir)
    second.close()
    assert is_written(run_dir), "the first has it still"
    second = RunDirectory(run_dir)
    first.close()
    assert is_written(run_dir) is False
    second.write_step(step_record(2))
    assert is_written(run_dir), "what found it taken has it from its next step on"
    second.close()
    assert is_written(run_dir) is False
    assert is_written(tmp_path / "nowhere") is False
    assert is_written(Path(__file__)) is None


def test_a_run_ends_when_it_is_killed_and_when_its_workers_live_on(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", RUNS, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"False\n", "it is closed, though a forked process has the file open"
    assert child.stdout.readline() == b"True\n"
    assert is_written(tmp_path)
    child.kill()
    child.communicate()
    assert is_written(tmp_path) is False


def test_the_page_is_for_this_machine_alone(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [step_record(1)])
    (directory / "report.html").write_text("a secret")
    with live(directory) as server:
        status, body = server.get("/")
        assert status == 200
        assert Page(body.decode()).data["live"] == ENDED
        for host in ("localhost", "LOCALHOST:1", f"127.0.0.1:{server.port}"):
            assert server.get(Host=host)[0] == 200
        for host in (
            "",
            "evil.example",
            f"evil.example:{server.port}",
            "127.0.0.1.evil.example",
            "localhost@evil",
            "[::1]",
        ):
            for path in ("/", "/data"):
                assert server.get(path, Host=host) == (403, b"only for localhost and 127.0.0.1")
        for path in (
            "/report.html",
            "/run.json",
            "/data/",
            "/data?a",
            "//etc/passwd",
            "/../run.json",
            "/%2e%2e/run.json",
        ):
            assert server.get(path) == (404, b"not here"), path
        for method in ("POST", "PUT", "OPTIONS"):
            assert server.get(method=method)[0] == 501
        with socket.create_connection(("127.0.0.1", server.port)) as bare:
            bare.sendall(b"GET /data HTTP/1.0\r\n\r\n")
            assert bare.recv(100).startswith(b"HTTP/1.0 403")
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.2", server.port))


def test_what_goes_wrong_is_told_and_it_goes_on(tmp_path: Path) -> None:
    directory = run_of(tmp_path / "run", 9)
    own_forecast(directory)
    plan = plan_file(tmp_path / "plan.json", 0.9, {"compute": 0.4})
    whole = (directory / "run.json").read_text()
    with live(directory, "--plan", plan) as server:
        assert server.data()["notes"] == [], "nine steps are too few beside a plan"
        (directory / "run.json").write_text(whole[:20])
        status, body = server.get()
        assert (status, b"is not JSON" in body) == (500, True)
        (directory / "run.json").write_text(whole)
        run_of(directory)
        assert "900 ms were forecast" in server.data()["notes"][0]
        # A browser that opens a connection and asks nothing, and one that goes before its answer.
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        idle[1].sendall(b"GET /data HTTP/1.0\r\nHost: localhost\r\n\r\n")
        idle[1].close()
        assert server.data()["live"] == ENDED
        idle[0].close()


def test_ctrl_c_ends_it_while_a_browser_is_connected(tmp_path: Path) -> None:
    server = Live(write_run(tmp_path / "run", [step_record(1)]))
    with socket.create_connection(("127.0.0.1", server.port)):
        assert server.interrupt() == (0, "")


def test_what_cannot_be_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", [])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["report", "--live", str(directory), "--port", str(port)]) == USER_ERROR
        assert f"--port = {port}: a free port, or 0 for any: " in capsys.readouterr().err
    assert main(["report", "--live", str(directory), "--port", "70000"]) == USER_ERROR
    assert "--port = 70000" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", "--live", str(directory), "-o", "page.html"])
    assert "not allowed with argument" in capsys.readouterr().err
    (directory / "run.json").write_text("{")
    assert main(["report", "--live", str(directory)]) == USER_ERROR
    assert "RUN_DIR" in capsys.readouterr().err
