"""Computes the traffic and memory of one training step from a ds config and the shape of a model.

Nothing here measures. `estimate_step.py` is the entry point; `zerowatch estimate`
(`runtime/cli/estimate/`) prints its estimates. `engine_estimate.py` estimates a live engine, and
`volume_check.py` compares a run with that estimate. Collectives are estimated in
`stage_*_traffic.py`, memory in `model_memory.py` and `gradient_memory.py`. Measured memory is in
`runtime/memory/`.
"""
