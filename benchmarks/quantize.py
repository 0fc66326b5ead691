"""What weights of 4 or 8 bits cost, rounded after training or in training (train.quantize).

A small Llama learns the documentation and the source of this package, byte by byte. All ways begin with
the same weights and see the same bytes in the same order:

    after training        an ordinary training, and some more updates as ordinary as before; rounded at the end
    in its last updates   the same ordinary training, and the same number of more updates with rounded weights
    from the beginning    all updates with rounded weights

The last updates are a training of their own, with a new optimizer and a quarter of the peak rate, as
`monograph train model.init=RUN train.quantize=int4` makes them; they begin with unrounded weights. The
weights are then written into a GGUF file (q4_0 or q8_0) and read from it, and the numbers of the file are
scored on documents and source files that were never trained on.

    before rounding    held-out bits per byte of the weights that the optimizer has
    of the file        held-out bits per byte of the file
    - after training   less those of the first way's file with the same seed

Numbers have their mean over the seeds, and its standard error.

    python benchmarks/quantize.py --out benchmarks/results/quantize.json
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import monograph as mono
from monograph.graph.lora_merge import plain_parameters
from monograph.model.gguf import (
    FILE,
    TRAINED_DTYPES,
    block_formats,
    import_gguf,
    llama_cpp_tensors,
    save_gguf,
)
from monograph.ops.weight_blocks import round_to_blocks
from monograph.text.tokenizer import Tokenizer

WAYS = ("after training", "in its last updates", "from the beginning")
RATE = 3e-3
LAST_RATE = RATE / 4
HELD_OUT_FILES = 20  # each so many files, one is held out
ROWS, LENGTH = 8, 128
HELD_OUT_ROWS = 256


def text() -> tuple[Tensor, Tensor]:
    """Return the bytes of the training files and those of the held-out files."""
    root = harness.ROOT
    paths = [*sorted((root / "docs").glob("*.md")), *sorted((root / "src").rglob("*.py"))]
    random.Random(0).shuffle(paths)
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for number, path in enumerate(paths):
        parts[number % HELD_OUT_FILES == 0].append(path.read_bytes())
    trained, held_out = (b"\n".join(files) for files in parts.values())
    return _as_tokens(trained), _as_tokens(held_out)


def _as_tokens(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def window(source: Tensor, draws: random.Random, rows: int) -> dict[str, Tensor]:
    """Return rows from random places of a text."""
    begins = [draws.randrange(len(source) - LENGTH - 1) for _ in range(rows)]
    cut = torch.stack([source[begin : begin + LENGTH + 1] for begin in begins])
    return {"tokens": cut[:, :-1].contiguous(), "targets": cut[:, 1:].contiguous()}


def new_model(seed: int, width: int, layers: int) -> mono.Llama:
    """Return a model with random weights."""
    config = mono.LlamaConfig(
        vocab_size=Tokenizer.bytes().vocab_size, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )  # fmt: skip
    return mono.Llama(config, seed=seed)


def trained(
    model: mono.Llama,
    source: Tensor,
    draws: random.Random,
    updates: int,
    rate: float,
    quantize: str,
) -> mono.Resident:
    """Train a model in place, with weights rounded unless `quantize` is "none"; return its engine."""
    engine = mono.Resident(
        model,
        optim=mono.Muon(lr=rate),
        schedule=mono.warmup_cosine(max(1, updates // 10), updates),
        clip=1.0,
        block_formats=block_formats(model, quantize),
    )
    for _ in range(updates):
        engine.accumulate(window(source, draws, ROWS))
        engine.update()
    return engine


@torch.no_grad()
def of_the_file(model: mono.Llama, quantize: str) -> mono.Llama:
    """Write a model into a GGUF file, and return a model with the numbers of the file."""
    gguf = import_gguf()
    rounded = copy_of(model)
    formats = block_formats(rounded, quantize)
    for name, parameter in rounded.named_parameters():
        if name in formats:
            parameter.copy_(round_to_blocks(parameter, formats[name]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "out")
        save_gguf(model, path, Tokenizer.bytes(), TRAINED_DTYPES[quantize], lambda line: None)
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path / FILE).tensors}
        for tensor in llama_cpp_tensors(plain_parameters(rounded), rounded.config):
            of_file = stored[tensor.name]
            numbers = torch.tensor(gguf.dequantize(of_file.data, of_file.tensor_type))
            if not torch.equal(numbers.view_as(tensor.read()), tensor.read()):
                raise SystemExit(f"quantize.py: {tensor.name} has other numbers in the file")
    return rounded


def copy_of(model: mono.Llama) -> mono.Llama:
    """Return another model with the same weights."""
    other = mono.Llama(model.config)
    other.load_state_dict(model.state_dict())
    return other


def unrounded_copy(engine: mono.Resident) -> mono.Llama:
    """Return a model with the unrounded weights of an engine."""
    model = copy_of(engine.model)
    masters = engine.state().optimizer
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(masters.get(f"master.{name}", parameter))
    return model


def bits_per_byte(model: mono.Llama, held_out: Tensor, rows: int) -> float:
    """Return the mean loss of a byte of rows that are the same for all models, in bits."""
    losses, count = mono.Resident(model, micro_batch=32).evaluate(
        window(held_out, random.Random(0), rows)
    )
    return float(losses / count) / math.log(2)


def scored(
    way: str, engine: mono.Resident, held_out: Tensor, quantize: str, rows: int
) -> dict[str, Any]:
    """Return the bits per byte of a trained model, before rounding and of its file."""
    return {
        "way": way,
        "quantize": quantize,
        "before": bits_per_byte(unrounded_copy(engine), held_out, rows),
        "file": bits_per_byte(of_the_file(copy_of(engine.model), quantize), held_out, rows),
    }


def cases_of(
    seed: int, source: Tensor, held_out: Tensor, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train in all ways from one seed."""
    updates, last, rows = options.updates, options.last_updates, options.held_out_rows
    draws = random.Random(seed)
    ordinary = new_model(seed, options.width, options.layers)
    trained(ordinary, source, draws, updates, RATE, "none")
    further_draws = draws.getstate()

    def finished(model: mono.Llama, quantize: str) -> mono.Resident:
        draws.setstate(further_draws)
        return trained(model, source, draws, last, LAST_RATE, quantize)

    cases = []
    unrounded = finished(copy_of(ordinary), "none")
    for quantize in options.quantize.split(","):
        cases.append(scored(WAYS[0], unrounded, held_out, quantize, rows))
        engine = finished(copy_of(ordinary), quantize)
        cases.append(scored(WAYS[1], engine, held_out, quantize, rows))
        model = new_model(seed, options.width, options.layers)
        first = trained(model, source, random.Random(seed), updates, RATE, quantize)
        model = unrounded_copy(first)
        cases.append(scored(WAYS[2], finished(model, quantize), held_out, quantize, rows))
    return [{**case, "seed": seed} for case in cases]


def cases_in_a_process(seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in all ways from one seed, in a process of its own if several are trained at once."""
    if options.jobs == 1:
        return cases_of(seed, *text(), options)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_cases_on_one_thread, seed, options).result()


def _cases_on_one_thread(seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return cases_of(seed, *text(), options)


def mean(values: Sequence[float]) -> str:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.4f} ± {error:.4f}"


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Return the ways of each format as a Markdown table."""
    lines = [
        "| `train.quantize` | rounded | before rounding | of the file | less than after training |",
        "|---|---|---:|---:|---:|",
    ]
    of = {(case["quantize"], case["way"], case["seed"]): case for case in cases}
    seeds = sorted({case["seed"] for case in cases})
    for quantize in dict.fromkeys(case["quantize"] for case in cases):
        first = [of[quantize, WAYS[0], seed] for seed in seeds]
        for way in WAYS:
            own = [of[quantize, way, seed] for seed in seeds]
            gains = [one["file"] - case["file"] for one, case in zip(first, own, strict=True)]
            gain = "" if way == WAYS[0] else mean(gains)
            before, file = (mean([case[key] for case in own]) for key in ("before", "file"))
            lines.append(f"| `{quantize}` | {way} | {before} | {file} | {gain} |")
    return "\n".join(lines)


def main() -> None:
    """Train in each way from each seed, and print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--quantize", default="int4", help="formats, joined by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="seeds that are trained at once")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--last-updates", type=int, default=60)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    options.held_out_rows = HELD_OUT_ROWS
    if options.smoke:
        options.quantize = "int4,int8"
        options.seeds, options.updates, options.last_updates = 1, 3, 2
        options.layers, options.width, options.held_out_rows = 1, 32, 4
    settings = {
        key: getattr(options, key)
        for key in ("quantize", "seeds", "jobs", "updates", "last_updates", "layers", "width")
    }
    found = harness.result("quantize", settings)
    with ThreadPoolExecutor(options.jobs) as pool:
        ends = [pool.submit(cases_in_a_process, seed, options) for seed in range(options.seeds)]
        for end in ends:
            found["cases"] += end.result()
            harness.write(options.out, found)
    harness.print_machine(found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
