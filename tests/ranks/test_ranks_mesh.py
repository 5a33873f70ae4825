"""Four ranks of which two train the same part of a model: tensor parallelism and pipelines beside ZeRO's stages."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import offloadzero
from tests.support import meshes
from tests.support.ranks import Found, run_in_turn
from tests.support.sharded import global_losses, said_of

TIMEOUT_S = 100.0
IS_LONG = os.environ.get("OFFLOADZERO_TEST_RANKS") == "all"
NUM_STEPS = 2
TOLERANCE = 1e-5  # relative, of fp32 losses


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the checkpoint of a whole model in it."""
    path = tmp_path_factory.mktemp("mesh")
    engine, *_ = offloadzero.initialize(model=meshes.make_model(), config=meshes.config_of("host", 0, path))
    engine.save_checkpoint(path / "whole")
    engine.close()
    return path


@pytest.fixture(scope="module")
def found(directory: Path) -> Found:
    """All functions of this file, one after the other in the same processes."""
    works = (
        train_tensor_parallel,
        train_dtensors,
        train_with_codes,
        decide_together,
        step_alone,
        end_apart,
        save_and_load,
        load_parts_that_do_not_fit,
        train_pipeline,
        start_with_other_calls,
    )
    return run_in_turn(works, 4, directory, timeout_s=TIMEOUT_S)


class Megatron:
    """An `mpu` with the methods of Megatron's that are needed."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self) -> Any:
        return self._mesh.get_group("dp")

    def get_tensor_model_parallel_rank(self) -> int:
        return int(self._mesh.get_local_rank("tp"))


def mesh_of(first: str, second: str, shape: tuple[int, int] = (2, 2)) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=(first, second))


def weights_of(engine: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in engine.module.state_dict().items()}


# --- tensor parallelism ---

CASES = ((3, "nvme"), (1, "host"), (0, "resident"), *(((3, "host"), (2, "nvme")) if IS_LONG else ()))


def train_tensor_parallel(_: int, directory: str) -> dict[str, Any]:
    """By case: losses, norm, weights."""
    mesh = mesh_of("dp", "tp")
    found: dict[str, Any] = {}
    for number, (stage, placement) in enumerate(CASES):
        model = meshes.make_model(mesh.get_group("tp"))
        config = meshes.config_of(placement, stage, directory, num_ranks=2)
        mpu = Megatron(mesh) if number % 2 else mesh
        engine, *_ = offloadzero.initialize(model=model, config=config, mpu=mpu)
        losses = meshes.train(engine, num_steps=NUM_STEPS)
        found[f"{stage} {placement}"] = [losses, engine.get_global_grad_norm(), weights_of(engine)]
        found["names"] = [engine.dp_world_size, engine.mp_world_size, engine.world_size, engine.global_rank]
        found["names"] += [engine.get_data_parallel_rank(), engine.get_tensor_parallel_rank()]
        found["batch"] = engine.train_batch_size()
        engine.close()
    return found


def train_alone(directory: Path) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    config = meshes.config_of("resident", 0, directory)
    engine, *_ = offloadzero.initialize(model=meshes.make_model(), config=config)
    losses = meshes.train(engine, num_steps=NUM_STEPS)
    norm, weights = engine.get_global_grad_norm(), dict(engine.module.state_dict())
    engine.close()
    return losses, norm, weights


def expect_as_alone(by_case: list[list[list[Any]]], directory: Path) -> None:
    """Losses, norm and weights of the ranks, by case, are those of one process on the global batch."""
    expected, norm, weights = train_alone(directory)
    assert norm > 0.5, "nothing is clipped"
    for ranks in by_case:
        losses = [found[0] for found in ranks]
        assert losses[0] == losses[1]
        assert losses[2] == losses[3]
        assert global_losses([losses[0], losses[2]]) == pytest.approx(expected, rel=TOLERANCE)
        assert len({found[1] for found in ranks}) == 1
        assert ranks[0][1] == pytest.approx(norm, rel=TOLERANCE)
        for data_rank in range(2):
            whole = meshes.whole_weights([ranks[2 * data_rank + place][2] for place in range(2)])
            for name, value in weights.items():
                torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-6)


def test_tensor_parallel_ranks_train_as_one_process(found: Found, directory: Path) -> None:
    by_rank = found["train_tensor_parallel"]
    by_case = [[of_rank[f"{stage} {placement}"] for of_rank in by_rank] for stage, placement in CASES]
    expect_as_alone(by_case, directory)
    for rank, of_rank in enumerate(by_rank):
        assert of_rank["names"] == [2, 2, 4, rank, rank // 2, rank % 2]
        assert of_rank["batch"] == 2 * meshes.GLOBAL_BATCH


# --- DTensors ---

# Stage, placement, whether blocks are recomputed. Else what autograd saves of weights is fetched again.
FORMS = ((3, "host", False), (3, "nvme", True), *(((1, "resident", False),) if IS_LONG else ()))


def parallelized(mesh: Any) -> meshes.Model:
    """The whole model, of which torch divides the blocks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = meshes.make_model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train_dtensors(_: int, directory: str) -> dict[str, Any]:
    """By case: losses, norm, weights; and whether a checkpoint gives another engine the same ones."""
    mesh = mesh_of("dp", "tp")
    found: dict[str, Any] = {}

    def engine_of(stage: int, placement: str, *, recomputes: bool) -> Any:
        model = parallelized(mesh)
        model.recomputes = recomputes
        given = [param for param in model.parameters() if param.requires_grad]
        config = meshes.config_of(placement, stage, directory, num_ranks=2)
        return offloadzero.initialize(model=model, model_parameters=given, config=config, mpu=mesh)[0]

    for stage, placement, recomputes in FORMS:
        engine = engine_of(stage, placement, recomputes=recomputes)
        losses = meshes.train(engine, num_steps=NUM_STEPS)
        found[f"{stage} {placement}"] = [losses, engine.get_global_grad_norm(), weights_of(engine)]
        if placement == "host":
            engine.save_checkpoint(f"{directory}/dtensors")
        engine.close()
    engine = engine_of(3, "nvme", recomputes=False)
    engine.load_checkpoint(f"{directory}/dtensors")
    found["loaded"] = weights_of(engine) == found["3 host"][2]
    engine.close()
    return found


def test_dtensors_train_as_one_process(found: Found, directory: Path) -> None:
    by_rank = found["train_dtensors"]
    assert all(of_rank["loaded"] for of_rank in by_rank)
    by_case = [[of_rank[f"{stage} {placement}"] for of_rank in by_rank] for stage, placement, _ in FORMS]
    expect_as_alone(by_case, directory)


# --- weights as codes ---


class Gated(torch.nn.Module):
    """A divided block with a matrix that is the same on all tensor-parallel ranks."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(meshes.WIDTH, meshes.WIDTH, bias=False)
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.gate(x).tanh())


def train_with_codes(_: int, directory: str) -> list[Any]:
    """Losses, and the weights that the ranks along `tp` have in common."""
    mesh = mesh_of("dp", "tp")
    model = meshes.make_model(mesh.get_group("tp"))
    model.blocks = torch.nn.ModuleList(Gated(block) for block in model.blocks)
    codes = {"zero_quantized_weights": True}
    config = meshes.config_of("host", 3, directory, num_ranks=2, zero_optimization=codes)
    engine, *_ = offloadzero.initialize(model=model, config=config, mpu=mesh)
    losses = meshes.train(engine, num_steps=NUM_STEPS)
    weights = weights_of(engine)
    engine.close()
    return [
        losses,
        {name: value for name, value in weights.items() if not name.endswith(tuple(meshes.DIVIDED))},
    ]


def test_codes_of_weights_are_the_same_on_tensor_parallel_ranks(found: Found) -> None:
    ranks = found["train_with_codes"]
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0][1] == ranks[2][1]


# --- decisions of all parts ---


def decide_together(rank: int, directory: str) -> dict[str, Any]:
    """By step, of which one rank spoils the gradient of its part in the second: losses, scale, norm."""
    mesh = mesh_of("dp", "tp")
    model = meshes.make_model(mesh.get_group("tp"))
    poison = [1.0]
    if rank == 1:
        model.blocks[0].up.weight.register_hook(lambda grad: grad * poison[0])
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}
    config = meshes.config_of("host", 3, directory, num_ranks=2, fp16=fp16)
    engine, *_ = offloadzero.initialize(model=model, config=config, mpu=mesh)
    found: dict[str, Any] = {"applied": [], "scale": [], "norm": []}
    for step in range(3):
        poison[0] = float("inf") if step == 1 else 1.0
        meshes.train(engine, num_steps=1, first=step)
        found["applied"].append(engine.was_step_applied())
        found["scale"].append(float(engine.loss_scale))
        found["norm"].append(engine.get_global_grad_norm())
    found["skipped"] = engine.skipped_steps
    engine.close()
    return found


def test_a_gradient_that_is_not_finite_in_one_part_skips_the_step_of_all(found: Found) -> None:
    by_rank = found["decide_together"]
    for of_rank in by_rank:
        assert of_rank["applied"] == [True, False, True]
        assert of_rank["scale"] == [16.0, 8.0, 8.0]
        assert of_rank["skipped"] == 1
        for step in (0, 2):
            assert of_rank["norm"][step] == by_rank[0]["norm"][step] > 0


def step_alone(rank: int, directory: str) -> dict[str, Any]:
    """Four parts without a second rank each, of which two alone have gradients in the second step; one ends then."""
    mesh = mesh_of("pp", "dp", (4, 1))
    torch.manual_seed(rank)
    config = meshes.config_of("host", 1, directory, gradient_accumulation_steps=1)
    del config["train_batch_size"]
    engine, *_ = offloadzero.initialize(model=torch.nn.Linear(16, 16), config=config, mpu=mesh)
    weights, norms = [], []

    def step(*, with_gradient: bool) -> None:
        weights.append(engine.module.weight.detach().clone())
        if with_gradient:
            engine.backward(engine(torch.ones(1, 16)).pow(2).sum())
        engine.step()
        norms.append(engine.get_global_grad_norm())

    step(with_gradient=True)
    step(with_gradient=rank >= 2)
    weights.append(engine.module.weight.detach().clone())
    changed = [not torch.equal(one, other) for one, other in itertools.pairwise(weights)]
    said = said_of(engine.close if rank == 3 else lambda: step(with_gradient=True))
    said_of(engine.close)  # what it has found meanwhile, once more
    return {"norms": norms, "changed": changed, "said": said}


def test_parts_without_gradients_take_the_step_of_the_others(found: Found) -> None:
    by_rank = found["step_alone"]
    norms = by_rank[0]["norms"]
    assert 0 < norms[1] < norms[0]
    assert [of_rank["norms"] for of_rank in by_rank] == [norms] * 4
    assert [of_rank["changed"] for of_rank in by_rank] == [[True, rank >= 2] for rank in range(4)]


def test_the_ranks_of_the_other_parts_are_told_of_an_end(found: Found) -> None:
    *others, last = (of_rank["said"] for of_rank in found["step_alone"])
    assert last == "nothing"
    for said in others:
        assert said.startswith("RankError: ")
        assert "rank 3: StateError: it has closed its engine" in said


def end_apart(rank: int, directory: str) -> dict[str, Any]:
    """The first part gathers the weights of its last step when the second has closed its engine; it reads them, too."""
    mesh = mesh_of("pp", "dp")
    config = meshes.config_of("host", 1, directory, num_ranks=2, gradient_accumulation_steps=1)
    del config["train_batch_size"]
    torch.manual_seed(0)
    engine, *_ = offloadzero.initialize(model=torch.nn.Linear(16, 16), config=config, mpu=mesh)
    before = engine.module.weight.detach().clone()
    others_closed = [Path(directory) / f"rank {other} has closed" for other in (2, 3)]
    updates = engine._runtime.group.updates
    gather = updates.all_gather

    def gather_late(*given: Any) -> None:
        until_s = time.monotonic() + TIMEOUT_S / 4
        while not all(path.exists() for path in others_closed):
            assert time.monotonic() < until_s, "the other part has not ended"
            time.sleep(0.01)
        gather(*given)

    if rank < 2:
        updates.all_gather = gather_late
    engine.backward(engine(torch.ones(1, 16)).pow(2).sum())
    engine.step()
    if rank >= 2:
        said = said_of(engine.close)
        others_closed[rank - 2].touch()
        return {"said": [said]}
    changed = []
    said = said_of(lambda: changed.append(not torch.equal(engine.module.weight.detach(), before)))
    saving = said_of(lambda: engine.save_checkpoint(f"{directory}/apart"))
    dist.barrier(mesh.get_group("dp"))
    said_of(engine.close)
    return {"said": [said], "changed": changed, "saving": saving}


def test_a_part_ends_its_run_after_another_has_closed_its_engine(found: Found) -> None:
    by_rank = found["end_apart"]
    assert [of_rank["said"] for of_rank in by_rank] == [["nothing"]] * 4
    for of_rank in by_rank[:2]:
        assert of_rank["changed"] == [True]
        assert of_rank["saving"].startswith("RankError: ")  # which takes all parts
        assert "StateError: it has closed its engine" in of_rank["saving"]


# --- checkpoints ---


def save_and_load(rank: int, directory: str) -> dict[str, Any]:
    """Of an engine that is saved, of two that load, and of checkpoints that do not fit."""
    mesh = mesh_of("dp", "tp")
    found: dict[str, Any] = {}

    def engine_of(placement: str, stage: int) -> Any:
        config = meshes.config_of(placement, stage, directory, num_ranks=2)
        return offloadzero.initialize(model=meshes.make_model(mesh.get_group("tp")), config=config, mpu=mesh)[
            0
        ]

    engine = engine_of("host", 3)
    meshes.train(engine, num_steps=2)
    engine.save_checkpoint(f"{directory}/saved", client_state={"seen": 2})
    engine.save_16bit_model(f"{directory}/saved")
    found["on"] = [meshes.train(engine, num_steps=1, first=2), weights_of(engine)]
    for tag in ("of both", "of one"):
        engine.save_checkpoint(f"{directory}/two", tag=tag, save_latest=tag == "of both" or rank % 2 == 0)
    engine.close()
    for stage, placement in ((3, "nvme"), (1, "resident")):
        engine = engine_of(placement, stage)
        path, client_state = engine.load_checkpoint(f"{directory}/saved")
        found[f"path {stage}"] = [str(Path(path).relative_to(directory)), client_state, engine.global_steps]
        found[f"on {stage}"] = [meshes.train(engine, num_steps=1, first=2), weights_of(engine)]
        if stage == 3:
            for name, given in (("two", {}), ("two", {"tag": "of one"}), ("whole", {})):
                load = engine.load_checkpoint
                found[f"{name} {given}"] = said_of(lambda: load(f"{directory}/{name}", **given))  # noqa: B023
        engine.close()
    return found


def test_each_part_of_a_model_has_its_checkpoint(found: Found, directory: Path) -> None:
    for rank, of_rank in enumerate(found["save_and_load"]):
        for stage in (1, 3):
            place = f"saved/mp_rank_0{rank % 2}/global_step2"
            assert of_rank[f"path {stage}"] == [place, {"seen": 2}, 2]
            assert of_rank[f"on {stage}"] == of_rank["on"]
        assert "ranks [1, 3] load another checkpoint than rank 0" in of_rank["two {}"]
        assert of_rank["two {'tag': 'of one'}"] == "nothing"
        assert "has the checkpoint of a whole model, and this rank trains part" in of_rank["whole {}"]
    assert [path.name for path in (directory / "saved").glob("*/*.safetensors")] == ["model.safetensors"] * 2
    engine, *_ = offloadzero.initialize(
        model=meshes.make_model(), config=meshes.config_of("host", 0, directory)
    )
    said = said_of(lambda: engine.load_checkpoint(directory / "saved"))
    assert (
        "has the checkpoints of 2 parts of a model (mp_rank_00, mp_rank_01): load them with the mpu" in said
    )
    engine.close()


def load_parts_that_do_not_fit(rank: int, directory: str) -> dict[str, Any]:
    """Stages of equal shapes, on ranks that go along `pp` or `tp` first; parts of two saves; more parts than before."""
    found: dict[str, Any] = {}

    def engine_of(names: tuple[str, str, str], shape: tuple[int, int, int] = (2, 1, 2)) -> tuple[Any, int]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = torch.nn.Linear(16, 16)
        place = 10 * mesh.get_local_rank("pp") + mesh.get_local_rank("tp")
        torch.nn.init.constant_(model.weight, place)
        config = meshes.config_of("host", 1, directory)
        del config["train_batch_size"]
        config["train_micro_batch_size_per_gpu"] = 1
        return offloadzero.initialize(model=model, config=config, mpu=mesh)[0], place

    def end(engine: Any) -> None:
        dist.barrier()
        said_of(engine.close)

    engine, _ = engine_of(("pp", "dp", "tp"))
    engine.save_checkpoint(f"{directory}/stages", tag="best")
    dist.barrier()
    old = Path(f"{directory}/stages/mp_rank_01")
    if rank == 0:
        shutil.copytree(old, f"{directory}/old")
    dist.barrier()
    engine.save_checkpoint(f"{directory}/stages", tag="best")
    end(engine)
    engine, place = engine_of(("tp", "dp", "pp"))
    with torch.no_grad():
        engine.module.weight.fill_(-1.0)
    engine.load_checkpoint(f"{directory}/stages")
    found["loaded"] = [engine.module.weight.detach().unique().tolist(), place]
    if rank == 0:
        shutil.rmtree(old)
        shutil.move(f"{directory}/old", old)
    dist.barrier()
    found["two saves"] = said_of(lambda: engine.load_checkpoint(f"{directory}/stages"))
    end(engine)
    engine, _ = engine_of(("pp", "dp", "tp"), (4, 1, 1))
    found["other axes"] = said_of(lambda: engine.load_checkpoint(f"{directory}/stages"))
    end(engine)
    engine, _ = engine_of(("pp", "dp", "tp"), (2, 2, 1))
    found["fewer parts"] = said_of(lambda: engine.save_checkpoint(f"{directory}/stages"))
    end(engine)
    return found


def test_a_part_is_loaded_at_its_place_with_the_others_of_its_save(found: Found) -> None:
    for rank, of_rank in enumerate(found["load_parts_that_do_not_fit"]):
        weights, place = of_rank["loaded"]
        assert weights == [place]
        assert place == 10 * (rank % 2) + rank // 2
        assert "parts of two saves are not loaded together" in of_rank["two saves"]
        assert "CheckpointError: " in of_rank["fewer parts"]
        assert (
            "4 parts of a model, and there are 2 here: save into another directory" in of_rank["fewer parts"]
        )
    said = [of_rank["other axes"] for of_rank in found["load_parts_that_do_not_fit"]]
    assert (
        "is of the part at pipeline rank 0 and tensor-parallel rank 1, of 4, and this rank trains" in said[1]
    )
    assert all("CheckpointError: " in text or "RankError: " in text for text in said)


# --- pipelines ---

NUM_MICRO = 4


def pipeline_batch(step: int, data_rank: int, num_ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [meshes.batch_of(step * NUM_MICRO + micro, data_rank, num_ranks) for micro in range(NUM_MICRO)]


def pipeline_config(stage: int, directory: str, num_ranks: int) -> dict[str, Any]:
    """Each step() is a boundary: a schedule runs all backwards of a step before it."""
    over = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": NUM_MICRO}
    over["train_batch_size"] = NUM_MICRO * meshes.GLOBAL_BATCH
    return meshes.config_of("host", stage, directory, num_ranks=num_ranks, **over)


def train_pipeline(_: int, directory: str) -> dict[str, Any]:
    """By schedule and stage of ZeRO: losses (of the last stage's ranks), norm, weights."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    mesh = mesh_of("pp", "dp")
    place, data_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    found: dict[str, Any] = {}
    for kind, stage in itertools.product((Schedule1F1B, ScheduleGPipe), (1, 0, 3) if IS_LONG else (1,)):
        engine, *_ = offloadzero.initialize(
            model=meshes.make_model(first=place == 0, last=place == 1),
            config=pipeline_config(stage, directory, 2),
            mpu=mesh,
        )
        schedule = kind(
            PipelineStage(engine.module, place, 2, engine.device, group=mesh.get_group("pp")),
            NUM_MICRO,
            loss_fn=lambda logits, targets: meshes.loss_of(logits, targets) / NUM_MICRO,
            scale_grads=False,
        )
        losses: list[torch.Tensor] = []
        for step in range(NUM_STEPS):
            batch = zip(*pipeline_batch(step, data_rank, 2), strict=True)
            inputs, targets = (torch.cat(side) for side in batch)
            of_step: list[torch.Tensor] = []
            if place == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=of_step)
            engine.step()
            losses += of_step
        scaled = [NUM_MICRO * loss.item() for loss in losses]
        found[f"{kind.__name__} {stage}"] = [scaled, engine.get_global_grad_norm(), weights_of(engine)]
        engine.close()
    return found


def train_pipeline_alone(directory: Path) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    config = pipeline_config(0, str(directory), 1)
    engine, *_ = offloadzero.initialize(model=meshes.make_model(), config=config)
    losses = []
    for step in range(NUM_STEPS):
        for inputs, targets in pipeline_batch(step, 0, 1):
            loss = meshes.loss_of(engine(inputs), targets)
            (loss / NUM_MICRO).backward()
            losses.append(loss.item())
        engine.step()
    norm, weights = engine.get_global_grad_norm(), dict(engine.module.state_dict())
    engine.close()
    return losses, norm, weights


def test_a_pipeline_trains_as_one_process(found: Found, directory: Path) -> None:
    expected, norm, weights = train_pipeline_alone(directory)
    assert norm > 0.5, "nothing is clipped"
    by_rank = found["train_pipeline"]
    for key in by_rank[0]:
        first, last = by_rank[:2], by_rank[2:]
        losses = global_losses([of_rank[key][0] for of_rank in last])
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert len({of_rank[key][1] for of_rank in by_rank}) == 1
        assert first[0][key][1] == pytest.approx(norm, rel=TOLERANCE)
        for one, other in zip(first, last, strict=True):
            of_last = {name.replace("blocks.0", "blocks.1"): value for name, value in other[key][2].items()}
            both = {**one[key][2], **of_last}
            assert both.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(torch.tensor(both[name]), value, rtol=1e-4, atol=1e-6)


# --- what is refused ---


def start_with_other_calls(rank: int, directory: str) -> dict[str, str]:
    """By what is wrong, on some ranks or on all; then all start."""
    mesh = mesh_of("dp", "tp")
    config = meshes.config_of("host", 3, directory, num_ranks=2)
    del config["train_batch_size"]
    near = {"zero_optimization": {**config["zero_optimization"], "zero_hpz_partition_size": 2}}
    share = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}

    def start(mpu: Any, **over: Any) -> str:
        model = meshes.make_model(mesh.get_group("tp"))
        call = offloadzero.initialize
        return said_of(lambda: call(model=model, config={**config, **over}, mpu=mpu)[0].close())

    def other_group() -> Any:
        """The third rank has a group that the fourth does not know."""
        *_, group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [2, 3])]
        mpu = Megatron(mesh)
        if rank == 2:
            mpu.get_data_parallel_group = lambda: group  # type: ignore[method-assign]
        return mpu

    return {
        "some": start(mesh if rank != 3 else None),
        "groups": start(other_group()),
        "near": start(mesh, **near),
        "share": start(mesh, **share),
        "flat": start(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))),
        "right": start(mesh),
    }


def test_what_is_wrong_with_a_mesh_is_said_on_all_ranks(found: Found) -> None:
    for of_rank in found["start_with_other_calls"]:
        assert of_rank["right"] == of_rank["flat"] == "nothing"
        assert of_rank["some"].startswith("ConfigError: mpu = ")
        assert of_rank["some"].endswith("the same on all ranks: ranks [3] have another than rank 0")
        assert of_rank["groups"].startswith("ConfigError: mpu = 'data-parallel groups by their first ranks")
        near = "ConfigError: zero_optimization.zero_hpz_partition_size = 2: in a mesh of ranks: 1"
        assert of_rank["near"] == near
        share = "ConfigError: zero_optimization.offload_optimizer.ratio = 0.5: in a mesh of ranks: 1.0"
        assert of_rank["share"] == share
