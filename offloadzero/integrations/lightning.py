"""Lightning over several ranks, in either of its packages."""

from __future__ import annotations

import importlib.util

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
        """Leave the weights where they are, as the configuration says where they live. Metrics go to the device."""
        module = self.lightning_module
        if module is None:
            raise AssertionError("a strategy is set up for a module")
        module._device = self.root_device  # what `module.device` says: its logs and gathers go there
        for each in module.modules():
            if next(each.parameters(), None) is None:
                each.to(self.root_device)

    def teardown(self) -> None:
        """Leave the weights where they are at the end, too: DDPStrategy calls `module.cpu()`."""
        module = self.lightning_module
        if module is not None:
            vars(module)["cpu"] = lambda: module
        try:
            super().teardown()
        finally:
            if module is not None:
                del vars(module)["cpu"]
