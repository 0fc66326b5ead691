"""Training throughput beside transformers' Trainer with torch_compile: same shapes, batch, precision and optimizer.

124M on rows of 1,024 tokens and 1.2B on rows of 2,048, in bf16 with fp32 masters and AdamW. Each system runs in a
process of its own, one after the other, on the same random tokens. MFU is (6 N_matmul + 6 L d T) x tokens/s, causal,
of the card's datasheet rate; raw TFLOP/s and the share of a measured matrix product stand beside it.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import harness
import torch
from torch import Tensor

from monograph.device import clock, default_device, describe, measured_matmul_flops, synchronize
from monograph.graph.precision import Precision
from monograph.loop import train
from monograph.measure.flops import flops_per_token, mfu
from monograph.measure.memory import peak_memory_bytes, reset_peak_memory
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

LR, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
WARM_UP = 3  # updates before the first that is timed
SYSTEMS = ("monograph", "trainer")
SHORTEST_CASE_S = 15.0  # with less time left, a case is not begun


class Shape(NamedTuple):
    """What is trained: T positions a row, rows of a micro-batch, micro-batches of an update."""

    config: LlamaConfig
    length: int
    micro_batch: int
    micro_batches: int

    @property
    def tokens_per_update(self) -> int:
        """Tokens of one update."""
        return self.length * self.micro_batch * self.micro_batches


SHAPES = {
    "124m": Shape(LlamaConfig.preset("124m"), length=1024, micro_batch=32, micro_batches=4),
    "1.2b": Shape(LlamaConfig.preset("1b"), length=2048, micro_batch=8, micro_batches=8),
}
SMOKE = {"nano": Shape(LlamaConfig.preset("nano"), length=16, micro_batch=2, micro_batches=2)}


class Pace:
    """Times updates in rounds, the same way for every system: `updated()` after each update, True when there is enough.

    After the warm-up one update is timed, which fixes how many make a round of about `round_s`; then `rounds` rounds,
    each ending with a wait for the device; then one more update in which the host's waits are counted.
    """

    def __init__(self, device: torch.device, rounds: int, round_s: float) -> None:
        self.device, self.round_s = device, round_s
        self.seconds: list[float] = []  # per update, one entry a round
        self.first_s, self.peak_bytes = 0.0, 0
        self.host_syncs: dict[str, int] | None = None
        self._steps = self._script(rounds)

    def begin(self) -> None:
        """To be called right before the first update."""
        next(self._steps)

    def updated(self) -> bool:
        """To be called after each update; whether the last one was the last."""
        return next(self._steps, True) is True

    def _now(self) -> float:
        synchronize(self.device)
        return clock()

    def _script(self, rounds: int) -> Iterator[bool]:
        began = self._now()
        yield False
        self.first_s = self._now() - began
        for _ in range(WARM_UP - 1):
            yield False
        reset_peak_memory(self.device)
        began = self._now()
        yield False
        count = max(1, round(self.round_s / (self._now() - began)))
        for _ in range(rounds):
            began = self._now()
            for _ in range(count):
                yield False
            self.seconds.append((self._now() - began) / count)
        self.peak_bytes = peak_memory_bytes(self.device)
        with harness.HostSyncs(self.device) as syncs:
            yield False
        self.host_syncs = syncs.counts


def random_rows(shape: Shape) -> Tensor:
    """One update's rows of random ids, [R, T + 1]; the last column is only a target."""
    generator = torch.Generator().manual_seed(0)
    rows = shape.micro_batch * shape.micro_batches
    return torch.randint(shape.config.vocab_size, (rows, shape.length + 1), generator=generator)


def monograph(shape: Shape, args: Namespace) -> dict[str, Any]:
    """This project's resident engine, the whole step captured."""
    device = default_device()
    began = clock()
    rows = random_rows(shape)
    window = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    if device.type == "cuda":  # as the data room hands windows out
        window = {name: tensor.pin_memory() for name, tensor in window.items()}
    engine = Resident(
        drawn_on(device, shape.config),
        optim=AdamW(lr=LR, betas=BETAS, weight_decay=DECAY),
        clip=CLIP,
        precision=Precision("bf16"),
        micro_batch=shape.micro_batch,
    )
    build_s = clock() - began
    began = clock()
    if obstacle := engine.capture(window):
        raise SystemExit(f"train.py: the step cannot be captured: {obstacle}")
    synchronize(device)
    compile_s = clock() - began
    pace = Pace(device, args.rounds, args.round_s)
    pace.begin()
    losses = []
    for update in train(engine, itertools.repeat(window)):
        losses.append(update.loss)
        if pace.updated():
            break
    mean_loss = float(torch.stack(losses).mean())
    return measured(pace, compile_s=compile_s, build_s=build_s, mean_loss=mean_loss)


def drawn_on(device: torch.device, config: LlamaConfig) -> Llama:
    """A Llama whose weights are drawn on the device: drawing 1.2B of them on the host takes longer than measuring."""
    with torch.device("meta"):
        model = Llama(config)
    model = model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=config.initializer_range)
    return model


def trainer(shape: Shape, args: Namespace) -> dict[str, Any]:
    """Hugging Face's Trainer on its own LlamaForCausalLM with SDPA, torch_compile and fused AdamW."""
    import transformers

    device = default_device()
    began = clock()
    values = shape.config.to_hf() | {"use_cache": False}
    with device:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(values))
    build_s = clock() - began
    pace = Pace(device, args.rounds, args.round_s)

    class Stopwatch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            control.should_training_stop = pace.updated()

    with tempfile.TemporaryDirectory() as folder:
        training = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**trainer_arguments(shape, device), output_dir=folder),
            train_dataset=Examples(random_rows(shape)[:, :-1]),
            callbacks=[Stopwatch()],
        )
        pace.begin()
        outcome = training.train()
    steady = sorted(pace.seconds)[len(pace.seconds) // 2]
    versions = {"transformers": transformers.__version__, "attention": model.config._attn_implementation}
    compile_s = pace.first_s - steady  # it compiles at its first update
    return measured(pace, compile_s=compile_s, build_s=build_s, mean_loss=outcome.training_loss) | versions


def trainer_arguments(shape: Shape, device: torch.device) -> dict[str, Any]:
    """The same training as `monograph`'s, in Trainer's words; nothing logged or saved."""
    return {
        "per_device_train_batch_size": shape.micro_batch,
        "gradient_accumulation_steps": shape.micro_batches,
        "max_steps": 1_000_000,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": DECAY,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "torch_compile": True,
        "use_cpu": device.type == "cpu",
        "dataloader_pin_memory": device.type == "cuda",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


class Examples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The rows as Trainer wants them: over and over, each with itself as labels (the model shifts them)."""

    def __init__(self, rows_RT: Tensor) -> None:
        self.rows_RT = rows_RT

    def __len__(self) -> int:
        return 10_000 * len(self.rows_RT)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row_T = self.rows_RT[index % len(self.rows_RT)]
        return {"input_ids": row_T, "labels": row_T}


def measured(pace: Pace, *, compile_s: float, build_s: float, mean_loss: float) -> dict[str, Any]:
    """What a case's process hands back."""
    return {
        "seconds_per_update": harness.spread(pace.seconds),
        "peak_memory_bytes": pace.peak_bytes,
        "compile_s": compile_s,
        "build_s": build_s,
        "host_syncs": pace.host_syncs,
        "mean_loss": mean_loss if math.isfinite(mean_loss) else None,  # over all updates: it did train
    }


# ── the cases, one process each ───────────────────────────────────────────────────────────────────


def run_case(name: str, shape: Shape, system: str, args: Namespace, seconds: float) -> dict[str, Any]:
    """One system on one shape in a new process; one that fails or runs out of time says why, the others go on."""
    case: dict[str, Any] = {"model": name, "system": system, "parameters": shape.config.parameter_count()}
    case |= {"sequence_length": shape.length, "micro_batch": shape.micro_batch, "micro_batches": shape.micro_batches}
    if seconds < SHORTEST_CASE_S:
        return case | {"error": "not measured: out of time"}
    command = [sys.executable, __file__, *sys.argv[1:], "--case", name, system]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return case | {"error": f"not measured: still running after {seconds:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return case | {"error": lines[-1] if lines else f"exit code {done.returncode}", "stderr": lines[-40:]}
    case |= json.loads(done.stdout.splitlines()[-1])
    tokens_per_s = [shape.tokens_per_update / s for s in case["seconds_per_update"]["values"]]
    return case | {"tokens_per_s": harness.spread(tokens_per_s)}


def rates(case: dict[str, Any], shape: Shape, peak: float | None, matmul: float) -> dict[str, float | None]:
    """Raw FLOP/s of the median and its shares of the datasheet's rate and of a measured matrix product's."""
    rate, per_token = case["tokens_per_s"]["median"], flops_per_token(shape.config, shape.length)
    return {
        "flops_per_s": rate * per_token,
        "mfu": mfu(rate, per_token, peak) if peak else None,
        "of_measured_matmul": mfu(rate, per_token, matmul),
    }


def row(case: dict[str, Any], cases: list[dict[str, Any]]) -> list[str]:
    """The table's line of one case; the last cell is its speed over Trainer's on the same model."""
    label = f"{case['model']} {case['system']}"
    if "error" in case:
        return [label, case["error"][:60], *[""] * 7]
    peer = next((c for c in cases if c["model"] == case["model"] and c["system"] == "trainer"), {})
    syncs = case["host_syncs"]
    return [
        label,
        harness.shown(case["tokens_per_s"], 0),
        f"{case['flops_per_s'] / 1e12:.3g}",
        f"{case['mfu']:.1%}" if case["mfu"] else "-",
        f"{case['of_measured_matmul']:.1%}",
        f"{case['peak_memory_bytes'] / 2**30:.1f}",
        f"{case['compile_s']:.0f}",
        "-" if syncs is None else str(sum(syncs.values())),
        f"{case['tokens_per_s']['median'] / peer['tokens_per_s']['median']:.2f}" if "tokens_per_s" in peer else "-",
    ]


HEADERS = ["", "tokens/s", "TFLOP/s", "MFU", "of matmul", "peak GiB", "compile s", "syncs/update", "x Trainer"]


def parse() -> Namespace:
    """The arguments, with the shapes they choose as `args.shapes`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--micro-batch", type=int, help="rows of a micro-batch; an update keeps its tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=2.0, help="about how long a round is")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no case after so long, and stop what runs")
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "SYSTEM"), help="measure one, in this process")
    args = parser.parse_args()
    args.shapes = {name: SHAPES[name] for name in args.models}
    if args.smoke:
        args.shapes, args.rounds, args.round_s = SMOKE, 2, 0.0
    if args.micro_batch:
        for name, shape in args.shapes.items():
            count = max(1, shape.micro_batch * shape.micro_batches // args.micro_batch)
            args.shapes[name] = shape._replace(micro_batch=args.micro_batch, micro_batches=count)
    return args


def main() -> None:
    """Measure and print; see `--help`."""
    began, args = clock(), parse()
    if args.case:
        model, system = args.case
        print(json.dumps({"monograph": monograph, "trainer": trainer}[system](args.shapes[model], args)))
        return
    device = default_device()
    peak = describe(device).peak_flops.get("bf16")
    matmul = measured_matmul_flops(device, torch.bfloat16)
    settings = {"rounds": args.rounds, "round_s": args.round_s, "smoke": args.smoke, "precision": "bf16"}
    formula = {"flops_per_token": "6 N_matmul + 6 L d T", "peak_flops_per_s": peak, "measured_matmul_flops": matmul}
    found = harness.result("train", settings | formula)
    harness.print_machine(found)
    datasheet = f"{peak / 1e12:.0f} TFLOP/s by the datasheet" if peak else "no datasheet rate"
    print(f"bf16: {datasheet}, {matmul / 1e12:.3g} TFLOP/s measured on a large matrix product")
    for name, shape in args.shapes.items():
        for system in args.systems:
            case = run_case(name, shape, system, args, args.seconds - (clock() - began))
            if "tokens_per_s" in case:
                case |= rates(case, shape, peak, matmul)
            found["cases"].append(case)
            harness.write(args.out, found)
            print(f"{clock() - began:4.0f} s  {'  '.join(row(case, found['cases']))}", flush=True)
    harness.print_table(HEADERS, [row(case, found["cases"]) for case in found["cases"]])
    sys.exit(any("error" in case for case in found["cases"]))


if __name__ == "__main__":
    main()
