"""Python processes that start with torch imported, which takes a second of each otherwise, and another at its end.

They are `subprocess.Popen`s of `python -c SCRIPT`, `python -m MODULE` or `python FILE` in every respect but one: the
child is forked from an interpreter that has imported torch and the package, and has done nothing else. What an
interpreter reads of its environment when it starts cannot be changed then: with another value of such a variable the
child starts anew.

[Note: whose child]
The parent must be the one that waits: this process, not the one that forks. So the child is forked twice and adopted
by its grandparent when its parent ends: prctl(2), PR_SET_CHILD_SUBREAPER. It is on for that moment only, so that no
other orphan of a test comes here.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

READ_AT_START = ("OMP_", "GOMP_", "MKL_", "PYTHON", "LD_", "TORCH", "OFFLOADZERO_", "MALLOC_")
READ_ON_FIRST_USE = ("OFFLOADZERO_ISA",)
PRELOADED = ("offloadzero.api.engine", "tests.support.tiny")
SERVER = "from tests.support.warm import next_script\nexec(next_script())"
PR_SET_CHILD_SUBREAPER = 36
_LIMIT = 1 << 20  # bytes of a request


class WarmProcess(subprocess.Popen[str]):
    """`Popen` of a command that begins with this interpreter, in text; its environment must be given."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        _, _, _, _, cwd, env, _, _, _, *ends = others[:15]
        interpreter, *options = map(os.fspath, args)
        assert interpreter == sys.executable
        server = _server_for(env)
        if server is None or not all(isinstance(option, str) for option in options):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = ends
        given = [own if own != -1 else inherited for inherited, own in enumerate((stdin, stdout, stderr))]
        self.pid = server.fork(
            {"options": options, "cwd": os.fspath(cwd or os.getcwd()), "env": dict(env)}, given
        )
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


class _Server:
    """The interpreter that is forked."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.read_at_start = _read_at_start(env)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Start a child of this process; return its id."""
        message = json.dumps(request).encode()
        assert len(message) < _LIMIT
        with self._lock:
            _adopt_orphans(True)
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LIMIT)
                socket.send_fds(self._socket, [message], descriptors)
                pid = self._socket.recv(32)
            finally:
                _adopt_orphans(False)
        if not pid:
            raise RuntimeError("the interpreter that tests fork has ended")
        return int(pid)


_servers: list[_Server] = []
_starting = threading.Lock()


def run_warm(command: Sequence[str], *, timeout_s: float, **keys: Any) -> subprocess.CompletedProcess[str]:
    """A `WarmProcess` to its end. One that outlives `timeout_s` is killed: subprocess.TimeoutExpired."""
    pipe = subprocess.PIPE
    process = WarmProcess(command, stdout=pipe, stderr=pipe, text=True, **keys)
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _server_for(env: Mapping[str, str] | None) -> _Server | None:
    if env is None:
        return None
    with _starting:
        if not _servers:
            _servers.append(_Server(env))
    return _servers[0] if _servers[0].read_at_start == _read_at_start(env) else None


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if value and name.startswith(READ_AT_START) and name not in READ_ON_FIRST_USE
    }


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def next_script() -> CodeType:
    """In the server: fork a child for each request. In each child: return what it has to run as its `__main__`."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LIMIT)
    for name in PRELOADED:
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1, (
        "what is imported has started threads, which forks do not have"
    )
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _LIMIT, 3)
        if not message:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            return _become(json.loads(message), descriptors, connection)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(middle, 0)


def _become(request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> CodeType:
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:  # [Note: whose child]
        os.sched_yield()
    connection.send(str(os.getpid()).encode())
    connection.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open_again(number, name)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    option, *rest = request["options"]
    if option == "-c":
        code, *sys.argv[1:] = rest
    elif option == "-m":
        module, *sys.argv[1:] = rest
        sys.path[0] = os.getcwd()
        code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    else:
        sys.argv[:] = request["options"]
        sys.path[0] = os.path.dirname(os.path.abspath(option))
        code = f"import runpy; runpy.run_path({option!r}, run_name='__main__')"
    return compile(code, "<string>", "exec")


def _open_again(number: int, name: str) -> None:
    """Make one of the standard streams anew: the former one remembers whether its file could be sought, say."""
    former = getattr(sys, name)
    stream = io.TextIOWrapper(
        open(number, "wb" if number else "rb", closefd=False),  # noqa: SIM115 -- open to the end
        encoding=former.encoding,
        errors=former.errors,
        line_buffering=name == "stderr" or os.isatty(number),
    )
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
