"""Measure the anonymous memory of a process that loads, merges and exports a model's folder, and
the bytes kept.

Makes a folder of bf16 weights in shards, and a folder of an adapter. Each case then runs in its own
process, with a thread that reads RssAnon from /proc/self/status. The peak resident set (VmHWM)
would tell nothing, because it includes pages of mapped files, which the system may drop at any
time: a folder may be larger than the memory. The kept bytes are counted tensor by tensor. The bound
is the kept bytes, three times the largest tensor in fp32, and 32 MiB; if weights are streamed, the
largest stage takes the tensor's place. `--before SRC` measures another source tree too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"
SHAPE = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
SMOKE = SHAPE | {
    "vocab_size": 4_000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
}
TINY = SHAPE | {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
}
SHARD_BYTES = 300_000_000
CONSTANT = 32 * 2**20
LORA = {"lora.rank": 8, "train.precision": "bf16"}
TRAINED: dict[str, dict[str, Any]] = {
    "train, fp32 masters": {
        "train.precision": "fp32",
        "optim.name": "adamw",
        "train.memory": "device",
    },
    "lora, base in bf16": LORA,
    "lora, base in int8": LORA | {"lora.base": "int8"},
    "lora, base in nf4": LORA | {"lora.base": "nf4"},
    "stream, planes on the host": {},
    "stream, planes on disk": {},
}
OTHERS = (
    "generate, bf16",
    "generate, adapter merged",
    "export hf, merged",
    "export gguf bf16, merged",
)
OTHERS += ("export gguf q8_0, merged",)


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    import harness  # not at the top: it would change the measured process's memory

    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--before", type=Path, metavar="SRC", help="another tree's src/, measured too"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where models may lie for a while; seven times the folder's size",
    )
    given = parser.parse_args()
    shape = SMOKE if given.smoke else SHAPE
    found = harness.result(
        "loading", {"shape": shape, "shard_bytes": SHARD_BYTES, "constant_bytes": CONSTANT}
    )
    harness.print_machine(found)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        called(SRC, Path(folder), "make", json.dumps(shape))
        called(SRC, Path(folder, "tiny"), "make", json.dumps(TINY))
        for case in (*TRAINED, *OTHERS):
            now = called(SRC, Path(folder), case)
            if given.before:
                now["before_peak_bytes"] = called(given.before, Path(folder), case)["peak_bytes"]
            found["cases"].append({"case": case, **now})
            harness.write(given.out, found)
    print(table(found["cases"]))


def table(cases: list[dict[str, Any]]) -> str:
    """Return the bytes as a Markdown table."""
    names = ["case", "folder", "kept", "peak before", "peak", "over the kept bytes", "bound"]
    lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    for case in cases:
        over = case["peak_bytes"] - case["kept_bytes"]
        before = f"{case['before_peak_bytes'] / 1e6:,.0f}" if "before_peak_bytes" in case else ""
        sizes = [f"{case[f'{key}_bytes'] / 1e6:,.0f}" for key in ("folder", "kept", "peak")]
        cells = [
            *sizes[:2],
            before,
            sizes[2],
            f"{over / 1e6:,.0f}",
            f"{case['over_bytes'] / 1e6:,.0f}",
        ]
        lines.append(f"| {case['case']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def called(src: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Return this script's result in a separate process that runs the package in `src`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--in", str(folder), *arguments]
    environment = os.environ | {
        "PYTHONPATH": str(src),
        "MONOGRAPH_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ── in the measured process ───────────────────────────────────────────────────────────────────────


def make(folder: Path, shape: dict[str, Any]) -> dict[str, Any]:
    """Make the folders to load: a base with a byte tokenizer, an adapter for it, and a little text."""
    import torch

    from monograph.graph.lora import Lora, adapt, adapted_layers
    from monograph.model.adapter import pack_adapters, save_adapter
    from monograph.model.config import LlamaConfig
    from monograph.model.hub import load_model, save_model
    from monograph.model.llama import Llama
    from monograph.text.tokenizer import Tokenizer

    model = Llama(LlamaConfig(**shape)).bfloat16()
    save_model(model, folder / "base", Tokenizer.bytes(), SHARD_BYTES)
    del model
    model, lora = load_model(folder / "base"), Lora(LORA["lora.rank"])
    adapt(model, lora)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(std=0.02)
    save_adapter(pack_adapters(model, lora, str(folder / "base")), folder / "adapter")
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("all work and no play makes a dull boy\n" * 400)
    return {}


def measure(folder: Path, case: str) -> dict[str, Any]:
    """Return one case's peak of anonymous memory over the memory before, and the bytes of the
    tensors that are kept.

    The same is done with a tiny model first, so that modules are imported and threads exist.
    """
    from monograph.model.hub import read_config
    from monograph.model.parameters import parameter_shapes

    prepare = trained if case in TRAINED else other
    prepare(folder / "tiny", case)()
    work = prepare(folder, case)
    largest = max(
        4 * math.prod(shape) for shape in parameter_shapes(read_config(folder / "base")).values()
    )
    before = trimmed()
    with most_anonymous() as peak:
        held = work()
    unit = max(largest, 4 * stage_elements(held)) if case.startswith("stream") else largest
    return {
        "folder_bytes": sum(
            path.stat().st_size for path in (folder / "base").glob("*.safetensors")
        ),
        "kept_bytes": kept_bytes(held),
        "peak_bytes": peak[0] - before,
        "largest_bytes": largest,
        "over_bytes": 3 * unit + CONSTANT,
    }


def trained(folder: Path, case: str) -> Callable[[], Any]:
    """Return a function that opens a run's model and engine, as `monograph train` does."""
    import torch

    from monograph.config import load
    from monograph.data.corpus import corpus
    from monograph.device import describe
    from monograph.graph.precision import Precision
    from monograph.optim import AdamW
    from monograph.run.folder import Run
    from monograph.run.models import build
    from monograph.run.progress import silent
    from monograph.run.recipe import ModelRecipe
    from monograph.session.objectives.texts import TextTask
    from monograph.session.resolve import resolve
    from monograph.session.setup import BuiltRun, make_engine, open_session
    from monograph.stream import Placement, Streamed
    from monograph.stream.placement import buffer_names

    keys = TRAINED[case] | {
        "model.init": str(folder / "base"), "data.tokenizer": "bytes", "data.sequence_length": 32, "optim.lr": 1e-4,
        "train.updates": 2, "train.tokens_per_update": 128, "train.compile": "none", "train.micro_batch": 4,
        "train.remat": "none",
    }  # fmt: skip
    plan = resolve(load(None, keys, {}), describe())
    text = corpus(
        folder / "texts", tokenizer="bytes", sequence_length=32, cache=folder / "home", held_out=0.2
    )
    if case.startswith("lora"):
        number = len(list(folder.glob("run*")))
        run = Run.create(folder / f"run{number}")
        return lambda: open_session(run, plan, TextTask(text), torch.device("cpu"), silent()).engine
    on_disk = frozenset(buffer_names()) if "disk" in case else frozenset()

    def masters() -> Any:
        # Without the plan, which would refuse an update that is too large for a small machine.
        recipe = ModelRecipe(str(folder / "base"), "auto", {}, 0)
        model, loss = build(recipe)
        if case.startswith("train"):
            return make_engine(BuiltRun(plan, recipe, model, loss), torch.device("cpu"))
        placement = Placement(on_disk=on_disk, folder=folder)
        return Streamed(model, optim=AdamW(), precision=Precision("bf16"), placement=placement)

    return masters


def other(folder: Path, case: str) -> Callable[[], Any]:
    """Return a function that loads a model to generate with it, or exports it."""
    from monograph.run.models import load, load_to_export, save

    if case.startswith("generate"):
        return lambda: load(folder / ("adapter" if "adapter" in case else "base"))[0]

    def export() -> None:
        number = len(list(folder.glob("out*")))
        _, kind, dtype, *_ = f"{case.replace(',', '')} - -".split()
        model, tokenizer, *_ = load_to_export(folder / "adapter")
        save(model, folder / f"out{number}", tokenizer, kind, None if kind == "hf" else dtype)

    if "gguf" in case:
        import gguf  # noqa: F401 - what importing it takes is not the export's
    return export


def anonymous() -> int:
    """Return the bytes of this process that belong to no file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def trimmed() -> int:
    """Return the same after freed memory has gone back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return anonymous()


@contextmanager
def most_anonymous() -> Iterator[list[int]]:
    """Yield a list whose one number is, after the block, the largest value that a thread saw in it."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.0005):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def kept_bytes(held: Any) -> int:
    """Return the anonymous bytes of the tensors that an engine or model holds, each memory counted
    once.
    """
    from torch import nn

    if held is None:
        return 0
    if hasattr(held, "ledger"):
        ledger = held.ledger()
        return int(
            ledger["homes"]["host"]
            + ledger["homes"]["device"]
            + ledger["device"]["slots and staging buffers"]
        )
    model = held if isinstance(held, nn.Module) else held.model
    tensors = [*model.parameters(), *model.buffers()]
    for plane in [] if model is held else held.step.planes:
        tensors += [plane.param, plane.grad, *plane.state.values()]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def stage_elements(held: Any) -> int:
    """Return the number of elements of a streamed model's largest plane, which is moved at once."""
    return max(each.plane.param.numel() for each in held.store.stored_planes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in"]:
        place, what = Path(sys.argv[2]), sys.argv[3]
        print(
            json.dumps(
                make(place, json.loads(sys.argv[4])) if what == "make" else measure(place, what)
            )
        )
        gc.collect()
    else:
        main()
