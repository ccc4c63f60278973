"""Tests of the demo: its training data, its model, and a short run.

Covers `demo/job.py`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.run
from scripts.forked_ranks import start_ranks
from scripts.launching import ZEROWATCH, start
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from zerowatch.errors import CommandLineError
from zerowatch.runtime.cli.demo import job
from zerowatch.runtime.cli.demo.corpus import MAX_BYTES, NextByteSequences, standard_library_text
from zerowatch.runtime.cli.demo.launch_ranks import launch_demo
from zerowatch.runtime.cli.demo.model import ByteGpt, GptConfig
from zerowatch.runtime.instrumentation.flops import flops_terms

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def text():
    return standard_library_text()


def test_the_text_is_the_source_of_this_python_and_the_same_each_time(text):
    sources = Path(sysconfig.get_path("stdlib"))

    assert bytes(text[:1000].tolist()) == (sources / "__future__.py").read_bytes()[:1000]
    assert 2**20 < len(text) <= MAX_BYTES
    assert torch.equal(text, standard_library_text())


def test_the_text_is_of_sorted_files_without_tests_and_installed_packages(tmp_path):
    for name in ("b.py", "a.py", "json/c.py", "test/d.py", "json/tests/e.py", "site-packages/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"# {name}\n")

    text = standard_library_text(tmp_path)

    assert bytes(text.tolist()) == b"# a.py\n# b.py\n# json/c.py\n"


def test_a_python_without_source_files_raises_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python source text in"):
        standard_library_text(tmp_path)


def test_each_label_is_the_byte_that_follows():
    sequences = NextByteSequences(torch.arange(10, dtype=torch.uint8), length=4)

    batches = list(torch.utils.data.DataLoader(sequences, batch_size=2))

    assert len(batches) == 1
    assert batches[0]["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches[0]["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_the_model_has_the_documented_size_and_starts_at_a_uniform_prediction(seed, text):
    torch.manual_seed(seed)
    model = ByteGpt()
    sequences = NextByteSequences(text, model.config.max_position_embeddings)

    loss = model(**{name: tensor[None] for name, tensor in sequences[7].items()})

    assert 2.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 3.5e6
    assert loss.item() == pytest.approx(math.log(256))


def test_the_model_overfits_a_batch_but_its_attention_is_causal(seed):
    torch.manual_seed(seed)
    model = ByteGpt(GptConfig(hidden_size=32, num_hidden_layers=2, max_position_embeddings=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    noise = NextByteSequences(torch.randint(256, (33,), dtype=torch.uint8), length=16)
    batch = torch.utils.data.default_collate([noise[0], noise[1]])

    losses = []
    for _ in range(20):
        losses.append(model(**batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()

    changed_end = {name: tensor.clone() for name, tensor in batch.items()}
    changed_end["input_ids"][:, -1] ^= 1
    assert losses[-1] < losses[0] / 2
    assert torch.equal(
        _losses_before_the_end(model, batch), _losses_before_the_end(model, changed_end)
    )


def _losses_before_the_end(model, batch):
    """Return the loss of all positions but the last, whose labels are masked."""
    labels = batch["labels"].clone()
    labels[:, -1] = -100
    return model(batch["input_ids"], labels).detach()


def test_the_flops_counter_supports_the_model():
    model = ByteGpt()
    multiplied = sum(p.numel() for p in model.parameters()) - (256 + 128) * 256

    flops = flops_terms(model).per_token(128)

    assert flops == 6 * multiplied + 12 * 4 * 256 * 128


def test_more_processes_than_gpus_raise_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(CommandLineError, match=r"--nproc 2, but this machine has 1 GPU"):
        launch_demo(steps=1, num_processes=2, stage=2)


def test_the_demo_starts_its_job_on_each_rank_with_the_options(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(torch.distributed.run, "main", started.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)

    code = launch_demo(steps=6, num_processes=3, stage=1)

    assert code == 0
    assert started == [
        [
            *("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=3"),
            *("-m", "zerowatch.runtime.cli.demo.job", "--steps=6", "--stage=1"),
        ]
    ]
    assert int(os.environ["OMP_NUM_THREADS"]) >= 1
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert "ZeRO-1, 3 processes on CPU, 6 steps" in capsys.readouterr().out


def test_on_gpus_a_rank_is_started_for_each_and_deepspeed_chooses_the_device(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(torch.distributed.run, "main", started.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)

    launch_demo(steps=6, num_processes=None, stage=1)

    assert "--nproc-per-node=4" in started[0]
    assert "DS_ACCELERATOR" not in os.environ
    assert "4 processes on GPU" in capsys.readouterr().out


@pytest.mark.parametrize(("exit_code", "status"), [(3, 3), (1, 1), (-9, 137)])
def test_the_exit_code_of_the_demo_is_that_of_the_rank_that_failed_first(
    monkeypatch, exit_code, status
):
    failures = {0: ProcessFailure(0, 7, exit_code, "")}
    assert _status_after(monkeypatch, ChildFailedError("job", failures)) == status


def test_the_exit_code_of_a_demo_that_was_signalled_is_that_of_a_shell(monkeypatch):
    error = SignalException("stopped", signal.SIGTERM)

    assert _status_after(monkeypatch, error) == 128 + 15


def _status_after(monkeypatch, error):
    def fail(arguments):
        raise error

    monkeypatch.setattr(torch.distributed.run, "main", fail)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")
    return launch_demo(steps=1, num_processes=1, stage=0)


@pytest.mark.jobs
def test_two_ranks_train_and_the_summary_names_the_run_log(tmp_path):
    finished = start_ranks(
        *(2, "-m", "zerowatch.runtime.cli.demo.job", "--steps", "6", "--stage", "1"),
        cwd=tmp_path,
        variables=WITHOUT_GPU,
    )

    assert_is_trained(finished, tmp_path)


@pytest.mark.slow
@pytest.mark.jobs
def test_the_command_trains_on_two_ranks(tmp_path):
    finished = start(
        *(ZEROWATCH, "demo", "--steps", "6", "--nproc", "2", "--stage", "1"),
        cwd=tmp_path,
        variables=WITHOUT_GPU,
    )

    assert_is_trained(finished, tmp_path)


def assert_is_trained(finished, folder):
    assert finished.returncode == 0, finished.stderr
    expected = ("tuner: on, observing", "still before the first step")  # the second: a slow start
    lines = finished.stderr.splitlines()
    assert all(any(words in line for words in expected) for line in lines), finished.stderr
    assert finished.stdout.count("/metrics\n") == 2
    assert "Time of 6 steps by phase (rank 0 of 2)" in finished.stdout
    (log,) = folder.glob("runs/*/rank-0.jsonl")
    assert str(log.relative_to(folder)) in finished.stdout
    report = log.with_name("report.html")
    assert str(report.relative_to(folder)) in finished.stdout
    assert f"made by: zerowatch report {report.parent.relative_to(folder)}" in finished.stdout
    assert '<div class="verdict">' in report.read_text()
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5


@pytest.mark.parametrize(
    ("on_gpu", "steps", "micro_batch", "warm_up"),
    [(False, 200, 8, 20), (True, 50, 64, 10), (False, 6, 8, 2), (False, 15, 8, 3)],
)
def test_the_ds_config_of_the_demo_depends_on_the_device_and_the_steps(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, steps: int, micro_batch: int, warm_up: int
) -> None:
    monkeypatch.setattr(job.accelerator, "current", SimpleNamespace(is_available=lambda: on_gpu))

    config = job.ds_config(steps=steps, stage=1)

    assert config["train_micro_batch_size_per_gpu"] == micro_batch
    assert config["bf16"] == {"enabled": on_gpu}
    assert config["zero_optimization"] == {"stage": 1}
    assert config["gradient_clipping"] == 1.0
    assert config["optimizer"]["params"] == {
        "torch_adam": True,
        "lr": 2e-3,
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
    }
    assert config["scheduler"]["params"] == {
        "total_num_steps": steps,
        "warmup_num_steps": warm_up,
        "warmup_type": "linear",
        "cos_min_ratio": 0.1,
    }


@pytest.mark.parametrize(("index", "is_known"), [(0, True), (2, True), (3, False), (-1, False)])
def test_a_text_has_whole_sequences_only(index: int, is_known: bool) -> None:
    sequences = NextByteSequences(torch.arange(13, dtype=torch.uint8), length=4)

    assert len(sequences) == 3
    if is_known:
        assert sequences[index]["labels"].tolist() == [4 * index + at for at in range(1, 5)]
    else:
        with pytest.raises(IndexError, match=f"sequence {index} of 3"):
            sequences[index]
