"""Predicts peak memory and the risk of running out, as pure functions of recorded readings.

`forecast_service.py` applies them during a run: it publishes and warns. Reports of errors that did
happen are in `runtime/memory/oom/`.
"""
