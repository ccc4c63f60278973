"""Faults that the mutation check plants, one at a time, to see whether `make test` finds them.

This is the second list. It was committed before its first run, and was made without a look at the
tests. The first list, in commit 2f049b3, has been run, and tests were added for what it missed.

The files were drawn by `random.Random(2)` from the tree of commit fb25543, without the files of the
first list. For each package of `runtime/`, by name, two files were drawn, and then one each of
`metrics/catalog/`, `metrics/exporters/` and `dashboards/alerts/`: by `choices` of the sorted paths,
weighted by number of lines. A file that was drawn already, or only declares data classes
(`runtime/top/run_view.py`, `metrics/exporters/telemetry_data.py`), was drawn again. Of these 37
files, `choice` dropped one at a time of those whose package had two, until 30 were left.

A first draw by the same seed also left out the files of `metrics/catalog/` that declare metrics.
That was a mistake in the script, and was corrected before a fault was written.

The line of a fault is the author's choice: a slip that a reviewer could overlook, that changes what
a user sees, and that is neither dead code nor the same in effect.

Nothing is added, removed or exchanged because of a result. If a change of the code moves or removes
the text of a fault, adapt the text, or plant the same slip where the code went.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """One fault: a text of a file of the package and its wrong replacement.

    Attributes:
        file: Path below the root of the repository.
        kind: What is wrong, such as "sign" or "dropped call".
        old: Text that occurs exactly once in the file.
        new: Its replacement.
        effect: What a user would see.
    """

    file: str
    kind: str
    old: str
    new: str
    effect: str

    @property
    def package(self) -> str:
        """The package in which the fault is planted, such as "runtime/common"."""
        top, second, *_ = self.file.removesuffix(".py").split("/")
        return f"{top}/{second}"


FAULTS = (
    PlantedFault(
        file="runtime/cli/run_command.py",
        kind="wrong index",
        old="parse_min_max_nnodes(options.nnodes)[1] == 1",
        new="parse_min_max_nnodes(options.nnodes)[0] == 1",
        effect="with --nnodes 1:2, the ranks of one training have another run id on each node",
    ),
    PlantedFault(
        file="runtime/cli/attach.py",
        kind="dropped case",
        old="if error.code not in (None, 0):",
        new="if error.code is not None:",
        effect="a script that ends with sys.exit(0) is recorded as a failed run",
    ),
    PlantedFault(
        file="runtime/collectives/call_recorder.py",
        kind="dropped statement",
        old="            if call.sequence == group.rank_set.issued:\n"
        "                group.rank_set.issued -= 1\n",
        new="",
        effect="after a refused call that the script has caught, ranks are compared one call apart",
    ),
    PlantedFault(
        file="runtime/collectives/stream_waits.py",
        kind="dropped condition",
        old="            if waiting == self._compute:\n                carried.clear()\n",
        new="            carried.clear()\n",
        effect="waiting of the compute stream is not counted if another stream waited before it",
    ),
    PlantedFault(
        file="runtime/common/phase_timer.py",
        kind="dropped condition",
        old="is_counted=self.current != OTHER or not self.is_between_steps()",
        new="is_counted=self.current != OTHER",
        effect="in a notebook, time between the passes of a step is missing if a cell ends there",
    ),
    PlantedFault(
        file="runtime/common/launcher_link.py",
        kind="dropped condition",
        old="is_ours = process in (str(os.getppid()), str(os.getpid()))",
        new="is_ours = process.isdecimal()",
        effect="the launcher shows the end of a job that a rank has started, not of its run",
    ),
    PlantedFault(
        file="runtime/cross_rank/error_analyzer.py",
        kind="off-by-one",
        old="0 < lengths.get(last, 0) < lengths[usual]",
        new="0 <= lengths.get(last, 0) < lengths[usual]",
        effect="if a peer dies in the first checkpoint, the other ranks say that they diverged",
    ),
    PlantedFault(
        file="runtime/cross_rank/exchange/store_log.py",
        kind="dropped maximum",
        old="self._store.now() - max(self._last_read, self._store.opened_at)",
        new="self._store.now() - self._last_read",
        effect="after the store was away for a while, all other ranks count as silent at once",
    ),
    PlantedFault(
        file="runtime/devices/device_probes.py",
        kind="wrong label",
        old='f"{device.kind}:{device_index}": device.hardware_id',
        new='f"{device.kind}:0": device.hardware_id',
        effect="over OTLP, only the first GPU of a host has the metrics of hardware",
    ),
    PlantedFault(
        file="runtime/engine/live_settings/bucket_settings.py",
        kind="missing restore",
        old="    except FAILURES:\n        _allocate_buffers(zero_3, before)\n        raise\n",
        new="    except FAILURES:\n        raise\n",
        effect="if a larger bucket of ZeRO 3 does not fit in memory, no buffers are left",
    ),
    PlantedFault(
        file="runtime/engine/rebuild/optimizer_layout.py",
        kind="wrong operand",
        old="            offset += size\n",
        new="            offset += max(length, 0)\n",
        effect="a rebuild of ZeRO 3 mixes up master weights that do not divide evenly",
    ),
    PlantedFault(
        file="runtime/estimator/zero3_coordinator.py",
        kind="off-by-one",
        old="for later in self._order[self._step :]:",
        new="for later in self._order[self._step + 1 :]:",
        effect="estimated gathers include parameters that the next module uses and ZeRO 3 keeps",
    ),
    PlantedFault(
        file="runtime/estimator/model_shape.py",
        kind="wrong order",
        old="        last_uses = list(dict.fromkeys(reversed(by_use)))\n"
        "        return [index for index in reversed(last_uses) if",
        new="        return [index for index in dict.fromkeys(by_use) if",
        effect="with tied weights, estimated buckets hold other gradients than those of DeepSpeed",
    ),
    PlantedFault(
        file="runtime/instrumentation/generated_tokens.py",
        kind="off-by-one",
        old="ended_before = ends.cumsum(1) - ends.long()",
        new="ended_before = ends.cumsum(1)",
        effect="each generated sequence that ends by itself counts one token too few",
    ),
    PlantedFault(
        file="runtime/integrations/accelerate_tracker.py",
        kind="dropped call",
        old="        self._begin()\n        self._attachment.close()\n",
        new="        self._attachment.close()\n",
        effect="if a script logs nothing, its configuration is missing in the run folder",
    ),
    PlantedFault(
        file="runtime/live_page/live_page.py",
        kind="dropped condition",
        old="end == last_end and 0 <= now - made_at < STATE_SECONDS",
        new="end == last_end and now - made_at < STATE_SECONDS",
        effect="after the system's clock was set back, the figures of the live page stand still",
    ),
    PlantedFault(
        file="runtime/live_page/step_history.py",
        kind="wrong operator",
        old="if is_old and total.steps >= min_steps:",
        new="if is_old or total.steps >= min_steps:",
        effect="figures of the last minute are often those of its last ten steps",
    ),
    PlantedFault(
        file="runtime/memory/offload/traffic.py",
        kind="dropped assignment",
        old="        self._copying_back = False\n        self._open = True\n",
        new="        self._copying_back = False\n",
        effect="after a rebuild of the engine, the bytes and seconds of offloading no longer grow",
    ),
    PlantedFault(
        file="runtime/monitor/advisor.py",
        kind="dropped factor",
        old="engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()",
        new="engine.train_micro_batch_size_per_gpu()",
        effect="with gradient accumulation, advice rests on the traffic of a single micro-batch",
    ),
    PlantedFault(
        file="runtime/monitor/metrics_log.py",
        kind="dropped call",
        old="        ended = self._written.keys() - values.keys()\n"
        "        changed.update(dict.fromkeys(sorted(ended)))\n",
        new="",
        effect="in the metrics log, a series that has ended keeps its last value",
    ),
    PlantedFault(
        file="runtime/reports/run_charts.py",
        kind="dropped condition",
        old="whole = np.where(np.isnan(values), np.nan, training_seconds(steps))",
        new="whole = training_seconds(steps)",
        effect="shares and rates of the report are too low where some steps have no value",
    ),
    PlantedFault(
        file="runtime/sinks/step_values.py",
        kind="dropped condition",
        old='        for spec, series in snapshot.values.items()\n        if spec.kind != "info"\n',
        new="        for spec, series in snapshot.values.items()\n",
        effect="sinks get a chart of the constant 1 for each set of labels that describe the run",
    ),
    PlantedFault(
        file="runtime/top/live_run.py",
        kind="dropped key",
        old="key=lambda rank: (rank.target.rank != 0, rank.tried_at),",
        new="key=lambda rank: rank.target.rank != 0,",
        effect="of more than 64 ranks, the terminal always shows the same 64",
    ),
    PlantedFault(
        file="runtime/trainer/oom_recovery/micro_batch_planner.py",
        kind="wrong comparison",
        old="for each, size in proven.items() if bucket <= each]",
        new="for each, size in proven.items() if each <= bucket]",
        effect="after an out-of-memory error, a size that fitted only shorter sequences is tried",
    ),
    PlantedFault(
        file="runtime/trainer/run_metrics.py",
        kind="wrong object",
        old='self._recorder.add(memory.OOMS, 1, device, "replayed")',
        new='self._shared_recorder.add(memory.OOMS, 1, device, "replayed")',
        effect="out-of-memory errors that other ranks than rank 0 survived are not counted",
    ),
    PlantedFault(
        file="runtime/tuner/policy/predict.py",
        kind="dropped factor",
        old="distance / max(1.0, 2 * self.facts.num_parameters)",
        new="distance / max(1.0, self.facts.num_parameters)",
        effect="predicted gains of another reuse distance of ZeRO 3 are wrong by a factor of 2",
    ),
    PlantedFault(
        file="runtime/tuner/policy/proposals.py",
        kind="wrong choice",
        old="REDUCE_BUCKET_SIZE.name: max(smaller)}",
        new="REDUCE_BUCKET_SIZE.name: min(smaller)}",
        effect="the tuner proposes the smallest buckets where several large ones would do",
    ),
    PlantedFault(
        file="metrics/catalog/devices.py",
        kind="dropped argument",
        old='    Label(name="xid"),\n    lean=EVERY_SERIES,\n',
        new='    Label(name="xid"),\n',
        effect='with the detail "lean", XID errors are not served, and their alerts never fire',
    ),
    PlantedFault(
        file="metrics/exporters/http_connection.py",
        kind="dropped case",
        old="return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ",
        new="return selectors.EVENT_READ",
        effect="a response that the socket does not take at once is cut off",
    ),
    PlantedFault(
        file="dashboards/alerts/overhead.py",
        kind="wrong aggregation",
        old='by("avg", WATCH_RATIO_BY_RANK.select())',
        new='by("sum", WATCH_RATIO_BY_RANK.select())',
        effect="in a job of many ranks, the alert on overhead fires at the usual overhead",
    ),
)
