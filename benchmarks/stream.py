"""Train a model whose weights, gradients and moments do not fit the device: stage by stage, killed,
resumed, compared.

On a GPU the allocator's peak is printed next to the counted bytes. On a CPU a budget takes the
place of the device: slots, staging buffers and activations between stages are counted and must stay
below `--budget`, while the model's whole state is many times as large. Three processes run one
after another:

    streamed   trains, saves after half of the updates, and is killed with SIGKILL in the middle of the next one
    resumed    continues from the checkpoint and trains the rest
    resident   trains all updates with everything on the device, as the reference

Their losses and gradient norms are printed and compared bit for bit.

With `--adapters` the model is a mixture of experts in 4 bits, of which adapters are trained, eagerly and
in bf16: only its frozen weights are streamed. What is copied to the device in an update is printed beside the
formula of tests/stream/traffic.py.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.device import clock, default_device
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.loop import EngineState
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.stream import Placement, Streamed
from monograph.stream.lanes import Home
from monograph.stream.store import adapters_on_device

SHAPE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 256,
}  # fmt: skip
SMOKE = SHAPE | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# 114 million parameters, of which experts are 101.
ADAPTED: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
ADAPTED_SMOKE = ADAPTED | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "moe_intermediate_size": 32,
}
LORA = Lora(rank=16, base="nf4")


def window(update: int, rows: int, shape: dict[str, Any]) -> dict[str, Tensor]:
    """Return an update's rows, made from its number."""
    draw = torch.Generator().manual_seed(update)
    tokens = torch.randint(
        shape["vocab_size"], (rows, shape["max_position_embeddings"] + 1), generator=draw
    )
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Run one process's share of the updates; return their losses and norms, and their costs."""
    shape, folder, device = task["shape"], Path(task["folder"]), default_device()
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**shape), seed=0)
    parameters = sum(p.numel() for p in model.parameters())
    options: dict[str, Any] = {"optim": AdamW(lr=3e-4), "clip": 1.0, "micro_batch": 1}
    placement = Placement(device, when="next forward", offload=True)
    if task["adapters"]:
        options["precision"] = Precision("bf16")
        install_adapters(model, LORA, precision=options["precision"])
        placement = adapters_on_device(model, Placement(device, offload=True))
    if task["engine"] == "resident":
        engine: Resident = Resident(model.to(device), **options)
    else:
        engine = Streamed(model, placement=placement, **options)
    # A mixture is trained eagerly: compiling it takes longer than its updates here.
    captures = not task["adapters"]
    if captures and (obstacle := engine.capture(window(0, task["rows"], shape), scope="blocks")):
        raise SystemExit(f"not compiled: {obstacle}")
    if task["resume"]:
        found = checkpointing.load_newest(folder, print)
        engine.load_state(EngineState(found.model, found.optimizer, found.state["engine"]))
        del found
    seen, seconds, cpu_seconds = [], [], []
    copied_before = 0
    while engine.index < task["updates"]:
        began, cpu_began = clock(), time.process_time()
        if isinstance(engine, Streamed):
            copied_before = engine.walk.lanes.moved_bytes[Home.HOST, Home.DEVICE]
        engine.accumulate(window(engine.index, task["rows"], shape))
        if task["killed_at"] == engine.index:
            print(json.dumps({"seen": seen}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        update = engine.update()
        seen.append([float(update.loss).hex(), float(update.grad_norm).hex()])
        seconds.append(clock() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
        print(
            f"  {task['name']:<9} update {update.index}: loss {float(update.loss):.6f}, {seconds[-1]:.1f} s"
        )
        if task["saves"] and engine.index == task["updates"] // 2:
            began = clock()
            state = engine.state()
            checkpoint = Checkpoint(
                engine.index, state.model, state.optimizer, {"engine": state.scalars}
            )
            checkpointing.save(folder, checkpoint, keep=1)
            print(f"  {task['name']:<9} checkpoint in {clock() - began:.0f} s")
    result = {
        "parameters": parameters,
        "seen": seen,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rss_bytes": peak_rss_bytes(),
    }
    if device.type == "cuda":
        result["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
    if isinstance(engine, Streamed):
        walk = engine.walk
        result |= {
            "device_bytes": walk.device_bytes + walk.stage_inputs.peak_bytes,
            "home_bytes": sum(engine.store.bytes_at().values()),
            "copied_to_device": walk.lanes.moved_bytes[Home.HOST, Home.DEVICE] - copied_before,
            "frozen_bytes": [stage.frozen.memory.nbytes for stage in engine.store.stages],
            "boundary_bytes": copied_boundaries(task, options.get("precision")),
            "moved": {
                f"{there} to {here}": size for (there, here), size in walk.lanes.moved_bytes.items()
            },
        }
    return result


def copied_boundaries(task: dict[str, Any], precision: Precision | None) -> int:
    """Return the bytes of stages' inputs that come back to the device in an update."""
    shape = task["shape"]
    numbers = task["rows"] * shape["max_position_embeddings"] * shape["hidden_size"]
    number_bytes = precision.dtype.itemsize if precision else 4
    return shape["num_hidden_layers"] * numbers * number_bytes


def frozen_copies(frozen_bytes: list[int], *, is_first: bool) -> int:
    """Return the bytes of frozen tensors that an update copies to the device: each block forward and
    backward, except the two that are still there; embedding and head once.

    In a process's first update no block is there.
    """
    first, *blocks, last = frozen_bytes
    forward = blocks if is_first else blocks[2:]
    return first + sum(forward) + sum(blocks[:-2]) + last


def peak_rss_bytes() -> int:
    """Return the process's largest resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(task: dict[str, Any]) -> dict[str, Any]:
    """Run the task in a separate process; if it was killed, return the last result that it printed."""
    command = [sys.executable, "-u", __file__, "--task", json.dumps(task)]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    last = "{}"
    assert done.stdout
    for line in done.stdout:
        if line.startswith("{"):
            last = line
        else:
            print(line, end="", flush=True)
    code = done.wait()
    if code != (-signal.SIGKILL if task["killed_at"] is not None else 0):
        raise SystemExit(f"{task['name']} ended with {code}")
    found: dict[str, Any] = json.loads(last)
    return found


def main(options: Namespace) -> None:
    """Run the three processes, compare them, and write the JSON."""
    shapes = (ADAPTED, ADAPTED_SMOKE) if options.adapters else (SHAPE, SMOKE)
    shape = shapes[1] if options.smoke else shapes[0]
    name = "stream_adapters" if options.adapters else "stream"
    found = harness.result(name, {"shape": shape, "updates": options.updates, "rows": options.rows})
    harness.print_machine(found)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        common = {
            "shape": shape,
            "updates": options.updates,
            "rows": options.rows,
            "folder": folder,
            "adapters": options.adapters,
        }
        tasks = [
            {
                "name": "streamed",
                "engine": "stream",
                "resume": False,
                "saves": True,
                "killed_at": options.updates // 2,
            },
            {
                "name": "resumed",
                "engine": "stream",
                "resume": True,
                "saves": False,
                "killed_at": None,
            },
            {
                "name": "resident",
                "engine": "resident",
                "resume": False,
                "saves": False,
                "killed_at": None,
            },
        ]
        killed, resumed, resident = (child(common | task) for task in tasks)
    equal = killed["seen"] + resumed["seen"] == resident["seen"]
    state, budget = resumed["home_bytes"], options.budget_gib * 2**30
    found["cases"] = [{"killed": killed, "resumed": resumed, "resident": resident}]
    found["equal_bits"] = equal
    harness.print_table(
        ["", "device", "state", "resident memory", "s an update", "CPU s"],
        [
            ["streamed", f"{resumed['device_bytes'] / 2**30:.2f} GiB", f"{state / 2**30:.2f} GiB",
             f"{resumed['rss_bytes'] / 2**30:.1f} GiB", f"{min(resumed['seconds']):.1f}",
             f"{min(resumed['cpu_seconds']):.1f}"],
            ["resident", "all", "" if options.adapters else f"{16 * resident['parameters'] / 2**30:.2f} GiB",
             f"{resident['rss_bytes'] / 2**30:.1f} GiB", f"{min(resident['seconds']):.1f}",
             f"{min(resident['cpu_seconds']):.1f}"],
        ],
    )  # fmt: skip
    print(
        f"{resumed['parameters'] / 1e9:.2f} billion parameters; losses and norms before and after the kill "
        f"{'equal in every bit' if equal else 'DIFFER'}; "
        f"device {'within' if resumed['device_bytes'] <= budget else 'BEYOND'} {options.budget_gib:g} GiB"
    )
    if options.adapters:
        frozen = frozen_copies(resumed["frozen_bytes"], is_first=len(resumed["seen"]) == 1)
        formula = frozen + resumed["boundary_bytes"]
        found["copied_as_planned"] = resumed["copied_to_device"] == formula
        print(
            f"{resumed['copied_to_device'] / 1e6:.1f} MB copied to the device in an update; the formula says "
            f"{formula / 1e6:.1f} MB"
        )
        equal = equal and found["copied_as_planned"]
    harness.write(options.out, found)
    if not equal or resumed["device_bytes"] > budget:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--updates", type=int, default=4, help="of which the first half is before the kill"
    )
    parser.add_argument("--rows", type=int, default=2, help="of an update; a micro-batch is one")
    parser.add_argument("--budget-gib", type=float, default=2.0, help="what the device may hold")
    parser.add_argument("--scratch", type=Path, help="where the checkpoint is written")
    parser.add_argument(
        "--adapters", action="store_true", help="train adapters of a mixture in 4 bits"
    )
    parser.add_argument("--task", help="what one of the processes does; for itself")
    given = parser.parse_args()
    if given.task:
        print(json.dumps(train(json.loads(given.task))))
    else:
        main(given)
