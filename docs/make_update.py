"""Draw docs/figures/update.svg, the way of one update through the code.

Usage: python docs/make_update.py (tests/test_update_picture.py compares)

A tiny run is trained on this machine while Python reports every call. The picture has the calls
that STOPS names, in the order and below the caller that they had in one update of that run. So it
changes with the code, and a stop that an update no longer passes is refused.
"""

from __future__ import annotations

import importlib
import inspect
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import monograph
from monograph.commands import train as command
from monograph.config import Settings
from monograph.step.parameters import Parameters

PICTURE = Path(__file__).resolve().parent / "figures" / "update.svg"
SOURCE = Path(monograph.__file__).parent
TEXT = "the quick brown fox jumps over the lazy dog. " * 200
RUN: dict[str, Any] = {
    "data.tokenizer": "bytes",
    "data.sequence_length": 32,
    "model.preset": "nano",
    "model.num_hidden_layers": 2,
    "optim.name": "adamw",
    "train.tokens_per_update": 128,
    "train.micro_batch": 2,
    "train.updates": 100,
    "train.compile": "none",
    "train.precision": "fp32",
}


class Stop(NamedTuple):
    """What the picture says of a function.

    Attributes:
        each: what the function is called for, such as "for each micro-batch"; empty if its caller calls it once.
        calls_each: what the function makes its own calls for, such as "for each update".
        number: the number of the step of docs/design.md that begins with this call.
    """

    each: str = ""
    calls_each: str = ""
    number: int = 0


LOOP, TRAIN = "commands/train.py:_loop", "loop.py:train"
STOPS = {
    LOOP: Stop(calls_each="for each update"),
    TRAIN: Stop(),
    "session/rewind.py:windows": Stop(number=1),
    "engine.py:Engine.accumulate": Stop(number=2),
    "step/step.py:accumulate": Stop(),
    "engine.py:Engine._micro_batches": Stop(),
    "step/step.py:Step.count_window": Stop(),
    "step/on_device.py:OnDevice.accumulate": Stop(),
    "step/step.py:Step._micro_step": Stop("for each micro-batch: add its gradient", number=3),
    "loss.py:TokenLoss.__call__": Stop(),
    "model/llama.py:Llama.forward": Stop(),
    "model/llama.py:Block.forward": Stop("for each block"),
    "ops/attention.py:attention": Stop(),
    "ops/cross_entropy.py:linear_cross_entropy": Stop(),
    "step/step.py:Step.differentiate": Stop(),
    "engine.py:Engine.update": Stop(number=4),
    "step/step.py:update": Stop(),
    "step/step.py:Step.set_lr": Stop(),
    "step/on_device.py:OnDevice.apply": Stop(),
    "step/step.py:Step.clip_and_apply": Stop(),
    "step/clip.py:squares": Stop("for each plane: its gradient's squares"),
    "step/step.py:Step.decide": Stop(),
    "step/clip.py:update_plane": Stop("for each plane: the optimizer's rule", number=5),
    "optim/updates.py:update_": Stop(),
    "optim/adamw.py:adamw_": Stop(),
    "step/step.py:finish_update": Stop(),
    "session/after_update.py:AfterUpdate.note": Stop(number=6),
    "session/after_update.py:AfterUpdate.evaluate": Stop(),
    "session/after_update.py:AfterUpdate.sample": Stop(),
    "session/after_update.py:AfterUpdate.save": Stop(),
}

# The picture is 540 wide, so that its text has 10 px where a phone leaves it 368.
WIDTH, LINE_HEIGHT, INDENT, FONT_SIZE = 540, 23, 15, 15
CHARACTER_WIDTH = 0.602 * FONT_SIZE  # of DejaVu Sans Mono; no other font of STYLE is wider
LEFT, RIGHT, TOP = 40, 22, 14
LEGEND = "differs between engines: a method of Parameters"
STYLE = f"""
svg {{ --paper: #fbfbfc; --ink: #1c1d21; --muted: #5f616a; --rule: #b9bcc6; --accent: #2457c5; --warn: #b23c06; }}
@media (prefers-color-scheme: dark) {{
  svg {{ --paper: #131417; --ink: #e3e4e8; --muted: #9a9da8; --rule: #50535d; --accent: #84a9ff; --warn: #ff9a6b; }}
}}
text {{ font: {FONT_SIZE}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--ink); }}
.file {{ fill: var(--muted); text-anchor: end; }} .each {{ fill: var(--accent); }}
.each, .legend {{ font-family: system-ui, "DejaVu Sans", sans-serif; }}
.number {{ fill: var(--paper); text-anchor: middle; font-weight: bold; }}
rect.each {{ fill-opacity: 0.07; stroke: var(--accent); stroke-opacity: 0.3; }}
path {{ fill: none; stroke: var(--rule); }} path.differs {{ fill: var(--warn); stroke: none; }}
circle {{ fill: var(--accent); }}
"""


@dataclass
class Call:
    """A call of a function, or in the picture the equal calls of one caller.

    Attributes:
        place: file and name of the function, "step/step.py:Step.decide".
        times: how often one call of its caller calls it; 0 for a generator.
        calls: the calls that it makes, in order.
    """

    place: str
    times: int = 1
    calls: list[Call] = field(default_factory=list)

    @property
    def stop(self) -> Stop:
        """Return what the picture says of it."""
        return STOPS[self.place]

    def drawn(self) -> Iterator[Call]:
        """Yield it, and everything that the picture has below it, from top to bottom."""
        yield self
        for call in self.calls:
            yield from call.drawn()


class EnoughUpdates(BaseException):
    """Ends the run when two updates are complete."""


class Recorder:
    """Records the calls within the package, as the function that `sys.setprofile` is given."""

    def __init__(self) -> None:
        self.root = Call(LOOP)
        self._open_calls = [self.root]

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Add a call that begins, or leave one that ends."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(SOURCE)):
            return
        if event == "return":
            self._open_calls.pop()
            return
        file = Path(code.co_filename).relative_to(SOURCE).as_posix()
        # A generator is resumed for each value, which is no call of its own.
        is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
        call = Call(f"{file}:{code.co_qualname}", times=0 if is_generator else 1)
        if call.place == TRAIN and len(self.updates()) == 2:
            raise EnoughUpdates
        self._open_calls[-1].calls.append(call)
        self._open_calls.append(call)

    def updates(self) -> list[list[Call]]:
        """Return the calls of each update: the loop calls `train`, and then what is done after it."""
        loop = [call for call in self.root.calls if call.place == LOOP]
        found: list[list[Call]] = []
        for call in loop[0].calls if loop else []:
            if call.place == TRAIN:
                found.append([])
            if found:
                found[-1].append(call)
        return found


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Record the training loop of a run that is made in the block, and end it by `EnoughUpdates`."""
    loop = command._loop

    def recorded_loop(*arguments: Any) -> None:
        before = sys.getprofile()
        sys.setprofile(recorder)
        try:
            loop(*arguments)
        finally:
            sys.setprofile(before)

    command._loop = recorded_loop
    try:
        yield
    except EnoughUpdates:
        pass
    finally:
        command._loop = loop


def traced() -> list[list[Call]]:
    """Return the calls of each update of a tiny run, for two updates."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as name, redirect_stderr(io.StringIO()):
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        settings = Settings().resolve(RUN | {"data.source": [str(folder / "text.txt")]}, __file__)
        with recorded(recorder):
            command.run(settings, out=folder / "run", resume=None, from_=None, json=False)
    return recorder.updates()


def stops(calls: Sequence[Call]) -> list[Call]:
    """Return the calls that STOPS names, below the nearest caller that it names, equal ones once."""
    found: dict[str, Call] = {}
    for call in calls:
        below = stops(call.calls)
        for each in [Call(call.place, call.times, below)] if call.place in STOPS else below:
            earlier = found.setdefault(each.place, each)
            if earlier is not each:
                earlier.times += each.times
                _add_missing(earlier, each)
    return [*found.values()]


def _add_missing(call: Call, equal: Call) -> None:
    """Add to a call what another call of the same function calls in addition."""
    below = {each.place: each for each in call.calls}
    for each in equal.calls:
        if each.place in below:
            below[each.place].times = max(below[each.place].times, each.times)
            _add_missing(below[each.place], each)
        else:
            call.calls.append(each)


def way(updates: Sequence[Sequence[Call]]) -> Call:
    """Return what is drawn of updates that are all alike.

    Raises:
        ValueError: the updates differ, or do not pass a stop, or pass it once where STOPS says that
            it is called for each of several things, or the other way round.
    """
    loop, *others = (Call(LOOP, calls=stops(update)) for update in updates)
    if any(other != loop for other in others):
        raise ValueError("the updates do not go the same way")
    drawn = [*loop.drawn()]
    missing = STOPS.keys() - {call.place for call in drawn}
    if missing:
        raise ValueError(f"an update does not pass {sorted(missing)}")
    wrong = [call.place for call in drawn if bool(call.stop.each) != (call.times > 1)]
    if wrong:
        raise ValueError(f"STOPS says otherwise how often these are called: {wrong}")
    return loop


def differs_between_engines(place: str) -> bool:
    """Return whether a function is a method of an engine's `Parameters`."""
    file, _, name = place.partition(":")
    module = importlib.import_module(f"monograph.{file.removesuffix('.py').replace('/', '.')}")
    owner = getattr(module, name.partition(".")[0])
    return isinstance(owner, type) and issubclass(owner, Parameters)


class Drawing:
    """The elements of the picture, line by line."""

    def __init__(self) -> None:
        self.bands: list[str] = []
        self.elements: list[str] = []
        self.line = 0.0

    def add(self, call: Call, depth: int = 0, bands: int = 0) -> float:
        """Draw a call and all below it; return the height of its own line."""
        x = LEFT + depth * INDENT
        begin = self.line
        if call.stop.each:
            bands += 1
            self.heading(x, call.stop.each)
        own = self.y
        file, _, name = call.place.partition(":")
        self.elements.append(f"<text {_at(x, own)}>{escape(name)}</text>")
        if differs_between_engines(call.place):
            self.diamond(x + len(name) * CHARACTER_WIDTH + 12, own)
        self.elements.append(f'<text class="file" {_at(WIDTH - RIGHT, own)}>{file}</text>')
        if call.stop.number:
            self.number(call.stop.number, own)
        self.line += 1
        first_call = self.line
        if call.stop.calls_each:
            bands += 1
            self.heading(x + INDENT, call.stop.calls_each)
        for below in call.calls:
            y = self.add(below, depth + 1, bands) - FONT_SIZE / 3
            self.elements.append(f'<path d="M{x + 4} {own + 6:.0f}V{y:.0f}h{INDENT - 7}"/>')
        if call.stop.each:
            self.band(x - 7, begin, bands)
        if call.stop.calls_each:
            self.band(x + INDENT - 7, first_call, bands)
        return own

    def heading(self, x: float, each: str) -> None:
        """Say for which things the calls of a frame are made."""
        self.elements.append(f'<text class="each" {_at(x, self.y)}>{each}</text>')
        self.line += 1

    @property
    def y(self) -> float:
        """Return the baseline of the current line."""
        return TOP + (self.line + 0.72) * LINE_HEIGHT

    def number(self, number: int, y: float) -> None:
        """Draw a step's number in a disk at the left edge."""
        self.elements.append(f'<circle cx="18" cy="{y - 5:.0f}" r="10"/>')
        self.elements.append(f'<text class="number" {_at(18, y)}>{number}</text>')

    def diamond(self, x: float, y: float) -> None:
        """Mark a function that differs between engines."""
        self.elements.append(f'<path class="differs" d="M{x:.0f} {y - 10:.0f}l5 5-5 5-5-5z"/>')

    def band(self, x: float, begin: float, bands: int) -> None:
        """Draw a frame from a line to the current one, narrower for each frame around it."""
        top, height = TOP + begin * LINE_HEIGHT, (self.line - begin) * LINE_HEIGHT
        width = WIDTH - 4 - 4 * bands - x
        place = f'x="{x:.0f}" y="{top + 1}" width="{width:.0f}" height="{height - 2}"'
        self.bands.append(f'<rect class="each" {place} rx="6"/>')

    def svg(self, title: str) -> str:
        """Return the whole picture."""
        self.line += 0.5  # above the legend
        self.diamond(LEFT, self.y)
        self.elements.append(f'<text class="legend" {_at(LEFT + 12, self.y)}>{LEGEND}</text>')
        self.line += 1
        height = round(2 * TOP + self.line * LINE_HEIGHT)
        size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        paper = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="var(--paper)"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(title)}</title>",
                f"<style>{STYLE}</style>",
                f'{paper} stroke="var(--rule)"/>',
                *self.bands[::-1],
                *self.elements,
                "</svg>\n",
            ]
        )


def _at(x: float, y: float) -> str:
    return f'x="{x:.0f}" y="{y:.0f}"'


def drawn(loop: Call) -> str:
    """Return the picture of an update."""
    drawing = Drawing()
    drawing.add(loop)
    return drawing.svg(
        "The way of one update: which function calls which, and in which file each is"
    )


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(drawn(way(traced())), encoding="utf-8")


if __name__ == "__main__":
    main()
