# Run: pytest tests/commands/test_plan.py
"""`monograph plan`: one JSON object, a table, no GPU; cards and sizes that make no sense are
refused in one line.
"""

from __future__ import annotations

import json
import os
import re

import pytest

from monograph.cli import main
from monograph.commands import plan
from monograph.commands.plan import memory_size
from monograph.device import describe
from monograph.errors import UsageError
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.planner import Limits, PlanRequest
from monograph.predict.footprint import Work
from monograph.predict.roofline import Calibration


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    return stop.value.code, *capsys.readouterr()


def test_a_small_model_on_a_named_card(capsys):
    code, out, _ = run(
        capsys, "model.preset=micro", "train.updates=100", "--device", "RTX 4090", "--json"
    )
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["schema"] == "monograph.plan/1"
    assert {
        "memory",
        "micro_batch",
        "remat",
        "precision",
        "peak_memory_bytes",
        "tokens_per_s",
    } <= found["chosen"].keys()
    assert found["chosen"] == found["candidates"][0] and found["device_verified"] is False
    assert found["chosen"]["wall_s"] == pytest.approx(100 * found["chosen"]["update_s"])
    assert "speed by datasheet" in out and "chosen" in out
    assert " ms an update\n" in out  # not 0.0 s


def test_what_does_not_fit_is_said_and_is_no_failure(capsys):
    code, out, _ = run(
        capsys, "model.preset=1b", "model.num_hidden_layers=2", "data.sequence_length=512", "--device=4090",
        "--device-memory=2GiB", "train.compile=none", "train.memory=device", "train.micro_batch=1", "--json",
    )  # fmt: skip
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["chosen"] is None and "GiB more" in found["refusal"]
    assert found["candidates"][0]["memory_by_origin"]["weights_bytes"] > 2**30


def test_memory_that_earlier_runs_took_beyond_the_trace_is_in_the_plan_and_said(
    capsys, monkeypatch
):
    arguments = ("model.preset=1b", "model.num_hidden_layers=2", "data.sequence_length=512", "--device=4090",
                 "train.compile=none", "train.remat=none", "--json", "train.memory=device")  # fmt: skip
    needed = []
    for more in (0, 2**28):
        monkeypatch.setattr(Calibration, "residual", lambda *_, more=more: more)
        _, out, _ = run(capsys, *arguments)
        best = json.loads(out.splitlines()[-1])["candidates"][0]
        assert best["calibrated_bytes"] == more and (
            "(0.25 GiB calibrated by earlier runs)" in out
        ) == bool(more)
        needed.append(
            (
                best["micro_batch"],
                best["peak_memory_bytes"],
                best["memory_by_origin"]["workspace_bytes"],
            )
        )
    assert needed[1] == (needed[0][0], needed[0][1] + 2**28, needed[0][2] + 2**28)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "H20O"), "did you mean H200"),
        (("--device-memory", "0"), "expected a number with its unit"),
        (("--device-memory", "0GiB"), "from 64MiB to 4TiB"),
        (("--device-memory", "24"), "such as 24GiB"),
        (("--device-memory", "24 bananas"), "such as 24GiB"),
        (("--device-memory", "9e9GiB"), "such as 24GiB"),
        (("--device-memory", "-1GiB"), "such as 24GiB"),
        (("--device", "4090", "--device-memory", "300MiB"), "leaves nothing for tensors"),
        (("--device", "4090", "--device-memory", "25GiB"), "GeForce RTX 4090 has 24.0 GiB in all"),
        (("--device", "T4", "train.precision=bf16"), "no bf16 arithmetic"),
        (
            ("--device", "A100-80", "train.precision=fp8"),
            "no fp8 arithmetic (NVIDIA's have it from the L4",
        ),
        (("--device", "A100-80", "train.precision=fp8"), "; use bf16"),
        (("--device", "A100-80", "train.precision=fp8_head"), "no fp8 arithmetic"),
        (
            ("--device", "H100", "train.precision=fp8_head", "train.memory=stream"),
            "train.precision = fp8_head does not go with train.memory = stream: it was not tried",
        ),
        (
            (
                "optim.name=muon",
                "optim.state=bf16",
                "optim.master_weights=false",
                "train.precision=fp32",
            ),
            "optim.master_weights = false keeps the weights in bf16, which train.precision = fp32 cannot use",
        ),
        (("model.init=a.py:build",), "a preset, sizes or a Hugging Face folder"),
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    code, _, error = run(capsys, *arguments)
    assert code == 2 and words in error and error.count("\n") == 1


def test_sizes():
    assert (
        memory_size("--m", "24GiB") == 24 * 2**30
        and memory_size("--m", "80 gb") == 80 * 10**9
        and memory_size("--m", "1.5TiB") == 3 * 2**39
    )
    with pytest.raises(UsageError, match="4TiB"):
        memory_size("--m", "5TiB")


@pytest.mark.skipif(describe().type == "cuda", reason="what a CPU has no arithmetic for")
@pytest.mark.parametrize("precision", ["fp8", "fp16"])
def test_this_machine_is_not_planned_for_what_it_will_not_train_in(capsys, precision):
    code, out, error = run(capsys, f"train.precision={precision}")
    assert (
        code == 2 and not out and f"train.precision = {precision}: " in error and "; use " in error
    )


STREAMED = (
    "model.preset=1b", "model.num_hidden_layers=4", "data.sequence_length=512", "train.tokens_per_update=16Ki",
    "train.memory=stream", "train.remat=none", "train.micro_batch=4", "optim.name=adamw", "--device=4090", "--json",
)  # fmt: skip


@pytest.fixture
def host_of(monkeypatch):
    """A host with so much memory and disk, whatever this one has."""

    def made(host_bytes, disk_bytes=0):
        here = lambda device, device_bytes, folder: Limits(device_bytes, host_bytes, disk_bytes)  # noqa: E731
        monkeypatch.setattr(Limits, "here", here)

    return made


# Most of the seconds would go into tracing captured blocks.
@pytest.mark.parametrize("scope", ["none", pytest.param("blocks", marks=pytest.mark.slow)])
def test_a_streamed_plan_says_what_lies_where_and_what_limits_it(scope, capsys, host_of):
    host_of(64 * 2**30)
    code, out, _ = run(capsys, *STREAMED, f"train.compile={scope}", "--device-memory=8GiB")
    best = json.loads(out.splitlines()[-1])["chosen"]
    assert (
        code == 0
        and best["memory"] == "stream"
        and best["update_s"] > 0
        and best["tokens_per_s"] > 0
    )
    assert set(best["placement"]) == {
        "when",
        "where",
        "offload",
        "blocks_per_stage",
        "on_device_share",
        "on_disk",
    }
    assert sum(best["bytes_by_tier"]["device"].values()) == best["peak_memory_bytes"] <= 8 * 2**30
    assert (
        best["bytes_by_tier"]["host"]["moments_bytes"] > 0
        and f"limited by {best['bottleneck']}" in out
    )
    assert "\nhost     " in out and "\nstream   " in out and "streamed" in out


@pytest.mark.slow
def test_a_host_that_is_too_small_is_said_and_is_no_failure(capsys, host_of):
    host_of(2**30, 2**30)
    code, out, _ = run(capsys, *STREAMED, "train.compile=blocks", "--device-memory=8GiB")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["chosen"] is None and found["candidates"] == []
    assert "the host needs" in found["refusal"] and "1.00 GiB may be taken in" in found["refusal"]


@pytest.mark.slow
def test_the_host_of_another_machine(capsys):
    small, large = (
        json.loads(
            run(
                capsys,
                *STREAMED,
                "train.compile=blocks",
                "--device-memory=8GiB",
                f"--host-memory={size}",
            )[1].splitlines()[-1]
        )
        for size in ("1GiB", "512GiB")
    )
    assert (
        small["chosen"] is None
        or sum(small["chosen"]["bytes_by_tier"]["host"].values()) <= 0.9 * 2**30
    )
    assert large["chosen"] and large["chosen"]["bytes_by_tier"]["disk"] == {}
    code, _, error = run(capsys, *STREAMED, "--host-memory=many")
    assert code == 2 and "--host-memory many: expected a number with its unit" in error


def test_a_folder_needs_no_more_than_its_shape(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig.preset("micro").to_hf()))
    code, out, _ = run(capsys, f"model.init={tmp_path}", "--device", "H200", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["chosen"]
    (tmp_path / "config.json").write_text("{")
    code, _, error = run(capsys, f"model.init={tmp_path}", "--device", "H200")
    assert code == 3 and "config.json" in error and error.count("\n") == 1


def test_a_folder_that_training_would_refuse_is_not_planned(capsys, tmp_path):
    save_model(
        Llama(LlamaConfig.preset("nano", vocab_size=259, max_position_embeddings=64)),
        tmp_path / "base",
    )
    plan = (f"model.init={tmp_path / 'base'}", "data.tokenizer=bytes", "--device", "H200")
    assert run(capsys, *plan, "data.sequence_length=64")[0] == 0
    code, _, error = run(capsys, *plan, "data.sequence_length=65")
    assert (
        code == 3
        and "data.sequence_length = 65 is longer than the model's max_position_embeddings = 64"
        in error
    )
    weights = tmp_path / "base" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    code, _, error = run(capsys, *plan, "data.sequence_length=64")
    assert code == 3 and "model.safetensors: damaged" in error and error.count("\n") == 1


def test_a_micro_batch_of_more_rows_than_an_update_has_is_said_to_be_cut(capsys):
    arguments = ("data.sequence_length=256", "train.tokens_per_update=2048", "--device", "H200")
    _, out, _ = run(capsys, "train.micro_batch=50", *arguments)
    assert "note     train.micro_batch = 50: an update has 8 rows, so micro-batches of 8" in out
    _, out, _ = run(capsys, "train.micro_batch=8", *arguments)
    assert "note" not in out


@pytest.mark.parametrize("device", [[], ["--device", "H100", "--host-memory", "4TiB"]])
def test_what_nothing_here_can_hold_is_refused_before_it_is_made(capsys, monkeypatch, device):
    """In one line that says which keys, how much that is and what there is; a plan for a larger
    machine is made.
    """
    monkeypatch.setattr(plan, "streamed_or_resident", lambda *_: pytest.fail("it was traced"))
    shape = ["model.preset=nano", "model.num_hidden_layers=4096", "model.hidden_size=1048576"]
    code, _, err = run(capsys, *shape, *device)
    assert code == 6
    assert re.search(
        r"model.num_hidden_layers = 4096.*: [0-9,.]+ T parameters, whose weights alone are [0-9.,]+ GiB",
        err,
    )
    assert ("H100" in err) == bool(device) and "make it smaller" in err


def test_a_plan_for_a_machine_that_is_larger_than_this_one_is_made(capsys):
    code, out, _ = run(
        capsys, "model.preset=8b", "model.num_hidden_layers=1", "data.sequence_length=512", "train.micro_batch=1",
        "train.remat=none", "--device", "H100", "--host-memory", "4TiB"
    )  # fmt: skip
    assert code == 0 and "plan" in out


def test_an_update_of_many_rows_has_its_micro_batches_counted_at_once():
    asked = PlanRequest(
        Work(LlamaConfig.preset("nano"), rows=1, length=1, optim=AdamW(), window_rows=2**32)
    )
    assert asked.micro_batches == [2**power for power in range(33)]
