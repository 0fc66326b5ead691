"""One compiled step that the laws share: compiling costs more than everything else here."""

from __future__ import annotations

import pytest

from batches import ragged, tiny_llama
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.schedule import warmup_cosine


@pytest.fixture(scope="session")
def compiled_step() -> Resident:
    """A tiny Llama whose whole step went through Inductor, warmed on windows of up to 16 rows in micro-batches of 4."""
    engine = Resident(tiny_llama(), optim=AdamW(lr=1e-2), schedule=warmup_cosine(2, 50), clip=0.5, micro_batch=4)
    assert engine.capture(ragged(16)) is None
    return engine
