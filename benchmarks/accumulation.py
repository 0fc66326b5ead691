"""Compare accumulated gradients with the large batch's: of Monograph's step, and of averaging
micro-batches' means.

One update of 16 rows of random tokens padded to 64, cut into micro-batches of several sizes; on a
CPU.
"""

from __future__ import annotations

import harness
import torch
from torch import Tensor, nn

import monograph as mono

ROWS, LENGTH, VOCABULARY = 16, 64, 256
BY_MICRO_BATCH = [1, 2, 4, 8, 16]


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    given = harness.arguments(__doc__).parse_args()
    found = harness.result(
        "accumulation",
        {"rows": ROWS, "length": LENGTH, "targets": int((ragged()["targets"] != -100).sum())},
        [measured(size) for size in ([4] if given.smoke else BY_MICRO_BATCH)],
    )
    harness.print_machine(found)
    print(table(found["cases"]))
    harness.write(given.out, found)


def table(rows: list[dict[str, float]]) -> str:
    """Return the errors as a Markdown table."""
    names = [
        "rows per micro-batch",
        "sum over count, fp32",
        "sum over count, fp64",
        "mean of means",
    ]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        errors = [f"{row['fp32']:.0e}", f"{row['fp64']:.0e}", f"{100 * row['mean_of_means']:.0f} %"]
        lines.append(f"| {row['micro_batch']} | {' | '.join(errors)} |")
    return "\n".join(lines)


def measured(size: int) -> dict[str, float]:
    """Return the relative errors of an update's gradient against the whole batch's, in
    micro-batches of `size` rows.
    """
    batch = ragged()
    parts = [
        {name: tensor[i : i + size] for name, tensor in batch.items()} for i in range(0, ROWS, size)
    ]
    errors: dict[str, float] = {"micro_batch": size}
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        step = mono.Step(model(dtype))
        large = mean_gradient(step.model, batch)
        step.discard()
        mono.accumulate(step, parts)
        errors[name] = distance(flat_gradient(step.model), large)
    plain = model(torch.float64)
    means = torch.stack([mean_gradient(plain, part) for part in parts]).mean(0)
    errors["mean_of_means"] = distance(means, mean_gradient(plain, batch))
    return errors


def model(dtype: torch.dtype) -> nn.Module:
    """Return a small Llama, the same at every call."""
    return mono.Llama(mono.LlamaConfig.preset("nano", vocab_size=VOCABULARY)).to(dtype)


def ragged() -> dict[str, Tensor]:
    """Return padded rows of random tokens, with lengths spread evenly from one target to a full
    row.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (
        torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2)
    )
    lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    targets[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return {"tokens": tokens, "targets": targets}


def mean_gradient(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the gradient of the batch's mean cross-entropy on dense logits, as one flat vector."""
    logits = module.logits(module(batch["tokens"])).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, batch["targets"].flatten(), ignore_index=-100)
    return torch.cat(
        [gradient.flatten() for gradient in torch.autograd.grad(loss, list(module.parameters()))]
    )


def flat_gradient(module: nn.Module) -> Tensor:
    """Return the gradients of the module's parameters as one flat vector."""
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def distance(one: Tensor, other: Tensor) -> float:
    """Return the relative Euclidean distance, in float64."""
    return float((one.double() - other.double()).norm() / other.double().norm())


if __name__ == "__main__":
    main()
