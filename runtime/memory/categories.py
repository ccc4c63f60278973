"""The words for what memory holds, as the catalog has them."""

from __future__ import annotations

from collections.abc import Mapping

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
COMM_BUFFERS = "comm_buffers"
ACTIVATIONS = "activations"
OTHER = "other"

# Those whose tensors the engine has; the others are what is left.
HELD = (PARAMETERS, GRADIENTS, OPTIMIZER, COMM_BUFFERS)
# Bytes of those, by device and category.
Held = Mapping[str, Mapping[str, int]]
