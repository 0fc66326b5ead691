"""What drafts cost and save, by count, and when they are switched off.

No clock is read, so that a text does not depend on one. The unit is the time of an ordinary step, in which
each row samples one token.

Shapes: B rows, K proposed tokens.
"""

from dataclasses import dataclass
from typing import Final

# A product of M rows takes 1 + (M - 1) / PRODUCT_ROWS times as long as one of a single row: it reads the
# weights once, and computes for each row. On a CPU the number was measured (dev/log.md); that of a GPU is
# an estimate from the rates of cards, which compute some 200 to 300 times while they read a number.
PRODUCT_ROWS: Final = {"cpu": 16.0, "cuda": 256.0}
# A pass takes PASS_COST more than its products, each proposal TOKEN_COST more than its share of a step, and
# a pass of a model whose layers are all recurrent RECURRENCE_COST more, since it computes their states twice.
# Measured on a CPU with one row (dev/log.md).
PASS_COST = 0.2
TOKEN_COST = 0.1
RECURRENCE_COST = 0.6
# Drafts are switched off once they have cost the time of this many steps more than they saved.
MAX_LOST_STEPS = 4.0
# Each step without drafts forgives this much of what they have lost. Drafts are tried again once half of it
# is forgiven, so that trying costs at most one step in a hundred.
FORGIVEN_BY_STEP = 0.01


@dataclass
class DraftBudget:
    """What drafts have cost so far, from which follows whether they are used.

    Attributes:
        lost_steps: how much more time drafts have cost than saved since this was last 0, in units of one
            step.
        is_spent: whether they have cost too much, so that steps go on without them.
    """

    lost_steps: float = 0.0
    is_spent: bool = False

    def count_passes(self, cost: float, tokens: float) -> None:
        """Count passes that took the time of `cost` steps, and gave a row as many tokens as `tokens` steps."""
        self.lost_steps = max(0.0, self.lost_steps + cost - tokens)

    def count_steps(self, steps: int) -> None:
        """Count steps without drafts, which forgive a part of what was lost."""
        self.lost_steps = max(0.0, self.lost_steps - steps * FORGIVEN_BY_STEP)
        if self.lost_steps <= MAX_LOST_STEPS / 2:
            self.is_spent = False


def cost_of_pass(
    rows: int, tokens: int, share: float, device: str, recurrent: float = 0.0
) -> float:
    """Return the estimated time of a pass with drafts in units of one ordinary step of the same rows.

        (1 + (B (K + 1) - 1) / R) / (1 + (B - 1) / R) + PASS_COST + K (share + TOKEN_COST)
            + recurrent RECURRENCE_COST,    R = PRODUCT_ROWS

    Args:
        rows: B.
        tokens: K.
        share: the weights that a step of the draft model reads, relative to those of the model, or its number of layers
            relative to the model's, whichever is larger.
        device: the type of device.
        recurrent: the share of the model's layers that are recurrent.
    """
    product_rows = PRODUCT_ROWS[device]
    step = 1 + (rows - 1) / product_rows
    check = 1 + (rows * (tokens + 1) - 1) / product_rows
    of_proposals = tokens * (share + TOKEN_COST)
    return check / step + PASS_COST + of_proposals + recurrent * RECURRENCE_COST
