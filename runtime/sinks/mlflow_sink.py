"""Writes values to a run of MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from .sink import SinkRun

if TYPE_CHECKING:
    from mlflow.entities import Run

# MLflow's limit of one request.
MAX_PER_REQUEST = 1000
TAG = "zerowatch.run_id"


class MlflowSink:
    """Writes to the script's active MLflow run, or to a run of its own if there is none. Beta.

    Needs the extra `mlflow`. MLflow's environment variables apply, such as MLFLOW_TRACKING_URI and
    MLFLOW_EXPERIMENT_NAME. The step is the optimizer step.

    Examples:
        >>> with mlflow.start_run() as run:
        ...     engine.watch.add_sink(zerowatch.MlflowSink(run.info.run_id))

    Args:
        run_id: MLflow's id of the run to write to; by default the run that is active in any thread
            when the first values arrive.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._given = self._run_id = run_id
        self._is_own = False

    def open(self, run: SinkRun) -> None:
        """Find the script's run, or begin one that is active on the thread of the sinks only."""
        import mlflow

        self._run_id, self._is_own = self._given, False  # it may have served an earlier training
        if self._run_id is None and (active := _active_run()) is not None:
            self._run_id = active.info.run_id
        if self._run_id is None:
            own = mlflow.start_run(run_name=run.run_id, tags={TAG: run.run_id})
            self._run_id, self._is_own = own.info.run_id, True
        else:
            mlflow.MlflowClient().set_tag(self._run_id, TAG, run.run_id)

    def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
        """Write the values as metrics."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        assert self._run_id is not None
        client, milliseconds = MlflowClient(), int(1000 * unix_seconds)
        metrics = (Metric(name, value, milliseconds, step) for name, value in values.items())
        for part in _parts(metrics):
            client.log_batch(self._run_id, metrics=part)

    def close(self, *, failed: bool) -> None:
        """End the run if it is our own."""
        import mlflow

        if self._is_own:
            mlflow.end_run("FAILED" if failed else "FINISHED")


def _active_run() -> Run | None:
    """Return the newest active run of all threads; `mlflow.active_run` has that of this thread."""
    from mlflow.tracking import fluent

    newest = getattr(fluent, "_get_latest_active_run", None)
    return None if newest is None else newest()


def _parts(metrics: Iterator[object]) -> Iterator[list[object]]:
    while part := list(islice(metrics, MAX_PER_REQUEST)):
        yield part
