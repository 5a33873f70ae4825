"""How engines begin and end: late failures leave the model as it was, what is dropped is freed, a fork is told so."""

from __future__ import annotations

import gc
import json
import os
import signal
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.engine.lifetime import EngineState
from offloadzero.errors import AioError, ConfigError, StateError
from tests.engine.leftovers import (
    assert_as_before,
    collect,
    forms,
    fresh_model,
    hooks_on,
    open_files,
    threads_of_ours,
)
from tests.support.faults import fails
from tests.support.tiny import make_engine, run_script, settings, tokens, train


def raises(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("late")


# --- initialize() that fails late ---


def wrong_scheduler(directory: Path) -> dict[str, Any]:
    config = settings(directory)
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_nm_steps": 3}}
    return {"config": config}


LATE: dict[str, tuple[Callable[[Path], dict[str, Any]], type[Exception]]] = {
    "a typo in the scheduler": (wrong_scheduler, ConfigError),
    "a scheduler that raises": (
        lambda directory: {"config": settings(directory), "lr_scheduler": raises},
        ZeroDivisionError,
    ),
}


@pytest.mark.parametrize("what", list(LATE))
def test_a_late_failure_leaves_the_model_as_it_was(tmp_path: Path, what: str) -> None:
    make, error = LATE[what]
    model = fresh_model()
    before, threads, files = forms(model), threads_of_ours(), open_files()
    with pytest.raises(error):
        offloadzero.initialize(model=model, **make(tmp_path))
    assert_as_before(model, before)
    assert (threads_of_ours(), os.listdir(tmp_path), open_files()) == (threads, [], files)
    engine = make_engine(settings(tmp_path), model)  # and it can be offloaded after all
    reference = make_engine(settings(tmp_path), fresh_model())
    assert train(engine, num_steps=2) == train(reference, num_steps=2)
    engine.close()
    reference.close()


# Where building may still fail when weights have moved, from the outside in.
PLACES = {
    "hooks": "offloadzero.engine.runtime.ModelHooks",
    "buffers": "offloadzero.engine.runtime._move_buffers",
    "collector": "offloadzero.engine.build.GradientCollector",
    "landing": "offloadzero.engine.build.Landing",
    "pipeline": "offloadzero.engine.build.UpdatePipeline",
    "executor": "offloadzero.engine.build.Executor",
}


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("placement", ["nvme", "host", "device"])
def test_an_engine_that_cannot_be_built_gives_the_weights_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, placement: str
) -> None:
    model = fresh_model()
    before, threads, files = forms(model), threads_of_ours(), open_files()
    with monkeypatch.context() as patch:
        patch.setattr(PLACES[place], raises)
        with pytest.raises(ZeroDivisionError):
            make_engine(settings(tmp_path, placement=placement), model)
    assert_as_before(model, before)
    assert (threads_of_ours(), os.listdir(tmp_path), open_files()) == (threads, [], files)


@pytest.mark.parametrize("what", ["register_state_dict_post_hook", "register_load_state_dict_post_hook"])
@pytest.mark.parametrize("nth", [1, 4])
def test_a_module_that_takes_no_hook_gives_the_weights_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, nth: int
) -> None:
    """Those that are on by then come off."""
    model = fresh_model()
    before, threads = forms(model), threads_of_ours()
    register, count = getattr(nn.Module, what), [0]

    def failing(self: nn.Module, hook: Any) -> Any:
        count[0] += 1
        return register(self, hook) if count[0] < nth else raises()

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, what, failing)
        with pytest.raises(ZeroDivisionError):
            make_engine(settings(tmp_path), model)
    assert_as_before(model, before)
    assert (threads_of_ours(), os.listdir(tmp_path)) == (threads, [])


@pytest.mark.parametrize("nth", [1, 2, 5, 9])
def test_a_file_that_fails_while_weights_move_loses_none(tmp_path: Path, nth: int) -> None:
    model = fresh_model()
    before, threads = forms(model), threads_of_ours()
    error = AioError(operation="pwrite", path="x", offset=0, num_bytes=1, errno=5)
    with fails("nvme.write", error, at=nth), pytest.raises(AioError) as caught:
        make_engine(settings(tmp_path), model)
    assert caught.value is error
    assert_as_before(model, before)
    assert (threads_of_ours(), os.listdir(tmp_path)) == (threads, [])


# --- twice, and after the end ---


def test_a_model_is_offloaded_once(tmp_path: Path) -> None:
    model = fresh_model()
    engine = make_engine(settings(tmp_path), model)
    losses = train(engine, num_steps=1)
    threads = threads_of_ours()
    with pytest.raises(StateError, match=r"emb\.weight is offloaded already, by another engine"):
        make_engine(settings(tmp_path), model)
    with pytest.raises(StateError, match=r"offloaded already"):
        offloadzero.offload(model, torch.optim.AdamW(model.parameters()), settings(tmp_path))
    assert threads_of_ours() == threads
    losses += train(engine, num_steps=2, first_seed=1)
    engine.close()
    reference = make_engine(settings(tmp_path))
    assert losses == train(reference, num_steps=3)
    reference.close()


def test_a_part_of_an_offloaded_model_is_refused_too(tmp_path: Path) -> None:
    model = fresh_model()
    engine = make_engine(settings(tmp_path), model)
    with pytest.raises(StateError, match=r"norm\.weight is offloaded already"):
        make_engine(settings(tmp_path), model.blocks[0])
    engine.close()


def test_a_model_whose_engine_was_closed_is_refused(tmp_path: Path) -> None:
    model = fresh_model()
    engine = make_engine(settings(tmp_path), model)
    assert engine.state is EngineState.OPEN
    engine.close()
    assert engine.state is EngineState.CLOSED
    with pytest.raises(StateError, match="closed"):
        engine.restore_model()
    with pytest.raises(
        StateError, match=r"engine was closed, and the weights are gone with it.*restore_model"
    ):
        make_engine(settings(tmp_path), model)


@pytest.mark.parametrize("placement", ["nvme", "host", "device"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_restored_model_is_an_ordinary_one(tmp_path: Path, placement: str, dtype: str) -> None:
    model = fresh_model()
    config = settings(tmp_path, placement=placement, bf16={"enabled": dtype == "bf16"})
    engine = make_engine(config, model)
    train(engine, num_steps=3)
    masters = {
        name: offloadzero.zero.safe_get_full_fp32_param(param) for name, param in model.named_parameters()
    }
    engine.restore_model()
    assert engine.state is EngineState.RESTORED
    assert hooks_on(model) == []
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32
        assert torch.equal(param, masters[name]), name
    assert model.head.weight is model.emb.weight
    assert os.listdir(tmp_path) == []
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(0)).backward()
    optimizer.step()
    with pytest.raises(StateError, match="restored"):
        engine.restore_model()
    engine.close()
    optimizer.zero_grad()
    again = make_engine(config, model)
    train(again, num_steps=1)
    again.close()


def test_a_model_is_not_restored_inside_of_its_forward(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path))
    train(engine, num_steps=1)

    def restore(*_: object) -> None:
        handle.remove()
        engine.restore_model()

    handle = engine.module.blocks[1].register_forward_pre_hook(restore)
    with pytest.raises(StateError, match="restore_model\\(\\) inside of the model's forward"):
        engine(tokens(0))
    train(engine, num_steps=1)
    engine.restore_model()


# --- engines that are dropped ---

DROPPED = {
    "nvme": {"placement": "nvme"},
    "host": {"placement": "host", "gradient_clipping": 1.0},
    "device": {"placement": "device"},
    "checkpointed": {"placement": "nvme", "activation_checkpoints": {"units": "blocks.*", "tier": "nvme"}},
}


@pytest.mark.parametrize("what", list(DROPPED))
def test_an_engine_that_is_dropped_is_freed(tmp_path: Path, what: str) -> None:
    collect()
    threads, files = threads_of_ours(), open_files()
    engine = make_engine(settings(tmp_path, **DROPPED[what]))
    train(engine, num_steps=2)  # the last updates may be in flight
    runtime = engine.optimizer.runtime
    gone = [weakref.ref(thing) for thing in (engine, engine.module, engine.optimizer, runtime)]
    arenas = [weakref.ref(arena.buffer) for arena in (runtime.store.device, runtime.store.host)]
    del engine, runtime
    collect(lambda: not any(reference() for reference in gone))
    assert [reference() for reference in gone] == [None] * len(gone)
    assert (threads_of_ours(), os.listdir(tmp_path), open_files()) == (threads, [], files)
    collect(lambda: not any(reference() is not None for reference in arenas))
    assert [reference() for reference in arenas] == [None] * len(arenas)


def test_the_plain_form_is_freed_too(tmp_path: Path) -> None:
    collect()
    threads, files = threads_of_ours(), open_files()

    def use() -> None:
        model = fresh_model()
        plain = torch.optim.AdamW(model.parameters())
        model, optimizer = offloadzero.offload(model, plain, settings(tmp_path))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(tokens(0)).backward()
        optimizer.step()
        scheduler.step()

    use()
    collect(lambda: threads_of_ours() == threads)
    assert (threads_of_ours(), os.listdir(tmp_path), open_files()) == (threads, [], files)


def test_a_model_keeps_its_engine(tmp_path: Path) -> None:
    """Its weights are there; who has dropped the engine and the optimizer may still evaluate and save it."""
    engine = make_engine(settings(tmp_path))
    train(engine, num_steps=1)
    model = engine.module
    expected = engine(tokens(5)).item()
    del engine
    collect()
    assert len(os.listdir(tmp_path)) == 1
    assert model(tokens(5)).item() == expected
    assert all(value.isfinite().all() for value in model.state_dict().values())
    del model
    collect(lambda: not os.listdir(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_failure_that_nobody_saw_is_said_when_its_engine_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: said.append(unraisable.exc_value))
    engine = make_engine(settings(tmp_path))
    train(engine, num_steps=1)
    engine.synchronize()
    engine.optimizer.runtime.failures.record(OSError("the drive is gone"))
    del engine
    collect(lambda: bool(said))
    assert [str(error) for error in said] == ["the drive is gone"]
    assert os.listdir(tmp_path) == []


def test_an_engine_that_is_dropped_on_one_of_its_own_threads_is_freed(tmp_path: Path) -> None:
    """The collector runs on whatever thread allocates."""
    collect()
    threads = threads_of_ours()
    engine = make_engine(settings(tmp_path))
    train(engine, num_steps=1)
    lane = engine.optimizer.runtime.store.on_device.h2d
    gate = threading.Event()

    def work() -> None:
        gate.wait()
        gc.collect()

    ticket = lane.submit(work)
    del engine, lane
    gate.set()
    ticket.wait()
    del ticket, work
    collect(lambda: threads_of_ours() == threads)
    assert (threads_of_ours(), os.listdir(tmp_path)) == (threads, [])


def test_an_exit_waits_for_what_was_collected(tmp_path: Path) -> None:
    script = """
        import gc, sys
        from tests.support.tiny import make_engine, settings, train
        engine = make_engine(settings(sys.argv[1]))
        train(engine, num_steps=1)
        for nth in range(1, 200):
            engine.optimizer.runtime.store.nvme.engine.inject("delay", nth, 20)
        train(engine, num_steps=1)
        del engine
        gc.collect()
    """
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == []


def test_an_engine_that_is_dropped_when_python_starts_no_more_threads_is_closed(tmp_path: Path) -> None:
    """As Python 3.12 does from the end of the main thread on: in what a script has given to atexit, say."""
    script = """
        import atexit, gc, sys
        from offloadzero.engine import lifetime
        from tests.support.tiny import make_engine, settings, train
        engine = make_engine(settings(sys.argv[1]))
        train(engine, num_steps=1)

        class NoThreads:
            def start_new_thread(*_):
                raise RuntimeError("can't create new thread at interpreter shutdown")

        @atexit.register
        def drop():
            global engine
            lifetime._thread = NoThreads()
            del engine
            gc.collect()
    """
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("method", "failure"), [("spawn", "ValueError('of the script')"), ("fork", None)])
def test_an_engine_of_a_child_of_multiprocessing_is_closed_at_its_end(
    method: str, failure: str | None, tmp_path: Path
) -> None:
    """Also of one that was forked, which ends without `atexit`."""
    work = f"""
        import os
        from tests.support.tiny import make_engine, settings, train

        def work(directory):
            engine = make_engine(settings(directory))
            train(engine, num_steps=1)
            assert os.listdir(directory)
            failure = {failure}
            if failure:
                raise failure
    """
    (tmp_path / "file").mkdir()
    (tmp_path / "child_of_test.py").write_text(textwrap.dedent(work))
    script = f"""
        import multiprocessing, sys
        sys.path.insert(0, sys.argv[1])
        from child_of_test import work
        if __name__ == "__main__":
            child = multiprocessing.get_context("{method}").Process(target=work, args=(sys.argv[1] + "/file",))
            child.start()
            child.join()
            sys.exit(child.exitcode)
    """
    done = run_script(script, tmp_path)
    assert (done.returncode, "of the script" in done.stderr) == ((0, False) if failure is None else (1, True))
    assert os.listdir(tmp_path / "file") == []


# --- forked children ---

FORKED = """
    import atexit, json, os, signal, sys, threading, torch
    from offloadzero.errors import StateError
    from tests.support.tiny import make_engine, settings, tokens, train

    directory, placement, clipping = sys.argv[1], sys.argv[2], float(sys.argv[3])
    before_backward, after_backward = json.loads(sys.argv[4])
    engine = make_engine(settings(directory, placement=placement, gradient_clipping=clipping))
    loss = None
    said = {}
    CALLS = {
        "forward": lambda: engine(tokens(2)),
        "evaluation": lambda: engine.eval()(tokens(2)),
        "backward": lambda: engine.backward(loss),
        "step": lambda: engine.step(),
        "zero_grad": lambda: engine.zero_grad(),
        "synchronize": lambda: engine.synchronize(),
        "save_checkpoint": lambda: engine.save_checkpoint(directory + "/ckpt", tag="child"),
        "state_dict": lambda: list(engine.module.state_dict().values())[0].clone(),
        "optimizer state": lambda: engine.optimizer.state_dict()["state"][0]["exp_avg"].clone(),
        "restore": lambda: engine.restore_model(),
        "grad_norm": lambda: engine.get_global_grad_norm(),
        "close": lambda: engine.close(),
    }

    def in_child(what):
        read, write = os.pipe()
        pid = os.fork()  # with transfers in flight
        if pid == 0:
            signal.alarm(5)
            try:
                CALLS[what]()
                message = "went through"
            except StateError as error:
                message = str(error)
            os.write(write, message.encode())
            if what in ("forward", "close", "step"):
                sys.exit(7)
            # What the interpreter does at the end of a script, without the second it takes to take torch apart.
            threading._shutdown()
            atexit._run_exitfuncs()  # those it has inherited
            os._exit(7)
        os.close(write)
        said[what] = os.fdopen(read).read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != 7:
            said[what] = f"exit status {status}"

    for what in before_backward:
        train(engine, num_steps=1)
        loss = engine(tokens(1))
        in_child(what)
    engine.backward(loss)
    for what in after_backward:
        in_child(what)
    engine.step()
    train(engine, num_steps=1)
    assert len([name for name in os.listdir(directory) if name.endswith(".bin")]) == (placement == "nvme")
    engine.close()
    print(json.dumps(said))
"""
# Before a backward, and between it and its step.
IN_CHILD = [
    ["forward", "evaluation", "backward", "synchronize", "save_checkpoint", "state_dict", "optimizer state",
     "restore", "grad_norm", "close"],
    ["step", "zero_grad"],
]  # fmt: skip

FORKED_AT = {"nvme": ("nvme", 0.0)} | (
    {"host-clipped": ("host", 1.0)} if "OFFLOADZERO_TEST_EXHAUSTIVE" in os.environ else {}
)


@pytest.fixture(scope="module", params=FORKED_AT.values(), ids=FORKED_AT)
def said_in_child(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("forked")
    done = run_script(FORKED, directory, *request.param, json.dumps(IN_CHILD), timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name in os.listdir(directory) if name != "ckpt"] == []
    said: dict[str, str] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("what", [what for whats in IN_CHILD for what in whats])
def test_a_forked_child_cannot_use_the_engine(said_in_child: dict[str, str], what: str) -> None:
    """And its exit leaves the parent, which trains on, alone."""
    expected = "the engine of this model belongs to process " if what != "close" else "went through"
    assert said_in_child[what].startswith(expected)


# --- SIGTERM and SIGHUP ---

TERMINATED = """
    import ctypes, os, signal, sys, time
    from tests.support.tiny import make_engine, settings, train

    def blocked(engine):  # where no handler of Python's would ever run
        ctypes.PyDLL(None).sleep(60)

    def waiting(engine):
        engine.optimizer.runtime.store.on_device.h2d.submit(lambda: time.sleep(60)).wait()

    def training(engine):
        train(engine, num_steps=100_000)

    signal.signal(int(sys.argv[2]), signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so
    for number, use in enumerate((blocked, waiting, training)):
        directory = f"{sys.argv[1]}/{number}"
        os.mkdir(directory)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            engine = make_engine(settings(directory))
            os.write(write, b"1")
            use(engine)
        os.read(read, 1)
        assert len(os.listdir(directory)) == 1
        os.kill(pid, int(sys.argv[2]))
        signal.alarm(10)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        signal.alarm(0)
        print(use.__name__, status, os.listdir(directory))
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_files_and_kills_at_once(tmp_path: Path, ending: int) -> None:
    done = run_script(TERMINATED, tmp_path, int(ending), timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{what} {-ending} []" for what in ("blocked", "waiting", "training")]


def test_a_handler_of_sigterm_is_left_alone(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from offloadzero.native.termination import is_installed
        from tests.support.tiny import make_engine, settings, train

        def mine(*_):
            print("mine", flush=True)

        assert not is_installed()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        engine = make_engine(settings(sys.argv[1]))
        assert is_installed()
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # what a framework asks before it sets its own
        engine.close()
        assert not is_installed()
        signal.signal(signal.SIGTERM, mine)
        engine = make_engine(settings(sys.argv[1]))
        assert not is_installed()
        os.kill(os.getpid(), signal.SIGTERM)
        train(engine, num_steps=1)
        engine.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        engine = make_engine(settings(sys.argv[1]))
        signal.signal(signal.SIGTERM, mine)
        os.kill(os.getpid(), signal.SIGTERM)
        train(engine, num_steps=1)
        assert len(os.listdir(sys.argv[1])) == 1
        engine.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    """
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "mine\nmine\n"), done.stderr


def test_sigterm_of_a_forked_child_leaves_its_parents_files(tmp_path: Path) -> None:
    """As a DataLoader ends its workers."""
    script = """
        import os, signal, sys, time
        from tests.support.tiny import make_engine, settings, train
        engine = make_engine(settings(sys.argv[1]))
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert len(os.listdir(sys.argv[1])) == 1
        train(engine, num_steps=1)
        engine.close()
    """
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []
