"""Measure `monograph serve` beside `generate` in a process, and beside llama.cpp's server with the
same weights.

Five parts, on one random model whose texts never end early. All servers stay up, take turns with
the same requests (ids, seeds, filters), and share the cores with the client, whose own CPU time is
told.

    overhead    as many requests as rows at once, compared with one `generate` of them, which compiles only what is
                worth it, and with a step that stays compiled; Monograph's come whole and as
                streams, others as streams
    latency     streams: one client, as many as rows and twice as many, eight times as many who ask once, then Poisson
                arrivals at the rate at which the first server answered as many clients as rows, and
                at twice that rate; from when a request was due
    rate        answers of one token per second, by as many clients as rows
    storm       streams: 8 clients, then 32, each of whom asks again as soon as it has its answer
    compared    Monograph's numbers over those of each other server

With --before SRC, the folder `src` of another checkout, its server is one of the others.

Words are vLLM's: TTFT is the time to the first text, ITL from text to text, TPOT (E2EL - TTFT) /
(tokens - 1), E2EL the time to the end. A 429 is counted and not asked again. llama.cpp's server is
that of the package `xllamacpp`, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from generate_peers import SMALL, shape
from generators import CHAIN, task
from loads import Server, closed_loop, counted, free_port, loaded, open_loop, started, times_of
from peer_llama import ORDER
from peer_llama import serve as serve_llama
from rounds import Child, ChildFailed

import monograph as mono
from monograph.decode import Generation, Sampling
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.device import clock, default_device

OURS, BEFORE, LLAMA = "monograph", "monograph before", "llama-server, "
SERVERS = [OURS, f"{LLAMA}f32", f"{LLAMA}f16"]
COMMAND = [sys.executable, "-m", "monograph", "serve"]
GOAL = 1.03
Body = dict[str, Any]


# ── what is compared ──────────────────────────────────────────────────────────────────────────────


def start(args: Namespace, name: str, home: Path) -> Server:
    """Start a server and wait until it answers.

    Raises:
        ChildFailed: it ended, or was not up in time.
    """
    if name.startswith(LLAMA):
        return start_llama(args, home / name.removeprefix(LLAMA))
    port = free_port()
    command = [*COMMAND, str(home / "hf"), "--port", str(port), "--rows", str(args.rows)]
    source = args.before if name == BEFORE else harness.ROOT / "src"
    return started(command, f"http://127.0.0.1:{port}", args.threads, home / f"{name}.log", source)


def start_llama(args: Namespace, folder: Path) -> Server:
    """Start llama.cpp's server on a folder's GGUF file in a process of its own."""
    child = Child([__file__, "--llama", str(folder / "model.gguf"), *args.sizes], args.threads, {})
    own_fields = {"model": "", "samplers": ORDER, "cache_prompt": False}
    return Server(child.answer()["address"], child.process.pid, own_fields, child.end)


def generate(args: Namespace, folder: str) -> None:
    """Generate in this process whenever stdin asks for it: by `generate`, or by a step that stays
    compiled.
    """
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(args.threads)
    model, tokenizer = mono.load(folder)
    model.to(default_device())
    kept: Generator | None = None
    answer: dict[str, Any] = {}
    while True:
        print(json.dumps(answer), file=reply, flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        order = json.loads(line)
        prompts = [body["prompt"] for body in order["bodies"]]
        samplings = [Sampling(**CHAIN, seed=body["seed"]) for body in order["bodies"]]
        tokens, ends = order["bodies"][0]["max_tokens"], (tokenizer.eos_id,)
        wall, cpu = clock(), time.process_time()
        if order["compiled"]:
            kept = kept or Generator(
                model, chain_of(samplings, len(ends)), rows=args.rows, slots=args.slots,
                vocabulary=tokenizer.vocab_size, mode="compiled",
            )  # fmt: skip
            pairs = zip(prompts, samplings, strict=True)
            requests = [
                Request(tuple(prompt), sampling, tokens, ends) for prompt, sampling in pairs
            ]
            done = list(Generation(kept, requests, tokenizer, [], n=1))
        else:
            done = list(mono.generate(model, tokenizer, prompts, samplings, max_tokens=tokens))
        answer = {"wall_s": clock() - wall, "cpu_s": time.process_time() - cpu}
        answer |= {
            "texts": [each.text for each in done],
            "tokens": sum(len(each.token_ids) for each in done),
        }


# ── requests and rounds ───────────────────────────────────────────────────────────────────────────


def bodies(args: Namespace, first: int, count: int, tokens: int, streamed: bool) -> list[Body]:
    """Return requests `first`, `first` + 1, ...: each has its own prompt and seed, so that none is
    known.
    """
    found = []
    for number in range(first, first + count):
        # After the 3 special tokens and the 256 bytes come pieces of printable ASCII.
        ids = random.Random(number).choices(
            range(259, args.config.vocab_size), k=args.prompt_tokens - 1
        )
        found.append({"prompt": [0, *ids], "max_tokens": tokens, "seed": number, **CHAIN})
        if streamed:
            found[-1] |= {"stream": True, "stream_options": {"include_usage": True}}
    return found


def overhead(args: Namespace, servers: dict[str, Server], home: Path) -> list[dict[str, Any]]:
    """Return the cases of as many requests as rows, by `generate` and through each server, whole
    and streamed.
    """
    child = Child([__file__, "--generate", str(home / "hf"), *args.sizes], args.threads, {})
    child.answer()

    ways = {"generate": ("generate", "")}
    if default_device().type == "cpu":  # on a GPU, compiling takes longer than all that is measured
        ways["compiled"] = "generate", "compiled"
    ways |= {
        f"{name}, {how}": (name, how)
        for name in servers
        for how in ("whole", "streamed")[name != OURS :]
    }

    def run(way: str, first: int, tokens: int) -> dict[str, Any]:
        name, how = ways[way]
        asked = bodies(args, first, args.rows, tokens, how == "streamed")
        if name in servers:
            return loaded(servers[name], closed_loop, asked, args.rows)
        found = child.ask(bodies=asked, compiled=how == "compiled")
        return found | {"answered": found["texts"], "refused": 0, "failed": [], "client_cpu_s": 0.0}

    for way in ways:
        run(way, 0, min(args.tokens, 16))
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for way in harness.turns(ways, args.rounds):
        rounds[way].append(run(way, args.rows * (1 + len(rounds[way])), args.tokens))
    child.end()
    base = rounds["generate"]
    found = []
    for way, ours in rounds.items():
        pairs = list(zip(ours, base, strict=True))
        same = [
            a == b
            for one, other in pairs
            for a, b in zip(one["texts"], other["texts"], strict=True)
        ]
        found.append(
            {"part": "overhead", "system": ways[way][0], "how": ways[way][1]}
            | counted(ours)
            | {
                "cpu_s_per_token": harness.spread(
                    [each["cpu_s"] / max(each["tokens"], 1) for each in ours]
                ),
                "over_wall": harness.spread(
                    [one["wall_s"] / other["wall_s"] for one, other in pairs]
                ),
                "over_cpu": harness.spread([one["cpu_s"] / other["cpu_s"] for one, other in pairs]),
                "same_text": sum(same) / len(same),
            }
        )
    return found


def latency(args: Namespace, servers: dict[str, Server], home: Path) -> list[dict[str, Any]]:
    """Return the cases of each load on each server."""
    found, rows, first, per_s = list[dict[str, Any]](), args.rows, 10**6, 0.0
    closed = [
        ("idle", 1, args.idle),
        ("rows closed", rows, 3 * rows),
        ("2 x rows closed", 2 * rows, 4 * rows),
    ]
    closed.append(("8 x rows at once", 8 * rows, 8 * rows))
    opened = [("1 x rate open", 1, 3 * rows), ("2 x rate open", 2, 6 * rows)]
    for load, times, count in [*closed, *opened]:
        arrivals_per_s = times * per_s if load.endswith("open") else None
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for name in harness.turns(servers, args.rounds):
            asked = bodies(
                args, first + count * len(rounds[name]), count, args.latency_tokens, True
            )
            how = (
                (closed_loop, asked, times)
                if arrivals_per_s is None
                else (open_loop, asked, arrivals_per_s, times)
            )
            rounds[name].append(loaded(servers[name], *how))
        first += count * args.rounds
        for name, each in rounds.items():
            outcomes = [one for a_round in each for one in a_round["answered"]]
            case = {
                "part": "latency",
                "system": name,
                "load": load,
                "arrivals_per_s": arrivals_per_s,
            }
            found.append(case | counted(each) | times_of(outcomes))
        if load == "rows closed":
            per_s = np.median(
                [len(one["answered"]) / one["wall_s"] for one in rounds[next(iter(servers))]]
            ).item()
        print(f"{load} is measured", file=sys.stderr, flush=True)
    return found


def rate(args: Namespace, servers: dict[str, Server], home: Path) -> list[dict[str, Any]]:
    """Return the cases of requests for one token."""
    count, first = args.rows * args.each, 2 * 10**6
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for name in harness.turns(servers, args.rounds):
        asked = bodies(args, first + count * len(rounds[name]), count, 1, False)
        rounds[name].append(loaded(servers[name], closed_loop, asked, args.rows))
    return [
        {"part": "rate", "system": name}
        | counted(each)
        | {
            "requests_per_s": harness.spread(
                [len(one["answered"]) / one["wall_s"] for one in each]
            ),
            "cpu_s_per_request": harness.spread([one["cpu_s"] / count for one in each]),
        }
        for name, each in rounds.items()
    ]


def storm(args: Namespace, servers: dict[str, Server], home: Path) -> list[dict[str, Any]]:
    """Return the cases of 8 and of 32 clients, who ask twice each in a round."""
    found = list[dict[str, Any]]()
    first = 3 * 10**6
    for clients in args.clients:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for name in harness.turns(servers, args.rounds):
            asked = bodies(
                args,
                first + 2 * clients * len(rounds[name]),
                2 * clients,
                args.latency_tokens,
                True,
            )
            rounds[name].append(loaded(servers[name], closed_loop, asked, clients))
        first += 2 * clients * args.rounds
        for name, each in rounds.items():
            outcomes = [one for a_round in each for one in a_round["answered"]]
            case = {
                "part": "storm",
                "system": name,
                "load": f"{clients} clients",
                "arrivals_per_s": None,
            }
            found.append(case | counted(each) | times_of(outcomes))
    return found


# ── what is printed ───────────────────────────────────────────────────────────────────────────────


def compared(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many times as fast Monograph's server is as each other one, number by number."""

    def place(case: dict[str, Any]) -> tuple[Any, ...]:
        return case["part"], case.get("how"), case.get("load")

    found: list[dict[str, Any]] = []
    ours = {place(case): case for case in cases if case["system"] == OURS and "answered" in case}
    for case in cases:
        mine = ours.get(place(case))
        if mine is None or not case["system"].startswith((LLAMA, BEFORE)):
            continue
        ratios: dict[str, list[float]] = {}
        if case["part"] in ("latency", "storm"):
            if case["part"] == "storm":
                pairs = zip(
                    mine["tokens_per_s"]["values"], case["tokens_per_s"]["values"], strict=True
                )
                ratios[f"tokens/s, {case['load']}"] = [own / theirs for own, theirs in pairs]
            for word, share in TIMES:
                # 0 if most events share their packets.
                if mine[word] and case[word] and mine[word][share]:
                    label = f"{word.removesuffix('_s').upper()} {share}, {case['load']}"
                    ratios[label] = [case[word][share] / mine[word][share]]
        else:
            label, key = RATES[case["part"]]
            pairs = zip(mine[key]["values"], case[key]["values"], strict=True)
            ratios[f"{label} {case.get('how', '')}".strip()] = [
                own / theirs for own, theirs in pairs if theirs
            ]
        for what, values in ratios.items():
            found.append(
                {
                    "part": "compared",
                    "system": case["system"],
                    "what": what,
                    "times": harness.spread(values),
                }
            )
    return found


def tables(found: dict[str, Any]) -> None:
    """Print what was measured, part by part."""
    cases, settings = found["cases"], found["settings"]
    for case in cases:
        if case.get("error"):
            print(f"{case['system']}, {case['part']}: {case['error'][:200]}")
    titles = {
        "overhead": f"{settings['rows']} requests of {settings['tokens']} tokens at once; time and CPU over generate's",
        "latency": f"Streams of {settings['latency_tokens']} tokens; milliseconds, p50/p90/p99 of all rounds' requests",
        "rate": "Requests for one token",
        "storm": f"As latency: clients who ask at once and again and again, {settings['latency_tokens']} tokens each",
    }
    for part, title in titles.items():
        if rows := [case for case in cases if case["part"] == part]:
            print(f"\n{title}")
            cells = [[cell for _, cell in COLUMNS[part](case)] for case in rows]
            harness.print_table([header for header, _ in COLUMNS[part](rows[0])], cells)
    lines: dict[str, dict[str, str]] = {}
    for case in cases:
        if case["part"] == "compared":
            middle = case["times"]["median"]
            verdict = "faster" if middle > 1.02 else "slower" if middle < 0.98 else "level"
            lines.setdefault(case["what"], {})[case["system"]] = f"{middle:.2f} {verdict}"
    if lines:
        print("\nMonograph is so many times as fast as")
        others = list(next(iter(lines.values())))
        harness.print_table(
            ["", *others],
            [[what, *(each.get(other, "-") for other in others)] for what, each in lines.items()],
        )


def overhead_columns(case: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the headers and cells of a line."""
    return [
        ("", f"{case['system']} {case['how']}"),
        ("tokens/s", f"{case['tokens_per_s']['median']:,.0f}"),
        ("ms CPU/token", f"{1000 * case['cpu_s_per_token']['median']:.2f}"),
        ("time", harness.shown(case["over_wall"], 3)),
        ("CPU", harness.shown(case["over_cpu"], 3)),
        ("goal", f"{GOAL}" if case["system"] == OURS else "-"),
        ("same text", f"{case['same_text']:.0%}"),
        *counts(case),
    ]


def latency_columns(case: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the headers and cells of a line."""
    times = [
        (
            word,
            "/".join(f"{1000 * value:.1f}" for value in case[key].values()) if case[key] else "-",
        )
        for word, key in (
            ("TTFT", "ttft_s"),
            ("ITL", "itl_s"),
            ("TPOT", "tpot_s"),
            ("E2EL", "e2el_s"),
        )
    ]
    arrivals = f"{case['arrivals_per_s']:.1f}" if case["arrivals_per_s"] else "-"
    tokens = ("tokens/s", f"{case['tokens_per_s']['median']:,.0f}")
    return [
        ("", f"{case['load']}: {case['system']}"),
        ("arrivals/s", arrivals),
        *times,
        tokens,
        *counts(case),
    ]


def rate_columns(case: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the headers and cells of a line."""
    return [
        ("", case["system"]),
        ("requests/s", f"{case['requests_per_s']['median']:,.0f}"),
        ("ms CPU/request", f"{1000 * case['cpu_s_per_request']['median']:.2f}"),
        *counts(case),
    ]


def counts(case: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the headers and cells that all lines have."""
    share = f"{case['client_share']['median']:.0%}"
    return [("answered", f"{case['answered']}"), ("429", f"{case['refused']}"), ("failed", f"{case['failed']}"),
            ("client", share)]  # fmt: skip


COLUMNS = {
    "overhead": overhead_columns,
    "latency": latency_columns,
    "rate": rate_columns,
    "storm": latency_columns,
}
TIMES = [
    ("ttft_s", "p50"),
    ("ttft_s", "p99"),
    ("itl_s", "p50"),
    ("itl_s", "p99"),
    ("e2el_s", "p50"),
]
RATES = {"overhead": ("tokens/s", "tokens_per_s"), "rate": ("requests/s", "requests_per_s")}


PARTS = {"overhead": overhead, "latency": latency, "rate": rate, "storm": storm}


def parse() -> Namespace:
    """Return the arguments, and in `args.sizes` those that a process of this script needs."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument(
        "--before", type=Path, metavar="SRC", help="the package's folder in another checkout"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the arithmetic of each server")
    parser.add_argument(
        "--rows", type=int, default=8, help="requests that a server answers at once"
    )
    parser.add_argument(
        "--cores", type=lambda text: {int(core) for core in text.split(",")}, help="for all, as 0,1"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="of an answer, in the part overhead"
    )
    parser.add_argument(
        "--latency-tokens", type=int, default=32, help="of an answer, in the part latency"
    )
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--idle", type=int, default=8, help="requests of the one client in a round")
    parser.add_argument(
        "--each", type=int, default=25, help="requests for one token, times rows, in a round"
    )
    parser.add_argument("--generate", metavar="FOLDER", help="`generate`'s own process")
    parser.add_argument("--llama", metavar="FILE", help="llama.cpp's server's own process")
    args = parser.parse_args()
    args.config = SMALL
    args.clients = [8, 32]
    if args.before:
        args.servers = [OURS, BEFORE, *(name for name in args.servers if name != OURS)]
    if args.smoke:
        args.clients = [2]
        args.config, args.rounds, args.rows, args.idle, args.each = shape(2, 64, 512), 2, 2, 2, 2
        args.tokens, args.latency_tokens, args.prompt_tokens = 8, 8, 8
    args.sizes = ["--smoke"] if args.smoke else []
    args.slots = args.prompt_tokens + max(args.tokens, args.latency_tokens)
    for name in ("rows", "threads", "tokens", "latency_tokens", "prompt_tokens"):
        args.sizes += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return args


def measure(args: Namespace, home: Path, found: dict[str, Any]) -> None:
    """Start the servers, add the cases of all parts, and end the servers."""
    made = task(args.config, args.rows, args.tokens, args.threads, torch.float32)
    mono.save(made.model, home / "hf", tokenizer=made.tokenizer)
    servers: dict[str, Server] = {}
    try:
        for name in args.servers:
            case: dict[str, Any] = {"part": "start", "system": name}
            if name.startswith(LLAMA) and importlib.util.find_spec("xllamacpp") is None:
                found["cases"].append(case | {"error": "not measured: xllamacpp missing"})
                continue
            if name.startswith(LLAMA):
                dtype = name.removeprefix(LLAMA)
                mono.save(
                    made.model, home / dtype, tokenizer=made.tokenizer, format="gguf", dtype=dtype
                )
            try:
                servers[name] = start(args, name, home)
                print(f"{name} is up", file=sys.stderr, flush=True)
            except ChildFailed as error:
                found["cases"].append(
                    case | {"error": f"not measured: {error.args[0]}", "stderr": error.args[1]}
                )
        for part in args.parts if servers else ():
            found["cases"] += PARTS[part](args, servers, home)
            harness.write(args.out, found)
            print(f"{part} is measured", file=sys.stderr, flush=True)
    finally:
        for server in servers.values():
            server.end()
    found["cases"] += compared(found["cases"])


def main() -> None:
    """Measure and print; see `--help`."""
    args = parse()
    if args.llama:
        return serve_llama(args.llama, args.rows, args.slots, args.threads)
    if args.generate:
        return generate(args, args.generate)
    if args.cores:
        os.sched_setaffinity(0, args.cores)
    torch.set_num_threads(args.threads)
    names = (
        "parts",
        "rounds",
        "threads",
        "rows",
        "tokens",
        "latency_tokens",
        "prompt_tokens",
        "idle",
        "each",
        "smoke",
    )
    settings = {name: getattr(args, name) for name in names} | {
        "cores": sorted(os.sched_getaffinity(0))
    }
    found = harness.result("serve", settings)
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as home:
        measure(args, Path(home), found)
    tables(found)
    harness.write(args.out, found)
    return None


if __name__ == "__main__":
    main()
