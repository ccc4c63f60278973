"""Trains a tiny GPT-2 with Accelerate and DeepSpeed.

zerowatch run --standalone --nproc-per-node 2 examples/accelerate_loop.py
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --tracker
"""

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from tiny_gpt import Sentences, fingerprint, tiny_gpt

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,  # on a CPU, torch's AdamW
}

parser = argparse.ArgumentParser()
parser.add_argument("--tracker", action="store_true", help="monitor by a tracker")
options = parser.parse_args()

trackers = []
if options.tracker:
    import zerowatch

    trackers.append(zerowatch.AccelerateTracker())

# Else, on a machine without a GPU, each rank takes itself for the only one.
PartialState(cpu=not torch.cuda.is_available())
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=DS_CONFIG),
    log_with=trackers,
)
accelerator.init_trackers("tiny-gpt", config={"lr": 1e-3})
model = tiny_gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Sentences(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, window = [], []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    window.append(loss.item())
    if accelerator.sync_gradients:
        losses.append(sum(window) / len(window))
        window.clear()
        accelerator.log({"my_loss": losses[-1]}, step=len(losses))
if accelerator.is_main_process:
    print("losses:", *losses)
    print("weights:", fingerprint(accelerator.unwrap_model(model)))
accelerator.end_training()
