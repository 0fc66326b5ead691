"""Compare the answers of N members, sampled in one decoder, with those of one member alone, and with
those of the members one after another.

Members have adapters of ranks 4 and 8 on one base. All sample as many answers of the same length, and
take turns in one process. The goal is that eight members take at most 2.5 times as long as one.
Where the rows of one member fill the machine, as products do on two CPU cores from some rows on, no
decoder can reach it.

python benchmarks/member_rollouts.py [--members 8] [--only CASE ...]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import harness
import torch

from monograph import member_rollouts, policy_loss, rollouts
from monograph.device import default_device
from monograph.ensemble import Ensemble
from monograph.graph.lora import Lora, adapt, adapted_layers
from monograph.graph.shared_base import copy_with_shared_base
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.rl.rollouts import WantedAnswers
from monograph.text.tokenizer import Tokenizer

GOAL = 2.5
AT_ONCE, ONE, IN_TURN = "all at once", "one member", "one after another"


def llama(hidden: int, layers: int, vocabulary: int) -> LlamaConfig:
    """Return a Llama with heads of 32, of which two share a key-value head."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )


class Case(NamedTuple):
    """A model, and the answers that a member samples: prompts, and answers to each."""

    config: LlamaConfig
    prompts: int
    group: int


CASES = {
    "0.2 M parameters, 4 answers": Case(llama(64, 2, 300), 2, 2),
    "0.2 M parameters, 32 answers": Case(llama(64, 2, 300), 8, 4),
    "26 M parameters, 4 answers": Case(llama(512, 8, 4096), 2, 2),
    "26 M parameters, 32 answers": Case(llama(512, 8, 4096), 8, 4),
}
SMOKE = {"smoke": Case(llama(64, 1, 300), 1, 2)}


def spread_out(member: Llama, seed: int) -> None:
    """Give a member's new adapters values as if they had been trained."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(member).values():
            shape = layer.lora_B.weight.shape
            layer.lora_B.weight.copy_(torch.randn(shape, generator=draw) * 0.02)


class Contestants:
    """The samplers of all members at once, and of each alone."""

    def __init__(self, case: Case, members: int, tokens: int) -> None:
        device = default_device()
        first = Llama(case.config, seed=0)
        adapt(first, Lora(rank=8))
        first.to(device)
        loras = [Lora(rank=4 if number % 2 else 8) for number in range(members)]
        others = [copy_with_shared_base(first, lora, seed) for seed, lora in enumerate(loras[1:])]
        models = [first, *others]
        for number, model in enumerate(models):
            spread_out(model, number)
        tokenizer = Tokenizer.bytes()
        records = [{"prompt": f"{number} and {number + 1} are "} for number in range(case.prompts)]
        options: Any = {
            "prompts": case.prompts,
            "group": case.group,
            "max_new_tokens": tokens,
        }
        alone = [
            copy_with_shared_base(model, lora) for model, lora in zip(models, loras, strict=True)
        ]
        ensemble = Ensemble(models, loss=policy_loss(), optim=AdamW, each=True)
        seeds = list(range(members))
        self.members = member_rollouts(ensemble, tokenizer, records, zero, seeds=seeds, **options)
        self.alone = [
            rollouts(
                Resident(model, loss=policy_loss(), optim=AdamW()),
                tokenizer,
                records,
                zero,
                seed=seed,
                **options,
            )
            for seed, model in enumerate(alone)
        ]
        self.wanted: list[WantedAnswers] = [
            each._wanted_answers(range(case.prompts)) for each in self.alone
        ]

    def sample(self, side: str) -> int:
        """Sample a window's answers; return the number of their tokens."""
        if side == AT_ONCE:
            answers = self.members.drawer.draw(dict(enumerate(self.wanted)))
            return sum(len(each.token_ids) for of_member in answers.values() for each in of_member)
        count = 1 if side == ONE else len(self.alone)
        return sum(
            len(each.token_ids)
            for own, wanted in zip(self.alone[:count], self.wanted[:count], strict=True)
            for each in own.drawer.draw(*wanted)
        )


def zero(prompt: str, answer: str, record: Any) -> float:
    """Return a reward that nothing reads."""
    return 0.0


def measure(name: str, case: Case, args: Any) -> dict[str, Any]:
    """Measure one case."""
    device = default_device()
    contest = Contestants(case, args.members, args.tokens)
    sides = (AT_ONCE, ONE, IN_TURN)
    tokens = {side: contest.sample(side) for side in sides}  # the first sample makes the decoders
    times = harness.interleaved(
        {side: lambda side=side: contest.sample(side) for side in sides}, args.rounds, device
    )
    return {
        "case": name,
        "parameters": case.config.parameter_count(),
        "answers_of_a_member": case.prompts * case.group,
        "members": args.members,
        "tokens": tokens,
        "seconds": {side: harness.spread([t.wall_s for t in each]) for side, each in times.items()},
        "times_one": harness.ratios(times[AT_ONCE], times[ONE]),
        "speedup": harness.ratios(times[IN_TURN], times[AT_ONCE]),
        "goal": GOAL,
    }


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="these cases")
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.members, args.tokens = 2, 2, 3
    result = harness.result(
        "member_rollouts",
        {key: getattr(args, key) for key in ("rounds", "members", "tokens", "smoke")},
    )
    harness.print_machine(result)
    for name, case in (SMOKE if args.smoke else CASES).items():
        if not args.only or name in args.only:
            result["cases"].append(measure(name, case, args))
    harness.write(args.out, result)
    rows = [
        [
            case["case"],
            *(harness.shown(case["seconds"][side], 3) for side in (ONE, AT_ONCE, IN_TURN)),
            harness.shown(case["times_one"]["wall"]),
            harness.shown(case["times_one"]["cpu"]),
            harness.shown(case["speedup"]["wall"]),
        ]
        for case in result["cases"]
    ]
    headers = [
        "case",
        f"{ONE}, s",
        f"{AT_ONCE}, s",
        f"{IN_TURN}, s",
        "at once / one",
        "by CPU time",
        "in turn / at once",
    ]
    harness.print_table(headers, rows)


if __name__ == "__main__":
    main()
