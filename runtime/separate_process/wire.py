"""Converts steps and collectives to plain values and back, for the way to another process.

The training process sends only settled measurements: no events, no tensors, no process groups.
They are tuples, because to pickle a step as a dataclass takes 47 us instead of 11, in hot caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..collectives.call_batch import CallBatch
from ..collectives.event_pool import EventPool
from ..collectives.groups import CollectiveCall, Group, Groups, RankSet
from ..common.device_scalar import read
from ..instrumentation.device_phases import DevicePhaseTimes
from ..instrumentation.generated_tokens import GenerationCounts
from ..instrumentation.raw_step import RawStep, StepCounts

# A data type is sent as its number in this list: to pickle one, its name is looked up in torch.
_DTYPES = [None, *sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)]
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}

SentCalls = tuple[Any, ...]
SentStep = tuple[Any, ...]


class _Passed:
    """Stands for an event that the device has passed. Nothing reads its time."""

    def query(self) -> bool:
        return True


PASSED: Any = _Passed()


@dataclass(frozen=True, slots=True)
class SentGroup:
    """What the other process must know of a process group.

    Attributes:
        index: The number of the group in this connection.
        role: Its role, which may change.
        size: Number of its ranks.
        backend: The name of its backend.
        on_device: Whether its collectives run on the accelerator.
        members: The global ranks.
        issued: Number of the last call that was issued on its rank set.
        labels_rank_set: Whether its role is one of those of the rank set; not for messages.
    """

    index: int
    role: str
    size: int
    backend: str
    on_device: bool
    members: tuple[int, ...]
    issued: int
    labels_rank_set: bool


class GroupSender:
    """Numbers the groups of this process, and describes those that are new or have a new role."""

    def __init__(self) -> None:
        self._indexes: dict[Group, int] = {}
        self._roles: dict[Group, str] = {}

    def index(self, group: Group) -> int:
        """Return the number of a group."""
        index = self._indexes.get(group)
        if index is None:
            index = self._indexes[group] = len(self._indexes)
        return index

    def changes(self, groups: Groups) -> list[SentGroup]:
        """Describe the groups that are new, or whose role has changed, since the last call.

        Call it after `send_calls` and `send_in_flight`, which may number groups that are not among
        `groups`, such as those of messages.
        """
        labelling = set(groups.known())
        for group in labelling:
            self.index(group)
        changed = []
        for group, index in self._indexes.items():
            if self._roles.get(group) != group.role:
                self._roles[group] = group.role
                rank_set = group.rank_set
                changed.append(
                    SentGroup(
                        index,
                        group.role,
                        group.size,
                        group.backend,
                        group.on_device,
                        rank_set.members,
                        rank_set.issued,
                        group in labelling,
                    )
                )
        return changed


class ReceivedGroups:
    """The groups of the other process, as `ComparisonThread` reads them.

    Attributes:
        by_index: The groups by their number.
        in_flight: Calls that were received before they had settled, by the key of their rank set
            and their number.
        received: The number of the last call that was received after it had settled, or that was
            issued before the watch, by the key of its rank set.
    """

    def __init__(self) -> None:
        self.in_flight: dict[tuple[str, int], CollectiveCall] = {}
        self.received: dict[str, int] = {}
        self.by_index: dict[int, Group] = {}
        self._rank_sets: dict[tuple[int, ...], RankSet] = {}
        self._labelling: dict[int, RankSet] = {}

    def rank_sets(self) -> list[RankSet]:
        """Return the rank sets seen so far."""
        return list(self._rank_sets.values())

    def known(self) -> list[Group]:
        """Return nothing: the groups themselves, which count their calls, are not here."""
        return []

    def update(self, groups: Iterable[SentGroup], *, are_first: bool = False) -> None:
        """Add groups, and change the roles of known ones.

        Args:
            groups: The groups.
            are_first: Whether these groups existed before the watch, so that their calls so far
                are not received.
        """
        for sent in groups:
            rank_set = self._rank_set(sent, has_earlier_calls=are_first and sent.issued > 0)
            known = self.by_index.get(sent.index)
            if known is None:
                known = self.by_index[sent.index] = Group.of_other_process(
                    sent.role, sent.size, sent.backend, rank_set, on_device=sent.on_device
                )
            known.role = sent.role
            if sent.labels_rank_set:
                self._labelling[sent.index] = rank_set
        for rank_set in self._rank_sets.values():
            rank_set.roles = [
                self.by_index[index].role
                for index, labelled in self._labelling.items()
                if labelled is rank_set
            ]

    def _rank_set(self, sent: SentGroup, *, has_earlier_calls: bool) -> RankSet:
        known = self._rank_sets.get(sent.members)
        if known is None:
            known = self._rank_sets[sent.members] = RankSet(sent.members)
            if has_earlier_calls:  # a reader begins with the call after the last one
                known.issued = self.received[known.key] = sent.issued
                group = Group.of_other_process("other", sent.size, "", known, on_device=False)
                last = CollectiveCall(0, group, 0, None, 0)
                last.sequence, last.timed, last.settled = sent.issued, False, True
                known.recent.append(last)
        return known


class ReceivedBatch(CallBatch):
    """A batch whose events the other process has read."""

    def settled(self) -> bool:
        """Return True: only settled batches are sent."""
        return True

    def read_events(self, events: EventPool) -> None:
        """Do nothing, because there are no events."""


def send_calls(batch: CallBatch, groups: GroupSender) -> SentCalls:
    """Return a settled batch as plain values."""
    index = groups.index
    calls = [
        (index(call.group), _DTYPE_NUMBERS.get(call.dtype, 0), call.values())
        for call in batch.calls
    ]
    return calls, batch.anchor is not None, batch.is_complete


def receive_calls(
    sent: SentCalls, groups: ReceivedGroups, *, joins_rank_sets: bool = True
) -> CallBatch:
    """Return a batch from its plain values, and add its calls to those of their rank sets."""
    rows, has_anchor, is_complete = sent
    announced = set(groups.in_flight.values())
    calls = [_receive_call(row, groups) for row in rows]
    batch = ReceivedBatch(calls, PASSED if has_anchor else None, is_complete)
    if not joins_rank_sets:
        return batch
    for call in sorted(calls, key=_sequence):  # of two threads, a later call may return first
        rank_set = call.group.rank_set
        if call not in announced:
            rank_set.recent.append(call)
        rank_set.issued = max(rank_set.issued, call.sequence)
        groups.received[rank_set.key] = max(groups.received.get(rank_set.key, 0), call.sequence)
    return batch


def send_in_flight(
    known: Groups, groups: GroupSender, last_sent: Mapping[RankSet, int]
) -> list[tuple[Any, ...]]:
    """Return the numbered calls that were issued and not sent yet, of all rank sets.

    A settled one among them is in no batch: it was left out, for example because its start could
    not be marked.

    Args:
        known: The process groups seen so far.
        groups: Numbers the groups.
        last_sent: The number of the last call that was sent, by its rank set.
    """
    in_flight = []
    for rank_set in known.rank_sets():
        calls = []
        for call in reversed(rank_set.recent.copy()):
            if call.sequence and call.sequence <= last_sent.get(rank_set, 0):
                break
            if call.sequence:
                index = groups.index(call.group)
                kind = (call.op, call.payload_bytes, call.dtype, call.phase)
                calls.append((index, call.sequence, kind, call.settled))
        in_flight += reversed(calls)
    return in_flight


def receive_in_flight(rows: Iterable[tuple[Any, ...]], groups: ReceivedGroups) -> None:
    """Add calls that have not settled yet to those of their rank sets.

    A call may have settled and been received since its row was made. Added again, it would never
    settle, and the comparison with other ranks would wait for it.
    """
    for index, sequence, (op, payload_bytes, dtype, phase), is_left_out in rows:
        group = groups.by_index[index]
        key = group.rank_set.key, sequence
        is_new = sequence > groups.received.get(group.rank_set.key, 0)
        if is_new and key not in groups.in_flight:
            call = CollectiveCall(op, group, payload_bytes, dtype, phase)
            call.sequence = sequence
            if is_left_out:
                call.timed = False
                call.settle()
            groups.in_flight[key] = call
            group.rank_set.recent.append(call)


def _receive_call(row: tuple[Any, ...], groups: ReceivedGroups) -> CollectiveCall:
    index, dtype, (op, payload_bytes, phase, sequence, *times, on_device) = row
    group = groups.by_index[index]
    announced = groups.in_flight.pop((group.rank_set.key, sequence), None) if sequence else None
    call = announced or CollectiveCall(op, group, payload_bytes, _DTYPES[dtype], phase)
    call.sequence = sequence
    call.start_ns, call.end_ns, call.issued_ns, call.wait_ns, call.wait_phase = times[:5]
    call.timed, call.is_bound, call.is_lost = times[5:]
    if on_device:
        call.start_event = call.end_event = PASSED
    return call


def _sequence(call: CollectiveCall) -> int:
    return call.sequence


def send_step(raw: RawStep) -> SentStep:
    """Return a settled step as plain values, without its calls. Its phases are those to record."""
    counts = raw.counts
    generation = counts.generation
    return (
        raw.step,
        raw.ended_at,
        raw.phase_ns,
        list(raw.intervals),
        (
            counts.micro_batches,
            counts.samples,
            counts.tokens,
            counts.sequence_length,
            counts.loss(),
            counts.skipped,
            counts.discarded_ns,
            None
            if generation is None
            else (generation.calls, generation.sequences, generation.total_tokens()),
        ),
        raw.coverage,
        read(raw.gradient_norm),
        read(raw.learning_rate),
        read(raw.loss_scale),
        None if raw.trace is None else dict(raw.trace),
        raw.memory,
        raw.phases_show_work,
        raw.unseen is not None,
    )


def receive_step(sent: SentStep, batch: CallBatch) -> RawStep:
    """Return a step from its plain values."""
    (
        step,
        ended_at,
        phase_ns,
        intervals,
        counts,
        coverage,
        gradient_norm,
        learning_rate,
        loss_scale,
        trace,
        memory,
        phases_show_work,
        has_unseen,
    ) = sent
    (
        micro_batches,
        samples,
        tokens,
        sequence_length,
        loss,
        skipped,
        discarded_ns,
        generation,
    ) = counts
    return RawStep(
        step=step,
        ended_at=ended_at,
        phase_ns=phase_ns,
        intervals=intervals,
        counts=StepCounts(
            micro_batches=micro_batches,
            samples=samples,
            tokens=tokens,
            sequence_length=sequence_length,
            losses=[] if loss is None else [loss],
            skipped=skipped,
            discarded_ns=discarded_ns,
            generation=None if generation is None else _receive_generation(generation),
        ),
        coverage=coverage,
        gradient_norm=gradient_norm,
        learning_rate=learning_rate,
        loss_scale=loss_scale,
        trace=trace,
        memory=memory,
        batch=batch,
        # Without these times, the phases count as those of the device that computes.
        device_phases=None if phases_show_work else DevicePhaseTimes(is_read=True),
        unseen=_UNSEEN if has_unseen else None,
    )


_UNSEEN: Any = object()  # only asked whether it is None


def _receive_generation(sent: Sequence[Any]) -> GenerationCounts:
    calls, sequences, tokens = sent
    # None stands for the tokens of a call that are not known.
    return GenerationCounts(calls=calls, sequences=sequences, tokens=[tokens])
