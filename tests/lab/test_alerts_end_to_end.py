"""Tests of alerts from the fault to Alertmanager: raised in time, complete, and resolved.

Two hosts, a real Prometheus and a real Alertmanager; the shipped rules with windows a thirtieth as
long. All faults happen to one run, so that it takes two minutes and not ten.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import pytest
from lab.alerting import RUNBOOK, Monitoring, alerting
from lab.fault_story import PATIENCE_SECONDS, Story
from lab.two_hosts import Host, missing, throttle, two_hosts
from lab.watched_run import WatchedRun, targets_url, watched_run
from require import program

from zerowatch.dashboards.timing import Timing

REASON = missing()
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

COMM_BOTTLENECK, LINK_SLOW = "ZerowatchCommBottleneck", "ZerowatchLinkSlow"
OOM_RISK_HIGH, STRAGGLER_RANK = "ZerowatchOomRiskHigh", "ZerowatchStragglerRank"
LOSS_NOT_FINITE, TRAINING_STALLED = "ZerowatchLossNotFinite", "ZerowatchTrainingStalled"
RANK_DOWN = "ZerowatchRankVanished"
PASSING = (
    COMM_BOTTLENECK,
    LINK_SLOW,
    OOM_RISK_HIGH,
    STRAGGLER_RANK,
    LOSS_NOT_FINITE,
    TRAINING_STALLED,
)
# Not of memory: should the risk become critical, another alert takes over. A rank that stands still
# does not answer either, and that alert silences the one on training.
SENT = (COMM_BOTTLENECK, LINK_SLOW, STRAGGLER_RANK, LOSS_NOT_FINITE)
OF_A_RANK = (OOM_RISK_HIGH, STRAGGLER_RANK, RANK_DOWN)

SCALE = 1 / 30
RATE = "200mbit"
# A start is unlike what follows, and the link must have shown what it can do.
USUAL_SECONDS = 12.0
# A rank that was down for so long without an alert raises none: three times the rule's patience.
QUIET_SECONDS = 6
STARTING_SECONDS = 120.0
FAULTY_RUN, ENDING_RUN = "faulty", "ending"
PORTS = {FAULTY_RUN: (9464, 29577), ENDING_RUN: (9474, 29587)}


@dataclass(frozen=True)
class Outcome:
    story: Story
    monitoring: Monitoring
    exit_codes: Sequence[int]  # of the run that came to its end


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    program("prometheus", apt="prometheus")
    folder = tmp_path_factory.mktemp("alerts")
    with ExitStack() as undo:
        hosts = undo.enter_context(two_hosts(None, managed=True))
        targets = [targets_url(hosts, serves) for serves, _ in PORTS.values()]

        def start(name: str) -> WatchedRun:
            return undo.enter_context(watched_run(hosts, folder / name, name, ports=PORTS[name]))

        (folder / "servers").mkdir()
        monitoring = undo.enter_context(alerting(folder / "servers", Timing(SCALE), targets))
        story, faulty = Story(monitoring.alerts), start(FAULTY_RUN)
        assert story.history.wait(faulty.has_begun, STARTING_SECONDS)
        story.pass_time(USUAL_SECONDS)
        go_wrong_in_the_rank(story, faulty)
        go_wrong_in_the_link(story, hosts)
        # Not at the same time as what follows: Alertmanager does not notify of the end of an alert
        # that is silenced by then, and a rank that is down silences all.
        story.await_resolved(*story.faults)
        story.history.wait(lambda: has_notified_of_all_ends(monitoring), PATIENCE_SECONDS)
        ending = stand_still(story, faulty, start)
        end_both(story, monitoring, faulty, ending)
        yield Outcome(story, monitoring, [rank.wait() for rank in ending.ranks])


def go_wrong_in_the_rank(story: Story, run: WatchedRun) -> None:
    """Let rank 1 grow, lose time, and produce NaN, each until its alert has fired."""
    story.begin(partial(run.begin, "grow"), OOM_RISK_HIGH, run=FAULTY_RUN, rank="1")
    story.begin(partial(run.begin, "slow"), STRAGGLER_RANK, run=FAULTY_RUN, rank="1")
    story.begin(partial(run.begin, "nan"), LOSS_NOT_FINITE, run=FAULTY_RUN)
    story.end(partial(run.cease, "nan"), LOSS_NOT_FINITE)
    story.end(partial(run.cease, "slow"), STRAGGLER_RANK)
    story.end(partial(run.cease, "grow"), OOM_RISK_HIGH)


def go_wrong_in_the_link(story: Story, hosts: Sequence[Host]) -> None:
    story.await_calm(COMM_BOTTLENECK)  # others wait for a slow rank too
    both = (COMM_BOTTLENECK, LINK_SLOW)
    story.begin(partial(throttle, hosts, RATE), *both, run=FAULTY_RUN)
    story.end(partial(throttle, hosts, None), *both)


def has_notified_of_all_ends(monitoring: Monitoring) -> bool:
    return all(monitoring.sent("RESOLVED", alert) for alert in SENT)


def stand_still(story: Story, run: WatchedRun, start: Callable[[str], WatchedRun]) -> WatchedRun:
    """Stop rank 1; meanwhile start the other run, while nothing else needs the cores."""
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    story.begin(partial(run.ranks[1].send_signal, stop), TRAINING_STALLED, run=FAULTY_RUN)
    other = start(ENDING_RUN)
    assert story.history.wait(other.has_begun, STARTING_SECONDS)
    story.end(partial(run.ranks[1].send_signal, go_on), TRAINING_STALLED)
    story.await_resolved(TRAINING_STALLED)
    story.await_calm(RANK_DOWN)  # who is stopped does not answer
    return other


def end_both(story: Story, monitoring: Monitoring, killed: WatchedRun, ending: WatchedRun) -> None:
    """Kill a rank of one run and let the other come to its end, until neither answers any more."""

    def is_over() -> bool:
        up = f'max_over_time(up{{run="{ENDING_RUN}"}}[{QUIET_SECONDS}s]) == 0'
        return len(monitoring.prometheus.series(up)) == len(ending.ranks)

    assert is_scraped(story, monitoring, ending)
    ending.begin("end")
    story.begin(killed.ranks[1].kill, RANK_DOWN, run=FAULTY_RUN, rank="1")
    story.await_raised(RANK_DOWN)
    assert story.history.wait(is_over, PATIENCE_SECONDS)


def is_scraped(story: Story, monitoring: Monitoring, run: WatchedRun) -> bool:
    """Wait until Prometheus has found a run's ranks; return whether it did."""

    def ranks_up() -> int:
        return len(monitoring.prometheus.series(f'up{{run="{run.name}"}} == 1'))

    return story.history.wait(lambda: ranks_up() == len(run.ranks), PATIENCE_SECONDS)


@pytest.mark.parametrize("alert", [*PASSING, RANK_DOWN])
def test_a_fault_is_notified_within_90_seconds(outcome, alert):
    fault = outcome.story.faults[alert]

    assert fault.raised_seconds is not None, outcome.story.table()
    assert fault.raised_seconds <= PATIENCE_SECONDS


@pytest.mark.parametrize("alert", PASSING)
def test_an_alert_ends_once_its_fault_does(outcome, alert):
    assert outcome.story.faults[alert].resolved_seconds is not None, outcome.story.table()


@pytest.mark.parametrize("alert", [*PASSING, RANK_DOWN])
def test_an_alert_says_where_how_bad_how_much_and_what_to_read(outcome, alert):
    spell = outcome.story.faults[alert].spell

    assert spell.labels["job"] == "zerowatch"
    assert spell.labels["run"] == FAULTY_RUN
    assert spell.labels.get("rank") == ("1" if alert in OF_A_RANK else None)
    assert spell.labels["severity"] in {"critical", "warning"}
    assert spell.annotations["runbook_url"] == f"{RUNBOOK}#{alert.lower()}"
    assert f"var-run={FAULTY_RUN}" in spell.annotations["dashboard_url"]
    assert FAULTY_RUN in spell.annotations["summary"]
    assert any(letter.isdigit() for letter in spell.annotations["description"])


@pytest.mark.parametrize("alert", SENT)
def test_the_receiver_gets_an_alert_and_its_end(outcome, alert):
    assert outcome.monitoring.sent("FIRING", alert)
    assert outcome.monitoring.sent("RESOLVED", alert)


def test_the_normal_end_of_a_run_is_no_rank_that_is_down(outcome):
    assert list(outcome.exit_codes) == [0, 0]
    assert outcome.story.history.find(RANK_DOWN, since=0.0, run=ENDING_RUN) is None


def test_how_long_each_alert_took(outcome, capsys):
    with capsys.disabled():
        print("", outcome.story.table(), sep="\n")
