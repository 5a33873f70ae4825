"""The inputs of checkpointed units: which of them leave the device until backward, and the bytes they take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offloadzero.config import OffloadConfig
from offloadzero.core.segments import TierName
from offloadzero.memory.arena import align_up

MIN_BYTES = 4096  # smaller inputs stay on the device: a copy costs more than their memory
NUM_INPUT_STAGING = 2  # buffers in each direction between device and file
INPUT_BYTES_KEY = "offloadzero.activation_checkpoints.input_bytes"
# Calls whose inputs are fetched ahead, by their tier.
INPUTS_AHEAD = {TierName.DEVICE: 1, TierName.HOST: 1, TierName.NVME: 2}


def may_leave(tensor: torch.Tensor, *, min_bytes: int = MIN_BYTES) -> bool:
    """Whether an input moves; parameters, masks, indices, small and strided inputs do not."""
    return (
        tensor.is_floating_point()
        and tensor.nbytes >= min_bytes
        and not (tensor.is_leaf and tensor.requires_grad)
        and _is_dense(tensor)
    )


def input_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two inputs of a graph share if they are the same tensor, as long as both of them live."""
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory, in any order: empty_like then keeps the strides."""
    return (
        tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


@dataclass(frozen=True)
class InputPlan:
    """The bytes for the inputs of checkpointed units until backward, by tier; `input_bytes` are those of one call."""

    tier: TierName
    input_bytes: int
    kept_bytes: int  # those of one call that this rank keeps; fewer where ranks divide inputs
    device: int  # the memory for inputs that come back
    host: int
    nvme: int

    def tier_bytes(self, tier: TierName) -> int:
        return {TierName.DEVICE: self.device, TierName.HOST: self.host, TierName.NVME: self.nvme}[tier]


def input_plan(config: OffloadConfig, num_checkpointed: int) -> InputPlan | None:
    """Plan the inputs of so many units; None: none leave the device, or their size is not given."""
    checkpointing = config.activation_checkpoints
    if checkpointing is None or checkpointing.input_bytes is None or not num_checkpointed:
        return None
    tier, each = checkpointing.tier, align_up(checkpointing.input_bytes)
    kept = align_up(-(-each // config.num_input_parts))
    is_on_host = tier.is_host_memory
    return InputPlan(
        tier=tier,
        input_bytes=each,
        kept_bytes=kept,
        device=(1 + INPUTS_AHEAD[tier]) * each,
        host=num_checkpointed * kept if is_on_host else 2 * NUM_INPUT_STAGING * kept,
        nvme=0 if is_on_host else num_checkpointed * kept,
    )
