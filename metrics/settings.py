"""All settings, their defaults and meanings, and how their sources are combined.

The module lies in `metrics/`, although most settings are about training, because the exporters and
the command `zerowatch stack` need settings too, and they must work without torch and DeepSpeed.

Order of precedence: call argument > ZEROWATCH_* environment > "zerowatch" block of the ds config >
zerowatch.toml > the run id that `zerowatch run` makes > default. `serve.port` is
ZEROWATCH_SERVE_PORT. zerowatch.toml is in the working directory, or else in that of the start:
Hydra changes it before the script's own code runs.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ..errors import SettingsError, cut, shortened
from .start_folder import START_FOLDER
from .thresholds import (
    DEVICE_UTILIZATION_LOW,
    EXPOSED_COMM_RATIO_HIGH,
    checked_thresholds,
    parsed_thresholds,
)

ENVIRONMENT_PREFIX = "ZEROWATCH_"
# The variable with the run id that `zerowatch run` makes. As ZEROWATCH_RUN_ID it would precede the
# ds config and zerowatch.toml.
LAUNCHED_RUN_ID = "_ZEROWATCH_RUN_ID"
TOML_FILE = Path("zerowatch.toml")
DS_BLOCK = '"zerowatch" block of the ds config'
# About 30 years: far above any useful time, and below what the clocks of the system can wait for.
MAX_SECONDS = 1e9
# Above any memory; a larger integer does not fit into a float.
MAX_BYTES = 2**63
Seconds = Annotated[float, Field(le=MAX_SECONDS)]
Bytes = Annotated[ByteSize, Field(le=MAX_BYTES)]
Detail = Literal["full", "lean"]
ConsoleMode = Literal["summary", "bar", "lines", "off"]
# Not "." or "..", and not hidden, as `.tuner` is.
MAX_RUN_ID_LENGTH = 80
RUN_ID_PATTERN = rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_RUN_ID_LENGTH - 1}}}"
# The variables that Kubernetes sets for a Service: the group is the name of the Service.
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://")
_SERVICE_URL_NAME = re.compile(r"(\w+?)_PORT(?:_\d+_(?:TCP|UDP|SCTP))?")
_AFTER_SERVICE = re.compile(
    r"_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)_(?:ADDR|PORT|PROTO))"
)


class Section(BaseModel):
    """Base of the sections: an instance is read-only; an unknown option, inf and nan are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _host_names(given: object) -> object:
    """Return names from the text of an environment variable; other values unchanged."""
    if isinstance(given, str):
        return tuple(name.strip() for name in given.split(",") if name.strip())
    return given


class ServeSettings(Section):
    """The HTTP server of /metrics and /targets."""

    enabled: bool = True
    """Whether to start the server."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=9464, ge=0, le=65535)
    """Port of local rank 0; local rank r adds r. 0 takes any free port."""
    strict_port: bool = False
    """Whether to wait for a taken port instead of moving to another one. Nothing is served if it is
    not free in linger_seconds and 15 s."""
    advertise_host: str | None = None
    """Host name in /targets; by default the address listened on, or this machine's name if that is
    a wildcard address."""
    linger_seconds: Seconds = Field(default=75.0, ge=0)
    """Maximum seconds to wait at exit until regular scrapers have read that the run is over: 1.2
    scrape intervals, only for scrapers seen in the last 3 of their intervals. A scraper that has
    scraped once counts as one with an interval of 60 s; another client's single request is not
    waited for. After Ctrl-C at most 25 s, which a second Ctrl-C ends."""
    detail: Detail = "full"
    """`full` serves all metrics: at most 370 to 860 series per rank, by the kind of job. `lean`
    serves at most 100, for runs of more than some 512 ranks: all alerts and the dashboards Runs and
    Overview work, the others have gaps. Rank 0 adds the metrics of the whole run. Applies to
    metrics over OTLP too."""
    tls_certificate: Path | None = None
    """PEM file of the server's certificate; switches HTTPS on."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key."""
    tls_client_ca: Path | None = None
    """PEM file of the authority whose client certificates are accepted; others are refused."""
    auth_token_file: Path | None = None
    """File with a bearer token that clients of every page but /healthz must send. It is read again
    when it changes. Without TLS, the token crosses the network unencrypted."""
    basic_auth_file: Path | None = None
    """File with one line `user:password` per user, of whom clients of every page but /healthz must
    be one. It is read again when it changes."""
    live_page: bool = True
    """Whether rank 0 serves a page about the run at `/`, for browsers."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_host_names)] = ()
    """More names by which browsers may reach the pages, such as that of a proxy, besides localhost,
    IP addresses and the names of this machine. ".example.org" allows all names below it, "*" any.
    In the environment variable, separated by commas."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ServeSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together; set both or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        return self


class RunLogSettings(Section):
    """The run log: a record of every step on disk."""

    enabled: bool = True
    """Whether to write the run folder."""
    folder: Path = Path("runs")
    """Folder in which each run gets a folder of its own."""
    segment_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Bytes after which a rank's log file is rotated."""
    max_segments: int = Field(default=8, ge=1)
    """Files kept for each rank, including the current one; as many for its metrics."""
    metrics_interval_seconds: Seconds = Field(default=15.0, ge=0)
    """Seconds between two records of all metrics of a rank, in metrics-<rank>.jsonl; 0 writes none.
    At most one record a second."""


class FlopsSettings(Section):
    """How the model's arithmetic is counted, for FLOPs and MFU."""

    method: Literal["analytic", "off"] = "analytic"
    """`analytic` counts by a formula for transformers; `off` publishes no FLOPs and no MFU."""
    peak_per_second: float | None = Field(default=None, gt=0)
    """Peak of one device in FLOP/s; by default from a table, or measured on CPU."""


class ProcessSettings(Section):
    """The process in which measurements are analysed."""

    separate: bool = False
    """Whether each rank has a process of its own for all that needs no engine: step log, metrics
    and their server, forecasts, comparison of the ranks. Training then waits less for Python's
    interpreter lock, and the log of a killed rank has all steps at once. Each such process takes
    some 260 MB. Not with a TrainingRun, OTLP, `profile`, `memory.trace_leaks`, or a script without
    DeepSpeed, which are monitored in the training's process."""


class SamplingSettings(Section):
    """How often devices are read, and collectives on a GPU are timed exactly."""

    device_interval_seconds: Seconds = Field(default=1.0, gt=0)
    """Seconds between two readings of a device."""
    exact_collectives_steps: int = Field(default=16, ge=0)
    """Average steps between two with exact ends of asynchronous NCCL calls; 0 never, as with
    CUDA_DEVICE_MAX_CONNECTIONS=1. Memory that such a call has written is then free for other use
    only after all calls that the same group issued before the memory was freed."""


class CrossRankSettings(Section):
    """How the ranks compare their collectives, over the job's own c10d store."""

    enabled: bool = True
    """Whether to compare; if false, waiting for other ranks cannot be separated from transfer."""
    interval_seconds: Seconds = Field(default=5.0, ge=0.1)
    """Seconds between two exchanges of reports between the ranks."""


class HangSettings(Section):
    """Detection of hangs."""

    enabled: bool = True
    """Whether to detect hangs."""
    timeout_seconds: Seconds = Field(default=30.0, gt=0)
    """Minimum timeout in seconds; the timeout is this, or ten times the median step if longer."""
    abort: bool = False
    """Whether to end the process at twice the limit, so that a launcher can restart it."""


class MemorySettings(Section):
    """Memory by category, and prediction of out-of-memory errors."""

    enabled: bool = True
    """Whether to measure categories, predict peaks and write reports."""
    detailed_sample_seconds: Seconds = Field(default=10.0, gt=0)
    """Seconds between two steps that are sampled in detail: memory by category and by phase."""
    reset_peak_counters: bool = True
    """Whether to reset peak counters at each reading: the kernel's peak RSS, and those of CUDA's
    allocator (transparent to the script). If false, peaks are not attributed to steps and
    out-of-memory prediction is disabled."""
    device_limit_bytes: Bytes | None = Field(default=None, gt=0)
    """A budget for the GPU, such as 60GiB, if less than what the device has."""
    host_limit_bytes: Bytes | None = Field(default=None, gt=0)
    """A budget for this process's memory on the host, if less than what the host allows."""
    trace_leaks: bool = False
    """Whether to trace allocations once memory seems to leak; tracing is slow."""


class ProfileSettings(Section):
    """Steps profiled by PyTorch's profiler, to check the measurements of other steps."""

    every_steps: int = Field(default=0, ge=0)
    """Profile every n-th step; 0 is never. The first profiled step takes a second longer."""
    max_traces: int = Field(default=3, ge=0)
    """Traces kept of each of the first 8 ranks in `traces/` of the run folder, for Perfetto and
    chrome://tracing; 0 writes none. Python stands still while a trace is written: about a second
    for a trace of 50 MB."""


def _base_url(text: str) -> str:
    if re.fullmatch(r"https?://[^@\s?#]+", text) and not re.search(
        r"/v1/(traces|metrics|logs)/*$", text
    ):
        return text
    raise PydanticCustomError(
        "base_url",
        "must be a base URL such as http://127.0.0.1:4318, without /v1/traces and without "
        "credentials, which go into OTEL_EXPORTER_OTLP_HEADERS",
    )


def _run_id(text: str) -> str:
    if re.fullmatch(RUN_ID_PATTERN, text):
        return text
    raise PydanticCustomError(
        "run_id", "must be 1 to 80 letters, digits, '_', '-' and '.', and not begin with '.'"
    )


class OtelSettings(Section):
    """Export to an OpenTelemetry collector by OTLP over HTTP; needs the extra `otel`."""

    endpoint: Annotated[str, AfterValidator(_base_url)] | None = None
    """Base URL of the collector, such as http://127.0.0.1:4318; by default that of
    OpenTelemetry's environment variables. If neither is set, nothing is sent."""
    traces: bool | None = None
    """Whether to send a trace of sampled steps, of slow ones, and of steps with errors; by default
    they are sent unless OTEL_TRACES_EXPORTER names another exporter."""
    metrics: bool | None = None
    """Whether to send the metrics too; Tempo takes traces only. By default they are sent if
    OTEL_METRICS_EXPORTER is otlp, or if they have an endpoint of their own."""
    logs: bool | None = None
    """Whether to send zerowatch's own log lines, and no others. By default they are sent if
    OTEL_LOGS_EXPORTER is otlp, or if they have an endpoint of their own."""
    every_steps: int | None = Field(default=None, ge=1)
    """Trace every n-th step on average, the same on all ranks; by default as OTEL_TRACES_SAMPLER
    says, else every 100th."""
    metrics_interval_seconds: Seconds | None = Field(default=None, ge=1)
    """Seconds between two exports of the metrics; by default OTEL_METRIC_EXPORT_INTERVAL, else
    15."""
    timeout_seconds: Seconds | None = Field(default=None, gt=0)
    """Timeout of an export; by default OTEL_EXPORTER_OTLP_TIMEOUT, else 5. Training never waits for
    an export. The end of a run waits at most 1 s, and the end of the process at most 10 s, if the
    collector has answered."""


class CheckpointSettings(Section):
    """Checkpoints of a TrainingRun."""

    background: bool = False
    """Whether `save` only copies the state to host memory, and a thread writes it while training
    goes on. Needs as much host memory as this rank's files; without it, files are written at
    once."""


class TunerSettings(Section):
    """What the tuner may change, how certain it must be, and what it may cost."""

    mode: Literal["off", "advise", "auto"] = "advise"
    """`off`: no tuner. `advise` logs what to change. `auto` changes it in a TrainingRun (elsewhere
    it advises), and undoes what did not help."""
    numerics: Literal["bitwise", "reassociation", "statistical", "unrestricted"] = "reassociation"
    """What a change may affect: `bitwise` no bit of the numbers; `reassociation` the order of sums;
    `statistical` also the rounding, with the same expectation; `unrestricted` also batch size and
    learning rate."""
    rebuild: bool = True
    """Whether the engine may be rebuilt, for settings that cannot be changed in a live engine."""
    min_gain: float = Field(default=0.01, gt=0, lt=1)
    """Minimum gain of throughput that is worth a change; 0.01 is 1 %. At least 1 %, and 3 % for a
    rebuild."""
    exploration_ratio: float = Field(default=0.05, ge=0, le=1)
    """Largest share of the training time so far, plus 10 minutes, that trials may cost; 0 for no
    trials."""
    diagnosis_interval_seconds: Seconds = Field(default=20.0, gt=0)
    """Seconds of training that a diagnosis of a TrainingRun is made from; 30 for any other."""
    cooldown_steps: int = Field(default=200, ge=0)
    """Steps of the cooldown after an accepted change, in which nothing else is tried; fewer if 10
    seconds of training, and at least 5 steps, are shorter."""
    total_steps: int | None = Field(default=None, ge=1)
    """Steps of the whole training; a change whose trial would not pay back by then is not tried. If
    not set, the training is assumed to be long."""
    max_exposed_comm_ratio: float = Field(default=float(EXPOSED_COMM_RATIO_HIGH), gt=0, lt=1)
    """Share of training time that waits for communication, above which it is a symptom."""
    min_device_utilization_ratio: float = Field(default=float(DEVICE_UTILIZATION_LOW), gt=0, le=1)
    """A device's busy share below which it is a symptom."""
    stop_file: Path | None = None
    """While this file exists on rank 0's host, nothing is changed and the trial is rolled back;
    accepted changes stay. By default `tuner.stop` in the run folder."""
    history_dir: Path | None = None
    """Directory of the tuner's history, reused by later runs of the same job; by default `.tuner`
    in run_log.folder, or `.tuner-<uid>` if the former is another user's or not writable, and none
    if no run log is written. Delete it to reset."""


def _names(given: object) -> object:
    """Return names from a list, or from the text of an environment variable."""
    return given.replace(",", " ").split() if isinstance(given, str) else given


class SinksSettings(Section):
    """Experiment trackers that get the values of rank 0's step record and metrics."""

    names: Annotated[
        tuple[Literal["mlflow", "tensorboard", "wandb"], ...], NoDecode, BeforeValidator(_names)
    ] = ()
    """Trackers, each with an extra of the same name: `wandb` and `mlflow` write to the script's
    run, or to one of their own. In the environment variable: names separated by commas."""
    deepspeed_monitor: bool = True
    """Whether to write where the ds config's own `tensorboard`, `wandb` and `csv_monitor` write."""
    interval_seconds: Seconds = Field(default=1.0, ge=0)
    """Minimum seconds between two steps that are written; 0 writes each step. The last step is
    always written."""
    metrics_interval_seconds: Seconds = Field(default=15.0, ge=0)
    """Minimum seconds between two steps that are written with all values of /metrics."""
    timeout_seconds: Seconds = Field(default=30.0, ge=0)
    """Maximum seconds to wait at the end of a run until all values are written; after Ctrl-C at
    most 5 s."""
    tensorboard_folder: Path | None = None
    """Folder of TensorBoard's files; by default `tensorboard` in the run folder."""


def _thresholds(given: object) -> dict[str, float]:
    """Return thresholds from a table, or from the text of an environment variable."""
    try:
        if isinstance(given, str):
            return parsed_thresholds(filter(str.strip, given.split(",")))
        return checked_thresholds(given)
    except ValueError as error:
        raise PydanticCustomError("threshold", "{reason}", {"reason": str(error)}) from None


class AlertSettings(Section):
    """The alerts of this run."""

    thresholds: Annotated[dict[str, float], NoDecode, BeforeValidator(_thresholds)] = {}
    """Thresholds of alerts and dashboards in place of the defaults, by name, such as
    {exposed_comm_ratio_high = 0.35}. In the environment variable: NAME=VALUE, separated by commas.
    Rank 0 exports them."""


class Settings(BaseSettings):
    """All settings. `load_settings` creates it, with one-line errors.

    Examples:
        >>> settings = load_settings({"serve": {"port": 9500}})
        >>> settings.serve.port
        9500
    """

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        env_ignore_empty=True,  # compose files pass unset variables on as empty ones
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    enabled: bool = True
    """Whether to monitor at all; false makes every entry point a plain pass-through."""
    run_id: Annotated[str, AfterValidator(_run_id)] | None = None
    """Name of the run and of its folder; by default made on rank 0 and shared with the others. If
    another live run has it, or an earlier training of the same process, a number is appended."""
    console: ConsoleMode = "summary"
    """What is printed on stderr besides at most three lines and warnings. `summary`: at the end of
    `zerowatch run` and of a TrainingRun, where the time went and what to try next. `lines`: also a
    line of figures every 10 seconds. `bar`: also a line of figures that is redrawn, on a terminal;
    elsewhere as `lines`. `off`: neither figures nor the summary."""
    serve: ServeSettings = ServeSettings()
    run_log: RunLogSettings = RunLogSettings()
    flops: FlopsSettings = FlopsSettings()
    process: ProcessSettings = ProcessSettings()
    sampling: SamplingSettings = SamplingSettings()
    cross_rank: CrossRankSettings = CrossRankSettings()
    hang: HangSettings = HangSettings()
    memory: MemorySettings = MemorySettings()
    profile: ProfileSettings = ProfileSettings()
    otel: OtelSettings = OtelSettings()
    sinks: SinksSettings = SinksSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tuner: TunerSettings = TunerSettings()
    alerts: AlertSettings = AlertSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use the arguments only, because `load_settings` combines the sources."""
        return (init_settings,)


def load_settings(
    arguments: Mapping[str, Any] | None = None, ds_block: Mapping[str, Any] | None = None
) -> Settings:
    """Combine all sources into the settings of this process.

    Args:
        arguments: Settings given by the caller, nested as in zerowatch.toml.
        ds_block: The "zerowatch" block of the DeepSpeed configuration.

    Raises:
        SettingsError: A source names a setting that does not exist, or a value that is not allowed.
    """
    _check_environment_names(Settings, ENVIRONMENT_PREFIX)
    toml_file = _toml_file()
    named_sources = {
        "call argument": _named_values(arguments, "call argument"),
        "environment": _from_environment(),
        DS_BLOCK: _named_values(ds_block, DS_BLOCK),
        str(toml_file): _from_toml(toml_file),
        "zerowatch run": _from_launcher(),
    }
    merged: dict[str, Any] = {}
    for origin, values in reversed(named_sources.items()):
        _check_source(values, origin)
        merged = _merge(merged, values)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise _settings_error(Settings, error.errors()[0], "all sources together") from None


def _named_values(values: Mapping[str, Any] | None, origin: str) -> dict[str, Any]:
    """Return a copy of a source's values.

    Raises:
        SettingsError: They are not a mapping, or one of its keys is not a string.
    """
    if values is None:
        return {}
    if isinstance(values, Mapping) and all(isinstance(name, str) for name in values):
        return dict(values)
    raise SettingsError(
        f"settings ({origin}) must be a mapping of names, nested as in {TOML_FILE}, such as "
        f"{{'serve': {{'port': 9500}}}}, got {shortened(values)}"
    )


def _check_source(values: Mapping[str, Any], origin: str) -> None:
    """Raise an error that names the source, if one of its values is invalid."""
    try:
        Settings(**values)
    except ValidationError as error:
        for fault in error.errors():
            # A rule about two settings is checked at the end: the other may come from another
            # source.
            if fault["type"] != "value_error":
                raise _settings_error(Settings, fault, origin) from None


def _from_environment() -> dict[str, Any]:
    source = EnvSettingsSource(Settings)
    links = {name.lower() for name in _service_links(os.environ)}
    source.env_vars = {
        name: text for name, text in source.env_vars.items() if name.lower() not in links
    }
    return source()


def _service_links(environment: Mapping[str, str]) -> set[str]:
    """Return the variables with our prefix that Kubernetes set for Services.

    In each pod that starts after a Service `zerowatch-x` with a cluster IP, Kubernetes sets
    ZEROWATCH_X_PORT=tcp://10.0.0.1:80, ZEROWATCH_X_SERVICE_HOST and more. Only by the URL do such
    names differ from those of settings, so ZEROWATCH_SERVICE_PORT alone is a misspelled setting.
    """
    services = {
        name: found[1]
        for name, text in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
        and _SERVICE_URL.match(text)
        and (found := _SERVICE_URL_NAME.fullmatch(name))
    }
    others = {
        name
        for service in set(services.values())
        for name in environment
        if name.startswith(service) and _AFTER_SERVICE.fullmatch(name, len(service))
    }
    return {*services, *others}


def _from_launcher() -> dict[str, Any]:
    run_id = os.environ.get(LAUNCHED_RUN_ID)
    return {"run_id": run_id} if run_id else {}


def _toml_file() -> Path:
    """Return zerowatch.toml of the working directory, else that of the process's start."""
    if START_FOLDER is None or os.path.lexists(TOML_FILE):
        return TOML_FILE
    at_start = START_FOLDER / TOML_FILE
    return at_start if os.path.lexists(at_start) else TOML_FILE


def _from_toml(file: Path) -> dict[str, Any]:
    try:
        return TomlConfigSettingsSource(Settings, file)()
    except ValueError as error:  # tomllib.TOMLDecodeError is one
        raise SettingsError(f"{file} is not valid TOML: {error}") from None
    except RecursionError:
        raise SettingsError(f"{file} is nested too deeply") from None
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}") from None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        known = merged.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[name] = _merge(known, value)
        else:
            merged[name] = value
    return merged


def _settings_error(settings: type[BaseModel], fault: ErrorDetails, origin: str) -> SettingsError:
    """Return an error that names the option, its source, its value and what is allowed."""
    option = ".".join(str(part) for part in fault["loc"]) or "settings"
    shown_option = cut(repr(option))
    if fault["type"] == "extra_forbidden":
        known = [*settings.model_fields, *_option_names(settings.model_fields)]
        if option in known:  # one key holds several names
            nested = functools.reduce(
                lambda inner, name: f"{{{name!r}: {inner}}}", reversed(option.split(".")), "..."
            )
            return SettingsError(f"setting {shown_option} ({origin}) must be nested: {nested}")
        return SettingsError(
            f"setting {shown_option} ({origin}) does not exist{_did_you_mean(option, known)}"
        )
    # A rejected URL may contain a password.
    shown = cut(re.sub(r"(?<=://)\S*@", "***@", repr(fault["input"])))
    got = "" if isinstance(fault["input"], dict) else f", got {shown}"
    never = option == "hang.timeout_seconds" and fault["type"] in (
        "finite_number",
        "less_than_equal",
    )
    advice = "; to detect no hangs, set hang.enabled=false" if never else ""
    return SettingsError(f"setting {shown_option} ({origin}): {fault['msg']}{got}{advice}")


def _check_environment_names(settings: type[BaseModel], prefix: str) -> None:
    """Reject a misspelled variable with our prefix, which pydantic-settings ignores."""
    known = {
        prefix + name.replace(".", "_").upper() for name in _option_names(settings.model_fields)
    }
    links = _service_links(os.environ)
    for variable in os.environ:
        if variable.startswith(prefix) and variable not in known and variable not in links:
            advice = _did_you_mean(variable, known)
            raise SettingsError(f"environment variable {cut(variable)} is no setting{advice}")


def _option_names(fields: Mapping[str, FieldInfo], prefix: str = "") -> Iterable[str]:
    for name, field in fields.items():
        inner = next(
            (
                kind
                for kind in (field.annotation, *get_args(field.annotation))
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ),
            None,
        )
        if inner is None:
            yield prefix + name
        else:
            yield from _option_names(inner.model_fields, f"{prefix}{name}.")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    options = list(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
    if not close:  # the section is missing, or is another one
        last_part = name.rpartition(".")[2]
        close = [option for option in options if option.rpartition(".")[2] == last_part]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
