"""Compare generation with transformers, a compiled model with a sampler on the host, llama.cpp and
gpt-fast.

transformers has a dynamic cache, or a static one and compiles; llama.cpp samples on the host or in
its graph. All have the same random weights, prompt and filters (temperature, top-k, top-p, min-p),
each system in its own process, with interleaved rounds. A round asks each for one token (the
first-token latency), for all tokens sampled, and for all tokens greedy. tokens/s counts every token
of every row over the whole call, the prompt's share included. Greedy texts are compared with
Monograph's: if two systems round differently, they differ from the first token whose two best
logits are nearly equal. "copy" compares the rate at which the weights are read, once per step, with
the measured rate of a large copy.

llama.cpp needs `xllamacpp` and `gguf`, and runs on a CPU only (its wheel for GPUs comes from
another place). gpt-fast draws with temperature and top-k alone.

With --at-once all systems of all cases are built and compiled at the same time, on as many cores as
there are, before the first is measured; all of them must fit in memory together. Measured rounds
stay one at a time, but the seconds until a system was ready are then those of a busy machine, on
which what is tuned by timing kernels (gpt-fast asks for that) is tuned, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from typing import Any, NamedTuple

import harness
import torch
from generators import HOW_TO_INSTALL, ON_A_CPU_ONLY, SYSTEMS, Write, task
from rounds import Child, ChildFailed

from monograph.device import clock, default_device
from monograph.model.config import LlamaConfig


class Case(NamedTuple):
    """A shape, its rows, the tokens of a round, and the goals: at least so many times a system's
    tokens/s.
    """

    config: LlamaConfig
    rows: int
    tokens: int = 128
    dtype: str = "float32"
    goals: dict[str, float] = {}


def shape(layers: int, width: int, vocabulary: int, **sizes: Any) -> LlamaConfig:
    """Return a Llama with heads of 64 and an untied head."""
    given = {
        "intermediate_size": -(-8 * width // 3 // 64) * 64,
        "num_attention_heads": width // 64,
    } | sizes
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        max_position_embeddings=1024,
        **given,
    )


SMALL = shape(6, 384, 32_000)
HYBRID = shape(
    8, 384, 32_000, model_type="qwen3_5_text", layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 2,
    partial_rotary_factor=0.25, rms_norm_eps=1e-6,  # the only one that llama.cpp computes
)  # fmt: skip
MAMBA = shape(
    8, 384, 32_000, model_type="granitemoehybrid", layer_types=(("mamba",) * 3 + ("full_attention",)) * 2,
    mamba_d_state=128, position_embedding_type="nope",
)  # fmt: skip
ONE_B, EIGHT_B = (
    LlamaConfig.preset(name, max_position_embeddings=1024, tie_word_embeddings=False)
    for name in ("1b", "8b")
)
STATIC = "transformers, static"
ON_CPU = {
    "small, 1 row": Case(SMALL, 1, goals={STATIC: 1.15}),
    "small, 8 rows": Case(SMALL, 8, goals={STATIC: 1.0}),
    "hybrid, 8 rows": Case(HYBRID, 8, goals=dict.fromkeys((STATIC, "transformers, dynamic"), 1.5)),
    "mamba, 8 rows": Case(MAMBA, 8, goals=dict.fromkeys((STATIC, "transformers, dynamic"), 1.5)),
}
ON_GPU = {
    "1b, 1 row": Case(ONE_B, 1, 256, "bfloat16", {STATIC: 4.0}),
    "8b, 1 row": Case(EIGHT_B, 1, 128, "bfloat16"),
    "1b, 8 rows": Case(ONE_B, 8, 256, "bfloat16"),
    "1b, 32 rows": Case(ONE_B, 32, 256, "bfloat16", {STATIC: 1.3}),
    "1b, 64 rows": Case(ONE_B, 64, 256, "bfloat16"),
}
SMOKE = {"smoke": Case(shape(2, 64, 512), 2, 8)}
COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}


# ── a system's own process ────────────────────────────────────────────────────────────────────────


def serve(args: Namespace, name: str, system: str) -> None:
    """Generate in this process whenever stdin asks for it; the first answer comes when everything
    is warm.
    """
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # systems may print; stdout is for answers
    torch.set_num_threads(args.threads)
    case, began = args.cases[name], clock()
    mine = task(case.config, case.rows, case.tokens, args.threads, getattr(torch, case.dtype))
    write = SYSTEMS[system].fit(mine)
    for greedy in (True, False):
        for tokens in (case.tokens, 1, case.tokens):
            write(tokens, greedy)
    answer: dict[str, Any] = {"first_s": clock() - began, "versions": SYSTEMS[system].versions}
    while True:
        print(json.dumps(answer), file=reply, flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # without the system's own shutdown, which would print or wait
        answer = timed(write, **json.loads(line))


def timed(write: Write, tokens: int, greedy: bool) -> dict[str, Any]:
    """Run once; return wall seconds, CPU seconds, and the texts."""
    wall, cpu = clock(), time.process_time()
    texts = write(tokens, greedy)
    return {"wall_s": clock() - wall, "cpu_s": time.process_time() - cpu, "texts": texts}


# ── the side that asks ────────────────────────────────────────────────────────────────────────────


def measure(
    args: Namespace, name: str, found: list[dict[str, Any]], children: dict[str, Child]
) -> None:
    """Measure every system of one case that is ready, and add to its entry what was found."""
    case = args.cases[name]
    answers: dict[str, list[dict[str, Any]]] = {system: [] for system in children}
    for system in harness.turns(children, args.rounds):
        ask = children[system].ask
        first, sampled = ask(tokens=1, greedy=False), ask(tokens=case.tokens, greedy=False)
        greedy = ask(tokens=case.tokens, greedy=True)
        answers[system].append({"first": first, "sampled": sampled, "greedy": greedy})
    for child in children.values():
        child.end()
    written, copied = case.rows * case.tokens, copied_bytes_per_s() if children else 0.0
    # A step reads one row of the embedding per sequence.
    read = case.config.parameter_count() - case.config.vocab_size * case.config.hidden_size
    read_bytes = read * torch.finfo(getattr(torch, case.dtype)).bits // 8
    for entry in found:
        if rounds := answers.get(entry["system"]):
            walls = [each["sampled"]["wall_s"] for each in rounds]
            entry["tokens_per_s"] = harness.spread([written / wall for wall in walls])
            entry["cpu_s_per_token"] = harness.spread(
                [each["sampled"]["cpu_s"] / written for each in rounds]
            )
            entry["first_token_s"] = harness.spread([each["first"]["wall_s"] for each in rounds])
            # The time that filters and draw add to a greedy step.
            entry["sampler_tax"] = harness.spread(
                [each["sampled"]["wall_s"] / each["greedy"]["wall_s"] - 1 for each in rounds]
            )
            entry["copy_share"] = read_bytes * entry["tokens_per_s"]["median"] / case.rows / copied
            entry["texts"] = rounds[0]["greedy"]["texts"]
            entry["repeats"] = all(each["greedy"]["texts"] == entry["texts"] for each in rounds)


def entries_of(args: Namespace, name: str) -> list[dict[str, Any]]:
    """Return an entry for every system of a case; one that cannot be measured here has an error."""
    found: list[dict[str, Any]] = []
    for system in args.systems:
        entry: dict[str, Any] = {"case": name, "system": system}
        if default_device().type != "cpu" and system in ON_A_CPU_ONLY:
            entry["error"] = "not measured: its wheel computes on a CPU"
        elif missing := SYSTEMS[system].missing:
            entry["error"] = f"not measured: {', '.join(missing)} missing"
        found.append(entry)
    return found


def start(args: Namespace, entry: dict[str, Any]) -> Child:
    """Start the process of an entry's system."""
    own = [
        __file__,
        "--serve",
        entry["case"],
        entry["system"],
        "--threads",
        str(args.threads),
        *(["--smoke"] if args.smoke else []),
    ]
    return Child(own, args.threads, {})


def is_ready(entry: dict[str, Any], child: Child) -> bool:
    """Wait until a process is warmed up, and add its first answer, or its error, to the entry."""
    try:
        entry |= child.answer()
    except ChildFailed as error:
        entry |= {"error": str(error.args[0]), "stderr": error.args[1]}
        return False
    print(
        f"{entry['case']}: {entry['system']} is ready after {entry['first_s']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return True


def start_in_turn(args: Namespace, entries: list[dict[str, Any]]) -> dict[str, Child]:
    """Return the processes of those systems of one case that are ready; each starts when the one
    before is.
    """
    children: dict[str, Child] = {}
    for entry in entries:
        if "error" in entry:
            continue
        child = start(args, entry)
        if is_ready(entry, child):
            children[entry["system"]] = child
    return children


def start_at_once(
    args: Namespace, entries: dict[str, list[dict[str, Any]]]
) -> dict[str, dict[str, Child]]:
    """Return, by case, the processes of those systems that are ready; all start together."""
    started = [
        (entry, start(args, entry))
        for name in args.names
        for entry in entries[name]
        if "error" not in entry
    ]
    children: dict[str, dict[str, Child]] = {name: {} for name in args.names}
    for entry, child in started:
        if is_ready(entry, child):
            children[entry["case"]][entry["system"]] = child
    return children


def copied_bytes_per_s() -> float:
    """Return the bytes read and written per second by the fastest of a few large copies on the
    device.
    """
    device = default_device()
    source = torch.zeros(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = [harness.timed(lambda: target.copy_(source), device).wall_s for _ in range(5)]
    return 2 * source.numel() / min(seconds)


def compare(found: list[dict[str, Any]], goals: dict[str, float]) -> None:
    """Add to each entry Monograph's tokens/s over its own, round by round, and how far their greedy
    texts agree.
    """
    ours = next((e for e in found if e["system"] == "monograph" and "error" not in e), None)
    for entry in found:
        if ours is None or "error" in entry:
            continue
        pairs = zip(ours["tokens_per_s"]["values"], entry["tokens_per_s"]["values"], strict=True)
        entry["ratio_wall"] = harness.spread([a / b for a, b in pairs])
        pairs = zip(
            entry["cpu_s_per_token"]["values"], ours["cpu_s_per_token"]["values"], strict=True
        )
        entry["ratio_cpu"] = harness.spread([a / b for a, b in pairs])
        entry["same_text"] = min(map(agreement, entry["texts"], ours["texts"]))
        entry["goal"] = goals.get(entry["system"])


def agreement(one: str, other: str) -> float:
    """Return the share of a text before the first character that differs."""
    longest = max(len(one), len(other))
    return len(os.path.commonprefix([one, other])) / longest if longest else 1.0


HEADERS = [
    "",
    "tokens/s",
    "ms CPU/token",
    "first ms",
    "Monograph is",
    "in CPU time",
    "goal",
    "tax",
    "copy",
    "same text",
]


def row(entry: dict[str, Any]) -> list[str]:
    """Return a system's line of the table."""
    label = f"{entry['case']}: {entry['system']}"
    if "error" in entry:
        return [label, entry["error"][:60], *[""] * (len(HEADERS) - 2)]
    return [
        label,
        f"{entry['tokens_per_s']['median']:,.0f}",
        f"{1000 * entry['cpu_s_per_token']['median']:.2f}",
        f"{1000 * entry['first_token_s']['median']:.1f}",
        harness.shown(entry["ratio_wall"]) if "ratio_wall" in entry else "-",
        harness.shown(entry["ratio_cpu"]) if "ratio_cpu" in entry else "-",
        f"{entry['goal']:.2f}" if entry.get("goal") else "-",
        f"{entry['sampler_tax']['median']:.0%}",
        f"{entry['copy_share']:.0%}",
        f"{entry['same_text']:.0%}" if "same_text" in entry else "-",
    ]


def parse() -> Namespace:
    """Return the arguments, with the chosen cases as `args.cases`."""
    on_gpu = default_device().type == "cuda"
    parser = harness.arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=[*ON_CPU, *ON_GPU], dest="names")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--at-once", action="store_true", help="start all systems together, then measure in turn"
    )
    parser.add_argument(
        "--serve", nargs=2, metavar=("CASE", "SYSTEM"), help="one system's own process"
    )
    args = parser.parse_args()
    args.cases = SMOKE if args.smoke else ON_CPU | ON_GPU
    args.names = list(SMOKE) if args.smoke else args.names or list(ON_GPU if on_gpu else ON_CPU)
    if args.smoke:
        args.rounds = 2
    return args


def main() -> None:
    """Measure and print; see `--help`."""
    args = parse()
    if args.serve:
        return serve(args, *args.serve)
    settings = {
        "rounds": args.rounds,
        "threads": args.threads,
        "smoke": args.smoke,
        "first_s": "all systems at once" if args.at_once else "one system at a time",
    }
    found = harness.result("generate-peers", settings)
    harness.print_machine(found)
    if missing := sorted({name for system in args.systems for name in SYSTEMS[system].missing}):
        print(f"missing: {', '.join(missing)}. {HOW_TO_INSTALL}")
    entries = {name: entries_of(args, name) for name in args.names}
    together = start_at_once(args, entries) if args.at_once else None
    for name, measured in entries.items():
        children = start_in_turn(args, measured) if together is None else together[name]
        measure(args, name, measured, children)
        compare(measured, args.cases[name].goals)
        found["cases"] += measured
        harness.write(args.out, found)
    harness.print_table(HEADERS, [row(entry) for entry in found["cases"]])
    return None


if __name__ == "__main__":
    main()
