"""Checkpoints that DeepSpeed itself writes, for where it is installed, and what it makes of them.

`torchrun --nproc_per_node N -m tests.support.deepspeed_checkpoints OUT --stage 2 --dtype bf16 --offload` trains three
steps, saves OUT/checkpoint, and writes OUT/expected.safetensors (the masters by DeepSpeed's own zero_to_fp32, the
moments as its engine gives them) and OUT/losses.json: those of the three steps that follow.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_STEPS = 3
VOCABULARY = 19


class OddModel(nn.Module):
    """Odd sizes, a tied head, a frozen and an unused parameter, buffers of three kinds."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, width), requires_grad=False)
        self.unused = nn.Parameter(torch.linspace(-1, 1, 5))
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
    zero |= dict.fromkeys(args.true, True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": args.optimizer, "params": {"lr": 2e-3, "betas": [0.9, 0.98]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 2e-3}},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
    }
    if not args.offload:
        config["optimizer"]["params"]["torch_adam"] = True
    if args.dtype != "fp32":
        config[args.dtype] = {"enabled": True}
    if args.dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 10
    if args.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": args.grad_accum_dtype}
    return config


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--true", nargs="*", default=[], metavar="KEY", help="of zero_optimization")
    parser.add_argument("--sub-group-size", type=int)
    parser.add_argument("--grad-accum-dtype")
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    deepspeed.init_distributed("gloo")
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
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
            losses.append(mean.item() / num_ranks)
        return losses

    train(0)
    states = {} if "round_robin_gradients" in args.true else states_of(engine, args.optimizer)
    engine.save_checkpoint(str(args.out / "checkpoint"), client_state={"epoch": 4, "name": "odd"})
    losses = train(NUM_STEPS)
    if rank == 0:
        # DeepSpeed cannot read what it writes with bf16, stage 1 and gradients in fp32.
        weights = (
            {} if args.grad_accum_dtype else get_fp32_state_dict_from_zero_checkpoint(args.out / "checkpoint")
        )
        weights.pop("head.weight", None)
        save_file({**states, **weights}, args.out / "expected.safetensors")
        (args.out / "losses.json").write_text(json.dumps(losses))
    torch.distributed.barrier()


def states_of(engine: Any, optimizer: str) -> dict[str, torch.Tensor]:
    """Masters and moments as the engine gives them: under round_robin_gradients those of other parameters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links them after the first group's first step, when the second group has none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    kinds = ["exp_avg"] if optimizer == "Lion" else ["exp_avg", "exp_avg_sq"]
    states = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            states[name] = safe_get_full_fp32_param(param).clone()
            for kind in kinds:
                states[f"{name}.{kind}"] = safe_get_full_optimizer_state(param, kind).clone()
    return states


if __name__ == "__main__":
    main()
