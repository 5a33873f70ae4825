"""`state_layout: compact` under the engine: placement, layout, checkpoints and accessors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero import CheckpointError, ConfigError, zero
from offloadzero.config import OffloadConfig
from offloadzero.config.schema import PlacementConfig, PlacementRule
from offloadzero.core.constants import COMPACT_BLOCK, num_scales
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.native.hyper import AdamHyper
from offloadzero.native.kernels import compact_adam_step, compact_encode
from offloadzero.planning.placement_rules import place
from offloadzero.update.records import Record, make_record, segment_slice
from offloadzero.update.specs.adam import ADAM
from tests.support.cases import IN_FULL
from tests.support.checkpoints import reseal
from tests.support.tiny import all_states
from tests.support.training import Outcome, assert_same, make_config, snapshot

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gpt_model

SEQ_LEN = 8
NUM_STEPS = 6 if IN_FULL else 4
# A block has 111,000 parameters, two chunks of an update; (rest) and the biases have odd sizes of blocks.
SIZE = gpt_model.GPTSize(num_layers=3, width=96, num_heads=4)
COMPACT = {"state_layout": "compact", "update": {"chunk_elements": 65_536}}
MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = ("exp_avg_e2m5", "exp_avg_sq_e1m7", "scales")


class Model(gpt_model.GPT):
    """A GPT with a tied head, a frozen matrix, and a vector that takes part where `with_extra` says so."""

    def __init__(self) -> None:
        super().__init__(SIZE, seq_len=SEQ_LEN)
        self.extra = nn.Parameter(torch.full((199,), 0.1))
        self.with_extra = False
        self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = super().forward(tokens, targets)
        return loss + self.extra.float().square().sum() if self.with_extra else loss


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay; vectors without, and at another rate."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trainable if param.dim() > 1]
    vectors = [param for param in trainable if param.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95)}]


@contextmanager
def engine_of(directory: Path, placement: str = "host", **over: Any) -> Iterator[offloadzero.Engine]:
    """A fresh engine of the compact layout, unless `layout` is another; closed at the end."""
    layout = over.pop("layout", "compact")
    config = make_config(placement, directory, **over)
    config["offloadzero"].update({**COMPACT, "state_layout": layout})
    torch.manual_seed(0)
    model = Model()
    engine, *_ = offloadzero.initialize(model=model, model_parameters=param_groups(model), config=config)
    try:
        yield engine
    finally:
        engine.close()


def train(engine: offloadzero.Engine, num_steps: int = NUM_STEPS, *, first: int = 0) -> list[float]:
    """Losses; the extra vector has a gradient in every second step."""
    losses = []
    for step in range(first, first + num_steps):
        engine.module.with_extra = step % 2 == 1
        for micro in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(100 * step + micro)
            data = torch.randint(0, gpt_model.VOCAB_SIZE, (2, SEQ_LEN + 1), generator=generator)
            loss = engine(data[:, :-1], data[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def run(directory: Path, placement: str, **over: Any) -> tuple[Outcome, dict[str, Tensor]]:
    """What a training leaves, and every byte of its segments."""
    with engine_of(directory, placement, **over) as engine:
        losses = train(engine)
        return snapshot(engine, losses), all_states(engine)


def assert_same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)), name


# --- placement ---


@pytest.mark.parametrize(("clipping", "accumulation"), [(0.0, 1), (0.5, 2)])
def test_placement_is_invisible(tmp_path: Path, clipping: float, accumulation: int) -> None:
    over = {"clipping": clipping, "accumulation": accumulation}
    resident, resident_bytes = run(tmp_path, "resident", **over)
    assert len([name for name in resident_bytes if name.endswith(".scales")]) == SIZE.num_layers + 3
    assert any((codes["exp_avg_e2m5"] != 0).all() for codes in resident.states.values())
    for placement in ("host", "nvme", "mixed"):
        outcome, states = run(tmp_path, placement, **over)
        assert_same(outcome, resident)
        assert_same_bytes(states, resident_bytes)


def test_a_rule_places_the_scales_and_nothing_changes(tmp_path: Path) -> None:
    """Alone on each tier, and between the moments."""
    resident, _ = run(tmp_path, "resident")
    tiers = {"host": "nvme", "nvme": "device", "resident": "host"}
    for placement, scales in tiers.items():
        everything = {"resident": "device"}.get(placement, placement)
        rules = [dict.fromkeys(("param", "master", *MOMENTS), everything), {"scales": scales}]
        with engine_of(tmp_path, offloadzero={"placement": rules}) as engine:
            losses = train(engine)
            runtime = engine.optimizer.runtime
            homes = {record.segments[SegmentKind.SCALES].tier.value for record in runtime.records}
            assert homes == {scales}
            assert_same(snapshot(engine, losses), resident)


class StandAlone:
    """One parameter's compact state in tensors of its own, updated by the kernel."""

    def __init__(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        n = param.numel()
        self.param = torch.empty(n, dtype=torch.bfloat16)
        self.state = (
            torch.empty(n, dtype=torch.int8),
            torch.empty(n, dtype=torch.int8),
            torch.empty(n, dtype=torch.uint8),
            torch.empty(num_scales(n)),
        )
        zeros = torch.zeros(n)
        compact_encode(param.detach().flatten(), zeros, zeros, self.param, *self.state, num_threads=1)
        beta1, beta2 = group.get("betas", (0.9, 0.999))
        self.hyper = AdamHyper(
            group.get("lr", 1e-3), beta1, beta2, eps=1e-8, weight_decay=group.get("weight_decay", 0.1)
        )
        self.num_steps = 0
        self.grad: Tensor | None = None

    def keep(self, grad: Tensor) -> None:
        self.grad = grad.flatten().clone()

    def step(self) -> None:
        if self.grad is None:
            return
        self.num_steps += 1
        compact_adam_step(
            self.param, self.grad, *self.state, hyper=self.hyper, step=self.num_steps, num_threads=1
        )
        self.grad = None


def test_the_engine_is_the_kernel_on_each_parameter_alone(tmp_path: Path) -> None:
    """Same gradients, no record, no chunks, no padding: same weights, codes and scales after each step's bits."""
    torch.manual_seed(0)
    twin = Model()
    alone = {id(param): StandAlone(param, group) for group in param_groups(twin) for param in group["params"]}
    by_name = {name: alone[id(p)] for name, p in twin.named_parameters() if id(p) in alone}
    with engine_of(tmp_path, "mixed") as engine:
        names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
        assert set(names) == set(by_name)
        params = dict(engine.module.named_parameters())
        for name in names:
            params[name].register_hook(by_name[name].keep)
        for step in range(NUM_STEPS):
            train(engine, 1, first=step)
            for state in by_name.values():
                state.step()
        assert {state.num_steps for state in by_name.values()} == {NUM_STEPS, NUM_STEPS // 2}
        weights = engine.module.state_dict()
        states = engine.optimizer.state_dict()["state"]
        numbered = [param for group in engine.optimizer.param_groups for param in group["params"]]
        for number, param in enumerate(numbered):
            name = next(name for name in names if params[name] is param)
            expected = by_name[name]
            assert torch.equal(weights[name].flatten(), expected.param), name
            for key, tensor in zip(CODES, expected.state[1:], strict=True):
                codes = states[number][key].flatten()
                assert torch.equal(codes.view(torch.uint8), tensor.view(torch.uint8)), f"{name}.{key}"


# --- the layout ---


def make(sizes: list[int], *, groups: list[int | None] | None = None, resident: bool = False) -> Record:
    params = [
        (f"p{i}", nn.Parameter(torch.zeros(1).expand(size)), 0 if groups is None else groups[i])
        for i, size in enumerate(sizes)
    ]
    return make_record(0, "unit", torch.bfloat16, params, spec=ADAM, resident=resident, compact=True)


@pytest.mark.parametrize("sizes", [[1], [511, 4097], [70_000, 3, 65_537], [262_144]])
def test_every_chunk_is_on_the_grid_of_direct_io(sizes: list[int]) -> None:
    """Chunks follow one another without gaps up to each segment's end, in whole blocks of 4096 bytes."""
    record = make(sizes)
    assert all(slot.offset % COMPACT_BLOCK == 0 for slot in record.slots)
    for kind, (dtype, num_elements) in record.layout.items():
        end = 0
        for start in range(0, record.num_trainable, 65_536):
            part = record.chunk_slice(kind, start, min(start + 65_536, record.num_trainable))
            assert part.start == end
            assert part.start * dtype.itemsize % 4096 == 0
            assert (part.stop - part.start) * dtype.itemsize % 4096 == 0
            end = part.stop
        assert end == num_elements, kind


def test_a_block_belongs_to_one_parameter() -> None:
    record = make([1, 511, 129, 4097], groups=[0, 1, 0, None])
    seen: set[int] = set()
    for slot in record.slots:
        if slot.trainable:
            part = segment_slice(SegmentKind.SCALES, slot.offset, slot.offset + slot.num_elements)
            assert part.stop - part.start == num_scales(slot.num_elements)
            assert not seen & set(range(part.start, part.stop))
            seen |= set(range(part.start, part.stop))
    with pytest.raises(AssertionError, match="inside a block"):
        segment_slice(SegmentKind.SCALES, 64, 128)


def test_the_scales_live_with_the_first_moment_unless_placed() -> None:
    def home(*rules: dict[SegmentKind, TierName]) -> TierName:
        placed = tuple(PlacementRule(tiers=MappingProxyType(rule)) for rule in rules)
        config = OffloadConfig(placement=PlacementConfig(rules=placed))
        return place([make([5000])], config)[0, SegmentKind.SCALES]

    assert home() is TierName.DEVICE
    assert home({SegmentKind("exp_avg"): TierName.NVME}) is TierName.NVME
    assert home({SegmentKind("exp_avg_sq"): TierName.NVME}) is TierName.DEVICE
    scales = {SegmentKind.SCALES: TierName.HOST}
    assert home(scales, {SegmentKind("exp_avg"): TierName.NVME}) is TierName.HOST


# --- what is refused, what keeps the fp32 layout ---


def small_engine(model: nn.Module, **top: Any) -> offloadzero.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "offloadzero": {"device": "cpu", "placement": "host", "state_layout": "compact"},
        **top,
    }
    engine, *_ = offloadzero.initialize(model=model, config=config)
    return engine


def test_a_model_without_bf16_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state_layout = 'compact': no trainable parameter is bf16"):
        small_engine(nn.Linear(9, 9))
    frozen = nn.Sequential(nn.Linear(9, 9).bfloat16().requires_grad_(False), nn.Linear(9, 9))
    with pytest.raises(ConfigError, match="no trainable parameter is bf16"):
        small_engine(frozen)


def test_records_of_other_dtypes_keep_the_fp32_layout() -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9).bfloat16())
    engine = small_engine(model)
    layouts = {r.dtype: r.compact for r in engine.optimizer.runtime.records}
    assert layouts == {torch.float32: False, torch.bfloat16: True}
    keys = {frozenset(state) for state in engine.optimizer.state_dict()["state"].values()}
    assert keys == {
        frozenset({*MOMENTS, "step"}),
        frozenset({*MOMENTS, "step", "master", *CODES}),
    }
    engine.close()


def test_eps_0_with_l2_decay_is_refused_and_with_decoupled_decay_trained() -> None:
    """The padding's update would be 0 / 0, its gradient then NaN by the decay, and with it the scale of its block."""

    def engine_of(kind: type[torch.optim.Adam], **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).bfloat16()
        optimizer = kind(model.parameters(), lr=0.01, eps=0.0, **options)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "offloadzero": {"device": "cpu", "placement": "host", "state_layout": "compact"},
        }
        return offloadzero.initialize(model=model, optimizer=optimizer, config=config)[0]

    with pytest.raises(
        ConfigError, match=r"optimizer\.param_groups\[0\]\.eps = 0\.0: above 0 with weight_decay of Adam"
    ):
        engine_of(torch.optim.Adam, weight_decay=0.1)
    for engine in (engine_of(torch.optim.AdamW, weight_decay=0.1), engine_of(torch.optim.Adam)):
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16)).float().square().sum())
            engine.step()
        assert all(param.isfinite().all() for param in engine.module.state_dict().values())
        if engine.optimizer.param_groups[0]["decoupled_weight_decay"]:
            engine.close()
            continue
        (saved,) = engine.optimizer.state_dict()["param_groups"]
        saved["weight_decay"] = 0.1
        with pytest.raises(ConfigError, match=r"state_dict\.param_groups\[0\]\.eps = 0\.0"):
            engine.optimizer.load_state_dict({**engine.optimizer.state_dict(), "param_groups": [saved]})
        engine.optimizer.param_groups[0]["weight_decay"] = 0.1
        engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16)).float().square().sum())
        with pytest.raises(ConfigError, match=r"optimizer\.param_groups\[0\]\.eps = 0\.0"):
            engine.step()
        engine.close()


# --- checkpoints ---


def bounds(values: Tensor, blocks: Tensor) -> Tensor:
    """The largest magnitude of each element's block of COMPACT_BLOCK."""
    count = values.numel()
    padded = torch.nn.functional.pad(blocks.flatten().abs().double(), (0, -count % COMPACT_BLOCK))
    return padded.view(-1, COMPACT_BLOCK).amax(1).repeat_interleave(COMPACT_BLOCK)[:count].view(values.shape)


def assert_within_rounding(compact: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """[Note: compact state]: what rounding the fp32 state of a parameter may change."""
    master = exact["master"].double()
    ulp = 2.0 ** (torch.floor(torch.log2(master.abs().clamp(min=2.0**-126))) - 7)
    assert ((compact["master"] - master).abs() <= ulp / 512).all()
    m = exact["exp_avg"].double()
    largest = bounds(m, m)
    assert ((largest == 0) | (largest >= 2.0**-100)).all()  # none is lost as a block too small to scale
    # Codes of 5 bits of y = 1 + 14.75 x; a value at the end of its segment may be rounded as one of the next.
    y = 1 + 14.75 * torch.where(largest > 0, m.abs() / largest, 0.0) + 1e-6
    step = 2.0 ** torch.floor(torch.log2(y)) / 32 / 14.75
    assert ((compact["exp_avg"] - m).abs() <= (step / 2 + 1e-6) * largest).all()
    s = exact["exp_avg_sq"].double().sqrt()
    largest = bounds(s, s)
    ours = compact["exp_avg_sq"].double().sqrt()
    is_small = s < largest / 382
    step = torch.where(s < largest * (1 - 1e-6) / 2.984375, 1 / 382, 1 / 191)
    assert ((ours - s).abs()[~is_small] <= (largest * (step / 2 + 1e-6))[~is_small]).all()
    assert (ours[is_small] <= (largest * (1 / 382 + 1e-6))[is_small]).all()


@pytest.mark.parametrize("by_checkpoint", [True, False])
def test_resuming_in_the_compact_layout_is_bitwise(tmp_path: Path, by_checkpoint: bool) -> None:
    """Half the steps, then the others after a load under another placement: the bits of all in one go."""
    straight, straight_bytes = run(tmp_path, "host", clipping=0.5)
    with engine_of(tmp_path, "nvme", clipping=0.5) as engine:
        losses = train(engine, NUM_STEPS // 2)
        engine.save_checkpoint(tmp_path / "saved")
        state_dict, weights = engine.optimizer.state_dict(), engine.module.state_dict()
        weights = {name: value.clone() for name, value in weights.items()}
    with engine_of(tmp_path, "mixed", clipping=0.5) as engine:
        if by_checkpoint:
            assert engine.load_checkpoint(tmp_path / "saved")[0] is not None
        else:
            frozen = "blocks.1.up.weight"
            zero.safe_set_full_fp32_param(dict(engine.module.named_parameters())[frozen], weights[frozen])
            engine.optimizer.load_state_dict(state_dict)
        losses += train(engine, NUM_STEPS // 2, first=NUM_STEPS // 2)
        assert_same(snapshot(engine, losses), straight)
        assert_same_bytes(all_states(engine), straight_bytes)


def test_an_fp32_checkpoint_loads_into_compact_within_one_rounding(tmp_path: Path) -> None:
    with engine_of(tmp_path, layout="fp32") as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "saved")
        exact = engine.optimizer.state_dict()
    for load in ("checkpoint", "state_dict"):
        with engine_of(tmp_path, "nvme") as engine:
            if load == "checkpoint":
                engine.load_checkpoint(tmp_path / "saved")
            else:
                engine.optimizer.load_state_dict(exact)
            ours = engine.optimizer.state_dict()["state"]
            assert ours.keys() == exact["state"].keys()
            for number, state in exact["state"].items():
                assert ours[number]["step"] == state["step"]
                assert_within_rounding(ours[number], state)
            assert all(loss == loss for loss in train(engine, 2, first=NUM_STEPS))


def test_a_compact_checkpoint_loads_into_fp32_exactly(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "saved")
        compact = engine.optimizer.state_dict()
    for load in ("checkpoint", "state_dict"):
        with engine_of(tmp_path, "mixed", layout="fp32") as engine:
            if load == "checkpoint":
                engine.load_checkpoint(tmp_path / "saved")
            else:
                engine.optimizer.load_state_dict(compact)
            for number, state in engine.optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    assert torch.equal(value, compact["state"][number][key]), key
                assert not set(CODES) & set(state)


def test_torch_adamw_takes_and_gives_the_state(tmp_path: Path) -> None:
    """torch's own state_dict loads, rounded; ours loads into torch."""
    with engine_of(tmp_path) as engine:
        train(engine)
        ours = engine.optimizer.state_dict()
    twin = Model().bfloat16()
    theirs = torch.optim.AdamW(param_groups(twin), lr=1e-3)
    theirs.load_state_dict(ours)
    plain = theirs.state_dict()
    for state in plain["state"].values():
        for key in (*CODES, "master"):
            del state[key]
        state.update({key: state[key].float() for key in MOMENTS})  # torch keeps them in bf16
    with engine_of(tmp_path) as engine:
        engine.optimizer.load_state_dict(plain)
        loaded = engine.optimizer.state_dict()["state"]
        for number, state in plain["state"].items():
            masters = {"master": loaded[number]["master"]}
            assert_within_rounding(loaded[number], {**state, **masters})


def test_a_checkpoint_with_codes_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Such as that of a version whose bytes meant something else: their name is another."""
    with engine_of(tmp_path) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "saved")
        for file in (tmp_path / "saved").rglob("unit-*.safetensors"):
            file.write_bytes(file.read_bytes().replace(b".exp_avg_e2m5", b".exp_avg_i8xx"))
        reseal(tmp_path / "saved" / "global_step1")
        with pytest.raises(CheckpointError, match=r"missing .*exp_avg_e2m5"):
            engine.load_checkpoint(tmp_path / "saved")


def test_a_checkpoint_with_codes_of_another_shape_is_refused(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        state_dict = engine.optimizer.state_dict()
        state = state_dict["state"][0]
        state["scales"] = state["scales"][:-1]
        with pytest.raises(ConfigError, match=r"\.scales = .*\(\d+, 2\)"):
            engine.optimizer.load_state_dict(state_dict)


# --- the full-state accessors ---


@pytest.mark.parametrize("placement", ["resident", "mixed"])
def test_accessors_round_what_is_set_and_leave_the_rest(tmp_path: Path, placement: str) -> None:
    generator = torch.Generator().manual_seed(3)
    with engine_of(tmp_path, placement) as engine:
        train(engine, 2)
        params = dict(engine.module.named_parameters())
        for name in ("blocks.2.down.bias", "blocks.0.qkv.weight", "extra"):
            param = params[name]
            exact = {
                "master": torch.randn(param.shape, generator=generator),
                "exp_avg": torch.randn(param.shape, generator=generator) * 1e-3,
                "exp_avg_sq": torch.rand(param.shape, generator=generator) * 1e-6,
            }
            before = all_states(engine)
            for key in MOMENTS:
                other = MOMENTS[key == MOMENTS[0]]
                untouched = zero.safe_get_full_optimizer_state(param, other)
                zero.safe_set_full_optimizer_state(param, exact[key], key)
                assert torch.equal(zero.safe_get_full_optimizer_state(param, other), untouched)
            zero.safe_set_full_fp32_param(param, exact["master"])
            ours = {key: zero.safe_get_full_optimizer_state(param, key) for key in MOMENTS}
            ours["master"] = zero.safe_get_full_fp32_param(param)
            assert_within_rounding(ours, exact)
            changed = sum(int((before[key] != value).sum()) for key, value in all_states(engine).items())
            assert 0 < changed <= 4 * param.numel() + num_scales(param.numel())
            bits = ours["master"].view(torch.int32) + 0x8000  # ties are rounded away from zero
            nearest = (bits >> 16).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(nearest, engine.module.state_dict()[name])


def test_editing_one_weight_keeps_the_bits_of_all_others(tmp_path: Path) -> None:
    with engine_of(tmp_path, "nvme") as engine:
        train(engine, 2)
        weight = engine.module.blocks[2].up.weight
        before, master = all_states(engine), zero.safe_get_full_fp32_param(weight)
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight[3, 5] = 1.5
        master[3, 5] = 1.5
        assert torch.equal(zero.safe_get_full_fp32_param(weight), master)
        changed = {key: int((before[key] != value).sum()) for key, value in all_states(engine).items()}
        assert {key: count for key, count in changed.items() if count} == {
            "blocks.2.param": 1,
            "blocks.2.master": 1,
        }


def test_what_is_set_is_what_the_kernel_encodes(tmp_path: Path) -> None:
    n = Model().extra.numel()
    m, v = torch.randn(n) * 1e-3, torch.rand(n) * 1e-6
    master = torch.randn(n)
    tensors = [torch.empty(n, dtype=t) for t in (torch.bfloat16, torch.int8, torch.int8, torch.uint8)]
    tensors.append(torch.empty(num_scales(n)))
    compact_encode(master, m, v, *tensors, num_threads=1)
    with engine_of(tmp_path, "nvme") as engine:
        extra = engine.module.extra
        zero.safe_set_full_optimizer_state(extra, m, "exp_avg")
        zero.safe_set_full_optimizer_state(extra, v, "exp_avg_sq")
        zero.safe_set_full_fp32_param(extra, master)
        runtime = engine.optimizer.runtime
        codes = runtime.weights.states.read_codes(*runtime.slots[id(extra)])
        for key, expected in zip(CODES, tensors[2:], strict=True):
            assert torch.equal(codes[key].flatten(), expected), key
        assert torch.equal(engine.module.state_dict()["extra"], tensors[0])
