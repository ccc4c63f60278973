"""How a threshold of a run is written in the text of an alert, by its unit."""

from __future__ import annotations

import pytest

from zerowatch.dashboards import limits
from zerowatch.metrics import thresholds
from zerowatch.metrics.thresholds import Threshold

OF_RUN = "job=%q, run=%q}` $labels.job $labels.run | query }}{{ . | first | value | "


@pytest.mark.parametrize(
    ("threshold", "written"),
    [
        (thresholds.EXPOSED_COMM_RATIO_HIGH, "humanizePercentage"),
        (thresholds.COMM_RISE_HIGH, 'printf "%.4g"'),
        (thresholds.RESTARTS_HIGH, 'printf "%.0f"'),
        (thresholds.CHECKPOINT_AGE_HIGH, "humanizeDuration"),
        (thresholds.TEMPERATURE_MARGIN_LOW, 'printf "%.0f"'),
        (Threshold("size", 1, "bytes", "Size."), 'humanize1024 | printf "%sB"'),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_threshold_of_the_run_is_written_by_its_unit(threshold, written):
    selected = f'{limits.ALERT_THRESHOLD.name}{{name="{threshold.name}", '

    assert limits.shown(threshold) == (
        f"{{{{ with printf `{selected}{OF_RUN}{written} }}}}{{{{ end }}}}"
    )
