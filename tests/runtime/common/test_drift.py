"""Every private name of DeepSpeed and torch that zerowatch uses exists in the installed version.

A name that is gone fails here, with the file that uses it, before a user meets it. The packages
that change an engine have their names in `deepspeed_internals.py`; the rest is listed here.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import pytest
from class_source import source_of

from zerowatch.runtime.common.deepspeed_internals import (
    COORDINATOR,
    ENGINE,
    INTERNALS,
    ZERO_1_AND_2,
    ZERO_3,
)
from zerowatch.runtime.common.ds_config_errors import TOP_LEVEL_KEYS

COLLECTIVES = "runtime/collectives/instrument.py"
ENGINE_HOOKS = "runtime/instrumentation/engine_hooks.py"
STEP = "runtime/instrumentation/step_collector.py and runtime/monitor/watch.py"
STREAMS = "runtime/common/accelerator.py and runtime/collectives/stream_waits.py"
PROFILE = "runtime/instrumentation/profiled_steps.py"
ESTIMATOR = "runtime/estimator/engine_estimate.py"
OFFLOAD = "runtime/memory/offload/"
RECOVERY = "runtime/trainer/oom_recovery/"

C10D = "torch.distributed.distributed_c10d"

USED_NAMES: tuple[tuple[str, str, str], ...] = (
    (C10D, COLLECTIVES, "_world GroupMember P2POp batch_isend_irecv"),
    (f"{C10D}:_World", COLLECTIVES, "pg_coalesce_state pg_map"),
    ("torch.distributed._functional_collectives", COLLECTIVES, "traceable_collective_remaps"),
    (
        "torch.distributed.pipelining.stage",
        "runtime/common/torch_engine.py",
        "_PipelineStageBase",
    ),
    (C10D, "runtime/common/rank_store.py", "_get_default_store PrefixStore Store"),
    (
        "torch.distributed:ProcessGroup",
        "runtime/collectives/groups.py",
        "_get_sequence_number_for_group size",
    ),
    ("torch.distributed:ProcessGroup", "runtime/common/group_backend.py", "_get_backend"),
    (
        "torch._C._distributed_c10d:Backend",
        "runtime/collectives/groups.py",
        "_get_sequence_number_for_group",
    ),
    ("torch._C._distributed_c10d:Backend", "runtime/common/group_backend.py", "name"),
    (
        "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent",
        "runtime/cli/launcher_notes.py",
        "_monitor_workers _stop_workers",
    ),
    (
        "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent",
        "runtime/cli/node_watch.py",
        "_rendezvous _start_workers _monitor_workers _pcontext _remaining_restarts _worker_group "
        "_store",
    ),
    (
        "torch.distributed.elastic.multiprocessing.api:SubprocessContext",
        "runtime/cli/node_watch.py",
        "subprocess_handlers",
    ),
    (
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler",
        "runtime/cli/node_watch.py",
        "settings shutdown num_nodes_waiting _state_holder _store _this_node",
    ),
    ("torch.distributed:Work", COLLECTIVES, "get_future wait"),
    ("torch.cuda:Stream", STREAMS, "wait_stream wait_event synchronize"),
    ("torch.cuda:Event", STREAMS, "record wait synchronize"),
    ("torch.cuda", STREAMS, "synchronize"),
    (
        "torch.autograd.profiler:profile",
        PROFILE,
        "_prepare_trace __enter__ __exit__",
    ),
    ("torch._C._autograd", PROFILE, "_profiler_enabled DeviceType"),
    (C10D, "runtime/cross_rank/exchange/store_log.py", "Store"),
    (
        f"{C10D}:Store",
        "runtime/cross_rank/exchange/store_log.py",
        "check get set delete_key clone set_timeout",
    ),
    (COORDINATOR, ESTIMATOR, "is_complete_trace"),
    (ENGINE, ESTIMATOR, "seq_data_parallel_group optimizer_name basic_optimizer"),
    ("torch.compiler", "runtime/common/tracing.py", "is_dynamo_compiling _is_compiling_flag"),
    (
        "torch._C._dynamo.eval_frame",
        "runtime/common/tracing.py",
        "set_code_exec_strategy _FrameExecStrategy _FrameAction",
    ),
    ("torch.compiler", "wrappers of passes and collectives", "is_compiling"),
    (
        "torch.utils.data.dataloader:_BaseDataLoaderIter",
        "runtime/instrumentation/dataloader_hooks.py",
        "__next__",
    ),
    ("runpy", "runtime/cli/attach.py", "_run_module_as_main"),
    (
        "deepspeed.comm.comm",
        "runtime/monitor/build_watch.py and runtime/monitor/run_info.py",
        "cdb comms_logger",
    ),
    (
        "deepspeed.comm.torch:TorchBackend",
        COLLECTIVES,
        "all_gather_function reduce_scatter_function",
    ),
    (
        "deepspeed.runtime.dataloader:DeepSpeedDataLoader",
        "runtime/instrumentation/dataloader_hooks.py",
        "__next__",
    ),
    (
        "deepspeed.utils.groups",
        "runtime/collectives/group_roles.py",
        "_TENSOR_MODEL_PARALLEL_GROUP _MODEL_PARALLEL_GROUP _EXPERT_PARALLEL_GROUP "
        "_EXPERT_DATA_PARALLEL_GROUP _DATA_PARALLEL_GROUP _ZERO_PARAM_INTRA_PARALLEL_GROUP "
        "_ALL_TO_ALL_GROUP _WORLD_GROUP mpu mesh_device",
    ),
    (
        ENGINE,
        ENGINE_HOOKS,
        "forward backward _backward_prologue _backward_epilogue step save_checkpoint "
        "load_checkpoint save_16bit_model global_steps module",
    ),
    (
        ENGINE,
        STEP,
        "skipped_steps get_global_grad_norm _get_optimizer_loss_scale fp16_enabled "
        "zero_optimization_stage",
    ),
    (
        "deepspeed.runtime.pipe.engine:PipelineEngine",
        "runtime/instrumentation/engine_hooks.py and runtime/instrumentation/pipeline_hooks.py",
        "train_batch eval_batch _INSTRUCTION_MAP micro_batches pipe_buffers is_first_stage "
        "train_micro_batch_size_per_gpu",
    ),
    (
        "deepspeed.runtime.pipe.schedule",
        "runtime/instrumentation/pipeline_hooks.py",
        "LoadMicroBatch RecvActivation ForwardPass SendActivation RecvGrad BackwardPass SendGrad "
        "ReduceTiedGrads ReduceGrads OptimizerStep",
    ),
    (
        "deepspeed.runtime.pipe.topology:PipelineParallelGrid",
        "runtime/collectives/group_roles.py",
        "get_pipe_parallel_group get_slice_parallel_group get_data_parallel_group "
        "get_model_parallel_group",
    ),
    (
        "deepspeed.runtime.sequence_parallel.parallel_state_sp",
        "runtime/collectives/group_roles.py",
        "get_sequence_parallel_group get_sequence_data_parallel_group",
    ),
    (ENGINE, ESTIMATOR, "_config"),
    (ENGINE, OFFLOAD, "offload_states reload_states"),
    (ENGINE, RECOVERY, "zero_grad"),
    (ZERO_1_AND_2, "runtime/memory/engine_memory.py", "norm_for_param_grads"),
    (ZERO_1_AND_2, "runtime/trainer/checkpoint/engine_files.py", "clip_grad"),
    (
        ZERO_1_AND_2,
        RECOVERY,
        "grads_in_partition reset_cpu_buffers _offload_accumulated_param_ids grad_position",
    ),
    (ZERO_3, OFFLOAD, "micro_step_id subgroup_to_device"),
)

CASES = [(place, user, name) for place, user, names in USED_NAMES for name in names.split()]
CASES += [
    (place, f"runtime/{package}/", name)
    for package, table in INTERNALS.items()
    for place, names in table.items()
    for name in names
]


def resolve(place: str) -> Any:
    module, _, attribute = place.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def is_there(owner: Any, name: str) -> bool:
    """Whether a module or class has the name, or its source sets it on `self`."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    return any(
        name in vars(kind).get("__annotations__", {})
        or f".{name} = " in source_of(kind)
        or f"self.{name}" in source_of(kind)
        for kind in owner.__mro__
        if kind.__module__.split(".")[0] in ("deepspeed", "torch")
    )


@pytest.mark.parametrize(("place", "user", "name"), CASES)
def test_each_private_name_still_exists(place: str, user: str, name: str) -> None:
    assert is_there(resolve(place), name), (
        f"{place} has no {name!r} in this version; {user} uses it. Find what replaced it, and "
        "change that file and this table together."
    )


class RecordingConfig(dict):
    """A ds config that records the keys that are looked up."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.looked_up: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.looked_up.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.looked_up.add(str(key))
        return super().__contains__(key)

    def __copy__(self) -> RecordingConfig:
        return self

    def keys(self) -> Any:
        return self


def test_the_top_level_keys_are_those_that_deepspeed_reads() -> None:
    config = RecordingConfig({"train_batch_size": 2})

    resolve("deepspeed.runtime.config:DeepSpeedConfig")(config)

    source = inspect.getsource(resolve("deepspeed"))
    mesh = {"sequence_parallel_size", "data_parallel_size"}  # read by deepspeed.initialize
    assert all(f'config["{key}"]' in source for key in mesh)
    assert config.looked_up | mesh | {"zerowatch"} == TOP_LEVEL_KEYS


def test_deepspeeds_backend_takes_the_parameters_that_are_read() -> None:
    ops = importlib.import_module("zerowatch.runtime.collectives.collective_table")
    backend = resolve("deepspeed.comm.torch:TorchBackend")

    for function in (function for row in ops.OPERATIONS for function in row.functions):
        if function.backend_parameters is None:
            continue
        method = getattr(backend, function.name)
        hidden = inspect.getclosurevars(method).nonlocals.get("func", method)

        actual = tuple(inspect.signature(hidden).parameters)[1:]
        assert actual == function.backend_parameters, f"TorchBackend.{function.name} takes {actual}"


def test_torchs_functions_take_parameters_that_can_be_read() -> None:
    call_reader = importlib.import_module("zerowatch.runtime.collectives.call_reader")
    ops = importlib.import_module("zerowatch.runtime.collectives.collective_table")
    c10d = resolve(C10D)

    for row in ops.OPERATIONS:
        for function in row.functions:
            original = getattr(c10d, function.name, None)
            if function.in_torch and original is not None:
                parameters = list(inspect.signature(original).parameters)
                call_reader.call_reader(row, function, parameters)


def test_each_value_of_the_label_op_has_a_row_in_order() -> None:
    labels = importlib.import_module("zerowatch.metrics.catalog.labels")
    ops = importlib.import_module("zerowatch.runtime.collectives.collective_table")

    assert tuple(row.label for row in ops.OPERATIONS) == labels.OPS
