"""Describe the results of benchmark scripts as tables in Markdown."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from measured_sentences import ROWS

from monograph.report.quantities import counted

# Cases of benchmarks/machine_code.py that launch kernels that are written by hand begin so.
OWN = "kernels written by hand,"
# How docs/gpu.md calls the parts of a training step's roofline.
ROOFLINE_PARTS = {
    "products": "products",
    "attention": "attention",
    "triton": "Triton's other kernels",
    "update": "update",
}
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
Found = dict[str, Any]  # a result file


def result(script: str) -> Found:
    """Return the result of a script of benchmarks/."""
    found: Found = json.loads((RESULTS / f"{script}.json").read_text())
    return found


def table() -> str:
    """Return one row per script, with the machine that it ran on."""
    lines = ["| measured | figure | machine, printed by |", "|---|---|---|"]
    for name, (what, sentence) in ROWS.items():
        path = f"benchmarks/{name.rpartition('/')[2]}.py"
        script, found = f"[{path}](../{path})", result(name)
        at = found["machine"]
        lines.append(
            f"| {what} | {sentence(found)} | {at['device']}, {at['cores']} cores, {script} |"
        )
    return "\n".join(lines)


CASES = {
    "overhead": "Smallest kernels, one micro-batch: 2 layers, 64 channels, vocabulary 256, 16 rows of 32",
    "overhead x4": "The same in four micro-batches of 4 rows",
    "compute": "Larger kernels: 4 layers, 192 channels, vocabulary 2,048, 8 rows of 128",
    "ragged": (
        "Ragged documents: the same model, 24 documents in micro-batches of 8 rows; Monograph packs them into 8 rows"
    ),
}
COLUMNS = (
    "trainer",
    "tokens/s",
    "tokens/CPU-s",
    "Monograph is",
    "in CPU time",
    "gradient error",
    "step MiB",
)


def peers(name: str) -> str:
    """Return one table for each case of a result of benchmarks/train_peers.py."""
    found = result(name)["cases"]
    lines = []
    for case, title in CASES.items():
        lines += [f"**{title}**", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [f"| {' | '.join(peer(entry))} |" for entry in found if entry["case"] == case] + [
            ""
        ]
    return "\n".join(lines[:-1])


def peer(entry: Found) -> list[str]:
    """Return a line of the table."""
    ratios = (entry[name] for name in ("ratio_wall", "ratio_cpu"))
    error = entry["gradient_error"]
    return [
        f"{entry['system']}, {entry['mode']}",
        *(f"{entry[name]['median']:,.0f}" for name in ("targets_per_wall_s", "targets_per_cpu_s")),
        *(f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})" for ratio in ratios),
        f"{error:.0e}" if error < 0.001 else f"{error:.0%}".replace("%", " %"),
        f"{entry['step_peak_bytes'] / 2**20:.1f}",
    ]


def quality(name: str = "time_to_quality") -> str:
    """Return one line for each system of a result of benchmarks/time_to_quality.py, the best first."""
    lines = [
        "| trainer | bits per byte | seeds | deviation | learning rate | million tokens |",
        "|---|---|---|---|---|---|",
    ]
    for case in sorted(result(name)["cases"], key=lambda case: float(case["mean"])):
        spread = "-" if case["deviation"] is None else f"{case['deviation']:.3f}"
        tried = f", best of {len(case['rates'])}" if len(case["rates"]) > 1 else ""
        rate = "its own" if case["lr"] is None else f"{case['lr']:g}{tried}"
        seeds = ", ".join(f"{bits:.3f}" for bits in case["bits_per_byte"])
        figures = [f"{case['mean']:.3f}", seeds, spread, rate, f"{case['tokens'] / 1e6:.2f}"]
        lines.append(
            f"| {' | '.join([case['system'].replace('before', 'monograph 0.1.0'), *figures])} |"
        )
    return "\n".join(lines)


def generating() -> str:
    """Return one line for each case and system of benchmarks/generate_peers.py."""
    lines = [
        "| system | tokens/s | ms of CPU per token | first token, ms | Monograph is | in CPU time | sampler's share |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in result("generate_peers")["cases"]:
        label = f"{entry['case']}: {entry['system']}"
        if "error" in entry:
            lines.append(f"| {label} | {entry['error']} | | | | | |")
            continue
        ratios = (entry[name] for name in ("ratio_wall", "ratio_cpu"))
        figures = [
            f"{entry['tokens_per_s']['median']:,.0f}",
            f"{1000 * entry['cpu_s_per_token']['median']:.2f}",
            f"{1000 * entry['first_token_s']['median']:.0f}",
            *(
                f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
                for ratio in ratios
            ),
            f"{entry['sampler_tax']['median']:.0%}".replace("%", " %"),
        ]
        lines.append(f"| {' | '.join([label, *figures])} |")
    return "\n".join(lines)


def serving(name: str = "serve") -> str:
    """Return one line for each load and server of benchmarks/serve.py, on a CPU or in "gpu/serve"."""
    lines = [
        "| load | server | tokens/s | first text, ms: p50, p99 | from text to text, ms: p50, p99 | 429 |",
        "|---" * 6 + "|",
    ]
    for case in result(name)["cases"]:
        if case["part"] != "latency":
            continue
        times = [
            [f"{1000 * case[name][at]:,.0f}" for at in ("p50", "p99")]
            for name in ("ttft_s", "itl_s")
        ]
        cells = [
            f"{case['tokens_per_s']['median']:,.0f}",
            *map(", ".join, times),
            str(case["refused"]),
        ]
        lines.append(f"| {' | '.join([case['load'], case['system'], *cells])} |")
    return "\n".join(lines)


def fusing() -> str:
    """Return one line for each case of benchmarks/siblings.py."""
    lines = [
        "| width | forward, separate, ms | fused over it | in CPU time | update, separate, ms | fused over it "
        "| in CPU time | peak memory | kept |",
        "|---" * 9 + "|",
    ]
    for case in result("siblings")["cases"]:
        cells = [f"{case['width']}, {case['precision']}, {case['mode']}"]
        for name in ("forward", "update"):
            cells.append(f"{case[name]['ms']['separate']['median']:.1f}")
            for ratio in (case[name]["fused_over_separate"][kind] for kind in ("wall", "cpu")):
                cells.append(f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})")
        peak = case["update_peak_bytes"]
        cells += [
            f"{peak['fused'] / peak['separate']:.2f} ×",
            "yes" if case["update"]["kept"] else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def launching() -> str:
    """Return what a step and a decode step launch and move, by benchmarks/launches.py."""
    lines = [
        "| model | rows x tokens | part | launches | products | moved by Triton | by attention | host waits |",
        "|---" * 8 + "|",
    ]
    for case in result("launches")["cases"]:
        for part, count in case["counts"].items():
            moved = [
                (count["triton_bytes"] + count["again_bytes"]) / 1e9,
                count["attention_bytes"] / 1e9,
            ]
            rows = f"{case['rows']} x {case['length']}" if part.startswith("micro-step") else ""
            cells = [case["case"], rows, part]
            cells += [
                f"{count['launches']:,.0f}" if not count["graphs"] else "1 graph",
                f"{count['cublas']:,.0f}",
            ]
            cells += [f"{gigabytes:.3g} GB" if gigabytes else "" for gigabytes in moved]
            lines.append(
                f"| {' | '.join([*cells, str(int(count['waits'] + count['waiting_copies']))])} |"
            )
    return "\n".join(lines)


def sharing_a_base() -> str:
    """Return one line for each case of benchmarks/shared_base.py."""
    found = result("shared_base")
    at = found["machine"]
    members = found["settings"]["members"]
    lines = [
        f"{members} sets of adapters, fp32, {at['device']}, {at['threads']} threads, a load of "
        f"{at['load_average']:.0f} before; the ratio of times, and of CPU times. Printed by "
        "[benchmarks/shared_base.py](../benchmarks/shared_base.py).",
        "",
        "| model | parameters | tokens of each | base | mode | one by one, s | at once, s | faster | in CPU time |",
        "|---" * 9 + "|",
    ]
    for case in found["cases"]:
        times = case["update_of_all_s"]
        cells = [
            case["shape"].partition(",")[0],
            f"{case['parameters'] / 1e6:.1f} M",
            f"{case['tokens_of_a_member']:,}",
            "fp32" if case["base"] == "auto" else case["base"],
            case["mode"],
            *(f"{times[side]['median']:.3g}" for side in ("one by one", "at once")),
        ]
        for kind in ("wall", "cpu"):
            ratio = case["speedup"][kind]
            cells.append(f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def launching_members() -> str:
    """Return what members on one base launch and move beside one, by benchmarks/members_launches.py."""
    lines = [
        "| base | members | launches | stored base, read | read by products | moved | over one by one |",
        "|---" * 7 + "|",
    ]
    for case in result("members_launches")["cases"]:
        alone = case["counts"]["1"]
        for members, counts in case["counts"].items():
            micro = counts["micro-step"]
            launches, of_one = (
                sum(part["launches"] for part in each.values()) for each in (counts, alone)
            )
            moved, moved_by_one = (_moved_bytes(each) for each in (counts, alone))
            cells = [
                case["case"],
                members,
                f"{launches:,.0f}" + ("" if members == "1" else f" ({launches / of_one:.2f} ×)"),
                *(
                    f"{micro[name] / 1e9:.3g} GB" if micro[name] else ""
                    for name in ("base_bytes_by_kernels", "base_bytes_by_products")
                ),
                f"{moved / 1e9:.3g} GB",
                "" if members == "1" else f"{moved / (int(members) * moved_by_one):.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _moved_bytes(counts: Found) -> float:
    """Return what a micro-step and an update of benchmarks/members_launches.py read and write."""
    names = ("triton_bytes", "again_bytes", "attention_bytes", "product_bytes")
    return float(sum(part.get(name, 0) for part in counts.values() for name in names))


def freezing() -> str:
    """Return what a decode step of a frozen base in few bits launches and moves, by the kernels for it
    and by the model's own forward pass, by benchmarks/launches.py.
    """
    [case] = result("launches_frozen")["cases"]
    counts = case["counts"]
    lines = [
        "| 1b, one row | weights | launches | moved | by its own forward pass: launches | moved |",
        "|---" * 6 + "|",
    ]
    for part, count in counts.items():
        own = counts.get(f"{part}, own forward pass")
        if own is None:
            continue
        cells = [part, f"{count['weight_bytes'] / 1e9:.3g} GB"]
        for of in (count, own):
            moved = of["product_bytes"] + of["triton_bytes"] + of["again_bytes"]
            share = moved / of["weight_bytes"]
            cells += [f"{of['launches']:,.0f}", f"{share:.3g} x the weights"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def banking() -> str:
    """Return what a decode step of rows with their own adapters launches and moves, by the kernels and by
    the model's own forward pass, by benchmarks/launches.py.
    """
    [case] = result("launches_bank")["cases"]
    lines = [
        "| 1b | weights | launches | of a layer | moved | by its own forward pass: launches | of a layer | moved |",
        "|---" * 8 + "|",
    ]
    for part, count in case["counts"].items():
        if part.endswith("own forward pass"):
            continue
        cells = [part, f"{count['weight_bytes'] / 1e9:.3g} GB"]
        for name in (part, f"{part}, own forward pass"):
            of = case["counts"].get(name)
            if of is None:
                cells += [""] * 3
                continue
            moved = of["product_bytes"] + of["triton_bytes"] + of["again_bytes"]
            cells += [
                f"{of['launches']:,.0f}",
                f"{case['launches_of_a_layer'][name]:.0f}",
                f"{moved / of['weight_bytes']:.3g} x the weights",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def limiting() -> str:
    """Return the roofline of benchmarks/launches.py by card, without and with what torch's own kernels
    move.
    """
    cards = list(result("launches")["cases"][0]["roofline"])
    lines = [f"| model | {' | '.join(cards)} |", "|---" * (len(cards) + 1) + "|"]
    for case in result("launches")["cases"]:
        if "roofline" not in case:  # only its decode step is counted
            continue
        times = (case["roofline"][card] for card in cards)
        cells = (f"{each['mfu']:.1%}, {each['mfu_with_torch']:.1%}" for each in times)
        lines.append(f"| {case['case']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def lasting() -> str:
    """Return the milliseconds that the roofline of benchmarks/launches.py gives to steps and parts of
    decoding, by card.
    """
    found = result("launches")["cases"]
    cards = list(found[0]["roofline"])
    lines = [f"| model | part | {' | '.join(cards)} |", "|---" * (len(cards) + 2) + "|"]
    for case in found:
        roofline = case.get("roofline", {})
        for part in ("products", "attention", "triton", "update") if roofline else ():
            cells = (milliseconds(roofline[card][part]) for card in cards)
            lines.append(f"| {case['case']} | {ROOFLINE_PARTS[part]} | {' | '.join(cells)} |")
        for part, count in case["counts"].items():
            if f"seconds {cards[0]}" not in count:
                continue
            cells = (milliseconds(1e3 * count[f"seconds {card}"]) for card in cards)
            lines.append(f"| {case['case']} | {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(time_ms: float) -> str:
    """Return a time with three digits, or with those before the point."""
    return f"{time_ms:,.0f} ms" if time_ms >= 100 else f"{time_ms:.3g} ms"


def answering() -> str:
    """Return how long a step takes in which members sample their answers, and how many times as long as
    one member's, by the roofline of benchmarks/launches.py.
    """
    [case] = result("launches_members")["cases"]
    members, answers = case["members"], case["answers"]
    lines = [
        "| positions of a row | card | one member | launches | moved | "
        f"{members} members | launches | moved | times one | times one in a run of its own |",
        "|---" * 10 + "|",
    ]
    for positions, by_card in case["ratios"].items():
        for card, ratios in by_card.items():
            cells = [positions, card]
            for count in (1, members):
                of = case["counts"][f"{count} x {answers} answers, {positions} positions"]
                moved = of["product_bytes"] + of["triton_bytes"] + of["again_bytes"]
                cells += [
                    milliseconds(1e3 * of[f"seconds {card}"]),
                    f"{of['launches']:,.0f}",
                    f"{moved / 1e9:.3g} GB",
                ]
            cells += [f"{ratios['one']:.2f}", f"{ratios['own_run']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def assembling() -> str:
    """Return what the machine code of each case needs by card, by benchmarks/machine_code.py."""
    cases = [case for case in result("machine_code")["cases"] if not case["case"].startswith(OWN)]
    cards = sorted({case["sm"] for case in cases})
    lines = [
        f"| what is compiled | {' | '.join(f'sm_{card}' for card in cards)} |",
        "|---" * (len(cards) + 1) + "|",
    ]
    for name in dict.fromkeys(case["case"] for case in cases):
        of_card = {case["sm"]: assembled(case) for case in cases if case["case"] == name}
        lines.append(f"| {name} | {' | '.join(of_card.get(card, 'not run') for card in cards)} |")
    return "\n".join(lines)


def assembled(case: Found) -> str:
    """Return the most registers that a kernel of the case needs, and the most bytes that one
    spills, if any does.
    """
    if "refused" in case:
        return "refused"
    kinds = case["kernels"].values()
    if case["eager"] or not kinds:
        return "eager" if case["eager"] else f"{len(case['parts'])} captured"
    spilled = max(kind["spilled_bytes"] for kind in kinds)
    return needed(max(kind["registers"] for kind in kinds), spilled)


def needed(registers: int, spilled_bytes: int) -> str:
    """Return a cell: the registers, and the spilled bytes if there are any."""
    return f"{registers}, {spilled_bytes:,} B" if spilled_bytes else str(registers)


def assembling_own() -> str:
    """Return what the machine code of each kernel that is written by hand needs by card."""
    cases = {
        (case["case"].removeprefix(OWN).strip(), case["sm"]): case["kernels"]
        for case in result("machine_code")["cases"]
        if case["case"].startswith(OWN) and "refused" not in case
    }
    cards = sorted({card for _, card in cases})
    lines = [
        f"| kernel | sizes of | {' | '.join(f'sm_{card}' for card in cards)} |",
        "|---" * (len(cards) + 2) + "|",
    ]
    for name, model in sorted({(name, model) for (model, _), of in cases.items() for name in of}):
        cells = []
        for card in cards:
            needs = cases.get((model, card), {}).get(name)
            missing = "does not fit" if (model, card) in cases else "not run"
            cells.append(needed(needs["registers"], needs["spilled_bytes"]) if needs else missing)
        lines.append(f"| `{name.removeprefix('_')}` | {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def taking() -> str:
    """Return how far predicted peaks are from the allocator's on a pretended card, by
    benchmarks/plan.py.
    """
    lines = ["| step | configurations | worst | median |", "|---|---|---|---|"]
    of_steps = {
        name: of for name, of in result("plan_pretended")["summary"].items() if isinstance(of, dict)
    }
    for name, of in of_steps.items():
        lines.append(f"| {name} | {of['cases']} | {of['worst']:.1%} | {of['median']:.1%} |")
    return "\n".join(lines)


def timing() -> str:
    """Return where the time of a step went on a card, by benchmarks/kernels.py, under what was
    expected of it.
    """
    expected = {case["case"]: case for case in result("launches")["cases"]}
    lines = [
        "| model | rows x tokens | time | products | attention | other kernels | copies | nothing |",
        "|---" * 8 + "|",
    ]
    for case in result("gpu/kernels")["cases"]:
        if case["case"] not in expected or "error" in case:
            continue
        counted, took, rows = (
            expected[case["case"]],
            case["milliseconds"],
            f"{case['rows']} x {case['length']}",
        )
        share = case["rows"] * case["length"] / (counted["rows"] * counted["length"])
        roof = counted["roofline"]["H200"]
        least = (
            share * roof["products"],
            share * roof["attention"],
            share * roof["triton"] + roof["update"],
        )
        lines.append(
            f"| {case['case']} | {rows} | expected | {' | '.join(f'{ms:.1f} ms' for ms in least)} | | |"
        )
        kinds = ("products", "attention", "others", "copies", "nothing")
        lines.append(f"| | | measured | {' | '.join(f'{took[kind]:.1f} ms' for kind in kinds)} |")
    return "\n".join(lines)


def decoding_on_a_card() -> str:
    """Return the tokens a second of each system on a card, by benchmarks/generate_peers.py."""
    lines = [
        "| 1B in bf16, 256 tokens a row | tokens/s | Monograph is | first token | share of a copy's rate |",
        "|---" * 5 + "|",
    ]
    for case in result("gpu/generate")["cases"]:
        if "error" in case:
            continue
        ratio = case["ratio_wall"]
        lines.append(
            f"| {case['case'].removeprefix('1b, ')}: {case['system']} | {case['tokens_per_s']['median']:,.0f} "
            f"| {ratio['median']:.2f} × ({ratio['low']:.2f}-{ratio['high']:.2f}) "
            f"| {1000 * case['first_token_s']['median']:.1f} ms | {case['copy_share']:.0%} |"
        )
    return "\n".join(lines)


def ensembles_on_a_card() -> str:
    """Return how many times faster an ensemble was on a card, by benchmarks/ensemble_peers.py."""
    ways = {
        "loop": "eager loop",
        "compiled loop": "compiled loop",
        "graphed compiled loop": "the same, captured",
        "torch.func": "`torch.func`",
        "compiled torch.func": "compiled",
        "graphed torch.func": "compiled and captured",
    }
    lines = [
        f"| an ensemble is so many times faster than | {' | '.join(ways.values())} |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for case in result("gpu/ensemble")["cases"]:
        kind = "training" if case["train"] else "inference"
        found = [f"{case['faster_than'][way]['wall']['median']:.3g}" for way in ways]
        lines.append(f"| {case['name']}, N = {case['members']}, {kind} | {' | '.join(found)} |")
    return "\n".join(lines)


def streaming_on_a_card() -> str:
    """Return how fast streamed training was on a card, by benchmarks/stream_speed.py."""
    lines = [
        "| 1.24 billion parameters, bf16 | tokens of an update | tokens/s | MFU | peak | copied in and out |",
        "|---" * 6 + "|",
    ]
    for case in result("gpu/stream_speed")["cases"]:
        name = "resident" if case["way"] == "resident" else "streamed"
        for size in case["updates"].values():
            moved_bytes = size["moved_bytes"]["in"] + size["moved_bytes"]["out"]
            lines.append(
                f"| {name} | {size['tokens']:,} | {size['tokens_per_s']:,.0f} | {size['mfu']:.1%} "
                f"| {size['peak_memory_bytes'] / 2**30:.1f} GiB | {moved_bytes / 1e9:.1f} GB |"
            )
    return "\n".join(lines)


def carrying() -> str:
    """Return the losses of every rate at every width of benchmarks/transfer.py, and their vertices."""
    found = result("transfer")
    rates = [f"2^{math.log2(rate):.0f}" for rate in found["settings"]["rates"]]
    lines = [
        f"| optimizer, head, rule | width | {' | '.join(rates)} | vertex |",
        "|---|---|" + "---|" * (len(rates) + 1),
    ]
    for case in found["cases"]:
        means = [statistics.mean(losses) for losses in case["losses"]]
        shown = [f"**{mean:.3f}**" if mean == min(means) else f"{mean:.3f}" for mean in means]
        place = f"2^{case['vertex_log2']:.1f}" if case["bracketed"] else "outside"
        lines.append(f"| {case['way']} | {case['width']} | {' | '.join(shown)} | {place} |")
    return "\n".join(lines)


def changing() -> str:
    """Return one line for each change of benchmarks/bottleneck.py."""
    found = result("bottleneck")
    lines = [
        "| change | limited by | predicted | measured (lowest to highest round) | off |",
        "|---" * 5 + "|",
    ]
    for case in found["cases"]:
        predicted, measured = case["predicted"], case["measured"]
        spread = f"{measured['median']:.2f} × ({measured['low']:.2f}-{measured['high']:.2f})"
        off = f"{predicted / measured['median'] - 1:+.0%}".replace("%", " %")
        lines.append(
            f"| {case['case']} | {case['bound_by']} | {predicted:.2f} × | {spread} | {off} |"
        )
    return "\n".join(lines)


def sharing() -> str:
    """Return one line for each number of ranks of benchmarks/ranks.py."""
    found = result("ranks")
    theirs = "torch's loop"
    head = [
        "engine",
        "held",
        theirs,
        "at the peak of an update",
        theirs,
        "sent in one",
        theirs,
        f"CPU time over {theirs}",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * 8 + "|"]
    for case in found["cases"]:
        name = (
            "one device"
            if case["parallel"] == "none"
            else f"`{case['parallel']}`, {case['ranks']} ranks"
        )
        name += ", Muon" * (case["optim"] == "muon")
        kinds = ("held", "peak", "sent")
        cells = [f"{case[loop][kind]:.1f}" for kind in kinds for loop in ("monograph", "torch")]
        cpu = case["slower"]["cpu"]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {cpu['median']:.2f} × ({cpu['low']:.2f}-{cpu['high']:.2f}) |"
        )
    return "\n".join(lines)


def sweeping() -> str:
    """Return the times of both sides of benchmarks/sweep_runs.py."""
    found = result("sweep_runs")
    [case], at = found["cases"], found["machine"]
    singles, sweep = case["single"], case["sweep"]
    [group] = sweep["groups"]
    lines = [
        f"{found['settings']['preset']}, 8 learning rates and 2 seeds, {found['settings']['updates']:,} updates each, "
        f"{at['device']}, {at['cores']} cores, printed by [benchmarks/sweep_runs.py](../benchmarks/sweep_runs.py). "
        f"The sweep found: {group['why']}.",
        "",
        f"| time of | {len(singles)} single runs | one sweep | ratio |",
        "|---|---|---|---|",
    ]
    for name, key in (
        ("compile, start, evaluation and report included", "wall_s"),
        ("training alone", "training_s"),
    ):
        total = sum(run[key] for run in singles)
        lines.append(
            f"| {name} | {total:.0f} s | {sweep[key]:.0f} s | {total / sweep[key]:.2f} × |"
        )
    return "\n".join(lines)


def climbing() -> str:
    """Return one line for each rung of benchmarks/ladder.py."""
    found = result("ladder")
    at, asked = found["machine"], found["settings"]
    where = f"{at['device']}, {at['cores']} cores, {counted(at['threads'], 'thread')}"
    lines = [
        f"{asked['preset']}, {asked['params'] / 1e6:.2f} M parameters, {asked['updates']} updates of "
        f"{asked['tokens_per_update']:,} tokens, {where}, {counted(asked['rounds'], 'round')}:",
        "",
        "| rung | over | tokens/CPU-s | speed (lowest to highest) | peak memory, MiB | memory | held-out loss |",
        "|---" * 7 + "|",
    ]
    for case in found["cases"]:
        if case["obstacle"]:
            lines.append(
                f"| {case['rung']} | {case['over']} | not here: {case['obstacle']} | | | | |"
            )
            continue
        ratio = case["times"]["cpu"] if "times" in case else None
        speed = f"{ratio['median']:.2f} × ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else ""
        saved = f"{case['memory_times']:.2f} ×" if case["memory_times"] else ""
        lines.append(
            f"| {case['rung']} | {case['over'] or ''} | {case['tokens_per_cpu_s']['median']:,.0f} | {speed} "
            f"| {case['peak_memory_bytes'] / 2**20:.1f} | {saved} | {case['eval_loss']:.3f} |"
        )
    return "\n".join(lines)
