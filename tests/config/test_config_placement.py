"""Where things are: ZeRO and placement, the file engine and its directories; whole configurations as they are found."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from offloadzero.config import (
    AioConfig,
    BatchConfig,
    LossScaleConfig,
    OffloadConfig,
    PlacementConfig,
    UpdateConfig,
    load_config,
)
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import ConfigError
from tests.config.blocks import RECORD, adam, homes, zero

# --- ZeRO and placement ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "number"), [(0, 0), (1, 1), (2, 2), (3.0, 3), (True, 1), (False, 0)])
def test_stages(stage: object, number: int) -> None:
    config = load_config(zero(stage))
    assert config.zero_stage == number
    assert type(config.zero_stage) is int
    assert config.placement == PlacementConfig()


def test_the_oldest_zero_switch() -> None:
    assert load_config({"zero_optimization": True}).zero_stage == 1
    assert load_config({"zero_optimization": False}).zero_stage == 0


def test_a_stage_out_of_range_says_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"^zero_optimization\.stage = 4: allowed 0, 1, 2, 3$"):
        load_config(zero(4))


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({}, {}),
        ({"offload_param": None, "offload_optimizer": {"device": "none", "nvme_path": "/nowhere"}}, {}),
        ({"offload_param": {"device": "cpu"}}, {"param": "host"}),
        ({"offload_optimizer": {"device": "cpu"}}, dict.fromkeys(RECORD[1:], "host")),
        ({"cpu_offload": True}, dict.fromkeys(RECORD[1:], "host")),
        ({"cpu_offload": False}, {}),
        ({"cpu_offload": True, "cpu_offload_params": True}, dict.fromkeys(RECORD, "host")),
        ({"cpu_offload_param": True, "offload_optimizer": {"device": "cpu"}}, dict.fromkeys(RECORD, "host")),
    ],
)
def test_offload_blocks(block: dict[str, Any], expected: dict[str, str]) -> None:
    assert homes(load_config(zero(3, **block))) == expected


@pytest.mark.parametrize(("name", "stages"), [("offload_param", {3}), ("offload_optimizer", {1, 2, 3})])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offload_blocks_need_their_stage(name: str, stages: set[int], stage: int) -> None:
    block = zero(stage, **{name: {"device": "cpu"}})
    if stage in stages:
        assert homes(load_config(block)) != {}
        return
    if name == "offload_param":  # DeepSpeed passes over it: tests/config/test_public_files.py
        (warning,) = load_config(block).warnings
        assert f"{name}.device = 'cpu' has no effect at stage {stage}: " in warning
        assert load_config(block).placement == PlacementConfig()
        return
    with pytest.raises(ConfigError, match=rf"{name}\.device = 'cpu': needs zero_optimization\.stage"):
        load_config(block)
    assert load_config(zero(stage, **{name: {"device": "none"}})).placement == PlacementConfig()


def test_an_old_name_beside_the_new_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.cpu_offload = True: the old name of"):
        load_config(zero(3, cpu_offload=True, offload_optimizer={"device": "none"}))


@pytest.mark.parametrize(
    ("block", "pinned"),
    [
        ({}, True),
        ({"offload_param": {"pin_memory": False}}, False),
        ({"offload_param": {"pin_memory": False}, "offload_optimizer": {"pin_memory": True}}, True),
        ({"cpu_offload_use_pin_memory": False}, False),
    ],
)
def test_pin_memory(block: dict[str, Any], pinned: bool) -> None:
    assert load_config(zero(3, **block)).pin_memory is pinned


def test_the_ratio_of_the_update_off_the_device() -> None:
    assert (
        load_config(zero(3, offload_optimizer={"device": "cpu", "ratio": 0.25})).placement.host_update_ratio
        == 0.25
    )
    assert (
        load_config(zero(3, offload_optimizer={"device": "none", "ratio": 0.25})).placement
        == PlacementConfig()
    )


@pytest.mark.parametrize(
    ("given_size", "chunk"),
    [
        (1, 65_536),
        (65_536, 65_536),
        (65_537, 65_536 + 4096),
        (1e6, 1_003_520),
        (UpdateConfig().chunk_elements - 1, UpdateConfig().chunk_elements),
    ],
)
def test_sub_group_size_is_the_updates_piece(given_size: float, chunk: int) -> None:
    assert load_config(zero(3, sub_group_size=given_size)).update.chunk_elements == chunk
    own = {"offloadzero": {"update": {"chunk_elements": 8192}}}
    assert load_config({**zero(3, sub_group_size=given_size), **own}).update.chunk_elements == 8192


def test_deepspeeds_usual_sub_group_size_does_not_become_a_buffer() -> None:
    config = load_config(zero(3, sub_group_size=1e9))
    assert config.update == UpdateConfig()
    assert any(line.startswith("zero_optimization.sub_group_size: accepted") for line in config.notices)


def test_own_units_win_over_the_persistence_threshold() -> None:
    own = {"offloadzero": {"units": {"min_leaf_elements": 5}}}
    assert load_config(zero(3, stage3_param_persistence_threshold=1e4)).units.min_leaf_elements == 10_000
    assert (
        load_config({**zero(3, stage3_param_persistence_threshold=1e4), **own}).units.min_leaf_elements == 5
    )


def test_own_placement_forms() -> None:
    def own(placement: object) -> OffloadConfig:
        return load_config({"offloadzero": {"placement": placement}})

    assert homes(own("host")) == dict.fromkeys(RECORD, "host")
    assert homes(own({"grad": "host", "master": "device"})) == {"grad": "host", "master": "device"}
    first, second = own([{"exp_avg": "host"}, {"units": "layers.0", "param": "device"}]).placement.rules
    assert (first.units, dict(first.tiers)) == ("*", {SegmentKind("exp_avg"): TierName.HOST})
    assert (second.units, dict(second.tiers)) == ("layers.0", {SegmentKind.PARAM: TierName.DEVICE})
    assert own([]).placement == PlacementConfig()


def test_own_placement_comes_after_the_offload_blocks() -> None:
    own = {"offloadzero": {"placement": {"exp_avg": "device"}}}
    config = load_config({**zero(3, offload_optimizer={"device": "cpu"}), **own})
    assert homes(config) == {"master": "host", "exp_avg": "device", "exp_avg_sq": "host"}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("cpu", r"offloadzero\.placement = 'cpu': allowed device, host, nvme, auto: cpu is 'host' here$"),
        (
            {"param": "ssd"},
            r"offloadzero\.placement\.param = 'ssd': allowed device, host, nvme: ssd is 'nvme' here$",
        ),
        (3, r"offloadzero\.placement = 3: one of device, host, nvme, an object"),
        ({}, r"offloadzero\.placement = \{\}: a rule needs at least one of param"),
        ([{"units": "a"}], r"offloadzero\.placement\[0\] = \{'units': 'a'\}: a rule needs"),
        ([{"param": "host"}, {"param": "disk"}], r"offloadzero\.placement\[1\]\.param = 'disk'"),
        ([{"param": "host", "units": ""}], r"offloadzero\.placement\[0\]\.units"),
        (["host"], r"offloadzero\.placement\[0\] = 'host': a JSON object"),
        ({"units": "a", "param": "host"}, r"offloadzero\.placement\.units"),
        ({"momentum": "host"}, r"offloadzero\.placement\.momentum = 'host': unknown key"),
        ("Auto", r"offloadzero\.placement = 'Auto': allowed device, host, nvme, auto \(did you mean 'auto'"),
        (["auto"], r"offloadzero\.placement\[0\] = 'auto': a JSON object"),
        ({"param": "auto"}, r"a rule needs at least one of"),
        (True, r"offloadzero\.placement = True: one of .* or auto"),
    ],
)
def test_bad_own_placements(placement: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"offloadzero": {"placement": placement}})


def test_a_gpu_is_not_taken_for_a_slip_of_cpu() -> None:
    with pytest.raises(ConfigError, match=r"allowed none, cpu, nvme: gpu is 'none' here$"):
        load_config({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}})


def test_the_compact_layout() -> None:
    def load(**own: object) -> OffloadConfig:
        return load_config({"bf16": {"enabled": True}, "offloadzero": {"state_layout": "compact", **own}})

    assert load_config({}).state_layout == load(state_layout="fp32").state_layout == "fp32"
    assert load().state_layout == "compact"
    assert load(update={"chunk_elements": 131_072}).update.chunk_elements == 131_072
    for elements in (4096, 5000):  # 4096 is the multiple of the other layout
        with pytest.raises(
            ConfigError, match=f"chunk_elements = {elements}: a multiple of 65536 with state_layout"
        ):
            load(update={"chunk_elements": elements})
    with pytest.raises(ConfigError, match="state_layout = 'compact': needs bf16 parameters, fp16 is enabled"):
        load_config({"fp16": {"enabled": True}, "offloadzero": {"state_layout": "compact"}})


def test_a_sub_group_size_is_rounded_up_to_chunks_of_the_compact_layout() -> None:
    own = {"offloadzero": {"state_layout": "compact"}}
    assert load_config({**zero(3, sub_group_size=100_000), **own}).update.chunk_elements == 131_072


# --- the file engine and nvme paths ----------------------------------------------------------------------


def test_aio_block() -> None:
    block = {
        "block_size": "2MiB",
        "queue_depth": 16,
        "thread_count": 2,
        "single_submit": False,
        "use_gds": False,
    }
    config = load_config(
        {"gradient_clipping": 1, "aio": block, "offloadzero": {"aio": {"backend": "native_aio"}}}
    )
    assert config.aio == AioConfig("native_aio", 2 * 2**20, 16, 2)
    assert config.notices == ()


def test_an_odd_block_size_is_rounded_up() -> None:
    config = load_config({"gradient_clipping": 1, "aio": {"block_size": 1_000_000}})
    assert config.aio.block_size == 1_003_520
    assert config.notices == ("aio.block_size: 1000000 is rounded up to 1003520",)


def test_the_key_deepspeeds_tuner_prints_points_to_the_right_one() -> None:
    with pytest.raises(
        ConfigError, match=r"aio\.num_threads = 8: .*intra_op_parallelism \(or thread_count\)"
    ):
        load_config({"aio": {"num_threads": 8}})


def on_nvme(path: object, stage: int = 3) -> dict[str, Any]:
    return zero(stage, offload_optimizer={"device": "nvme", "nvme_path": path})


def test_nvme_paths_unite_in_order_without_repetition(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    for directory in (a, b, c):
        directory.mkdir()
    (tmp_path / "link").symlink_to(a)
    block = {
        "offload_param": {"device": "nvme", "nvme_path": str(b)},
        "offload_optimizer": {"device": "nvme", "nvme_path": [str(a), f"{b}/"]},
    }
    own = {"nvme_path": [str(tmp_path / "link"), str(c)]}
    config = load_config({**zero(3, **block), "offloadzero": own})
    assert config.nvme_paths == (b, a, c)
    assert homes(config) == dict.fromkeys(RECORD, "nvme")


def test_nvme_paths_of_other_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert load_config(on_nvme(tmp_path / "x")).nvme_paths == (tmp_path / "x",)
    assert load_config(on_nvme([tmp_path / "x"])).nvme_paths == (tmp_path / "x",)
    assert load_config(on_nvme("~/x")).nvme_paths == (tmp_path / "x",)
    assert load_config(on_nvme("x")).nvme_paths == (Path("x").absolute(),)
    own = load_config({"offloadzero": {"placement": "nvme", "nvme_path": "x"}})
    assert (own.nvme_paths, homes(own)) == ((Path("x").absolute(),), dict.fromkeys(RECORD, "nvme"))


def test_one_blocks_path_serves_both(tmp_path: Path) -> None:
    block = {
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
    }
    assert load_config(zero(3, **block)).nvme_paths == (tmp_path,)
    own = {"offloadzero": {"nvme_path": str(tmp_path)}}
    assert load_config({**zero(3, offload_param={"device": "nvme"}), **own}).nvme_paths == (tmp_path,)


@pytest.mark.parametrize(
    ("source", "key"),
    [
        (zero(3, offload_param={"device": "nvme"}), "zero_optimization.offload_param.nvme_path"),
        (zero(1, offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.nvme_path"),
        ({"offloadzero": {"placement": "nvme"}}, "offloadzero.nvme_path"),
        ({"offloadzero": {"placement": [{"units": "a", "master": "nvme"}]}}, "offloadzero.nvme_path"),
    ],
)
def test_nvme_needs_a_directory(source: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="the placement uses nvme") as caught:
        load_config(source)
    assert caught.value.key == key


@pytest.mark.parametrize("value", ["", [], [""], 3, [3], {"a": 1}])
def test_bad_nvme_path_values(value: object) -> None:
    for source in (on_nvme(value), {"offloadzero": {"nvme_path": value}}):
        with pytest.raises(ConfigError, match="nvme_path"):
            load_config(source)


def test_an_nvme_path_must_be_a_directory(tmp_path: Path) -> None:
    key = r"zero_optimization\.offload_optimizer\.nvme_path"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{key}\[1\] = '.*file': is not a directory"):
        load_config(on_nvme([str(tmp_path), str(tmp_path / "file")]))
    with pytest.raises(ConfigError, match=rf"{key} = '.*below': there is no such directory"):
        load_config(on_nvme(str(tmp_path / "file" / "below")))
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is not a directory"):
        load_config(on_nvme(str(tmp_path / "dangling")))


def test_an_nvme_path_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not (str(path) == str(tmp_path) and mode & os.W_OK))
        with pytest.raises(ConfigError, match="is not writable: this process lacks the permission"):
            load_config(on_nvme(str(tmp_path)))
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[8] = real.f_flag | os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    with pytest.raises(ConfigError, match="is not writable: the filesystem is mounted read-only"):
        load_config(on_nvme(str(tmp_path)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="lacks the permission"):
        load_config(on_nvme(str(tmp_path)))


def read_only_mount() -> str | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, _, options, *_ = line.split()
        if "ro" in options.split(",") and os.path.isdir(where):
            return where
    return None


@pytest.mark.skipif(read_only_mount() is None, reason="nothing is mounted read-only here")
def test_a_real_read_only_mount_is_refused() -> None:
    with pytest.raises(ConfigError, match="mounted read-only"):
        load_config(on_nvme(read_only_mount()))


# --- whole configurations as they are found --------------------------------------------------------------


def test_the_hugging_face_stage_3_configuration() -> None:
    """The stage 3 example of the transformers documentation, every "auto" left as it is."""
    source = {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": 0.9 * 1001 * 1001,
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    config = load_config(source)
    assert config.zero_stage == 3
    assert homes(config) == dict.fromkeys(RECORD, "host")
    assert config.optimizer == adam("AdamW", lr=None)
    assert config.scheduler is not None
    assert set(config.scheduler.params.values()) == {"auto"}
    batch_keys = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    assert config.batch == BatchConfig(unresolved=batch_keys)
    assert config.gradient_clipping == 1.0
    assert config.max_live_parameters == 10**9
    assert config.gather_16bit_weights_on_save
    assert config.steps_per_print == 2000
    assert [line.split(" ")[0] for line in config.warnings] == ["gradient_clipping"]
    assert {line.split(":")[0] for line in config.notices} == {
        *("fp16.enabled", "bf16.enabled"),
        *(f"optimizer.params.{key}" for key in ("betas", "eps", "weight_decay")),
        *(
            f"zero_optimization.{key}"
            for key in (
                "overlap_comm",
                "contiguous_gradients",
                "sub_group_size",
                "stage3_prefetch_bucket_size",
                "stage3_max_reuse_distance",
                "stage3_param_persistence_threshold",
            )
        ),
    }


def test_accelerates_plugin_configuration() -> None:
    """What accelerate builds from its plugin's arguments."""
    source = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "cpu", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": math.inf,
        "fp16": {"enabled": True, "auto_cast": True},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    }
    config = load_config(source, world_size=4)
    assert config.batch == BatchConfig(32, 4, 2)
    assert homes(config) == {"param": "host"}
    assert config.precision.loss_scale == LossScaleConfig()
    assert [line.split(":")[0] for line in config.notices] == [
        "zero_allow_untested_optimizer",
        "fp16.auto_cast",
    ]
