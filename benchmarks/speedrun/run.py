"""Train a 124M-class model to a validation loss of 3.28 on FineWeb with one device.

    python benchmarks/speedrun/run.py --data FOLDER

FOLDER has the files of GPT-2 tokens of the public speedrun (docs/speedrun.md says which); nothing is
downloaded. The run follows the recipe of speedrun_recipe.py, scores the first 10,485,760 tokens of
the validation file, and stops at the first score of at most 3.28. The clock stops while it scores
and saves; compiling, on random tokens, comes before it starts. `--out FILE` gets the numbers as
JSON; next to it are the log in the public format (FILE with .txt) and the checkpoints. Ctrl-C saves;
the same command with --resume goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
import torch  # noqa: E402
from public_log import Log, Step  # noqa: E402
from shards import (  # noqa: E402
    GPT2,
    Validation,
    Windows,
    batch_of,
    open_shards,
    pairs_of,
    vocabulary_of,
)
from speedrun_recipe import (  # noqa: E402
    MICRO_BATCH,
    RECIPE,
    SMOKE,
    Recipe,
    engine_of,
    training_flops,
)

import monograph as mono  # noqa: E402
from monograph.device import clock, default_device, describe, synchronize  # noqa: E402
from monograph.errors import (  # noqa: E402
    DiskFull,
    Diverged,
    InputRefused,
    MonographError,
    RunInUse,
    Stopped,
    UsageError,
)
from monograph.loss import Batch  # noqa: E402
from monograph.profiling.memory import peak_memory_bytes, reset_peak_memory  # noqa: E402
from monograph.run.signals import StopSignal  # noqa: E402
from monograph.step import Update  # noqa: E402
from monograph.storage.writing import DISK_ERRORS, lock_folder  # noqa: E402

CODE = tuple(
    Path(__file__).with_name(name)
    for name in ("run.py", "speedrun_recipe.py", "shards.py", "public_log.py")
)
SAVE_EVERY = 500  # updates


class Watch:
    """Seconds of training: it is paused while something else happens."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device, self._before = device, seconds
        self._began: float | None = None

    def start(self) -> None:
        """Go on, once the device is done with what came before."""
        synchronize(self._device)
        self._began = clock()

    def pause(self) -> None:
        """Stop, once the device is done."""
        synchronize(self._device)
        self._before = self.seconds
        self._began = None

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._before + (0.0 if self._began is None else clock() - self._began)


class Run:
    """A model in training, its tokens, its log, and what it has scored.

    Attributes:
        scores: [updates, validation loss, seconds of training] of each score.
        pairs: pairs of a query and a key that attention computed in training, in one head.
        end: why training ended: "target", "schedule", "minutes" or "tokens"; "" while it goes on.
    """

    def __init__(self, args: argparse.Namespace, recipe: Recipe) -> None:
        """Open the tokens and build the engine.

        Raises:
            InputRefused: the tokens are missing, damaged or of another vocabulary.
        """
        self.args, self.recipe = args, recipe
        self.device = default_device()
        self._shards = open_shards(args.data, "train")
        scored = open_shards(args.data, "val")[0]
        self.validation = Validation(
            scored, args.vocabulary, recipe.val_tokens, recipe.length, recipe.rows
        )
        self.windows = self._windows_from(0)
        self._require_tokens()
        self.engine = engine_of(recipe, args.seed, self.device, args.precision, args.micro_batch)
        self.engine.announce = tell
        self.log = Log(args.out.with_suffix(".txt"))
        self.watch = Watch(self.device)
        self.scores: list[list[float]] = []
        self.pairs = 0
        self.end = ""
        self._skipped = 0

    def _windows_from(self, start: int) -> Windows:
        recipe, args = self.recipe, self.args
        return Windows(
            self._shards,
            args.vocabulary,
            recipe.rows,
            recipe.length,
            order=args.order,
            seed=args.seed,
            start=start,
            pin=self.device.type == "cuda",
        )

    def _require_tokens(self) -> None:
        held, needed = self.windows.count, self.recipe.updates
        if held >= needed:
            return
        each = self.recipe.tokens_per_update
        line = f"{self.args.data}: its files have {held:,} updates of {each:,} tokens; the schedule has {needed:,}"
        if not held or self.args.minutes is None:
            raise InputRefused(f"{line}: add files, or give --updates, which makes it shorter")
        tell(f"{line}: the run ends where they end")

    @property
    def settings(self) -> dict[str, Any]:
        """Return everything on which the weights depend."""
        files = [[shard.path.name, len(shard.tokens)] for shard in self._shards]
        recipe = json.loads(json.dumps(self.recipe.record()))  # tuples become lists, as in a file
        chosen = {name: getattr(self.args, name) for name in ("seed", "order", "precision")}
        return {"recipe": recipe, "files": files, **chosen}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the engine's state."""
        return {
            "settings": self.settings,
            "window": self.windows.index,
            "scores": self.scores,
            "pairs": self.pairs,
            "train_s": self.watch.seconds,
            "log_bytes": self.log.size_bytes,
            "end": self.end,
        }

    def begin(self) -> None:
        """Begin a new log.

        Raises:
            UsageError: there is one already.
        """
        if self.log.path.exists():
            raise UsageError(
                f"{self.log.path}: exists already; --resume goes on with that run, --out FILE begins another"
            )
        self.log.begin(CODE)

    def resume(self) -> None:
        """Continue from the newest checkpoint.

        Raises:
            UsageError: there are no checkpoints, or they are of a run with other settings.
        """
        folder = self.args.checkpoints
        if folder is None:
            raise UsageError("--resume needs the checkpoints: leave out --checkpoints none")
        state = mono.load_checkpoint(self.engine, folder, tell)
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                raise UsageError(
                    f"--resume: {folder} is of a run with another {name}: give what it was begun with"
                )
        self.windows = self._windows_from(state["window"])
        self.scores = state["scores"]
        self.pairs = state["pairs"]
        self.end = state["end"]
        self.watch = Watch(self.device, state["train_s"])
        self.log.cut(state["log_bytes"])

    def save(self) -> None:
        """Save a checkpoint, unless none is wanted."""
        if self.args.checkpoints is not None:
            mono.save_checkpoint(self.engine, self, self.args.checkpoints)

    def compile(self) -> None:
        """Compile every graph on random tokens; weights and state stay as they are.

        Raises:
            UsageError: torch cannot compile the step.
        """
        if self.args.compile == "none":
            return
        if obstacle := self.engine.capture(self._random_window(), scope=self.args.compile):
            raise UsageError(
                f"the step cannot be compiled: {obstacle}; --compile none does without"
            )

    def _random_window(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        sizes = (self.recipe.rows, self.recipe.length + 1)
        vocabulary = self.args.vocabulary
        tokens = torch.randint(vocabulary.size, sizes, generator=generator)
        return batch_of(tokens.numpy(), vocabulary.separator)

    def score(self) -> float:
        """Score the validation tokens, log and keep the loss, and return it.

        Raises:
            Diverged: the loss is not a number.
        """
        sums = [self.engine.evaluate(batch) for batch in self.validation.batches()]
        total, count = (float(torch.stack(each).double().sum()) for each in zip(*sums, strict=True))
        if count != self.validation.tokens:
            raise AssertionError(f"{count} tokens were scored instead of {self.validation.tokens}")
        loss = total / count
        index = self.engine.index
        if not math.isfinite(loss):
            raise Diverged(f"the validation loss after {index} updates is {loss}: lower the rates")
        self.log.add(Step(index, self.recipe.updates, 1e3 * self.watch.seconds, val_loss=loss))
        self.scores.append([index, loss, self.watch.seconds])
        self.write()
        return loss

    def train(self, stop: StopSignal) -> None:
        """Train until the target, the schedule, the tokens or the minutes end.

        Raises:
            Stopped: a signal asked for it; the run is saved.
        """
        if self.end in ("target", "schedule"):
            return
        self.end = ""
        if not self.scores:
            self.score()
        reset_peak_memory(self.device)
        self.watch.start()
        unlogged: Update | None = None
        for update in mono.train(self.engine, self._counted(), updates=self.recipe.updates):
            # The device works on this update while the host waits for the loss of the one before.
            if unlogged is not None:
                self._log(unlogged)
            unlogged = update
            if not self._pauses(stop):
                continue
            self.watch.pause()
            self._log(update)
            unlogged = None
            self._after(update, stop)
            if self.end:
                return
            self.watch.start()
        self.watch.pause()
        if unlogged is not None:
            self._log(unlogged)
            self._skipped = int(unlogged.skipped)
        self.end = "tokens"
        self.save()

    def _counted(self) -> Iterator[Batch]:
        for window in self.windows:
            self.pairs += pairs_of(window, self.recipe.window)
            yield window

    def _log(self, update: Update) -> None:
        loss = float(update.loss)
        milliseconds = 1e3 * self.watch.seconds
        self.log.add(Step(update.index + 1, self.recipe.updates, milliseconds, train_loss=loss))

    def _pauses(self, stop: StopSignal) -> bool:
        index = self.engine.index
        due = index % SAVE_EVERY == 0 or self.recipe.scores_at(index)
        return due or self._out_of_time or bool(stop.requested)

    @property
    def _out_of_time(self) -> bool:
        minutes = self.args.minutes
        return minutes is not None and clock() - self.args.began >= 60 * minutes

    def _after(self, update: Update, stop: StopSignal) -> None:
        """Score, save and decide whether the run ends, after an update with the watch paused."""
        index = self.engine.index
        self._skipped = int(update.skipped)
        if self.recipe.scores_at(index):
            reached = self.score() <= self.recipe.target
            if reached and not self.args.whole:
                self.end = "target"
        if not self.end and index == self.recipe.updates:
            self.end = "schedule"
        if not self.end and self._out_of_time:
            self.end = "minutes"
        if self.end or stop.requested or index % SAVE_EVERY == 0:
            self.save()
        if stop.requested and not self.end:
            kept = "saved" if self.args.checkpoints else "not saved (--checkpoints none)"
            raise Stopped(
                f"{kept} at update {index:,}; to continue: the same command with --resume"
            )

    def found(self) -> dict[str, Any]:
        """Return the run's numbers as a benchmark's JSON object."""
        recipe, args = self.recipe, self.args
        index = self.engine.index
        train_s = self.watch.seconds
        update_s = train_s / index if index else None
        reached = next((score for score in self.scores if score[1] <= recipe.target), None)
        tokens = index * recipe.tokens_per_update
        peak = describe(self.device).peak_flops.get(args.precision)
        flops = training_flops(recipe, tokens, self.pairs)
        settings = self.settings | {
            "vocabulary": args.vocabulary._asdict(),
            "val_sha256": self.validation.sha256,
            "smoke": args.smoke,
            "compile": args.compile,
            "micro_batch": self.engine.micro_batch,
        }
        case = {
            "parameters": recipe.config.parameter_count(),
            "updates": index,
            "tokens": tokens,
            "pairs": self.pairs,
            "skipped_updates": self._skipped,
            "train_s": train_s,
            "update_s": update_s,
            "tokens_per_s": tokens / train_s if index else None,
            "mfu": flops / (train_s * peak) if index and peak else None,
            "whole_schedule_s": recipe.updates * update_s if update_s else None,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "val_loss": self.scores[-1][1] if self.scores else None,
            "val_tokens": self.validation.tokens,
            "reached": reached
            and dict(zip(("updates", "val_loss", "train_s"), reached, strict=True)),
            "end": self.end,
            "scores": self.scores,
        }
        return harness.result("speedrun", settings, [case])

    def write(self) -> None:
        """Write the run's numbers.

        Raises:
            DiskFull: there is no room.
            InputRefused: the file cannot be written.
        """
        try:
            harness.write(self.args.out, self.found())
        except OSError as error:
            line = f"{self.args.out}: cannot be written: {error.strerror}"
            raise (DiskFull if error.errno in DISK_ERRORS else InputRefused)(line) from None


def tell(line: str) -> None:
    """Print a line that is no result."""
    print(line, file=sys.stderr, flush=True)


def told(found: dict[str, Any]) -> str:
    """Return what a run has come to, in one or two lines."""
    [case] = found["cases"]
    if not case["updates"]:
        return "no update was made"
    said = f"{case['updates']:,} updates, {case['tokens']:,} tokens, {case['train_s']:.1f} s of training"
    target = found["settings"]["recipe"]["target"]
    if case["reached"]:
        reached = case["reached"]
        return f"{said}: {reached['val_loss']:.4f} <= {target} after {reached['train_s'] / 60:.2f} minutes"
    if case["end"] == "schedule":
        return f"{said}: the schedule ended at a validation loss of {case['val_loss']:.4f}, not {target}"
    whole = case["whole_schedule_s"] / 60
    updates = found["settings"]["recipe"]["updates"]
    return (
        f"{said}: validation loss {case['val_loss']:.4f}, not {target} yet ({case['end']})\n"
        f"at this speed the schedule's {updates:,} updates take {whole:.1f} minutes; whether they reach {target} "
        "is not measured"
    )


def table_row(found: dict[str, Any]) -> str:
    """Return a run's row of the table in docs/speedrun.md."""
    [case] = found["cases"]
    at, reached = found["machine"], case["reached"]
    minutes = f"{reached['train_s'] / 60:.2f} min" if reached else "not reached"
    loss = f"{(reached or case)['val_loss']:.4f}"
    cells = (
        f"one {at['device']}",
        minutes,
        loss,
        f"{(reached or case)['updates']:,}",
        f"{case['tokens_per_s'] / 1e3:.0f} k" if case["tokens_per_s"] else "-",
        f"{case['mfu']:.1%}" if case["mfu"] else "-",
        str(found["settings"]["seed"]),
        at["date"],
    )
    return f"| {' | '.join(cells)} |"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments, with defaults that depend on others filled in."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="stop after so long, everything included"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights, and of --order shuffled"
    )
    parser.add_argument("--updates", type=int, metavar="N", help="length of the schedule")
    parser.add_argument(
        "--order",
        choices=("stream", "shuffled"),
        default="stream",
        help="the rules fix the stream; shuffled: rows in an order of the seed",
    )
    parser.add_argument(
        "--whole", action="store_true", help="do not stop at the target, but at the schedule's end"
    )
    parser.add_argument("--micro-batch", type=int, metavar="ROWS")
    parser.add_argument("--precision", choices=("bf16", "fp32", "fp8"))
    parser.add_argument("--compile", choices=("whole", "blocks", "none"))
    parser.add_argument(
        "--checkpoints", metavar="FOLDER", help="default: next to --out; none: save nothing"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args(arguments)
    args.began = clock()
    args.out = args.out or Path("speedrun.json")
    if args.checkpoints is None:
        args.checkpoints = args.out.with_name(f"{args.out.stem}-checkpoints")
    else:
        args.checkpoints = None if args.checkpoints == "none" else Path(args.checkpoints)
    cuda = default_device().type == "cuda"
    args.precision = args.precision or ("bf16" if cuda else "fp32")
    args.compile = args.compile or ("none" if args.smoke else "whole")
    if args.micro_batch is None and not args.smoke:
        args.micro_batch = MICRO_BATCH
    return args


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe that the arguments ask for, and set the vocabulary.

    Raises:
        UsageError: a number is out of range.
        InputRefused: the folder's tokens are not GPT-2's.
    """
    for name in ("updates", "micro_batch", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    if obstacle := mono.Precision(args.precision).obstacle(describe()):
        raise UsageError(f"--precision {args.precision}: {obstacle}")
    args.vocabulary = vocabulary_of(args.data)
    recipe = RECIPE
    if args.smoke:
        config = dataclasses.replace(SMOKE.config, vocab_size=args.vocabulary.size)
        recipe = dataclasses.replace(SMOKE, config=config)
    elif args.vocabulary != GPT2:
        raise InputRefused(
            f"{args.data}: has tokens of a vocabulary of {args.vocabulary.size:,}; {RECIPE.target} is a loss over "
            f"GPT-2's {GPT2.size:,} (a tiny model trains on these with --smoke)"
        )
    return dataclasses.replace(recipe, updates=args.updates) if args.updates else recipe


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the run's numbers.

    Raises:
        MonographError: the run cannot begin, cannot go on, or was stopped.
    """
    this = Run(args, recipe_of(args))
    try:
        args.out.resolve().parent.mkdir(parents=True, exist_ok=True)
        if args.checkpoints is None:
            return trained(this)
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        with lock_folder(args.checkpoints):
            return trained(this)
    except BlockingIOError:
        raise RunInUse(
            f"{args.checkpoints}: another run writes there: give another --out"
        ) from None
    except OSError as error:
        line = f"{error.filename or args.out}: {error.strerror}"
        raise (DiskFull if error.errno in DISK_ERRORS else InputRefused)(line) from None


def trained(this: Run) -> dict[str, Any]:
    """Begin or resume a run, train, and return its numbers."""
    if this.args.resume:
        this.resume()
    else:
        this.begin()
    with StopSignal(lambda name: tell(f"{name}: finishing the update")) as stop:
        this.compile()
        this.train(stop)
    this.write()
    return this.found()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print; see `--help`."""
    try:
        found = run(parse(arguments))
    except Stopped as stopped:
        tell(str(stopped))
        sys.exit(stopped.exit_code)
    except MonographError as error:
        tell(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before the first update, or after the last
        tell("error: interrupted")
        sys.exit(130)
    harness.print_machine(found)
    print(told(found))
    print(table_row(found))


if __name__ == "__main__":
    main()
