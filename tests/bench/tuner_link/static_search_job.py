"""Measures a list of configurations on one live engine, and reports each result.

It is asked for {"visits": [configuration], "settle_steps": n, "steps": n}.
"""

from __future__ import annotations

from typing import Any

from bench.tuner_link.linked_model import asked, leave, new_run, report, visit


def main(asked: dict[str, Any]) -> None:
    run = new_run(settings={"tuner": {"mode": "off"}})
    for configuration in asked["visits"]:
        report(visit(run, configuration, asked["settle_steps"], asked["steps"]))
    leave(run)


if __name__ == "__main__":
    main(asked())
