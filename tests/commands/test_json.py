"""Run: pytest tests/commands/test_json.py (the last line of stdout with --json, of every command
that has it).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from commands.forked import CommandServer
from commands.inputs import ONCE, TINY, newest, with_texts

TRAIN = (
    "schema run update tokens train_loss eval_loss eval_bits_per_byte eval_weights tokens_per_s mfu peak_memory_bytes "
    "wall_s training_s promised_s compile_s graph_breaks recompiles device dtype params passed_over"
)
COMMANDS = {
    "train --resume run": TRAIN,
    "generate run alpha -n 2 --max-tokens 4": "schema completions tokens_per_s prefill_s masks masks_s "
    "drafted_passes drafted_tokens graphs host_syncs_per_token device_to_host_bytes_per_token",
    "evaluate run": "schema bits_per_byte perplexity loss tokens acc acc_stderr acc_norm acc_norm_stderr acc_bytes "
    "acc_bytes_stderr chance questions weights",
    "sweep --out s": "schema run measure members best advice wall_s tokens_per_s",
    "compare run run": "schema runs differences",
    "runs .": "schema runs",
    "keys lr": "schema keys",
    "check run": "schema run files checkpoints",
    "check": "schema device device_type driver_version memory_bytes free_memory_bytes cores has_bf16 peak_flops_per_s "
    "measured_flops_per_s bandwidth_bytes_per_s compiler_obstacle compiled_bytes disks limits monograph_version "
    "torch_version python_version",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: CommandServer) -> Path:
    """A folder with a run that has come to its end."""
    folder = with_texts(tmp_path_factory.mktemp("json"))
    assert server.run(folder, "train", *TINY, "--out", "run", figures=0).code == 0
    assert server.run(folder, "sweep", *ONCE, "train.seed=0,1", "--out", "s", figures=0).code == 0
    return folder


def numbers(value: Any, name: str = "") -> dict[str, Any]:
    """Every value that is no list or table, by its name with those around it."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if inner is None:
        return {name: value}
    return {
        key: each for part, item in inner for key, each in numbers(item, f"{name}.{part}").items()
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_the_last_line_is_one_object_with_its_schema(
    command: str, place: Path, server: CommandServer
) -> None:
    without_compiler = {"CXX": "no-such-compiler"}  # which `check` would try
    done = server.run(place, *command.split(), "--json", env=without_compiler, figures=0)
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert list(found) == COMMANDS[command].split()
    assert found["schema"] == f"monograph.{command.split()[0]}/1"
    for name, value in numbers(found).items():
        if any(
            unit in name
            for unit in ("_bytes", "_per_s", "_s", "tokens", "loss", "update", "cores", "params")
        ):
            assert value is None or isinstance(value, int | float), name


def test_a_damaged_checkpoint_is_an_entry_with_its_fault(
    place: Path, server: CommandServer
) -> None:
    weights = newest(place / "run") / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"x")
    done = server.run(place, "check", "run", "--json")
    weights.write_bytes(whole)
    *others, last = json.loads(done.out.splitlines()[-1])["checkpoints"]
    assert done.code == 3 and last["name"] == "step-00000008" and "sha256" in last["fault"]
    assert others and all(each["fault"] is None for each in others)


def test_each_record_is_written_by_its_own_options(place: Path, server: CommandServer) -> None:
    """Records beside each other write what each writes alone from the command line; both
    log-probabilities are told.
    """
    records = [
        {"prompt": "al\u2028pha", "temperature": 0, "logprobs": 2},
        {
            "prompt": "alpha",
            "seed": 5,
            "top_p": 0.5,
            "dry_multiplier": 1,
            "dry_sequence_breakers": [],
        },
        {"prompt": "be", "logit_bias": {"70": 50, "71": -math.inf}, "mirostat_tau": 2.5},
    ]
    (place / "records.jsonl").write_text(
        "".join(json.dumps(each, ensure_ascii=False) + "\r\n" for each in records)
    )

    def written(*arguments: str) -> list[dict[str, Any]]:
        done = server.run(
            place, "generate", "run", *arguments, "--max-tokens", "6", "--json", figures=0
        )
        assert done.code == 0, done.err
        return json.loads(done.out.splitlines()[-1])["completions"]

    (place / "records.txt").write_bytes((place / "records.jsonl").read_bytes())
    assert written("--prompts", "records.txt") == written("--prompts", "records.jsonl")
    together = written("--prompts", "records.jsonl")
    assert together[2]["token_ids"][0] == 70
    for record, completion in zip(records, together, strict=True):
        flags = [
            f"--{key.replace('_', '-')}={record.pop(key)}"
            for key in ("temperature", "seed", "top_p")
            if key in record
        ]
        pairs = [f"{key}={json.dumps(value)}" for key, value in record.items() if key != "prompt"]
        [alone] = written(str(record["prompt"]), *flags, *(f"--sampler={pair}" for pair in pairs))
        assert alone["token_ids"] == completion["token_ids"] and alone.keys() == completion.keys()
    likely = together[0]["logprobs"][0]
    assert likely["processed_drawn"] == 0 and len(likely["processed_likeliest"]) == 1 < len(
        likely["likeliest"]
    )
    assert likely["drawn"] == likely["likeliest"][0][1] < 0
