"""How much faster a text is written with a draft model, by how often the two models agree.

The draft model is the model without its last layers. What these layers add is multiplied by a factor:
with 0 the models agree on every token, and with a large one on hardly any. So the figures depend on no
training. Texts with and without drafts are written in turns in one process, in alternating order. Figures
are medians over pairs.

    tokens in a pass   how many tokens a pass over proposed tokens gives, at most one more than proposed
    ratio              tokens per second with drafts / without, within a pair
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import torch

from monograph.decode.draft import DRAFT_TOKENS
from monograph.decode.generator import Generator, Mode
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.device import default_device
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama

PROMPT = tuple(range(300, 316))
# What the last layers add is multiplied by these.
FACTORS = (0.0, 0.03, 0.1, 1.0)


def models(smoke: bool, factor: float) -> tuple[Llama, Llama]:
    """Return a model with random weights, and its draft model."""
    torch.manual_seed(0)
    width, layers = (64, 2) if smoke else (512, 12)
    config = LlamaConfig(
        vocab_size=2_048,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=1_024,
    )
    model = Llama(config)
    draft = Llama(LlamaConfig(**(vars(config) | {"num_hidden_layers": 1})))
    with torch.no_grad():
        for name, matrix in model.named_parameters():
            if matrix.ndim == 2:
                matrix.mul_(2)
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            if adds and ".layers.0." not in name:
                matrix.mul_(factor)
    draft.load_state_dict(model.state_dict(), strict=False)
    device = default_device()
    return model.to(device).eval(), draft.to(device).eval()


class Writer:
    """A decoder that writes texts of one length."""

    def __init__(
        self,
        model: Llama,
        draft: Llama | None,
        rows: int,
        tokens: int,
        mode: Mode,
        prompt: tuple[int, ...] = PROMPT,
    ) -> None:
        """Allocate the decoder."""
        self.sampling = Sampling(temperature=0.8)
        self._prompt = prompt
        self.generator = Generator(
            model,
            chain_of([self.sampling]),
            rows=rows,
            slots=len(prompt) + tokens,
            vocabulary=model.config.vocab_size,
            mode=mode,
            draft=draft,
        )
        self._tokens = tokens

    def tokens_per_s(self, seed: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Write a text in each row; `clock` returns seconds."""
        rows = self.generator.rows
        for row in range(rows):
            request = Request(self._prompt, self.sampling, self._tokens, seed=seed * rows + row)
            self.generator.submit(request)
        began = clock()
        count = sum(len(event.token_ids) for event in self.generator.run())
        return count / (clock() - began)


def measured(factor: float, rows: int, tokens: int, pairs: int, smoke: bool) -> dict[str, Any]:
    """Return the figures of one factor and number of rows."""
    model, draft = models(smoke, factor)
    mode: Mode = "captured" if model.lm_head.weight.is_cuda else "eager"
    plain = Writer(model, None, rows, tokens, mode)
    drafted = Writer(model, draft, rows, tokens, mode)
    return {
        "factor": factor,
        "rows": rows,
        **compared(plain, drafted, pairs),
        "passes": drafted.generator.drafted_passes,
    }


def compared(
    plain: Writer, drafted: Writer, pairs: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Return what drafts give: both write the same texts, in turns."""
    writers = {"plain": plain, "drafted": drafted}
    speeds: dict[str, list[float]] = {name: [] for name in writers}
    for number in range(pairs + 1):
        order = list(writers) if number % 2 else list(writers)[::-1]
        for name in order:
            speeds[name].append(writers[name].tokens_per_s(number, clock))
    # The first texts warm up.
    ratios = [a / b for a, b in zip(speeds["drafted"][1:], speeds["plain"][1:], strict=True)]
    generator = drafted.generator
    assert generator.drafter is not None
    return {
        "tokens_in_a_pass": generator.drafted_tokens / max(1, generator.drafted_passes),
        "cost": generator.drafter.cost,
        "tokens_per_s": statistics.median(speeds["drafted"][1:]),
        "ratio": harness.spread(ratios),
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Return the cases as a table in Markdown."""
    lines = ["| rows | tokens in a pass | tokens/s with drafts / without |", "|---|---|---|"]
    for case in cases:
        ratio = case["ratio"]
        lines.append(
            f"| {case['rows']} | {case['tokens_in_a_pass']:.2f} | {ratio['median']:.2f} "
            f"({ratio['low']:.2f} to {ratio['high']:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    if args.smoke:
        args.tokens, args.pairs, args.rows = 25, 1, [1]
    found = harness.result(
        "drafts",
        {
            "tokens": args.tokens,
            "pairs": args.pairs,
            "draft_tokens": DRAFT_TOKENS,
            "smoke": args.smoke,
        },
    )
    harness.print_machine(found)
    for rows in args.rows:
        for factor in FACTORS:
            found["cases"].append(measured(factor, rows, args.tokens, args.pairs, args.smoke))
            harness.write(args.out, found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
