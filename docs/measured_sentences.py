"""Describe each benchmark script's result in one sentence of the table of docs/measured.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Found = dict[str, Any]  # a result file
RIVALS = ("plain loop", "trainer", "lightning", "litgpt")


def first_run(found: Found) -> str:
    """Held-out bits per byte of the default model, and those of the yardsticks on the same bytes."""
    lines = [
        f"{name} {found['levels'][name]:.2f}" for name in ("trigram", "gzip -9", "order 6", "xz -9")
    ]
    finals = [f"{case['final']['bits_per_byte']:.2f}" for case in found["cases"]]
    [tokens] = {case["tokens_per_update"] for case in found["cases"]}
    return f"{' and '.join(finals)} in updates of {tokens:,} tokens; {', '.join(lines)}"


def steps(found: Found) -> str:
    """Tokens per second of the captured step, divided by those of the eager one."""
    those = [case for case in found["cases"] if case["dtype"] == "bf16"]
    return ", ".join(f"{case['shape']} {case['speedup']['wall']['median']:.2f} ×" for case in those)


def start(found: Found) -> str:
    """Time to the first update with a warm cache, divided by that with a cold one."""
    return ", ".join(
        f"{case['shape']} {case['warm_over_cold']['median']:.2f} ×" for case in found["cases"]
    )


def train(found: Found) -> str:
    """Tokens per second and share of the card's rate, and the speed over the peer's where it was
    measured.
    """
    lines = []
    for case in found["cases"]:
        if case["system"] != "monograph" or "error" in case:
            continue
        rate, of = case["tokens_per_s"]["median"], f"{case['mfu']:.1%}"
        peers = [
            p for p in found["cases"] if p["model"] == case["model"] and p["system"] == "trainer"
        ]
        ratios = [
            f", {rate / p['tokens_per_s']['median']:.2f} × Trainer"
            for p in peers
            if "tokens_per_s" in p
        ]
        lines.append(
            f"{case['model']}: {rate:,.0f} tokens/s, {of} of the datasheet's rate{''.join(ratios)}"
        )
    return "; ".join(lines)


def loss(found: Found) -> str:
    """Memory and time of the chunked loss, divided by those of dense logits, for the worst size and
    dtype.
    """
    lines = []
    for mode in ("eager", "captured"):
        those = [case for case in found["cases"] if case["mode"] == mode]
        memory = max(case["memory_ratio"] for case in those)
        time = max(case["time_ratio"]["wall"]["median"] for case in those)
        lines.append(f"{mode}: 1/{1 / memory:.1f} of the memory, {time:.2f} × the time")
    return "; ".join(lines)


def train_peers(found: Found) -> str:
    """How many times as fast as each peer's compiled step the captured step is."""
    lines = []
    for case, words in (
        ("compute", "rows of one length"),
        ("ragged", "ragged documents"),
        ("overhead", "tiny model"),
    ):
        those = [
            e
            for e in found["cases"]
            if e["case"] == case and e["mode"] == "compiled" and e["system"] in RIVALS
        ]
        ratios = ", ".join(
            f"{entry['system']} {entry['ratio_wall']['median']:.1f} ×" for entry in those
        )
        lines.append(f"{words}: {ratios}")
    return "; ".join(lines)


def time_to_quality(found: Found) -> str:
    """Held-out bits per byte of each system after the same time."""
    minutes = found["settings"]["minutes"]
    those = sorted(found["cases"], key=lambda case: float(case["mean"]))
    scores = ", ".join(f"{case['system']} {case['mean']:.3f}" for case in those)
    return f"after {minutes:g} minutes: {scores.replace('before', '0.1.0')}"


def generate_peers(found: Found) -> str:
    """Tokens per second, divided by those of each peer."""
    lines = []
    for case in dict.fromkeys(entry["case"] for entry in found["cases"]):
        those = [e for e in found["cases"] if e["case"] == case and "error" not in e]
        ratios = ", ".join(
            f"{entry['system'].replace(',', '')} {entry['ratio_wall']['median']:.1f} ×"
            for entry in those
            if entry["system"].startswith(("transformers", "llama.cpp"))
        )
        lines.append(f"{case}: {ratios}")
    return "; ".join(lines)


def serve(found: Found) -> str:
    """Time and CPU time over `generate`'s, and requests for one token per second over each other
    server's.
    """
    lines = []
    for case in found["cases"]:
        if (
            case["part"] == "overhead"
            and case.get("how") in ("whole", "streamed")
            and case["system"] == "monograph"
        ):
            over = f"{case['over_wall']['median']:.2f} × the time, {case['over_cpu']['median']:.2f} × the CPU time"
            lines.append(f"{case['how']}: {over} of `generate`")
    for case in found["cases"]:
        if case["part"] == "compared" and case["what"] in ("tokens/s, streamed", "TTFT p50, idle"):
            lines.append(f"{case['what']}: {case['times']['median']:.1f} × {case['system']}")
    return "; ".join(lines)


def sampler(found: Found) -> str:
    """How much longer a whole decode step with the full chain takes than a greedy one."""
    lines = [
        f"{case['batch']} rows {100 * case['wall_tax']['full chain']['median']:.1f} %"
        for case in found["steps"]
    ]
    return ", ".join(lines).replace("1 rows", "1 row")


def remat(found: Found) -> str:
    """Peak memory of a spread budget over that of torch's at the same share, and the times of both
    over no budget.
    """
    lines = []
    over = found["verdict"]["bytes_over_torch"]["spread, whole"]
    for share, ratio in sorted(over.items(), key=lambda pair: float(pair[0]), reverse=True):
        times = {
            case["name"]: case["time_over_none"]["cpu_s"]["median"]
            for case in found["cases"]
            if case["scope"] == "whole" and f"{case['share']:g}" == share
        }
        lines.append(f"{share}: {ratio:.2f} × ({times['spread']:.2f} and {times['torch']:.2f})")
    return ", ".join(lines)


def plan(found: Found) -> str:
    """How far the predicted peak memory is from the allocator's, at worst and at the median, by
    compile scope.
    """
    lines = []
    for name, entry in found["summary"].items():
        if isinstance(entry, dict):
            worst, median = (f"{100 * entry[of]:.2g} %" for of in ("worst", "median"))
            lines.append(
                f"{name} ({entry['cases']} models) {worst} at worst, {median} at the median"
            )
    return "; ".join(lines)


def regret(found: Found) -> str:
    """Speed of the planned way over that of the fastest, and errors of predicted times once one way
    is measured.
    """
    errors = []
    for case in found["cases"]:
        times = {
            way: entry["median"] / case["predicted_s"][way]
            for way, entry in case["seconds"].items()
        }
        errors += [
            abs(times[case["chosen"]] / ratio - 1)
            for way, ratio in times.items()
            if way != case["chosen"]
        ]
    reached = "; ".join(f"{case['case']}: {100 * case['reached']:.0f} %" for case in found["cases"])
    near = sum(error <= 0.15 for error in errors)
    return (
        f"{reached}; predicted times of {len(errors)} other ways, once one was measured: median error "
        f"{100 * statistics.median(errors):.0f} %, {near} within 15 %, worst {100 * max(errors):.0f} %"
    )


def scopes(found: Found) -> str:
    """CPU time of compiling and time of an update with a graph per block, over those with one graph
    of the step.
    """
    lines = []
    for case in found["cases"]:
        compiling = case["compile"]["blocks"]["cpu_s"] / case["compile"]["whole"]["cpu_s"]
        step = case["step_blocks_over_whole"]["median"]
        lines.append(
            f"{case['layers']} layers: compiling {compiling:.2f} ×, an update {step:.2f} ×"
        )
    return "; ".join(lines)


def siblings(found: Found) -> str:
    """Time of a captured update with fused siblings over one with separate ones, by width."""
    lines = []
    for precision in dict.fromkeys(case["precision"] for case in found["cases"]):
        those = [
            c for c in found["cases"] if c["mode"] == "captured" and c["precision"] == precision
        ]
        ratios = (
            f"{c['width']} {c['update']['fused_over_separate']['cpu']['median']:.2f} ×"
            for c in those
        )
        lines.append(f"{precision}: {', '.join(ratios)}")
    return "; ".join(lines)


def transfer(found: Found) -> str:
    """How far the best learning rate moves between the narrowest and the widest model, in factor-2
    steps.
    """
    widths = found["settings"]["widths"]
    steps = "; ".join(
        f"{drift['way']} {drift['steps']:+.1f}"
        if drift["bracketed"]
        else f"{drift['way']}: not within the rates tried"
        for drift in found["drifts"]
    )
    return f"from width {widths[0]} to {widths[-1]}, in steps of a factor of 2: {steps}"


def sweep_runs(found: Found) -> str:
    """How many times faster one command is than the single runs, and how far their losses are
    apart.
    """
    ratios, [case] = found["ratios"], found["cases"]
    apart = ratios["largest_loss_difference"]
    at_once = max(max(group["rounds"]) for group in case["sweep"]["groups"])
    return (
        f"{found['settings']['preset']}, {found['settings']['updates']:,} updates each: compile, start and report "
        f"included {ratios['compile_included']:.2f} ×, training alone {ratios['compile_excluded']:.2f} × "
        f"({'one after another' if at_once == 1 else f'{at_once} at once'}, which the sweep chose); held-out losses "
        f"{f'at most {apart:.0e} apart' if apart else 'equal'}"
    )


def stream(found: Found) -> str:
    """What lay on the device and on the host, and whether the numbers were the resident run's."""
    [case] = found["cases"]
    streamed, resident = case["resumed"], case["resident"]
    return (
        f"{streamed['parameters'] / 1e9:.2f} billion parameters in fp32: {streamed['device_bytes'] / 2**30:.2f} GiB on "
        f"the device, {streamed['home_bytes'] / 2**30:.0f} GiB on the host; losses and norms "
        f"{'have the bits' if found['equal_bits'] else 'DIFFER from those'} of the run without streaming; "
        f"{min(streamed['seconds']) / min(resident['seconds']):.1f} × its time per update (one thread)"
    )


def finetune(found: Found) -> str:
    """The share of unseen instances answered right, and the share that llama.cpp answers alike."""
    lines = []
    for case in found["cases"]:
        way = "all weights" if case["way"] == "full" else "adapters"
        right = f"{case['exact']:.0%} of {case['asked']} right, llama.cpp answers {case['agrees']:.0%} alike"
        lines.append(f"{way}: {right}, {case['wall_s']:.0f} s")
    return "; ".join(lines)


def adapters(found: Found) -> str:
    """Peak memory of the larger shape, by what is trained, and the planner's worst error where a
    plan was run.
    """
    large = [case for case in found["cases"] if case["model"] == "8b"]
    peaks = "; ".join(
        f"{case['way']} {case['peak_bytes']['none'] / 2**30:.1f} GiB" for case in large
    )
    errors = [abs(case["measured"]["error"]) for case in found["cases"] if case["measured"]]
    length = found["settings"]["length"]
    return f"8B, rows of {length:,} tokens: {peaks}; at worst {max(errors):.1%} off in {len(errors)} runs of 1B"


def adapter_peers(found: Found) -> str:
    """How many times as fast as each of PEFT's ways."""
    ratios = (
        (case["way"], case["monograph_is_faster"]["wall"]["median"]) for case in found["cases"][1:]
    )
    return "; ".join(f"{way} {ratio:.1f} ×" for way, ratio in ratios)


def ensemble(found: Found) -> str:
    """How many times faster N members are together than by the best other way, one thread."""
    lines = []
    for case in found["cases"]:
        if case["threads"] == 1:
            way, best = min(
                ((way, ratios["cpu"]["median"]) for way, ratios in case["faster_than"].items()),
                key=lambda each: each[1],
            )
            kind = "training" if case["train"] else "inference"
            loop = case["faster_than"]["loop"]["cpu"]["median"]
            lines.append(
                f"{case['name']}, N = {case['members']}, {kind}: loop {loop:.1f} ×, {way} {best:.1f} ×"
            )
    return "; ".join(lines)


def bottleneck(found: Found) -> str:
    """The predicted and the measured speedup of each change."""
    cases = [
        (case["case"], case["predicted"], case["measured"]["median"]) for case in found["cases"]
    ]
    return "; ".join(
        f"{name}: {predicted:.2f} × and {measured:.2f} ×" for name, predicted, measured in cases
    )


def ranks(found: Found) -> str:
    """Bytes per parameter at the peak of an update, here and in torch's engines, and the CPU time
    over theirs.
    """
    cases = [
        (f"{case['parallel']} on {case['ranks']}{', Muon' * (case['optim'] == 'muon')}",
         *(case[loop]["peak"] for loop in ("monograph", "torch")),
         case["slower"]["cpu"]["median"])
        for case in found["cases"] if case["parallel"] != "none"
    ]  # fmt: skip
    return "; ".join(
        f"{name}: {own:.1f} and {other:.1f} bytes, {cpu:.2f} ×" for name, own, other, cpu in cases
    )


# By script: what it measures, and the function that makes a sentence of its result.
ROWS: dict[str, tuple[str, Callable[[Found], str]]] = {
    "first_run": (
        "held-out bits per byte of a first model by [0.1.0's recipe](training.md#what-the-recipe-is-worth), two seeds "
        "(lower is better)",
        first_run,
    ),
    "steps": ("speed of a step as one graph, compared with eager mode, bf16", steps),
    "start": (
        "time to the first update with a warm compile cache, compared with a cold one",
        start,
    ),
    "gpu/train": (
        "training on a GPU, bf16, one document per row, compared with transformers' Trainer, compiled "
        "([how](gpu.md#measured-on-a-card))",
        train,
    ),
    "xeon/train_peers": (
        "training speed on a CPU with a fast MKL, compared with compiled peers, fp32, one thread ([how](peers.md))",
        train_peers,
    ),
    "train_peers": ("the same on a CPU with a slow MKL", train_peers),
    "now/time_to_quality": (
        "held-out bits per byte of a default run, compared with 0.1.0 and the best compiled peer at its best learning "
        "rate, mean over seeds (lower is better, [how](peers.md#quality-after-the-same-time))",
        time_to_quality,
    ),
    "time_to_quality": (
        "the same by 0.1.0's recipe, compared with more peers ([how](peers.md#quality-after-the-same-time))",
        time_to_quality,
    ),
    "generate_peers": (
        "speed of generation with temperature, top-k, top-p and min-p, compared with peers, fp32, one thread "
        "([how](generate.md#compared-with-others))",
        generate_peers,
    ),
    "serve": (
        "`serve` with 8 texts at once, compared with `generate` and llama.cpp's server, fp32, one thread "
        "([how](serve.md#measured))",
        serve,
    ),
    "sampler": (
        "extra time of a decode step for penalties and all usual filters, vocabulary 32,000",
        sampler,
    ),
    "remat": (
        "peak memory with an activation checkpointing budget spread over 12 blocks, compared with torch's budget for "
        "the whole graph, by the share of bytes kept (in brackets: CPU time of both, compared with keeping all, "
        "[how](memory.md#what-it-saves-and-what-it-costs))",
        remat,
    ),
    "plan": ("error of the planned peak memory on random models", plan),
    "regret": ("speed of the planned way to train, compared with the fastest that fits", regret),
    "bottleneck": (
        "speedup of nine changes: predicted by `monograph profile` and measured, one thread "
        "([how](profile.md#predicted-and-measured))",
        bottleneck,
    ),
    "ranks": (
        "`train.parallel`: peak bytes per parameter on a rank, here and with torch's DDP or FSDP2 in a plain loop, and "
        "CPU time compared with it; fp32 AdamW or Muon, a graph per block "
        "([how](distributed.md#what-a-rank-holds))",
        ranks,
    ),
    "scopes": ("`compile=blocks` compared with `whole`", scopes),
    "siblings": (
        "CPU time of an update with fused query-key-value and gate-up, compared with separate ones, by width, one "
        "thread "
        "([how](siblings.md))",
        siblings,
    ),
    "ensemble_peers": (
        "speed of N small models as one graph, compared with an eager loop and the best other way, one thread "
        "([how](ensemble.md#what-it-saves))",
        ensemble,
    ),
    "sweep_runs": (
        "speed of a sweep of 8 learning rates and 2 seeds, compared with 16 single runs "
        "([how](sweep.md#compared-with-single-runs))",
        sweep_runs,
    ),
    "stream": (
        "a streamed model, killed and resumed ([how](stream.md#measured))",
        stream,
    ),
    "finetune": (
        "unseen chats that a small finetuned model answers right, one thread ([how](finetune.md#measured))",
        finetune,
    ),
    "adapters": (
        "planned peak memory of all weights, and of adapters on 16, 8 and 4 bits ([how](lora.md#what-is-kept-where))",
        adapters,
    ),
    "adapter_peers": (
        "speed of adapters on packed conversations, compared with transformers and PEFT, fp32, one thread "
        "([how](lora.md#compared-with-peft))",
        adapter_peers,
    ),
    "transfer": (
        "how far the best learning rate of a wide model is from that of a narrow one ([how](transfer.md#measured))",
        transfer,
    ),
    "loss": (
        "chunked cross-entropy compared with dense logits, vocabulary 128,256, worst case",
        loss,
    ),
}
