"""Lightning, in either of its packages: on a GPU, and over several ranks."""

from __future__ import annotations

import importlib.util

from offloadzero.access.parameter import is_offloaded

if importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch.strategies import DDPStrategy
else:
    from pytorch_lightning.strategies import DDPStrategy  # type: ignore[assignment]


class OffloadStrategy(DDPStrategy):
    """`Trainer(strategy=OffloadStrategy())`, with `offload()` in `configure_optimizers`; on one GPU as well.

    Ranks, samplers and saving are DDPStrategy's; gradients are averaged by offloadzero. With the other one of the
    packages `lightning` and `pytorch_lightning` make such a class of its DDPStrategy.
    """

    def configure_ddp(self) -> None:
        """Leave the module unwrapped."""

    def model_to_device(self) -> None:
        """Leave weights that are to be trained where they are: the configuration says where they live."""
        module = self.lightning_module
        if module is None or module.trainer.state.fn != "fit":
            super().model_to_device()
            return
        module._device = self.root_device  # what `module.device` says: its logs and gathers go there
        for each in module.modules():
            if next(each.parameters(), None) is None:  # metrics
                each.to(self.root_device)

    def teardown(self) -> None:
        """Leave offloaded weights where they are at the end, too: DDPStrategy calls `module.cpu()`."""
        module = self.lightning_module
        if module is None or not any(map(is_offloaded, module.parameters())):
            super().teardown()
            return
        vars(module)["cpu"] = lambda: module
        try:
            super().teardown()
        finally:
            del vars(module)["cpu"]
