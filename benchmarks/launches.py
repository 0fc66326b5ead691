"""Count what training and sampling launch on a GPU, without one: kernels, bytes, FLOPs, waits, and
a roofline of them.

The project's own step and decoder are compiled for sm_90 and run on a pretended card
(`pretended.py`), where kernels compute nothing. Two depths are compiled and extrapolated to the
model's own, since every count is linear in the number of layers; nano, whose own depth is compiled
as well, checks that. The same code gives the same counts at each run.

Triton's bytes are Inductor's: each of a kernel's arguments counts once, and twice if it is read and
written. What a loop over a row reads a second or third time is listed apart (a cache may have it), and
so are attention's kernels, whose time is taken from the FLOPs of the pairs of a query and a key of the
same document. Times are of datasheets: 65 % of the peak for products, 42 % for attention, 80 % of the
bandwidth; a kernel takes no less time than its instructions (those of loops as often as they run, and
branches that are hardly taken among them).

One of torch's own kernels moves as much as Triton's largest: the norm of the gradients. The MFU is printed
without and with its bytes.

A window is one micro-batch. So all gradients are written, and none is added to an earlier one.
"""

from __future__ import annotations

import dataclasses
import gc
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple, cast
from unittest import mock

import harness
import pretended
import torch
from adapter_rows import random_adapter
from sampler import FULL
from steps import Shape, packed_window

from monograph.decode import adapter_bank
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.device import card_device
from monograph.graph.capture import compiled as compile_function
from monograph.graph.lora import Lora
from monograph.graph.lora_base import quantise_base
from monograph.graph.precision import Precision
from monograph.graph.rounded_base import round_frozen_weights
from monograph.graph.shared_base import copy_without_adapters
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.cross_entropy import chunk_count
from monograph.ops.logits_gradient import replace_logits_
from monograph.optim import AdamW
from monograph.predict.roofline import matmul_parameters, training_flops
from monograph.resident import Resident

Numbers = dict[str, float]
PRODUCTS, ATTENTION, TRAFFIC = 0.65, 0.42, 0.8  # shares of the datasheet's rates
CARDS = ("H200", "A100-80", "4090")


class Case(NamedTuple):
    """A preset, the rows of a micro-batch that fit an H200, and the depths that are compiled."""

    preset: str
    rows: int
    length: int
    depths: tuple[int, int]


CASES = {
    "124m": Case("124m", 32, 2048, (2, 4)),
    "1b": Case("1b", 16, 2048, (2, 4)),
    "nano": Case("nano", 64, 256, (1, 3)),
}
BATCHES, PROMPT, TOKENS = (1, 64), 512, 64  # of decoding
FROZEN_NAME = "1b frozen"
FROZEN_LAYERS = (1, 2)  # the depths that are compiled
RANK = 16  # of the adapters on frozen bases, and of those in a bank
BANK_NAME = "1b bank"
ADAPTERS = 8  # in the bank
# How the linear layers of the bank's base are stored, and the rows of a step.
BANKED = (("bf16", 8), ("bf16", 64), ("nf4", 8))
MEMBERS_NAME = "1b members"
MEMBERS, ANSWERS = 8, 32  # of each member
POSITIONS = (128, PROMPT + TOKENS)  # of a row's text that a step's attention reads
LOSS_NAME = "loss"
LOSS_KERNEL = "_replace_row"  # replaces a chunk's logits by their gradient
HYBRID_NAME = "qwen3-next"
# The layers of Qwen3-Next 80B, of which a few are compiled, with a small vocabulary.
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 5120,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def shape_of(case: Case, layers: int | None = None) -> Shape:
    """Return the preset's shape, with another number of layers if one is given."""
    over = {} if layers is None else {"num_hidden_layers": layers}
    config = LlamaConfig.preset(case.preset, **over)
    return Shape(config, case.length, case.rows)


def model_of(config: LlamaConfig) -> Llama:
    """Return a model on the card whose weights nobody wrote."""
    with torch.device("meta"):
        model = Llama(config)
    model = model.to_empty(device="cuda")
    model.tie_weights()
    return model


def engine_of(shape: Shape, precision: str = "bf16") -> Resident:
    """Return the engine that `monograph train` builds with this precision."""
    return Resident(
        model_of(shape.config),
        optim=AdamW(lr=1e-3),
        clip=1.0,
        precision=Precision(precision),
        micro_batch=shape.rows,
        rounds_in_update=True,
    )


def training(shape: Shape, packed: bool, precision: str) -> dict[str, Numbers]:
    """Return the counts of a micro-step that is called, of one that is replayed, and of an update."""
    torch.cuda.reset_peak_memory_stats()
    window = packed_window(shape, torch.device("cuda"))
    if not packed:
        window = {name: window[name] for name in ("tokens", "targets")}
    engine = engine_of(shape, precision)
    step = engine.step
    reasons: list[str] = []
    step.announce = reasons.append  # gets the reason if the micro-step cannot be replayed
    if obstacle := engine.capture(window):
        raise SystemExit(f"launches.py: the step cannot be captured: {obstacle}")
    engine.accumulate(window)
    engine.update()
    batch = next(engine._micro_batches(window))
    # A query sees the earlier positions of its document, and its own.
    columns = torch.arange(shape.length).expand(len(window["tokens"]), -1)
    pairs = (window.get("positions", columns) + 1).sum().item()
    with pretended.Counted() as replayed:
        step.micro_step(batch)
    if not replayed.graphs:
        why = "; ".join(reasons) or "the driver saw no launch of a graph"
        raise SystemExit(f"launches.py: the micro-step is not replayed: {why}")
    with pretended.Counted() as called:
        step._micro_step(batch)
    with pretended.Products() as products:
        step._micro_step(batch)
    engine.accumulate(window)
    with pretended.Counted() as updated:
        engine.update()
    if not any("ForeachReduce" in name for _, name in updated.launches):
        raise SystemExit(
            "launches.py: the norm of the gradients is not torch's own kernel any more"
        )
    with pretended.Counted() as rounded:
        step.parameters.accumulate([])  # a window without micro-batches
    if rounded.launches:
        raise SystemExit("launches.py: the update does not round the weights any more")
    times = (
        {f"triton_s {name}": part.triton_s(rates(name)) for name in CARDS}
        for part in (called, updated)
    )
    peak = torch.cuda.max_memory_reserved()
    return {
        "micro-step called": called.numbers()
        | {"flops": products.flops, "fp8_flops": products.fp8_flops}
        | {"pairs": pairs, "peak_bytes": peak}
        | next(times),
        "micro-step replayed": replayed.numbers(),
        "update": updated.numbers()
        | {"norm_bytes": sum(plane.grad.nbytes for plane in step.planes)}
        | next(times),
    }


def decode_step(
    model: Llama, rows: int, prompt: int, positions: int = PROMPT + TOKENS, **options: Any
) -> tuple[Generator, Callable[[], None]]:
    """Return a generator whose rows have read prompts, and its decode step, which has been compiled.

    The step's attention reads this number of positions.
    """
    generator = Generator(
        model,
        chain_of([FULL]),
        rows=rows,
        slots=PROMPT + TOKENS,
        vocabulary=model.config.vocab_size,
        **{"mode": "compiled"} | options,
    )
    for seed in range(rows):
        sampling = dataclasses.replace(FULL, seed=seed)
        generator.submit(Request((5,) * prompt, sampling, TOKENS))
    # Not `run`, which would wait for the end of a text: no token is drawn here.
    generator.advance()
    # The step of that block, which follows no automata: another one would be compiled while it is
    # counted.
    called = generator.steps.step_for(generator.chain)
    blocks = generator.cache.block_count_for(positions)
    return generator, lambda: called(blocks, "window", False)


MIXERS = {"delta net": "linear", "gated attention": "full"}


def hybrid_layers(rows: int, mixers: Iterable[str] = MIXERS, **options: Any) -> dict[str, Numbers]:
    """Return the counts of the layers of a hybrid in a decode step, by kind.

    A kind's counts are those of a step of a model with one more layer of it, less those of a step of
    the model without.
    """
    found = {}
    for kind, is_dense in (("mixture", False), ("feed-forward layer", True)):
        smaller = hybrid_step(("linear", "full"), is_dense, rows, **options)
        for mixer in mixers:
            layer = MIXERS[mixer]
            larger = hybrid_step(("linear", layer, "full"), is_dense, rows, **options)
            found[f"{mixer} and {kind}, a step of batch {rows}"] = {
                name: max(number, smaller[name])
                if name in pretended.LARGEST
                else number - smaller[name]
                for name, number in larger.items()
            }
    return found


def hybrid_step(mixers: tuple[str, ...], is_dense: bool, rows: int, **options: Any) -> Numbers:
    """Return the counts of a decode step of Qwen3-Next with layers of these kinds."""
    gc.collect()
    torch._dynamo.reset()
    config = LlamaConfig(
        **HYBRID,
        num_hidden_layers=len(mixers),
        layer_types=tuple(f"{mixer}_attention" for mixer in mixers),
        mlp_only_layers=tuple(range(len(mixers))) if is_dense else (),
    )
    # A prompt of one token has nothing to read: cuBLAS' triangular solver, by which delta nets read
    # prompts, cannot be pretended.
    _, step = decode_step(model_of(config).to(torch.bfloat16), rows, 1, **options)
    with pretended.Counted() as counted:
        step()
    return counted.numbers()


def frozen(config: LlamaConfig, base: Any, adapts: bool) -> Llama:
    """Return a model in bf16 whose base is frozen in few bits, as a run trains adapters on it."""
    model = model_of(config)
    if adapts:
        lora = Lora(rank=RANK, base=base)
        device = torch.device("cuda")
        install_adapters(model, lora, precision=Precision("bf16"), device=device)
    else:
        quantise_base(model, base, None)
        round_frozen_weights(model, torch.bfloat16, [model.model.embed_tokens])
    return model


def frozen_step(config: LlamaConfig, base: Any, adapts: bool, by_kernels: bool = True) -> Numbers:
    """Return the counts of a decode step of one row under autocast, as a run samples from its weights.

    It is computed by the kernels, or by the model's own forward pass.
    """
    gc.collect()
    torch._dynamo.reset()
    model = frozen(config, base, adapts)
    with ExitStack() as stack:
        stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        if not by_kernels:
            kernels = "monograph.decode.fast_forward.fast_forward"
            stack.enter_context(mock.patch(kernels, lambda *_: None))
        # A prompt of one token has nothing to read.
        _, step = decode_step(model, 1, 1)
        step()  # reads more blocks of the cache than the steps before it, which is compiled anew
        with pretended.Counted() as counted:
            step()
        with pretended.Products() as products:
            step()
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    return counted.numbers() | {"product_bytes": products.bytes, "weight_bytes": weights}


def frozen_steps(layers: int) -> dict[str, Numbers]:
    """Return the counts of steps of 1b with this number of layers, by how it is frozen."""
    config = LlamaConfig.preset("1b", num_hidden_layers=layers)
    found = {}
    for base in ("int8", "nf4"):
        for adapts in (False, True):
            name = f"{base} with adapters" if adapts else base
            found[name] = frozen_step(config, base, adapts)
            found[f"{name}, own forward pass"] = frozen_step(config, base, adapts, False)
            print(layers, name, flush=True)
    return found


def banked_step(config: LlamaConfig, base: Any, rows: int, by_kernels: bool = True) -> Numbers:
    """Return the counts of a decode step of rows that have their own adapters, as an endpoint serves them.

    It is computed by the kernels, or by the model's own forward pass. Without kernels, the sampler and
    attention have theirs, too.
    """
    gc.collect()
    torch._dynamo.reset()
    model = model_of(config).to(torch.bfloat16)
    if base != "bf16":
        quantise_base(model, base, None)
    adapters = {str(seed): random_adapter(model, RANK, seed) for seed in range(ADAPTERS)}
    bank = adapter_bank.install(model, adapters)
    with ExitStack() as stack:
        if not by_kernels:
            kernels = "monograph.decode.fast_forward.fast_forward"
            stack.enter_context(mock.patch(kernels, lambda *_: None))
        # A prompt of one token has nothing to read.
        _, step = decode_step(model, rows, 1)
        step()  # reads more blocks of the cache than the steps before it, which is compiled anew
        with pretended.Counted() as counted:
            step()
        with pretended.Products() as products:
            step()
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    own = bank.nbytes * ADAPTERS / (ADAPTERS + 1)  # slot 0 is not read
    return counted.numbers() | {"product_bytes": products.bytes, "weight_bytes": weights + own}


def banked_steps(layers: int) -> dict[str, Numbers]:
    """Return the counts of steps of 1b with this number of layers, by base and rows."""
    config = LlamaConfig.preset("1b", num_hidden_layers=layers)
    found = {}
    for base, rows in BANKED:
        name = f"{base}, {rows} rows"
        found[name] = banked_step(config, base, rows)
        if base == "bf16" and rows <= ADAPTERS:
            found[f"{name}, own forward pass"] = banked_step(config, base, rows, False)
        print(layers, name, flush=True)
    return found


def members_model(config: LlamaConfig, members: int) -> Llama:
    """Return the model that samples the answers of members: their base with a bank of their adapters."""
    model = cast(Llama, copy_without_adapters(frozen(config, "auto", True)))
    adapters = {str(number): random_adapter(model, RANK, number) for number in range(members)}
    bank = adapter_bank.install(model, adapters, rank=RANK)
    bank.has_fast_products = True
    return model


def members_step(model: Llama, rows: int, positions: int) -> Numbers:
    """Return the counts of a decode step under autocast, as a run with rewards samples answers."""
    gc.collect()
    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16):
        # A prompt of one token has nothing to read.
        _, step = decode_step(model, rows, 1, positions)
        step()  # may read other blocks of the cache than the steps before it, which is compiled anew
        with pretended.Counted() as counted:
            step()
        with pretended.Products() as products:
            step()
    numbers = counted.numbers() | {"product_bytes": products.bytes} | lasting(counted, products)
    numbers["flops"] = products.flops + sum(kernel.flops for kernel in counted.kernels)
    return numbers


def members_steps(
    config: LlamaConfig, members: int, answers: int, texts: Iterable[int]
) -> dict[str, Numbers]:
    """Return the counts of steps in which members sample their answers, beside one member's, for texts
    of these numbers of positions.

    One member samples in the members' decoder, and as in a run of its own.
    """
    found = {}
    for positions in texts:
        for count in (1, members):
            rows = count * answers
            name = f"{count} x {answers} answers, {positions} positions"
            found[name] = members_step(members_model(config, count), rows, positions)
        alone = frozen(config, "auto", True)
        name = f"1 x {answers} answers, {positions} positions, in a run of its own"
        found[name] = members_step(alone, answers, positions)
        print(config.num_hidden_layers, positions, "positions", flush=True)
    return found


def decoding(config: LlamaConfig, rows: int) -> dict[str, Numbers]:
    """Return the counts of a decode step with the full chain of filters, and of its sampler alone."""
    model = model_of(config).to(torch.bfloat16)
    generator, step = decode_step(model, rows, PROMPT)
    with pretended.Counted() as whole:
        step()
    with pretended.Products() as products:
        step()
    # The sampler follows the product with the head.
    head = max(
        place
        for place, (library, name) in enumerate(whole.launches)
        if library == "cublas" or name == "_multiply"
    )
    sampler = pretended.Counted(whole.launches[head + 1 :])
    triton = sum(library == "triton" for library, _ in sampler.launches)
    sampler.kernels = whole.kernels[len(whole.kernels) - triton :]
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    found = {
        f"decode step, batch {rows}": whole.numbers()
        | {"flops": products.flops, "product_bytes": products.bytes, "weight_bytes": weights}
        | lasting(whole, products),
        f"its sampler, batch {rows}": sampler.numbers() | lasting(sampler),
    }
    if rows == 1:
        reader = generator.reader
        read = compile_function(reader._run_pass)
        blocks = reader.cache.block_count_for(PROMPT)
        read(blocks, reader.chunk)
        with pretended.Counted() as chunk:
            read(blocks, reader.chunk)
        with pretended.Products() as products:
            read(blocks, reader.chunk)
        found[f"a prompt's chunk of {reader.chunk}"] = (
            chunk.numbers() | {"flops": products.flops} | lasting(chunk, products)
        )
    return found


def counts(case: Case, layers: int | None, args: Namespace) -> dict[str, Numbers]:
    """Return all counts of a shape of a depth."""
    shape = shape_of(case, layers)
    torch._dynamo.reset()
    found = training(shape, not args.unpacked, args.precision)
    if args.precision == "bf16" and (case.preset == "1b" or args.smoke):
        for rows in BATCHES:
            gc.collect()
            torch._dynamo.reset()
            found |= decoding(shape.config, rows)
    gc.collect()
    torch.cuda.empty_cache()
    return found


def extrapolated(
    few: dict[str, Numbers], many: dict[str, Numbers], depths: tuple[int, int], layers: int
) -> Any:
    """Return the counts at a depth by the line through two others; a maximum stays one."""

    def at(name: str, low: float, high: float) -> float:
        if name in pretended.LARGEST:
            return max(low, high)
        return low + (high - low) * (layers - depths[0]) / (depths[1] - depths[0])

    return {
        part: {name: at(name, value, many[part][name]) for name, value in numbers.items()}
        for part, numbers in few.items()
    }


def rates(name: str) -> pretended.Rates:
    """Return what a card reaches of its datasheet's rates: a multiply-add of 32 lanes is one
    instruction and 64 FLOPs.
    """
    card = card_device(name)
    assert card.bandwidth_bytes_per_s
    return pretended.Rates(
        card.bandwidth_bytes_per_s * TRAFFIC,
        card.peak_flops["fp32"] / 64,
        card.peak_flops["bf16"] * PRODUCTS,
    )


def lasting(counted: pretended.Counted, products: pretended.Products | None = None) -> Numbers:
    """Return the seconds of a step by card: of Triton's kernels and of torch's products, one after
    another.
    """
    return {
        f"seconds {name}": counted.triton_s(rates(name))
        + (products.seconds(rates(name)) if products else 0.0)
        for name in CARDS
    }


def roofline(case: Case, found: dict[str, Numbers]) -> dict[str, dict[str, float]]:
    """Return by card the milliseconds of a micro-step and its update by cause, and the MFU, without and
    with the norm of the gradients.
    """
    shape, micro, update = shape_of(case), found["micro-step called"], found["update"]
    config, tokens = shape.config, case.rows * case.length
    width = config.num_attention_heads * config.head_dim
    # Forward and backward, a pair of a query and a key takes 12 FLOPs for each channel.
    attended = 12 * config.num_hidden_layers * width * micro["pairs"]
    visible_positions = [micro["pairs"] / tokens] * config.num_hidden_layers
    model_flops = tokens * training_flops(matmul_parameters(config), width, visible_positions)
    times = {}
    fp8_flops = micro["fp8_flops"]
    for name in CARDS:
        peaks = card_device(name).peak_flops
        if fp8_flops and "fp8" not in peaks:
            continue
        peak = peaks["bf16"]
        fp8_s = fp8_flops / (peaks["fp8"] * PRODUCTS) if fp8_flops else 0.0
        parts = {
            "products": micro["flops"] / (peak * PRODUCTS) + fp8_s,
            "attention": attended / (peak * ATTENTION),
            "triton": micro[f"triton_s {name}"],
            "update": update[f"triton_s {name}"],
        }
        times[name] = {part: 1e3 * seconds for part, seconds in parts.items()}
        times[name]["mfu"] = model_flops / sum(parts.values()) / peak
        of_torch_s = update["norm_bytes"] / rates(name).bytes_per_s
        times[name]["torch"] = 1e3 * of_torch_s
        times[name]["mfu_with_torch"] = model_flops / (sum(parts.values()) + of_torch_s) / peak
    return times


def measured_frozen() -> dict[str, Any]:
    """Count decode steps of a base that is frozen in few bits."""
    layers = LlamaConfig.preset("1b").num_hidden_layers
    few, many = map(frozen_steps, FROZEN_LAYERS)
    return {
        "case": FROZEN_NAME,
        "layers": layers,
        "compiled_layers": FROZEN_LAYERS,
        "counts": extrapolated(few, many, FROZEN_LAYERS, layers),
    }


def measured_bank() -> dict[str, Any]:
    """Count decode steps of rows with their own adapters."""
    layers = LlamaConfig.preset("1b").num_hidden_layers
    few, many = map(banked_steps, FROZEN_LAYERS)
    return {
        "case": BANK_NAME,
        "adapters": ADAPTERS,
        "rank": RANK,
        "layers": layers,
        "compiled_layers": FROZEN_LAYERS,
        "launches_of_a_layer": {
            part: many[part]["launches"] - numbers["launches"] for part, numbers in few.items()
        },
        "counts": extrapolated(few, many, FROZEN_LAYERS, layers),
    }


def measured_members(is_smoke: bool) -> dict[str, Any]:
    """Count decode steps of members that sample their answers in one decoder."""
    config = LlamaConfig.preset("nano" if is_smoke else "1b")
    members, answers = (2, 2) if is_smoke else (MEMBERS, ANSWERS)
    texts = POSITIONS[:1] if is_smoke else POSITIONS
    few, many = (
        members_steps(
            dataclasses.replace(config, num_hidden_layers=layers), members, answers, texts
        )
        for layers in FROZEN_LAYERS
    )
    counts = extrapolated(few, many, FROZEN_LAYERS, config.num_hidden_layers)
    return {
        "case": MEMBERS_NAME,
        "members": members,
        "answers": answers,
        "rank": RANK,
        "layers": config.num_hidden_layers,
        "compiled_layers": FROZEN_LAYERS,
        "counts": counts,
        "ratios": {
            str(positions): members_ratios(counts, members, answers, positions)
            for positions in texts
        },
    }


def members_ratios(
    counts: dict[str, Numbers], members: int, answers: int, positions: int
) -> dict[str, Numbers]:
    """Return by card how many times as long a step of all members takes as one of one member.

    `one` samples in the members' decoder, and `own_run` in a run of its own.
    """
    texts = f"{answers} answers, {positions} positions"
    together, one = counts[f"{members} x {texts}"], counts[f"1 x {texts}"]
    alone = counts[f"1 x {texts}, in a run of its own"]
    return {
        name: {
            "one": together[f"seconds {name}"] / one[f"seconds {name}"],
            "own_run": together[f"seconds {name}"] / alone[f"seconds {name}"],
        }
        for name in CARDS
    }


def loss_counts(case: Case, rows: int | None = None) -> Numbers:
    """Return what the loss's own kernel moves in all chunks of a micro-step, and its seconds by card.

    Args:
        case: a preset and the rows of a micro-batch.
        rows: the tokens of a chunk, if not those of the micro-step.
    """
    vocabulary, tokens = LlamaConfig.preset(case.preset).vocab_size, case.rows * case.length
    chunks = chunk_count(tokens, vocabulary, "cuda")
    rows = rows or tokens // chunks
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    targets = torch.empty(rows, dtype=torch.int64, device="cuda")
    with pretended.Counted() as called:
        replace_logits_(logits, targets, torch.empty(rows, device="cuda"))
    [kernel] = [kernel for kernel in called.kernels if kernel.name == LOSS_KERNEL]
    found = {
        "chunks": chunks,
        "once_bytes": chunks * kernel.once_bytes,
        "again_bytes": chunks * kernel.again_bytes,
        "instructions_of_a_logit": 32 * kernel.warp_instructions / logits.numel(),
    }
    for name in CARDS:
        seconds = chunks * called.triton_s(rates(name))
        bytes_s = (found["once_bytes"] + found["again_bytes"]) / rates(name).bytes_per_s
        found |= {f"seconds {name}": seconds, f"of its bytes {name}": seconds / bytes_s}
    return found


def measured_loss() -> dict[str, Any]:
    """Count the loss's own kernel for the models whose vocabulary is large."""
    counts = {name: loss_counts(CASES[name]) for name in ("124m", "1b")}
    return {"case": LOSS_NAME, "counts": counts}


def measured_hybrid() -> dict[str, Any]:
    """Count the layers of a hybrid, by their kernels and by the model's own forward pass."""
    by_torch = hybrid_layers(1, ["delta net"], impl="reference")
    counts = hybrid_layers(1) | {
        f"{part}, without kernels": numbers for part, numbers in by_torch.items()
    }
    return {"case": HYBRID_NAME, "packed": False, "counts": counts}


def measured(name: str, args: Namespace) -> dict[str, Any]:
    """Count one case at its depth."""
    if name == HYBRID_NAME:
        return measured_hybrid()
    if name == FROZEN_NAME:
        return measured_frozen()
    if name == BANK_NAME:
        return measured_bank()
    if name == MEMBERS_NAME:
        return measured_members(args.smoke)
    if name == LOSS_NAME:
        return measured_loss()
    case = CASES[name]
    if args.smoke:
        case = case._replace(rows=2, length=64)
    own = shape_of(case).config.num_hidden_layers
    depths = tuple(args.layers) if args.layers else case.depths
    few, many = (counts(case, layers, args) for layers in depths)
    found = extrapolated(few, many, depths, own)
    result = {"case": name, "rows": case.rows, "length": case.length, "packed": not args.unpacked}
    result["precision"] = args.precision
    result |= {
        "layers": own,
        "compiled_layers": depths,
        "counts": found,
        "roofline": roofline(case, found),
    }
    if own < max(depths):
        exact = counts(case, own, args)
        compared = {(part, number) for part, numbers in exact.items() for number in numbers}
        different = [
            f"{part}: {number} {found[part][number]:g}, not {exact[part][number]:g}"
            for part, number in sorted(compared)
            # Launches to the last one; bytes nearly, as Inductor counts some small tensors twice.
            if number not in (*pretended.LARGEST, "peak_bytes")
            and abs(found[part][number] - exact[part][number]) > 5e-3 * abs(exact[part][number])
        ]
        result["extrapolated_is_compiled"] = different or True
    return result


HEADERS = [
    "",
    "launches",
    *pretended.LIBRARIES,
    "Triton GB",
    "again",
    "attention",
    "TFLOP",
    "registers",
    "stack",
]
HEADERS += ["graphs", "waits", "waiting copies"]


def row(name: str, numbers: Numbers) -> list[str]:
    """Return a line of the table."""
    whole = ("launches", *pretended.LIBRARIES)
    return [
        name,
        *(f"{numbers[key]:,.0f}" for key in whole),
        *(
            f"{numbers[key] / 1e9:,.3f}"
            for key in ("triton_bytes", "again_bytes", "attention_bytes")
        ),
        f"{numbers['flops'] / 1e12:,.3f}" if "flops" in numbers else "",
        *(
            f"{numbers[key]:.0f}"
            for key in (*pretended.LARGEST, "graphs", "waits", "waiting_copies")
        ),
    ]


def print_seconds(counts: dict[str, Numbers]) -> None:
    """Print how long the parts of decoding take by the roofline."""
    table = [
        [part, *(f"{1e3 * numbers[f'seconds {name}']:.4g}" for name in CARDS)]
        for part, numbers in counts.items()
        if f"seconds {CARDS[0]}" in numbers
    ]
    if table:
        harness.print_table(["roofline, ms", *CARDS], table)


def show(result: dict[str, Any]) -> None:
    """Print a case's tables."""
    if result["case"] == HYBRID_NAME:
        print(f"\n{HYBRID_NAME}, a layer of a compiled decode step, bf16, sm_90:")
        harness.print_table(HEADERS, [row(*counted) for counted in result["counts"].items()])
        return
    if result["case"] == FROZEN_NAME:
        print(f"\n{FROZEN_NAME}, a compiled decode step of one row, bf16, sm_90:")
        harness.print_table(HEADERS, [row(*counted) for counted in result["counts"].items()])
        return
    if result["case"] == BANK_NAME:
        print(f"\n{BANK_NAME} of {ADAPTERS} adapters, a compiled decode step, bf16, sm_90:")
        harness.print_table(HEADERS, [row(*counted) for counted in result["counts"].items()])
        print(f"launches of a layer: {result['launches_of_a_layer']}")
        return
    if result["case"] == MEMBERS_NAME:
        print(f"\n{MEMBERS_NAME}, a compiled decode step under autocast, bf16, sm_90:")
        harness.print_table(HEADERS, [row(*counted) for counted in result["counts"].items()])
        print_seconds(result["counts"])
        for positions, by_card in result["ratios"].items():
            for card, ratios in by_card.items():
                print(
                    f"{card}, {positions} positions: all members take {ratios['one']:.2f} times as long as one, "
                    f"and {ratios['own_run']:.2f} times as long as one in a run of its own"
                )
        return
    if result["case"] == LOSS_NAME:
        print("\nthe loss's kernel in a micro-step, bf16, sm_90:")
        for name, found in result["counts"].items():
            print(name, ", ".join(f"{key} {number:.4g}" for key, number in found.items()))
        return
    few, many = result["compiled_layers"]
    kind = "packed" if result["packed"] else "one document a row"
    precision = result["precision"]
    print(f"\n{result['case']}, {result['rows']} x {result['length']}, {kind}, {precision}, sm_90:")
    print(f"{result['layers']} layers, extrapolated linearly from {few} and {many}", end="")
    check = result.get("extrapolated_is_compiled")
    print(
        ""
        if check is None
        else "; compiled, too: the same"
        if check is True
        else f"; compiled, too: {check}"
    )
    harness.print_table(HEADERS, [row(name, numbers) for name, numbers in result["counts"].items()])
    for name, numbers in result["counts"].items():
        if weights := numbers.get("weight_bytes"):
            sampler = result["counts"][name.replace("decode step", "its sampler")]
            moved = numbers["product_bytes"] + numbers["triton_bytes"] + numbers["again_bytes"]
            own = sampler["triton_bytes"] + sampler["again_bytes"]
            print(
                f"{name}: {moved / weights:.4f} times the weights' {weights / 1e9:.3f} GB; sampler {own / moved:.2%}"
            )
    print_seconds(result["counts"])
    peak = result["counts"]["micro-step called"]["peak_bytes"]
    print(f"memory of the card that was taken: {peak / 2**30:.1f} GiB")
    parts = ("products", "attention", "triton", "update")
    table = [
        [
            card,
            *(f"{times[part]:.4g}" for part in parts),
            f"{times['mfu']:.2%}",
            f"{times['torch']:.4g}",
            f"{times['mfu_with_torch']:.2%}",
        ]
        for card, times in result["roofline"].items()
    ]
    harness.print_table(["roofline, ms", *parts, "MFU", "torch's own", "MFU with it"], table)


def main() -> None:
    """Count and print; see `--help`."""
    parser = harness.arguments(__doc__)
    names = [*CASES, HYBRID_NAME]
    # The frozen case, the bank, members and the loss have files of results of their own.
    choices = [*names, FROZEN_NAME, BANK_NAME, MEMBERS_NAME, LOSS_NAME]
    parser.add_argument("--cases", nargs="+", choices=choices, default=names)
    parser.add_argument(
        "--layers", nargs=2, type=int, metavar="N", help="the two depths that are compiled"
    )
    parser.add_argument(
        "--unpacked", action="store_true", help="one document a row: attention by cuDNN"
    )
    parser.add_argument("--precision", choices=("bf16", "fp8_head"), default="bf16")
    args = parser.parse_args()
    if args.smoke:
        args.cases, args.layers = ["nano", MEMBERS_NAME], [1, 3]
    pretended.watch()
    found = harness.result(
        "launches", {"cases": args.cases, "unpacked": args.unpacked, "smoke": args.smoke}
    )
    for name in args.cases:
        found["cases"].append(measured(name, args))
        harness.write(args.out, found)
        show(found["cases"][-1])


if __name__ == "__main__":
    main()
