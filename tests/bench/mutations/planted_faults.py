"""Faults that the mutation check plants, one at a time, to see whether `make test` finds them.

This is the third list. It was committed before its first run, and was made without a look at the
tests. The lists before it, in commits 2f049b3 and df686c1, have been run, and tests were added for
what they missed.

`drawn_faults.py 3`, in the tree of commit bfd526a3, drew the candidates. Of each place the first
was taken that changes what a user could see, does not raise an error at each use of its line, and
is not in the list yet. So 25 of the 30 are first candidates, and ten candidates were skipped: six
changed nothing that is visible, four always raised.

Nothing is added, removed or exchanged because of a result. If a change of the code moves or removes
the text of a fault, adapt the text, or plant the same slip where the code went.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.mutations.drawn_faults import package_of


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
        return package_of(self.file)


FAULTS = (
    PlantedFault(
        file="dashboards/cli.py",
        kind="dropped call",
        old="        _print_lines(_native_stack().down())\n",
        new="",
        effect="`zerowatch stack down --native` stops nothing and prints nothing",
    ),
    PlantedFault(
        file="dashboards/alerts/hardware.py",
        kind="off-by-one",
        old="        keep_firing_seconds=5 * MINUTE,\n"
        '        summary=f"The clock of a GPU is lowered',
        new="        keep_firing_seconds=6 * MINUTE,\n"
        '        summary=f"The clock of a GPU is lowered',
        effect="the alert on a throttled GPU stays for six minutes after its cause ended, not five",
    ),
    PlantedFault(
        file="dashboards/definitions/step_anatomy.py",
        kind="off-by-one",
        old='        queries=(Query(of_run(recorded.GENERATION_WAIT), "waiting"),),\n'
        "        unit=RATIO,\n"
        "        minimum=0,\n",
        new='        queries=(Query(of_run(recorded.GENERATION_WAIT), "waiting"),),\n'
        "        unit=RATIO,\n"
        "        minimum=1,\n",
        effect="the chart of waiting in generation begins at 100 %, so its curve is not visible",
    ),
    PlantedFault(
        file="dashboards/grafana/dashboard_json.py",
        kind="dropped call",
        old='        result.append(_label("node", "Node", active, _SORT_ALPHABETICALLY, _ALL))\n',
        new="",
        effect="dashboards have no choice of the node, and their panels by node find no data",
    ),
    PlantedFault(
        file="dashboards/stack/native_stack.py",
        kind="dropped call",
        old="        self._set_ports(self._ports_of_last_start() or self._settings)\n",
        new="",
        effect="`stack status --native`, and `up` of a running stack, end with an AttributeError",
    ),
    PlantedFault(
        file="metrics/recorder.py",
        kind="sign",
        old="        self.sum += value\n",
        new="        self.sum -= value\n",
        effect="the sums of all histograms are negative, and so are the means made of them",
    ),
    PlantedFault(
        file="metrics/catalog/spec.py",
        kind="off-by-one",
        old='return words[-1] if words[-1] in _UNITS and "per" not in words else ""',
        new='return words[-2] if words[-1] in _UNITS and "per" not in words else ""',
        effect="served names end in a second, wrong unit, such as zerowatch_step_seconds_step",
    ),
    PlantedFault(
        file="metrics/exporters/prometheus.py",
        kind="dropped call",
        old="    ProcessCollector(registry=registry)\n",
        new="",
        effect="the metrics of the process, such as its CPU time and open files, are not served",
    ),
    PlantedFault(
        file="runtime/training_run.py",
        kind="dropped call",
        old="        self._window_runner.micro_batch_samples = num_samples\n"
        "        self._tuner.on_user_change()\n",
        new="        self._window_runner.micro_batch_samples = num_samples\n",
        effect="the tuner's next switch sets back the micro-batch size that the script has set",
    ),
    PlantedFault(
        file="runtime/cli/check/all_checks.py",
        kind="off-by-one",
        old="SEVERITY[each.verdict] >= SEVERITY[least]",
        new="SEVERITY[each.verdict] > SEVERITY[least]",
        effect="`zerowatch check` exits with 0 although a check has failed",
    ),
    PlantedFault(
        file="runtime/cli/node_watch.py",
        kind="sign",
        old="self._lost_elsewhere.setdefault(name, self._now() - seconds)",
        new="self._lost_elsewhere.setdefault(name, self._now() + seconds)",
        effect="a lost node that other nodes report is logged as silent for negative seconds",
    ),
    PlantedFault(
        file="runtime/collectives/call_recorder.py",
        kind="dropped call",
        old="        self._add(calls)\n\n    def on_wait_start(",
        new="\n    def on_wait_start(",
        effect="collectives other than messages are not recorded: no bytes, times or waits",
    ),
    PlantedFault(
        file="runtime/common/step_errors.py",
        kind="dropped call",
        old="        self.add(kind, exception_name(error), str(error))\n",
        new="",
        effect="traces do not show out-of-memory errors and the error that ended the run",
    ),
    PlantedFault(
        file="runtime/cross_rank/comparison_thread.py",
        kind="dropped call",
        old='                logger.error("%s", self.divergence)\n',
        new="                pass\n",
        effect="no log line says which ranks issue other collectives than the rest",
    ),
    PlantedFault(
        file="runtime/cross_rank/divergence.py",
        kind="wrong label",
        old='diverged=tuple(fields["diverged"])',
        new='diverged=tuple(fields["issued"])',
        effect="if ranks diverge, all but the first stop comparing, and do not name who diverged",
    ),
    PlantedFault(
        file="runtime/devices/gpu_health.py",
        kind="sign",
        old="make(), now\n        self._due = -math.inf\n",
        new="make(), now\n        self._due = math.inf\n",
        effect="error counters of a GPU that are read every 15 s, such as ECC, are never served",
    ),
    PlantedFault(
        file="runtime/engine/compression/encoding.py",
        kind="sign",
        old="view(SCALE_DTYPE).view(\n        -1, 1\n    )",
        new="view(SCALE_DTYPE).view(\n        1, 1\n    )",
        effect="scaled compression of more than 256 gradients ends with an error of their shape",
    ),
    PlantedFault(
        file="runtime/estimator/estimate_remarks.py",
        kind="off-by-one",
        old="if micro_batches == 1 or options.stage < 2:",
        new="if micro_batches == 1 or options.stage <= 2:",
        effect="at stage 2, the estimate no longer says that each micro-batch reduces gradients",
    ),
    PlantedFault(
        file="runtime/instrumentation/pipeline_hooks.py",
        kind="dropped call",
        old="            delattr(engine, INSTRUCTION_MAP)\n",
        new="            pass\n",
        effect="after monitoring has ended, a pipeline engine still calls the wrapped instructions",
    ),
    PlantedFault(
        file="runtime/instrumentation/torch_hooks.py",
        kind="wrong label",
        old='("DivBackward", "MulBackward")',
        new='("DivBackward", "step")',
        effect="with `loss * 0.25` before backward, the recorded loss is a quarter of the real one",
    ),
    PlantedFault(
        file="runtime/integrations/lightning_callback.py",
        kind="wrong label",
        old='        if stage == "fit":\n            self._end(failed=False)',
        new='        if stage == "LightningCallback":\n            self._end(failed=False)',
        effect="after `fit`, monitoring goes on: the run log and the sinks are not complete yet",
    ),
    PlantedFault(
        file="runtime/live_page/step_history.py",
        kind="sign",
        old="[now - then for now, then in",
        new="[now + then for now, then in",
        effect="on the live page, the seconds of waiting by cause grow from point to point",
    ),
    PlantedFault(
        file="runtime/memory/oom/error_report.py",
        kind="sign",
        old="        others = format_bytes(total - free - own)\n",
        new="        others = format_bytes(total + free - own)\n",
        effect="an out-of-memory report says that other processes hold more memory than they do",
    ),
    PlantedFault(
        file="runtime/memory/forecast/forecaster.py",
        kind="dropped call",
        old="        self._fit_trends(rows, min_width)\n",
        new="",
        effect="slow growth of memory is not forecast: no time to the error, and a low risk",
    ),
    PlantedFault(
        file="runtime/monitor/log_file.py",
        kind="off-by-one",
        old='self.path.with_suffix(f".{age - 1}.jsonl") if age > 1 else self.path',
        new='self.path.with_suffix(f".{age - 1}.jsonl") if age >= 1 else self.path',
        effect="the run log is never divided into segments, and grows beyond its limit",
    ),
    PlantedFault(
        file="runtime/reports/run_summary.py",
        kind="wrong label",
        old='        "device_temperature_celsius": max(hottest, default=None),\n',
        new='        "comm_ratio": max(hottest, default=None),\n',
        effect="reports show the temperature as the share of communication, and no temperature",
    ),
    PlantedFault(
        file="runtime/separate_process/forwarding.py",
        kind="sign",
        old="changed.append((key, value - (last or 0.0) if is_counter else value))",
        new="changed.append((key, value + (last or 0.0) if is_counter else value))",
        effect="with process.separate, counters of the training process grow too fast",
    ),
    PlantedFault(
        file="runtime/sinks/tensorboard_sink.py",
        kind="dropped call",
        old="            self._writer.close()\n",
        new="            pass\n",
        effect="TensorBoard may lack the values of the last ten seconds of a run",
    ),
    PlantedFault(
        file="runtime/top/panels.py",
        kind="sign",
        old='"rank": lambda rank: -rank.rank,',
        new='"rank": lambda rank: rank.rank,',
        effect="sorted by rank, the terminal's table begins with the last rank",
    ),
    PlantedFault(
        file="runtime/trainer/oom_recovery/recorded_passes.py",
        kind="wrong label",
        old='"all_gather_into_tensor": ("output_tensor", "input_tensor",',
        new='"all_gather_into_tensor": ("reduce_scatter", "input_tensor",',
        effect="with ZeRO 3, a rank that runs out of memory within a pass cannot complete the pass",
    ),
    PlantedFault(
        file="runtime/tuner/policy/controller.py",
        kind="dropped call",
        old='        logger.warning("tuner in safe mode, nothing more is tried in this run: '
        '%s", reason)\n',
        new="",
        effect="no log line says that the tuner has stopped, and why",
    ),
)
