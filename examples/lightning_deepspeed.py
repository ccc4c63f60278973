"""Trains a tiny GPT-2 with Lightning's DeepSpeedStrategy.

zerowatch run --standalone --nproc-per-node 2 examples/lightning_deepspeed.py
torchrun --standalone --nproc-per-node 2 examples/lightning_deepspeed.py --callback
"""

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from tiny_gpt import Sentences, fingerprint, tiny_gpt


class TinyGpt(LightningModule):
    """Language modeling on random tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.gpt(**batch).loss
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class DeepSpeedAnywhere(DeepSpeedStrategy):
    """DeepSpeedStrategy also on a CPU, which Lightning refuses: only to try this example."""

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_environment()
        else:
            DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_distributed()
        else:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device


parser = argparse.ArgumentParser()
parser.add_argument("--callback", action="store_true", help="monitor by a callback")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

callbacks = []
if options.callback:
    import zerowatch

    callbacks.append(zerowatch.LightningCallback())

config = {"zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False}
module = TinyGpt()
trainer = Trainer(
    strategy=DeepSpeedAnywhere(config={**config, "zero_allow_untested_optimizer": True}),
    devices=int(os.environ["WORLD_SIZE"]),
    max_steps=options.steps,
    accumulate_grad_batches=2,
    callbacks=callbacks,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(Sentences(512), batch_size=4))
if trainer.is_global_zero:
    pairs = zip(module.losses[::2], module.losses[1::2], strict=True)
    print("losses:", *((first + second) / 2 for first, second in pairs))
    print("weights:", fingerprint(module))
