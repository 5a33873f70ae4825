"""Lightning over several ranks, in either of its packages."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch.strategies import DDPStrategy
else:
    from pytorch_lightning.strategies import DDPStrategy  # type: ignore[assignment]


class OffloadStrategy(DDPStrategy):
    """`Trainer(strategy=OffloadStrategy())`, with `offload()` in `configure_optimizers` as on one rank.

    Ranks, samplers and saving are DDPStrategy's; gradients are averaged by offloadzero. With the other one of the
    packages `lightning` and `pytorch_lightning` make such a class of its DDPStrategy.
    """

    def configure_ddp(self) -> None:
        """Leave the module unwrapped."""

    def model_to_device(self) -> None:
        """Leave the weights where they are: the configuration says where they live."""
