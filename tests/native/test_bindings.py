"""Both compiled modules against hostile arguments: every entry point, every argument, each call in its own process.

The modules take plain numbers, so a mistake in the typed faces, or a caller who goes around them, must end in an
exception. A call that dies of a signal, or does not end, is named.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offloadzero.errors import ConfigError
from offloadzero.io.engine import AioEngine
from offloadzero.native import kernels
from tests.support.tiny import run_bare_script

PACKAGE = Path(kernels.__file__).parents[1]

# A script forks for each call: what it prints is {entry point: [[arguments, outcome], ...]}, where an outcome is
# "returned", the name of an exception, or "signal N".
HARNESS = """
    import collections, ctypes, json, os, signal, sys

    INTEGERS = (-1, 0, 1, 3, -2**31, 2**31, 2**32, -2**63, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
    OTHERS = (None, "x", b"", 1.5, float("nan"), float("inf"), (), (1, 2), [], object())
    HOSTILE = (*INTEGERS, *OTHERS)
    # At sixteen bytes past a page, twice: of 64 KiB each, and 64 KiB apart.
    memory = (ctypes.c_char * (32 * 65536))()
    start = (ctypes.addressof(memory) + 4095) // 4096 * 4096

    def place(index):
        return start + 2 * index * 65536

    NAMES = ("returned", "ValueError", "TypeError", "OverflowError", "RuntimeError", "MemoryError", "OSError")

    def run(call):
        signal.alarm(20)
        try:
            call()
            os._exit(0)
        except Exception as error:
            kinds = [base.__name__ for base in type(error).__mro__ if base.__name__ in NAMES]
            os._exit(NAMES.index(kinds[0]) if kinds else 99)

    def ended(child):
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            return f"signal {os.WTERMSIG(status)}"
        code = os.WEXITSTATUS(status)
        return NAMES[code] if code < len(NAMES) else "other"

    def outcomes(calls):
        children = []
        for call in calls:
            children.append(os.fork())
            if children[-1] == 0:
                run(call)
        return [ended(child) for child in children]

    def outcome(call):
        return outcomes([call])[0]

    results = collections.defaultdict(list)

    def attack(name, function, arguments, hostile=HOSTILE, prepare=lambda arguments: arguments):
        cases = {"as it is": arguments}
        for position in range(len(arguments)):
            for value in hostile:
                what = f"argument {position} = {value!r:.60}"
                cases[what] = [*arguments[:position], value, *arguments[position + 1:]]
        calls = [lambda case=case: function(*prepare(case)) for case in cases.values()]
        calls.append(lambda: function(*prepare(arguments)[:-1]))
        calls.append(lambda: function(*prepare(arguments), 1))
        names = [*cases, "too few", "too many"]
        for first in range(0, len(calls), 32):
            results[name] += zip(names[first:], outcomes(calls[first : first + 32]))
"""

ADAM = """
    from offloadzero.native import _kernels as module
    SCALARS = (1.0, 0.9, 0.1, 0.99, 0.01, 1e-8, 1e-3, 1.0, 1.0, 0.0, 1.0, 0.1, True)
    N = 1000
    COMPACT = tuple(map(place, range(5)))
    STATE = tuple(map(place, range(5, 8)))
    BAD_ADDRESSES = (place(0) + 1, place(1) + 2, place(0) + 512, place(1), 0x10000, 2**47 - 4096, 2**64 - 8)
    HOSTILE = (*HOSTILE, *BAD_ADDRESSES)

    def addresses(*indices):
        return [place(index) for index in indices]

    calls = {
        "isa_supported": [0],
        "set_cores": [b"\\x01"],
        "adam_step": [0, 0, *addresses(0, 1, 2, 3, 4), N, 0, 2, SCALARS],
        "lion_step": [1, 2, *addresses(0, 1, 2, 3), N, 0, 2, SCALARS],
        "sgd_step": [2, 1, *addresses(0, 1, 2, 3), N, 0, 2, SCALARS],
        "adagrad_step": [2, 1, *addresses(0, 1, 2, 3), N, 0, 2, SCALARS],
        "compact_adam_step": [0, COMPACT, place(8), N, 0, 2, SCALARS, 7],
        "compact_encode": [STATE, COMPACT, N, 0, 2],
        "compact_decode": [COMPACT, STATE, N, 0, 2],
        "stream": [((place(0), 2), (place(1), 4)), 1, True, 1024, 0, 2],
        "sq_norm": [2, place(0), N, 0, 2],
        "sq_norms": [2, place(0), N, ((0, 10), (10, 10), (7, N)), 0, 2],
        "accumulate": [0, 2, *addresses(0, 1), N, 0, 2],
        "split_master": [*addresses(0, 1, 2), N, 0, 2],
        "join_master": [*addresses(0, 1, 2), N, 0, 2],
        "copy_bytes": [*addresses(0, 1), N, 2],
    }
    for name, arguments in calls.items():
        attack(name, getattr(module, name), arguments, HOSTILE)
    for isa, num_threads in ((7, 2), (7, -1), (0, 0), (0, 1025), (-1, 1), (None, 1), (0, "x"), (2**40, 1), (0, 2**40)):
        # 2**32 patterns take a while: no call that works.
        call = lambda: module.split_join_exhaustive(isa, num_threads)
        results["split_join_exhaustive"].append([f"{isa}, {num_threads}", outcome(call)])
    for name, position, tuples in (("compact_adam_step", 1, COMPACT), ("compact_encode", 0, STATE),
                                   ("compact_encode", 1, COMPACT), ("compact_decode", 0, COMPACT),
                                   ("adam_step", 10, SCALARS)):
        inside = calls[name]
        attack(f"{name}: {position}", lambda *t: getattr(module, name)(*inside[:position], t, *inside[position + 1:]),
               list(tuples), HOSTILE)
    attack("sq_norms: part", lambda *t: module.sq_norms(2, place(0), N, (t,), 0, 2), [3, N], HOSTILE)
    attack("stream: array", lambda *t: module.stream((t, (place(1), 4)), 1, False, 1024, 0, 2), [place(0), 2], HOSTILE)
    places = {
        "same": lambda: module.copy_bytes(place(0), place(0), N, 1),
        "half": lambda: module.copy_bytes(place(0), place(0) + N // 2, N, 1),
        "one byte": lambda: module.copy_bytes(place(0) + N - 1, place(0), N, 1),
        "touching": lambda: module.copy_bytes(place(0) + N, place(0), N, 1),
        "crooked": lambda: module.accumulate(2, 2, place(0), place(1) + 2, N, 0, 1),
        "both read": lambda: module.stream(((place(0), 2), (place(0), 2)), 0, False, 1024, 0, 1),
        "read and written": lambda: module.stream(((place(0), 2), (place(0), 2)), 1, False, 1024, 0, 1),
    }
    results["places"] = list(zip(places, outcomes(places.values())))
    for threads in (0, -1, 1025):
        results["num_threads"].append([threads, outcome(lambda: module.copy_bytes(place(0), place(1), 9, threads))])
    print(json.dumps(results))
"""

AIO = """
    from offloadzero.io import _aio as module
    path = os.path.join(sys.argv[1], "file").encode()
    IS_URING = False
    ADDRESS = place(0)
    HOSTILE = (*HOSTILE, 0x10000, 2**64 - 8, ADDRESS + 1)
    handles = {}

    # Objects are made in the child that uses them: threads do not survive a fork.
    def new_engine():
        return module.Engine(IS_URING, 4096, 4, 1, -1.0)

    def engine():
        handles["engine"] = new_engine()
        return handles["engine"]

    def same_engine():
        return handles.get("engine") or engine()

    def file():
        return same_engine().open(path, True, False, True)

    def written():
        opened = file()
        return handles["engine"].submit(opened, True, ADDRESS, 8192, 0, 0, 1)

    def real(arguments):
        return [argument() if callable(argument) else argument for argument in arguments]

    HOSTILE = [value for value in HOSTILE if value not in (3, -2**31, 2**64 - 1, 2**64, (1, 2), "x")]
    calls = {
        "Engine": [IS_URING, 4096, 4, 1, 5.0],
        "Engine.close": [engine, True],
        "Engine.stats": [engine],
        "Engine.register_buffer": [engine, ADDRESS, 65536],
        "Engine.unregister_buffer": [engine, ADDRESS],
        "Engine.inject": [engine, 0, 1, 5],
        "Engine.clear_faults": [engine],
        "Engine.open": [engine, path, True, False, True],
        "Engine.submit": [same_engine, file, True, ADDRESS, 8192, 0, 0, 1],
        "Engine.collect_finished": [engine],
        "File.num_bytes": [file],
        "File.preallocate": [file, 4096, 8192],
        "File.sync": [file],
        "File.close": [file],
        "Operation.done": [written],
        "Operation.wait": [written, 5.0],
        "Operation.times": [written],
        "crc32c_blocks": [ADDRESS, 8200, 4096, place(1), False],
        "crc32c_find_mismatch": [ADDRESS, 8200, 4096, place(1)],
        "crc32c_implementation": [],
    }

    def entry(name):
        owner, _, method = name.rpartition(".")
        return getattr(getattr(module, owner) if owner else module, method)

    for name, arguments in calls.items():
        attack(name, entry(name), arguments, (*HOSTILE, file, engine, written, new_engine), real)

    # A queue that ends with the engine, and what is done with it afterwards.
    def after_close(name):
        def call():
            arguments = real(calls[name])
            handles["engine"].close(False)
            entry(name)(*arguments)
        return call

    def in_a_fork(name):
        def call():
            arguments = real(calls[name])
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    entry(name)(*arguments)
                except RuntimeError:
                    os._exit(5)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            if os.WIFSIGNALED(status):
                os.kill(os.getpid(), os.WTERMSIG(status))
            if os.WEXITSTATUS(status) == 5:
                raise RuntimeError
        return call

    for name in calls:
        if "." in name and name != "Engine.close":
            results["after close"].append([name, outcome(after_close(name))])
        if name.startswith("Engine.") or name in ("Operation.done", "Operation.wait"):
            results["in a fork"].append([name, outcome(in_a_fork(name))])
    for field, wrong in (("block_size", (0, 100, 4097, 2**31)), ("queue_depth", (0, 4097)), ("num_threads", (0, 257))):
        for value in wrong:
            numbers = {"block_size": 4096, "queue_depth": 4, "num_threads": 1, field: value}
            call = lambda: module.Engine(IS_URING, *numbers.values(), -1.0)
            results["numbers"].append([f"{field} = {value}", outcome(call)])

    def use_of_closed(use):
        def call():
            closed = file()
            closed.close()
            use(closed)
        return call

    uses = {
        "num_bytes": lambda file: file.num_bytes(),
        "preallocate": lambda file: file.preallocate(0, 4096),
        "sync": lambda file: file.sync(),
        "alignment": lambda file: file.alignment,
        "direct_refusal": lambda file: file.direct_refusal,
        "submit": lambda file: handles["engine"].submit(file, True, ADDRESS, 8192, 0, 0, 1),
    }
    for name, use in uses.items():
        results["closed file"].append([name, outcome(use_of_closed(use))])
    for name in ("File", "Operation"):
        results["made alone"].append([name, outcome(entry(name))])
    print(json.dumps(results))
"""

Results = dict[str, list[tuple[Any, str]]]


def attacked(script: str, *arguments: object) -> Results:
    done = run_bare_script(HARNESS + script, *arguments, timeout_s=120)
    assert done.returncode == 0, done.stderr
    results: Results = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def adam() -> Results:
    return attacked(ADAM)


@pytest.fixture(scope="module", params=["native_aio", "io_uring"])
def aio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    try:
        AioEngine(backend=request.param).close()
    except ConfigError as error:
        pytest.skip(str(error))
    script = AIO.replace("IS_URING = False", f"IS_URING = {request.param == 'io_uring'}")
    return attacked(script, tmp_path_factory.mktemp("aio"))


def entry_points(module: str) -> set[str]:
    """The functions, types and methods of the stub, which the type checker holds against every call."""
    found = set()
    for node in ast.parse((PACKAGE / f"{module}.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [
                part for part in node.body if isinstance(part, ast.FunctionDef) and not part.decorator_list
            ]
            found |= {node.name if part.name == "__new__" else f"{node.name}.{part.name}" for part in methods}
    return found


def assert_survived(results: Results) -> None:
    dead = [
        f"{name}({what}): {end}"
        for name, calls in results.items()
        for what, end in calls
        if end.startswith("signal") or end == "other"
    ]
    assert dead == []


def ends(results: Results, name: str) -> dict[Any, str]:
    return dict(results[name])


def test_every_entry_point_of_the_kernels_survives(adam: Results) -> None:
    assert_survived(adam)
    assert entry_points("native/_kernels") <= set(adam)
    for name in entry_points("native/_kernels") - {"split_join_exhaustive"}:
        assert ends(adam, name)["as it is"] == "returned", name
        assert ends(adam, name)["too few"] == ends(adam, name)["too many"] == "TypeError"
    outcomes = Counter(end for calls in adam.values() for _, end in calls)
    assert outcomes["ValueError"] > 400
    assert outcomes["TypeError"] > 400
    assert {end for _, end in adam["split_join_exhaustive"]} == {"ValueError", "TypeError", "OverflowError"}


def test_what_the_kernels_refuse(adam: Results) -> None:
    assert {end for _, end in adam["num_threads"]} == {"ValueError"}
    for name, positions, count in (
        ("adam_step", range(2, 7), 7),
        ("lion_step", range(2, 6), 6),
        ("accumulate", range(2, 4), 4),
        ("copy_bytes", range(2), 2),
        ("split_master", range(3), 3),
        ("join_master", range(3), 3),
    ):
        found = ends(adam, name)
        for position in positions:  # the addresses
            if name == "lion_step" and position == 3:
                continue  # an fp32 parameter has no master
            for value in (0, 2**64 - 8, 0x10000):
                assert found[f"argument {position} = {value}"] == "ValueError", (name, position, value)
            assert found[f"argument {position} = -1"] == "OverflowError"
        for value in (-1, 2**63 - 1, 2**31):
            assert found[f"argument {count} = {value}"] == "ValueError", (name, value)
    assert ends(adam, "places") == {
        "same": "ValueError",
        "half": "ValueError",
        "one byte": "ValueError",
        "touching": "returned",
        "crooked": "ValueError",
        "both read": "returned",
        "read and written": "ValueError",
    }
    for name in ("sq_norm", "sq_norms"):
        assert ends(adam, name)["argument 0 = 3"] == "ValueError"
    part = ends(adam, "sq_norms: part")
    for value in (-1, 2**31, 2**63 - 1):
        assert part[f"argument 0 = {value}"] == part[f"argument 1 = {value}"] == "ValueError"
    assert part["argument 1 = 0"] == "ValueError"  # it begins behind its end


def test_every_entry_point_of_the_file_engine_survives(aio: Results) -> None:
    assert_survived(aio)
    assert entry_points("io/_aio") <= set(aio)
    # Nothing is registered before; native AIO registers nothing, and io_uring what there is a limit for.
    refused = {"Engine.unregister_buffer": {"ValueError"}, "Engine.register_buffer": {"returned", "OSError"}}
    for name in entry_points("io/_aio"):
        assert ends(aio, name)["as it is"] in refused.get(name, {"returned"}), name
        assert ends(aio, name)["too few"] == ("TypeError" if name != "crc32c_implementation" else "returned")
    outcomes = Counter(end for calls in aio.values() for _, end in calls)
    assert outcomes["ValueError"] > 100
    assert outcomes["ValueError"] + outcomes["TypeError"] > 500


def test_what_the_file_engine_refuses(aio: Results) -> None:
    assert {end for _, end in aio["numbers"]} == {ends(aio, "Engine")["argument 4 = nan"]} == {"ValueError"}
    assert {end for _, end in aio["in a fork"]} == {"RuntimeError"}
    assert {end for _, end in aio["closed file"]} == {"ValueError"}
    assert {end for _, end in aio["made alone"]} == {"TypeError"}
    submit = ends(aio, "Engine.submit")
    for what in ("3 = 0", "3 = 65536", "4 = -1", f"4 = {2**63 - 1}", "5 = -1", f"5 = {2**63 - 1}"):
        assert submit[f"argument {what}"] == "ValueError", what
    # A file that another engine has opened.
    assert [end for what, end in aio["Engine.submit"] if "new_engine" in what and "argument 0" in what] == [
        "ValueError"
    ]


# --- the typed faces ---


def test_buffers_that_are_none_are_named(tmp_path: Path) -> None:
    read_only = np.zeros(8, dtype=np.uint8)
    read_only.flags.writeable = False
    wrong: list[Any] = [
        b"bytes",
        read_only,
        np.zeros((8, 8))[:, ::2],
        memoryview(bytearray(8))[::2],
        [1, 2],
        5,
        None,
    ]
    wrong += [torch.zeros(8, 8).t(), torch.zeros(8, device="meta"), torch.zeros(3, 3).to_sparse()]
    with AioEngine(backend="aiofiles") as engine, engine.open(tmp_path / "file", create=True) as file:
        file.preallocate(4096)
        for buffer in wrong:
            with pytest.raises(ConfigError, match="buffer"):
                engine.read(file, buffer, offset=0)
            with pytest.raises(ConfigError, match="buffer"):
                engine.register_parts(buffer)


def test_tensors_that_do_not_lie_right_are_named() -> None:
    memory = bytearray(4 * 16 + 1)
    odd = torch.frombuffer(memory, dtype=torch.uint8)[1:]
    base = odd.data_ptr()
    crooked = torch.frombuffer(memory, dtype=torch.float32, offset=1 if base % 4 else 2, count=8)
    assert crooked.data_ptr() % 4
    with pytest.raises(ConfigError, match="aligned"):
        kernels.sq_norm(crooked)
    floats = torch.zeros(100)
    with pytest.raises(ValueError, match="acc and grad overlap"):
        kernels.accumulate(floats[:60], floats[40:])
    assert not floats.any()
