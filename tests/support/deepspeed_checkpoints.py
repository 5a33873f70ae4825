"""Checkpoints that DeepSpeed itself writes, for where it is installed, and what it makes of them.

`torchrun --nproc_per_node N -m tests.support.deepspeed_checkpoints OUT --stage 2 --dtype bf16 --offload` trains three
steps, saves OUT/checkpoint, writes OUT/expected.pt (the masters by DeepSpeed's own zero_to_fp32, the moments as its
engine gives them) and OUT/losses.json: those of the three steps that follow.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_STEPS = 3
VOCABULARY = 37


class OddModel(nn.Module):
    """Odd sizes, a tied head, a frozen and an unused parameter, buffers of three kinds."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, width), requires_grad=False)
        self.unused = nn.Parameter(torch.linspace(-1, 1, 7))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.linspace(0.9, 1.1, width))
        self.register_buffer("left_out", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * self.frozen * self.scale.to(hidden.dtype)
        logits = self.head(self.norm(hidden)).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def odd_model() -> OddModel:
    torch.manual_seed(5)
    return OddModel()


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, and the rest."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def batch(step: int, rank: int) -> torch.Tensor:
    """The tokens of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (2, 11), generator=generator)


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": args.stage, "stage3_param_persistence_threshold": 20}
    if args.sub_group_size:
        zero["sub_group_size"] = args.sub_group_size
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if args.round_robin:
        zero["round_robin_gradients"] = True
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {
            "type": args.optimizer,
            "params": {"lr": 2e-3, "betas": [0.9, 0.98], "torch_adam": not args.offload},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 2e-3}},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
    }
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    if args.dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 10
    if args.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": args.grad_accum_dtype}
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--round-robin", action="store_true")
    parser.add_argument("--sub-group-size", type=int)
    parser.add_argument("--grad-accum-dtype")
    args = parser.parse_args()

    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    model = odd_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups(model), config=ds_config(args)
    )

    def train(first: int) -> list[float]:
        losses = []
        for step in range(first, first + NUM_STEPS):
            loss = engine(batch(step, rank))
            engine.backward(loss)
            engine.step()
            mean = loss.detach().float().clone()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / torch.distributed.get_world_size())
        return losses

    train(0)
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links them after the first group's first step, when the second group has none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    states: dict[str, Any] = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            keys = ["exp_avg"] if args.optimizer == "Lion" else ["exp_avg", "exp_avg_sq"]
            values = {key: safe_get_full_optimizer_state(param, key) for key in keys}
            states[name] = {key: value.clone() for key, value in values.items() if value is not None}
            states[name]["fp32"] = safe_get_full_fp32_param(param).clone()
    engine.save_checkpoint(str(args.out / "checkpoint"), client_state={"epoch": 4, "name": "odd"})
    losses = train(NUM_STEPS)
    if rank == 0:
        try:
            fp32: Any = get_fp32_state_dict_from_zero_checkpoint(str(args.out / "checkpoint"))
        except ValueError as error:
            fp32 = str(error)
        torch.save({"fp32": fp32, "states": states, "steps": engine.global_steps}, args.out / "expected.pt")
        (args.out / "losses.json").write_text(json.dumps(losses))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
