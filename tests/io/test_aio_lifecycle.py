"""How file engines begin and end: arguments, the choice of a backend, close, forks, exits with work in flight."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from offloadzero.errors import ConfigError, StateError
from offloadzero.io.engine import AioBackend, AioEngine
from tests.io.engines import BACKENDS, MIB, make_engine, random_bytes, run_script


class TestMistakes:
    def test_engine_arguments(self) -> None:
        for key, value in [
            ("block_size", 1000),
            ("block_size", 0),
            ("block_size", 2 << 30),
            ("queue_depth", 0),
            ("num_threads", 0),
            ("backend", "io_ring"),
        ]:
            with pytest.raises(ConfigError) as caught:
                AioEngine(**{key: value})  # type: ignore[arg-type]
            assert caught.value.key == key

    def test_buffers(self, engine: AioEngine, tmp_path: Path) -> None:
        with engine.open(tmp_path / "data", create=True) as file:
            with pytest.raises(ConfigError, match="writable"):
                engine.read(file, b"constant", offset=0)
            with pytest.raises(ConfigError, match="contiguous"):
                engine.write(file, np.zeros((4, 4))[:, 1], offset=0)
            with pytest.raises(ConfigError, match="contiguous"):
                engine.write(file, torch.zeros(4, 4)[:, 1], offset=0)
            with pytest.raises(ConfigError, match="contiguous"):
                engine.write(file, memoryview(b"abcdef")[::2], offset=0)
            with pytest.raises(ConfigError, match="host memory"):
                engine.write(file, torch.zeros(4, device="meta"), offset=0)
            with pytest.raises(ConfigError) as caught:
                engine.write(file, b"abc", offset=-1)
            assert caught.value.key == "offset"
            assert file.num_bytes == 0

    def test_a_file_of_another_engine(self, backend: str, tmp_path: Path) -> None:
        with make_engine(backend) as one, make_engine(backend) as two:
            file = one.open(tmp_path / "data", create=True)
            with pytest.raises(ConfigError, match="opened by this engine"):
                two.read(file, bytearray(1), offset=0)


class TestLifecycle:
    def test_close_finishes_what_was_submitted(self, backend: str, tmp_path: Path) -> None:
        data = random_bytes(4 * MIB)
        engine = make_engine(backend, block_size=65536, queue_depth=2)
        file = engine.open(tmp_path / "data", create=True)
        tickets = [engine.write(file, data[k::4], offset=k * MIB) for k in range(4)]
        engine.close()
        engine.close()
        assert all(ticket.done() for ticket in tickets)
        for ticket in tickets:
            ticket.wait()
        assert (tmp_path / "data").read_bytes() == b"".join(data[k::4] for k in range(4))
        with pytest.raises(StateError, match="closed"):
            engine.open(tmp_path / "data")
        with pytest.raises(StateError, match="closed"):
            engine.read(file, bytearray(1), offset=0)

    @pytest.mark.parametrize("name", BACKENDS)
    def test_a_forked_child_gets_an_error(self, name: str, tmp_path: Path) -> None:
        make_engine(name).close()
        script = """
            import os, sys, warnings
            from offloadzero.errors import StateError
            from offloadzero.io.engine import AioEngine
            engine = AioEngine(backend=sys.argv[1])
            file = engine.open(sys.argv[2], create=True)
            engine.inject("delay", 1, 500)
            ticket = engine.write(file, b"parent", offset=0)
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)  # Python 3.12
            child = os.fork()
            if child == 0:
                attempts = [
                    lambda: engine.read(file, bytearray(1), offset=0),
                    lambda: engine.open(sys.argv[2]),
                    lambda: engine.stats(),
                    lambda: ticket.wait(),
                ]
                refused = 0
                for attempt in attempts:
                    try:
                        attempt()
                    except StateError as error:
                        refused += "belongs to process" in str(error)
                engine.close()
                del engine, file, ticket, attempts
                sys.exit(100 + refused)  # runs the exit handlers of the child
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 104
            ticket.wait()
            back = bytearray(6)
            engine.read(file, back, offset=0).wait()
            assert back == b"parent"
            print("fine")
        """
        done = run_script(script, name, str(tmp_path / "data"))
        assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")

    @pytest.mark.parametrize(
        ("name", "ending"),
        [*((name, "return") for name in BACKENDS), (BACKENDS[0], "sys.exit(0)"), (BACKENDS[-1], "1/0")],
    )
    def test_the_interpreter_exits_with_operations_in_flight(
        self, name: str, ending: str, tmp_path: Path
    ) -> None:
        make_engine(name).close()
        script = f"""
            import sys
            from offloadzero.io.engine import AioEngine
            def main():
                engine = AioEngine(backend=sys.argv[1], block_size=65536, queue_depth=4)
                file = engine.open(sys.argv[2], create=True)
                engine.inject("delay", 1, 3_600_000)
                engine.inject("delay", 3, 3_600_000)
                kept.append(engine)
                for k in range(50):
                    kept.append(engine.write(file, bytes(300_000), offset=k * 300_000))
                    engine.read(file, bytearray(100), offset=k * 300_000)
                {ending}
            kept = []
            main()
        """
        done = run_script(script, name, str(tmp_path / "data"), timeout_s=30.0)
        assert done.returncode == (1 if ending == "1/0" else 0)
        assert ("ZeroDivisionError" in done.stderr) if ending == "1/0" else (done.stderr == "")


class TestChoosingABackend:
    SECCOMP = """
        import ctypes, errno, logging, os, resource, struct, sys
        libc = ctypes.CDLL(None, use_errno=True)

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

        def forbid(*numbers):
            # Load the system call's number; EPERM if it is one of `numbers`; allow the rest.
            code = struct.pack("HBBI", 0x20, 0, 0, 0)
            for number in numbers:
                code += struct.pack("HBBI", 0x15, 0, 1, number)
                code += struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM)
            code += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
            program = Program(len(code) // 8, code)
            assert libc.prctl(38, 1, 0, 0, 0) == 0
            assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()

        IO_URING_SETUP = 425
        IO_SETUP = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
        records = []
        class Keep(logging.Handler):
            def emit(self, record):
                records.append(record)
        logging.getLogger("offloadzero.aio").addHandler(Keep())
        from offloadzero.errors import ConfigError
        from offloadzero.io.engine import AioEngine
    """

    @pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="system call numbers")
    def test_auto_falls_back_and_says_why(self, tmp_path: Path) -> None:
        script = (
            self.SECCOMP
            + """
        forbid(IO_URING_SETUP)
        for _ in range(2):
            engine = AioEngine()
            assert (engine.backend, engine.reason) == ("native_aio", "io_uring: EPERM"), engine.reason
        (record,) = records
        assert record.getMessage() == "aio backend: native_aio (io_uring: EPERM)"
        file = engine.open(sys.argv[1], create=True)
        engine.write(file, b"through native AIO", offset=1).wait()
        try:
            AioEngine(backend="io_uring")
        except ConfigError as error:
            assert "not available here (io_uring: EPERM)" in str(error)
        else:
            raise AssertionError("io_uring was asked for by name and fell back")
        forbid(IO_SETUP)
        engine = AioEngine()
        assert (engine.backend, engine.reason) == ("aiofiles", "io_uring: EPERM; native_aio: EPERM")
        back = bytearray(18)
        engine.read(engine.open(sys.argv[1]), back, offset=1).wait()
        assert back == b"through native AIO"
        print("fine")
        """
        )
        done = run_script(script, str(tmp_path / "data"))
        assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr

    def test_auto_takes_what_a_named_backend_would(self) -> None:
        for name in BACKENDS:
            try:
                AioEngine(backend=name).close()
            except ConfigError:
                continue
            with AioEngine() as engine:
                assert engine.backend is AioBackend(name)
                return
        pytest.fail("no backend is available")

    def test_importing_loads_neither_torch_nor_a_backend(self) -> None:
        script = """
            import sys
            import offloadzero.io.engine
            unwanted = {"torch", "numpy", "aiofiles", "asyncio", "offloadzero.io._aio"}
            print(sorted(unwanted & set(sys.modules)))
        """
        assert run_script(script).stdout == "[]\n"
