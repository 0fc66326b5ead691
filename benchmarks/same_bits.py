"""Check that two versions of the code train to the same bits, by digests of 20 updates of every
engine.

Run it at one commit with `--out FILE` and at another with `--against FILE`, on the same processor
with the same torch, since bits depend on both. It ends with exit code 1 if a digest differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import monograph as mono
from monograph.graph.remat import Remat
from monograph.loss import IGNORE, Batch
from monograph.resident import Resident
from monograph.step import Clip

UPDATES, ROWS, LENGTH, VOCABULARY, MEMBERS = 20, 4, 16, 64, 4
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
# Not one of the library's, which another version may have had otherwise.
SCHEDULE = partial(pow, 0.9)


def main() -> None:
    """Train every configuration, print its digests, and compare them if asked to."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--captured",
        action="store_true",
        help="compile each step by Inductor before its first update",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=CONFIGURATIONS, help="these configurations"
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="what another version wrote")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a sum's order, and so its bits, depends on the number of threads
    names, updates = given.only or [*CONFIGURATIONS], 2 if given.smoke else UPDATES
    found = {name: digests(name, updates, given.captured) for name in names}
    result = harness.result("same_bits", {"updates": updates, "captured": given.captured}, [found])
    for name, parts in found.items():
        print(f"{name:34}", *(f"{part} {digest[:12]}" for part, digest in parts.items()))
    harness.write(given.out, result)
    if given.against and (different := differences(json.loads(given.against.read_text()), result)):
        raise SystemExit("same_bits.py: other bits than before in " + ", ".join(different))


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the configurations and parts whose digests differ from those of another result of the
    same settings.
    """
    if before["settings"] != now["settings"]:
        raise SystemExit(
            f"same_bits.py: settings were {before['settings']}, and are {now['settings']}"
        )
    [were], [are] = before["cases"], now["cases"]
    return [
        f"{name} {part}"
        for name, parts in are.items()
        for part in parts
        if were[name][part] != parts[part]
    ]


def digests(name: str, updates: int, captured: bool) -> dict[str, str]:
    """Train one configuration; return the SHA-256 of its losses, of its norms, and of each kind of
    its state.
    """
    make, window_of = CONFIGURATIONS[name]
    torch.manual_seed(0)
    engine = make()
    if captured and (obstacle := engine.capture(window_of(0))):
        raise SystemExit(f"same_bits.py: {name} cannot be captured: {obstacle}")
    done = list(mono.train(engine, (window_of(index) for index in range(updates))))
    score, targets = engine.evaluate(window_of(0) if not name.endswith("own rows") else shared(0))
    state = engine.state()
    counters = json.dumps(state.scalars, sort_keys=True).encode()
    member = engine.member_state(1) if isinstance(engine, mono.Ensemble) else state
    return {
        "losses": digest(
            {str(update.index): update.loss for update in done}
            | {"score": score, "targets": targets}
        ),
        "norms": digest({str(update.index): update.grad_norm for update in done}),
        "weights": digest(state.model),
        "optimizer": digest(state.optimizer),
        "member": digest({**member.model, **member.optimizer}),
        "counters": hashlib.sha256(counters).hexdigest(),
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


# ── windows ───────────────────────────────────────────────────────────────────────────────────────


def tokens(index: int, *size: int) -> Iterator[Tensor]:
    """Return random tokens and targets of a window."""
    generator = torch.Generator().manual_seed(index)
    return (torch.randint(VOCABULARY, size, generator=generator) for _ in range(2))


def packed(index: int) -> Batch:
    """Return full rows of two documents each."""
    read, targets = tokens(index, ROWS, LENGTH)
    column, border = torch.arange(LENGTH), 1 + (torch.arange(ROWS)[:, None] + index) % (LENGTH - 1)
    positions = torch.where(column < border, column, column - border)
    return {
        "tokens": read,
        "targets": targets,
        "segments": 1 + (column >= border).long(),
        "positions": positions,
    }


def padded(index: int) -> Batch:
    """Return three rows of several lengths; three, so that micro-batches of two are filled up."""
    read, targets = tokens(index, ROWS - 1, LENGTH)
    targets[
        torch.arange(LENGTH) >= 3 + (torch.arange(ROWS - 1)[:, None] * 5 + index) % (LENGTH - 2)
    ] = IGNORE
    return {"tokens": read, "targets": targets}


def shared(index: int) -> Batch:
    """Return the same rows for all members."""
    return dict(zip(("tokens", "targets"), tokens(index, ROWS, LENGTH), strict=True))


def own(index: int) -> Batch:
    """Return different rows for each member."""
    return dict(zip(("tokens", "targets"), tokens(index, MEMBERS, ROWS, LENGTH), strict=True))


# ── engines ───────────────────────────────────────────────────────────────────────────────────────


def llama(seed: int = 0, **sizes: Any) -> mono.Llama:
    """Return a tiny model, the same at every call."""
    return mono.Llama(mono.LlamaConfig.preset("nano", **(SHAPE | sizes)), seed=seed)


def resident(**options: Any) -> Resident:
    """Return an engine on the device."""
    return mono.Resident(llama(), schedule=SCHEDULE, **options)


def adapted() -> Resident:
    """Return an engine with low-rank adapters on a frozen base."""
    model = llama()
    mono.adapt(model, mono.Lora(rank=4))
    return mono.Resident(
        model, optim=mono.AdamW(lr=1e-2), schedule=SCHEDULE, clip=1.0, micro_batch=2
    )


def streamed(placement: mono.Placement, **options: Any) -> Resident:
    """Return an engine that streams from the host, stage by stage."""
    model = llama(tie_word_embeddings=False)
    return mono.Streamed(model, schedule=SCHEDULE, micro_batch=2, placement=placement, **options)


def ensemble(**options: Any) -> Resident:
    """Return an ensemble of several rates, decays and seeds, like the members of a sweep."""
    knobs = mono.grid(lr=[1e-3, 1e-2], weight_decay=[0.0, 0.1])
    return mono.Ensemble(
        [llama(seed) for seed in range(MEMBERS)], knobs, schedule=SCHEDULE, **options
    )


def adamw(**options: Any) -> mono.AdamW:
    """Return AdamW with a learning rate at which every bit changes."""
    return mono.AdamW(lr=1e-2, **options)


BF16, FP16 = mono.Precision("bf16"), mono.Precision("fp16")
SWEEP, HOST = mono.Placement(), mono.Placement(when="next forward", where="host", offload=True)
EVERYWHERE = mono.Placement(
    when="next forward", on_device=frozenset({(0, "weights"), (1, "exp_avg")})
)
CONFIGURATIONS: dict[str, tuple[Callable[[], Resident], Callable[[int], Batch]]] = {
    "resident packed": (lambda: resident(optim=adamw()), packed),
    "resident padded accumulated": (lambda: resident(optim=adamw(ema=0.9), micro_batch=2), padded),
    "resident bf16 muon": (
        lambda: resident(optim=mono.Muon(lr=1e-2), precision=BF16, micro_batch=2),
        packed,
    ),
    "resident fp16 clip": (
        lambda: resident(optim=adamw(), precision=FP16, clip=Clip(0.5, skip_spikes=True)),
        padded,
    ),
    "resident recomputed": (lambda: resident(optim=adamw(), remat=Remat.Full(), clip=1.0), packed),
    "resident 8bit": (lambda: resident(optim=adamw(state="8bit"), clip=1.0, micro_batch=2), packed),
    "adapters": (adapted, padded),
    "streamed": (lambda: streamed(SWEEP, optim=adamw(), clip=0.5), padded),
    "streamed bf16": (
        lambda: streamed(EVERYWHERE, optim=adamw(state="bf16"), clip=1.0, precision=BF16),
        packed,
    ),
    "streamed host": (
        lambda: streamed(HOST, optim=adamw(ema=0.9), clip=0.5, precision=BF16),
        packed,
    ),
    "streamed backward": (
        lambda: streamed(mono.Placement(when="backward"), optim=mono.Muon(lr=1e-2)),
        packed,
    ),
    "ensemble": (lambda: ensemble(clip=0.5), shared),
    "ensemble accumulated": (lambda: ensemble(clip=0.5, micro_batch=3, precision=BF16), shared),
    "ensemble own rows": (lambda: ensemble(clip=1.0, each=True), own),
}


if __name__ == "__main__":
    main()
