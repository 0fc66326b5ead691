"""Begin runs with an earlier version, and use them with this one: which commands work, and what
`--resume` does.

    python benchmarks/old_runs.py --before ../before/src

The earlier version, a checkout's `src`, makes five runs: on text, with adapters, from rewards, from
preferences, and a sweep. Where it knew values with parts, such as `optim.name=adamw:8bit`, the runs
use them. Of each run that was finished this version checks, generates, evaluates, exports, serves
and begins another one; of each that was killed after its first checkpoint, it resumes a copy.
Without `--before` this version makes the runs, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from monograph.config.renamed import new_spelling

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
ANSWER_S = 120.0  # an answer of a server is not waited for longer
EX_TEMPFAIL = 75  # the exit code of a run that was stopped and can be resumed

SHORT = (
    "train.updates=12",
    "train.save_every=4",
    "train.eval_every=6",
    "train.keep=99",
    "train.compile=none",
)
ROWS = ("data.sequence_length=32", "train.tokens_per_update=128")
# The arguments with which the earlier version begins a run of each kind.
RUNS: dict[str, tuple[str, ...]] = {
    "text": (
        "train", "texts", "data.tokenizer=bpe:300", "model.hidden_size=16", "model.num_hidden_layers=1",
        "model.num_attention_heads=2", "optim.name=muon:8bit", "optim.schedule=wsd:0.1", "optim.grad_clip=1.0:all",
        *ROWS, *SHORT,
    ),
    "adapters": (
        "train", "texts", "model.init=text", "lora.rank=4:dora", "lora.alpha=8:sqrt", "optim.lr=1e-3:4", *ROWS, *SHORT,
    ),
    "rewards": (
        "train", "prompts.jsonl", "model.init=text", "rl.reward=regex:[a-z ]+", "rl.kl=k1:0.1",
        "rl.max_new_tokens=6:mask", "rl.prompts=2", "rl.group=3", "data.sequence_length=32", *SHORT,
    ),
    "preferences": (
        "train", "pairs.jsonl", "model.init=text", "prefer.loss=robust:0.1:0.2", "data.sequence_length=32",
        "train.tokens_per_update=64", *SHORT,
    ),
    "sweep": (
        "sweep", "texts", "data.tokenizer=bpe:300", "optim.lr=1e-3,3e-3", "optim.schedule=cosine:0.1",
        "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2", *ROWS,
    ),
}  # fmt: skip
USES = {
    "check": ("check", "{model}"),
    "generate": ("generate", "{model}", "alpha", "--max-tokens", "4"),
    "evaluate": ("evaluate", "{model}", "--data", "texts"),
    "export": ("export", "{model}", "--to", "{out}"),
    "--from": ("train", "{data}", "--from", "{model}", "--out", "{out}", "train.updates=2"),
}


def main() -> None:
    """Make and use the runs; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", type=Path, help="the folder `src` of a checkout of the earlier version"
    )
    parser.add_argument("--smoke", action="store_true", help="only the run on text, and no server")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    given = parser.parse_args()
    kinds = ["text"] if given.smoke else [*RUNS]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_inputs(place)
        results = {
            kind: tried(place, given.before, kind, serving=not given.smoke) for kind in kinds
        }
    print(table(results))
    if given.out:
        given.out.write_text(
            json.dumps({"schema": "monograph.old_runs/1", "runs": results}, indent=1) + "\n"
        )


def write_inputs(place: Path) -> None:
    """Write texts, prompts and pairs."""
    draws = random.Random(0)
    (place / "texts").mkdir()
    for number in range(40):
        (place / "texts" / f"{number}.txt").write_text(" ".join(draws.choices(WORDS, k=60)))
    prompts = [{"prompt": word} for word in WORDS]
    pairs = [{"prompt": word[:2], "chosen": word[2:], "rejected": word[::-1]} for word in WORDS * 4]
    for name, records in (("prompts", prompts), ("pairs", pairs)):
        (place / f"{name}.jsonl").write_text("\n".join(json.dumps(record) for record in records))


def command(place: Path, source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the version whose `src` is given, as a user would, in a folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "monograph", *arguments],
        cwd=place, env=environment(place, source), capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def environment(place: Path, source: Path) -> dict[str, str]:
    """Return the variables with which a command runs."""
    return os.environ | {
        "PYTHONPATH": str(source),
        "MONOGRAPH_HOME": str(place / "home"),
        "NO_COLOR": "1",
    }


def tried(place: Path, before: Path | None, kind: str, serving: bool) -> dict[str, str]:
    """Make a run with the earlier version and use it with this one: what each use gave, `ok` or its
    last line.
    """
    run, arguments = place / kind, RUNS[kind] if before else respelled(RUNS[kind])
    before = before.resolve() if before else ROOT / "src"
    length = ["train.updates=12"] if kind == "sweep" else []
    begun = command(place, before, *arguments, *length, "--out", kind)
    if begun.returncode:
        raise SystemExit(
            f"old_runs.py: the earlier version cannot make the run {kind}: {last_line(begun.stderr)}"
        )
    data = next(name for name in ("texts", "prompts.jsonl", "pairs.jsonl") if name in arguments)
    model = f"{kind}/best" if kind == "sweep" else kind
    results = {}
    for name, use in USES.items():
        out = f"{kind}-{name.strip('-')}"
        filled = [part.format(model=model, data=data, out=out) for part in use]
        results[name] = outcome(command(place, ROOT / "src", *filled))
    if serving:
        results["serve"] = served(place, model)
    if kind == "sweep":
        stop_while_training(place, before, [*arguments, "train.updates=800"], "stopped")
        results["--resume"] = outcome(command(place, ROOT / "src", "sweep", "--out", "stopped"))
    else:
        cut = cut_after_first_checkpoint(run, place / f"{kind}-cut")
        results["--resume"] = outcome(command(place, ROOT / "src", "train", "--resume", str(cut)))
        if results["--resume"] == "ok":
            results["weights"] = "the same bits" if weights(cut) == weights(run) else "others"
    return results


def stop_while_training(place: Path, source: Path, arguments: list[str], out: str) -> None:
    """Begin a run or a sweep, and send it SIGTERM when it trains: it saves and ends."""
    begun = subprocess.Popen(
        [sys.executable, "-m", "monograph", *arguments, "--out", out],
        cwd=place, env=environment(place, source), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert begun.stderr
    for line in begun.stderr:
        if "tok/s" in line:
            begun.terminate()
            break
    begun.communicate()
    if begun.returncode != EX_TEMPFAIL:
        raise SystemExit(
            f"old_runs.py: {out} was to be stopped while it trains, and ended with {begun.returncode}"
        )


def respelled(arguments: tuple[str, ...]) -> list[str]:
    """Return arguments as this version spells them."""
    found = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        now = new_spelling(key, value) or {key: value}
        found += [f"{k}={v}" for k, v in now.items()] if value else [argument]
    return found


def cut_after_first_checkpoint(run: Path, to: Path) -> Path:
    """Return a copy of a finished run as it would be if it had been killed after its first
    checkpoint.
    """
    shutil.copytree(run, to)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (to / "metrics.jsonl").write_text("".join(line for line in lines if '"summary"' not in line))
    for checkpoint in sorted((to / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)
    return to


def weights(run: Path) -> dict[str, bytes]:
    """The bytes of the newest weights of a run."""
    newest = max((run / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in sorted(newest.glob("*.safetensors"))}


def served(place: Path, model: str) -> str:
    """Serve a model and ask it for a text: `ok`, or the last line of what went wrong."""
    server = subprocess.Popen(
        [sys.executable, "-m", "monograph", "serve", model, "--port", "0"],
        cwd=place, env=environment(place, ROOT / "src"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said = until_ready(server)
        if "http://" not in said[-1]:
            return last_line("\n".join(said))
        url = "http://" + said[-1].split("http://")[1].split()[0]
        body: dict[str, Any] = {"model": "last", "prompt": "alpha", "max_tokens": 4}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return "ok" if json.load(answer)["usage"]["completion_tokens"] else "no text"
    finally:
        server.terminate()
        server.communicate()


def until_ready(server: subprocess.Popen[str]) -> list[str]:
    """Return what a server prints until it names its address, or ends."""
    assert server.stdout
    said = [""]
    for line in server.stdout:
        said.append(line)
        if "http://" in line:
            break
    return said


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    """Return `ok`, or the exit code and the last line of a command that failed."""
    return "ok" if not done.returncode else f"exit {done.returncode}: {last_line(done.stderr)}"


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing was printed"


def table(results: dict[str, dict[str, str]]) -> str:
    """The results as a Markdown table, a row a run."""
    names = [*dict.fromkeys(name for each in results.values() for name in each)]
    rows = [["run", *names], ["---"] * (1 + len(names))]
    rows += [[kind, *(each.get(name, "") for name in names)] for kind, each in results.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
