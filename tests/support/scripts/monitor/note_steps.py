"""Trains until it is killed, and appends the number of each completed step to STEPS_FILE."""

import os
import time

import torch

import zerowatch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
zerowatch.watch(model, optimizer)
steps = os.open(os.environ["STEPS_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for step in range(1, 10**9):
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    os.write(steps, b"%d\n" % step)
    time.sleep(0.003)
