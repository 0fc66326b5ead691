"""Sample the answers of all members of an ensemble in one decoder, and arrange their windows.

The members have adapters on one base. The decoder's model is that base with a bank of adapters
(`monograph.decode.adapter_bank`), in which each member has a slot. A row of the decoder uses the adapter
of the member for which it samples an answer. An answer has the same seed as in a run of the member alone.

Shapes: N members, R rows of a window, T positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from monograph.decode.adapter_bank import AdapterFactors, StoredAdapter, install
from monograph.decode.completion import Completion, Generation
from monograph.decode.generator import Generator, Mode
from monograph.device import clock
from monograph.ensemble import Ensemble
from monograph.errors import UsageError
from monograph.graph.lora import adapted_layers
from monograph.graph.shared_base import copy_without_adapters
from monograph.loss import Batch, fill_of
from monograph.model.llama import Llama
from monograph.rl.rollouts import (
    Drawer,
    Rollouts,
    SampledAnswers,
    WantedAnswers,
    not_finite,
    without_collection,
)

# Why members sample their answers one after another.
WITHOUT_ADAPTERS = (
    "members without adapters each have weights of their own, which one decoder cannot have"
)

# Why members do not sample episodes in one decoder.
EPISODES = "the episodes of members with an environment are sampled by one decoder each"


class MembersDrawer:
    """A sampler of answers from the weights of the members of an ensemble.

    Attributes:
        ensemble: the ensemble.
        drawers: for each member, a `Drawer`, which scores its answers. Their options differ only in the
            seed.
        model: the members' base, with a bank of their adapters.
        bank: the bank; the slot of a member has its number as its name.
        diverged: the numbers of the members whose logits were not finite. They sample no more answers.
    """

    def __init__(self, ensemble: Ensemble, drawers: Sequence[Drawer]):
        """Make the model, which shares the base's weights with the members.

        Raises:
            UsageError: the members have no adapters, or adapters that a bank cannot hold.
        """
        self.ensemble = ensemble
        self.drawers = drawers
        adapters = {
            str(number): _adapter_of(member) for number, member in enumerate(ensemble.members)
        }
        self.model = cast(Llama, copy_without_adapters(ensemble.members[0]))
        rank = max(adapter.rank for adapter in adapters.values())
        self.bank = install(self.model, adapters, rank=rank)
        # The faster products round differently from those of a model with one adapter. That is fine: an
        # answer has to be that of the member alone only up to rounding.
        self.bank.has_fast_products = True
        self.diverged: set[int] = set()
        # The decoder that `_generator` returned last, and its mode.
        self._cached_generator: tuple[Mode, Generator] | None = None

    def draw(self, wanted: Mapping[int, WantedAnswers]) -> dict[int, list[Completion]]:
        """Sample answers of several members at once.

        Args:
            wanted: by member, the answers that it needs.

        Returns:
            By member, its answers. A member whose logits are not finite has none, and is added to
            `diverged`.
        """
        # The last update has changed the adapters.
        for number in wanted:
            self.bank.replace(str(number), _adapter_of(self.ensemble.members[number]))
        requests = [
            request
            for number, (prompts, seeds) in wanted.items()
            for request in self.drawers[number].requests(
                prompts, seeds, adapter=self.bank.slot_of(str(number))
            )
        ]
        generator = self._generator
        step = self.ensemble.step
        with without_collection(), step.precision.context(step.device.type), torch.no_grad():
            generator.forget()
            tokenizer = self.drawers[0].prompts.tokenizer
            completions = iter(list(Generation(generator, requests, tokenizer, ())))
        answers = {}
        for number, (prompts, _) in wanted.items():
            of_member = [next(completions) for _ in prompts]
            if any(completion.finish_reason == "not_finite" for completion in of_member):
                self.diverged.add(number)
            else:
                answers[number] = of_member
        return answers

    def evaluate(self) -> dict[int, dict[str, float]]:
        """Sample answers to held-out prompts, and return the figures of `Drawer.evaluate` by member.

        Members in `diverged` have none. This may add members to `diverged`.
        """
        wanted = {
            number: drawer.held_out_answers()
            for number, drawer in enumerate(self.drawers)
            if number not in self.diverged
        }
        return {
            number: self.drawers[number].held_out_figures(wanted[number].prompts, answers)
            for number, answers in self.draw(wanted).items()
        }

    @property
    def _generator(self) -> Generator:
        """Return the decoder, in the mode that suits the number of steps of the whole run."""
        first = self.drawers[0]
        prompts = first.options.prompts * len(self.drawers)
        answers = prompts * first.options.group
        mode = first.mode_of(answers)
        if self._cached_generator and self._cached_generator[0] == mode:
            return self._cached_generator[1]
        generator = first.new_generator(self.model, prompts, answers, mode)
        self._cached_generator = mode, generator
        return generator


def _adapter_of(member: nn.Module) -> StoredAdapter:
    """Return a member's adapter; it shares the member's memory.

    Raises:
        UsageError: it has none.
    """
    layers = adapted_layers(member)
    if not layers:
        raise UsageError(WITHOUT_ADAPTERS)
    factors = {}
    for name, layer in layers.items():
        magnitude = layer.lora_magnitude_vector
        factors[name] = AdapterFactors(
            layer.lora_A.weight.detach(),
            layer.lora_B.weight.detach(),
            None if magnitude is None else magnitude.detach(),
        )
    first = next(iter(layers.values()))
    return StoredAdapter(
        place="a member",
        rank=first.lora_A.weight.shape[-2],
        scale=first.scale,
        factors=factors,
        digest="",  # a digest is of weights that never change, and these are in training
    )


class MembersRollouts(Iterator[Batch]):
    """An iterator over the windows of an ensemble, [N, R, T], whose answers are sampled when a window
    is asked for.

    The window of a member is the one that its own `Rollouts` makes, with empty rows after its rows if
    other members have more. A member whose logits are not finite is left out: it gets only empty rows, so
    that its updates are skipped, and the others go on.

    Attributes:
        drawer: samples the answers.
        members: for each member, the `Rollouts` that make its windows.
    """

    def __init__(self, drawer: MembersDrawer, members: Sequence[Rollouts]):
        self.drawer = drawer
        self.members = members

    @property
    def left_out(self) -> set[int]:
        """Return the numbers of the members that sample no more answers; a caller may add some."""
        return self.drawer.diverged

    def close(self) -> None:
        """Do nothing: no window is prepared ahead."""

    def __next__(self) -> Batch:
        """Sample, score and weigh the answers of the members' next windows.

        Raises:
            Diverged: the logits of all members are not finite.
            InputRefused: a reward failed. The positions are those before the windows.
        """
        positions = [rollouts.rows_consumed for rollouts in self.members]
        try:
            window = self._make_windows()
        except BaseException:
            # Some members have moved on to their next prompts, although no member has learned from answers
            # to the ones before.
            for rollouts, position in zip(self.members, positions, strict=True):
                rollouts.rows_consumed = position
            raise
        # The masks of dropout depend on the number of micro-batches so far. How many an update has depends
        # on the lengths of its answers, so the maximum is counted for each update.
        options = self.drawer.drawers[0].options
        ensemble = self.drawer.ensemble
        micro_batches = options.prompts * options.group
        ensemble.stacked_parameters.caller.draw.fill_(ensemble.index * micro_batches)
        return window

    def _make_windows(self) -> Batch:
        """Return the next windows of all members as one.

        Each member's window is made by a Python generator (`WindowInTheMaking`), which runs until it needs
        answers. The answers for all members are then sampled together. This goes on until all generators
        have ended.
        """
        diverged = self.drawer.diverged
        makings = {
            number: rollouts.make_window()
            for number, rollouts in enumerate(self.members)
            if number not in diverged
        }
        windows: dict[int, Batch | None] = {}
        wanted: dict[int, WantedAnswers] = {}

        def go_on(number: int, sampled: SampledAnswers | None) -> None:
            """Make a member's window up to the next answers that it needs, or to its end."""
            try:
                # The first value that is sent to a Python generator must be None.
                wanted[number] = makings[number].send(sampled)  # type: ignore[arg-type]
            except StopIteration as made:
                windows[number] = made.value

        for number in makings:
            go_on(number, None)
        while wanted:
            asked = dict(wanted)
            wanted.clear()
            began = clock()
            answers = self.drawer.draw(asked)
            seconds = clock() - began
            for number, completions in answers.items():
                go_on(number, SampledAnswers(completions, seconds))
        for number in diverged:
            self.members[number].is_fresh = False  # its `numbers` are about an earlier window
        finished = {number: window for number, window in windows.items() if window is not None}
        if not finished and len(diverged) == len(self.members):
            raise not_finite(self.members[0].drawer.prompts.train[0])
        if not finished:
            raise StopIteration
        return self._stacked(finished)

    def _stacked(self, windows: Mapping[int, Batch]) -> Batch:
        """Return the members' windows as one, [N, R, T]."""
        # A window in which no answer changes the gradient may lack some tensors that others have. `likes`
        # has one tensor of each name, for its dtype and its shape without the rows.
        likes = {name: tensor for window in windows.values() for name, tensor in window.items()}
        rows = max(len(window["targets"]) for window in windows.values())
        fill = fill_of(self.drawer.ensemble.step.loss, likes) or {}

        def padded(name: str, number: int) -> torch.Tensor:
            """Return a tensor of a member's window, with empty rows up to `rows`."""
            like = likes[name]
            tensor = like.new_full((rows, *like.shape[1:]), fill.get(name, 0))
            if number in windows and name in windows[number]:
                of_member = windows[number][name]
                tensor[: len(of_member)] = of_member
            return tensor

        stacked = {}
        for name in likes:
            stacked[name] = torch.stack([padded(name, i) for i in range(len(self.members))])
        return stacked
