"""Predicts peak memory and the risk of running out, as pure functions of recorded readings.

`forecast_service.py` calls these functions during a run, publishes the forecasts and logs warnings.
`runtime/memory/oom/` reports the errors that have happened.
"""
