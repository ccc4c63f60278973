"""Faults that the mutation check plants, one at a time, to see whether `make test` finds them.

The list was committed before its first run, and was made without a look at the tests. Two files of
each package of `runtime/` were drawn at random, a file by its number of lines, and one each of
`metrics/catalog/`, `metrics/exporters/` and `dashboards/alerts/`. A file that only declares a data
class was drawn again. The line of a fault is the author's choice: a slip that a reviewer could
overlook, that changes what a user sees, and that is neither dead code nor the same in effect.

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
        file="runtime/common/undo.py",
        kind="missing restore",
        old="        elif name in vars(owner):\n            delattr(owner, name)\n",
        new="",
        effect="after an undo an engine keeps attributes of its own that it did not have before",
    ),
    PlantedFault(
        file="runtime/common/accelerator.py",
        kind="dropped condition",
        old="on_device = device_kind() == current.kind and current.is_available()",
        new="on_device = current.is_available()",
        effect="with DS_ACCELERATOR=cpu on a machine with GPUs, figures of an idle GPU",
    ),
    PlantedFault(
        file="runtime/devices/nvml_probe.py",
        kind="wrong unit",
        old='"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS, 1024',
        new='"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS, 1000',
        effect="bytes received over NVLink are 2.3 % too low",
    ),
    PlantedFault(
        file="runtime/devices/cuda_allocator.py",
        kind="dropped term",
        old="self._available = free + reserved",
        new="self._available = float(free)",
        effect="the limit of a GPU excludes what torch has reserved, so that OOM alerts are wrong",
    ),
    PlantedFault(
        file="runtime/collectives/totals.py",
        kind="dropped term",
        old="blocked_ns[call.phase] += call.exposed_ns - call.wait_exposed_ns",
        new="blocked_ns[call.phase] += call.exposed_ns",
        effect="time that a later wait exposes counts twice as exposed communication",
    ),
    PlantedFault(
        file="runtime/collectives/call_batch.py",
        kind="dropped maximum",
        old="waited_until[wait] = max(start, call.end_ns)",
        new="waited_until[wait] = call.end_ns",
        effect="of calls that share one wait, some exposed time counts twice",
    ),
    PlantedFault(
        file="runtime/common/liveness_file.py",
        kind="off-by-one",
        old="int(after_name[19])",
        new="int(after_name[20])",
        effect="running ranks of another run are reported as killed",
    ),
    PlantedFault(
        file="runtime/memory/oom/evidence.py",
        kind="sign",
        old='reported["allocated"] + reported.get("reserved_unallocated", 0.0)',
        new='reported["allocated"] - reported.get("reserved_unallocated", 0.0)',
        effect="the out-of-memory report shows too little in use and too much free",
    ),
    PlantedFault(
        file="runtime/instrumentation/raw_step.py",
        kind="dropped term",
        old="self.samples = (self.samples or 0) + shape.samples",
        new="self.samples = shape.samples",
        effect="with gradient accumulation, samples count only the last micro-batch of a step",
    ),
    PlantedFault(
        file="runtime/instrumentation/engine_instrumentation.py",
        kind="dropped call",
        old="        calls.groups.drain_coverage()\n",
        new="",
        effect="coverage of the step after a rebuild includes the collectives of the rebuild",
    ),
    PlantedFault(
        file="runtime/cross_rank/divergence.py",
        kind="off-by-one",
        old="if counts[0][1] * 2 > len(values):",
        new="if counts[0][1] * 2 >= len(values):",
        effect="with two ranks, the one with the higher number is blamed for every divergence",
    ),
    PlantedFault(
        file="runtime/cross_rank/hang/hang_context.py",
        kind="wrong unit",
        old="((now_ns if in_flight else call.end_ns) - call.start_ns) / 1e9",
        new="((now_ns if in_flight else call.end_ns) - call.start_ns) / 1e6",
        effect="the hang report gives the age of a call in milliseconds, as seconds",
    ),
    PlantedFault(
        file="runtime/estimator/stage_3_traffic.py",
        kind="dropped case",
        old="size = self.options.hpz_partition_size if gather.secondary else self.ranks",
        new="size = self.ranks",
        effect="estimated bytes of ZeRO++'s secondary gathers are those of all ranks",
    ),
    PlantedFault(
        file="runtime/estimator/estimate_step.py",
        kind="sign",
        old="frozen=sum(part for part, is_trained in parts if not is_trained)",
        new="frozen=sum(part for part, is_trained in parts if is_trained)",
        effect="estimated ZeRO-3 memory counts trained weights again, as frozen ones",
    ),
    PlantedFault(
        file="runtime/engine/compression/stage_1_and_2_reduction.py",
        kind="wrong call",
        old="slice_.output.add_(rounded.view(slice_.output.shape).to(slice_.output.dtype))",
        new="slice_.output.copy_(rounded.view(slice_.output.shape).to(slice_.output.dtype))",
        effect="with compression and fp32 accumulation, only the last micro-batch trains",
    ),
    PlantedFault(
        file="runtime/engine/compression/gradient_compressor.py",
        kind="dropped factor",
        old="gradient_scale * _loss_scale(self._engine)",
        new="gradient_scale",
        effect="under fp16, error feedback is wrong by the change of the loss scale",
    ),
    PlantedFault(
        file="runtime/trainer/window/batch_tree.py",
        kind="wrong index",
        old="(int(leaf.shape[1]) for",
        new="(int(leaf.shape[-1]) for",
        effect="the length of a batch with features or images is the size of its last dimension",
    ),
    PlantedFault(
        file="runtime/trainer/window/micro_batches.py",
        kind="missing restore",
        old="        for module, was_training in modes:\n"
        "            module.training = was_training\n",
        new="        engine.train()\n",
        effect="after an evaluation, modules that the script froze in eval mode train again",
    ),
    PlantedFault(
        file="runtime/tuner/policy/trial_search.py",
        kind="dropped term",
        old="remaining * expected_gain / (1 + expected_gain) > cost_seconds",
        new="remaining * expected_gain > cost_seconds",
        effect="near its end, a run starts trials that cannot pay back",
    ),
    PlantedFault(
        file="runtime/tuner/knobs/memory_check.py",
        kind="sign",
        old="usable = USED_RATIO * measured.limit_bytes - extra_bytes",
        new="usable = USED_RATIO * measured.limit_bytes + extra_bytes",
        effect="the tuner tries a change that needs memory which the micro-batch takes",
    ),
    PlantedFault(
        file="runtime/monitor/watch_thread.py",
        kind="swapped arguments",
        old="self._add_step_times(raw.phase_ns, blocked_ns)",
        new="self._add_step_times(blocked_ns, raw.phase_ns)",
        effect="straggler scores compare the waiting of ranks instead of their work",
    ),
    PlantedFault(
        file="runtime/monitor/overhead_metrics.py",
        kind="wrong label",
        old='            "steps": thread.dropped_steps,\n'
        '            "timing": thread.untimed_calls,\n',
        new='            "steps": thread.untimed_calls,\n'
        '            "timing": thread.dropped_steps,\n',
        effect="calls without a time are exported as dropped steps, and the reverse",
    ),
    PlantedFault(
        file="runtime/cli/demo/console.py",
        kind="dropped assignment",
        old="            self._num_printed = len(self._records)\n",
        new="",
        effect="each line of the demo shows the mean of the whole run, not of its own steps",
    ),
    PlantedFault(
        file="runtime/cli/demo/summary.py",
        kind="wrong label",
        old="return max(devices, default=None)",
        new="return min(devices, default=None)",
        effect="on a GPU, the demo's summary shows memory and use of the CPU",
    ),
    PlantedFault(
        file="metrics/catalog/memory.py",
        kind="wrong label",
        old='"reserved", "inactive_split")',
        new='"reserved")',
        effect="on a GPU, the memory hook fails on a label that is not allowed, and is dropped",
    ),
    PlantedFault(
        file="metrics/exporters/listener.py",
        kind="off-by-one",
        old="range(first, last + 1, FALLBACK_PORT_STEP)",
        new="range(first, last, FALLBACK_PORT_STEP)",
        effect="of the documented fallback ports the last one is never tried",
    ),
    PlantedFault(
        file="metrics/recorder.py",
        kind="dropped call",
        old="{spec: dict(series) for spec, series in self._values.items()}",
        new="{spec: series for spec, series in self._values.items()}",
        effect="a snapshot changes while it is exported, and can hold half a commit",
    ),
    PlantedFault(
        file="metrics/settings.py",
        kind="dropped call",
        old="merged[name] = _merge(known, value)",
        new="merged[name] = value",
        effect="one ZEROWATCH_SERVE_* variable discards the [serve] section of zerowatch.toml",
    ),
    PlantedFault(
        file="dashboards/recording_rules.py",
        kind="dropped matcher",
        old="rate(training.PHASE_SECONDS, time_range, TRAINING_PHASES, 'rank=\"0\"')",
        new="rate(training.PHASE_SECONDS, time_range, TRAINING_PHASES)",
        effect="the share of time lost to replays is divided by the number of ranks",
    ),
    PlantedFault(
        file="dashboards/alerts/memory.py",
        kind="wrong label",
        old='same=(*IDENTITY, "rank", "device")',
        new='same=(*IDENTITY, "device")',
        effect="a critical risk of one rank silences the warnings about all other ranks",
    ),
    # Packages that came after the first run of the list.
    PlantedFault(
        file="runtime/reports/run_summary.py",
        kind="wrong denominator",
        old="        step_seconds=time.training / time.steps,",
        new="        step_seconds=time.training,",
        effect="the table of ranks shows the time of all steps as that of one step",
    ),
    PlantedFault(
        file="runtime/live_page/older_steps.py",
        kind="wrong comparison",
        old="point is not None and point.ended_at < before_unix_seconds",
        new="point is not None",
        effect="steps that the page has already are drawn twice",
    ),
    PlantedFault(
        file="runtime/top/recent_seconds.py",
        kind="dropped reset",
        old="            self._scrapes.clear()  # the rank was restarted",
        new="            pass",
        effect="negative rates for a minute after a rank was restarted",
    ),
    PlantedFault(
        file="runtime/integrations/lightning_callback.py",
        kind="dropped condition",
        old="        if not trainer.sanity_checking:",
        new="        if True:",
        effect="what the module logs in Lightning's sanity check is recorded as a value of the run",
    ),
    PlantedFault(
        file="runtime/sinks/mlflow_sink.py",
        kind="wrong unit",
        old="int(1000 * unix_seconds)",
        new="int(unix_seconds)",
        effect="MLflow shows the values in January 1970",
    ),
)
