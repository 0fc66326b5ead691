"""Width transfer of a run: the shape that its learning rate is for, and the narrow run on which that rate is found."""

from __future__ import annotations

import math

from monograph.config import Settings
from monograph.errors import UsageError
from monograph.measure.quantities import counted
from monograph.model.config import LlamaConfig
from monograph.transfer import WidthTransfer, narrowed

WIDTH = "width"
# Bjorck et al. 2024, "Scaling Optimal LR Across Token Horizons": the best rate falls with the tokens.
HORIZON = "arXiv 2409.19913"


def base_width(value: str) -> int | None:
    """The hidden size that `optim.transfer` names, None if it is only "width"."""
    return int(value.removeprefix(f"{WIDTH}:")) if value != WIDTH else None


def transfer_of(settings: Settings, config: LlamaConfig | None) -> WidthTransfer | None:
    """The rule by which a model of that shape is trained, None without transfer.

    Args:
        settings: of the run.
        config: the model's shape, None if it is no Llama.

    Raises:
        UsageError: transfer of something else, or from a width that does not keep the shape's ratios.
    """
    value = settings.optim.transfer
    if value == "none":
        return None
    origin = settings.origins.get("optim.transfer", "default")
    if config is None or settings.model.init is not None:
        raise UsageError(
            f"{origin}: optim.transfer = {value} is a rule for a model whose weights are drawn here, by preset or "
            f"sizes, not for model.init = {settings.model.init}; leave it at none"
        )
    try:
        return WidthTransfer(config, narrowed(config, base_width(value)))
    except UsageError as error:
        raise UsageError(f"{origin}: optim.transfer = {value}: {error}") from None


def fixed_transfer(settings: Settings, config: LlamaConfig | None) -> str:
    """`optim.transfer` with its width named, as a run records it.

    Raises:
        UsageError: see `transfer_of`.
    """
    transfer = transfer_of(settings, config)
    return f"{WIDTH}:{transfer.base.hidden_size}" if transfer else "none"


def require_rate(settings: Settings) -> None:
    """Refuse to train with transfer and no learning rate: what is best for the base is not known.

    Raises:
        UsageError: saying so.
    """
    if settings.optim.transfer != "none" and settings.optim.lr == "auto":
        origin = settings.origins.get("optim.transfer", "default")
        raise UsageError(
            f"{origin}: optim.transfer = {settings.optim.transfer} carries a learning rate that was found on a "
            "narrower model: give it as optim.lr (`monograph sweep` finds it)"
        )


def same_transfer(given: str, own: str) -> bool:
    """Whether what is asked for is what a run has: its own, or "width" without saying which."""
    return given == own or (given == WIDTH and own.startswith(f"{WIDTH}:"))


def proxy_of(settings: Settings, config: LlamaConfig) -> Settings:
    """The narrow run on which a wide one's rate is found: the same, tokens per update included, but for the width.

    Args:
        settings: of the wide run, transfer on; what depends on the model's size (tokenizer, tokens per update)
            fixed, or the narrow run would choose its own. The learning rate may be open.
        config: its model's shape.

    Raises:
        UsageError: see `transfer_of`.
    """
    transfer = transfer_of(settings, config)
    assert transfer is not None
    base = transfer.base
    sizes = {
        name: getattr(base, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    }
    narrow = {f"model.{name}": size for name, size in sizes.items()}
    return settings.resolve({**narrow, "optim.transfer": "none"}, f"the proxy of {config.hidden_size}")


def carried(settings: Settings, proxy: Settings, updates: int, proxy_updates: int) -> list[str]:
    """What a person is told who carries the best knobs of a proxy to the wide model: what carries and what does not.

    Args:
        settings: of the wide run, tokens per update fixed.
        proxy: of the narrow one.
        updates: of the wide run.
        proxy_updates: of the narrow one.
    """
    lines = [
        "carried: learning rate, betas, eps, warm-up in updates, and weight decay as lr * weight_decay per update",
        "not carried: tokens per update, number of updates, sequence length, depth, data, vocabulary, precision",
    ]
    size, proxy_size = int(settings.train.tokens_per_update), int(proxy.train.tokens_per_update)
    if size != proxy_size:
        factor = math.sqrt(size / proxy_size)
        lines.append(
            f"{size:,} tokens per update instead of {proxy_size:,}: the best rate goes with the square root of that, "
            f"about {factor:.2g} times the one found; not applied"
        )
    ratio = updates * size / (proxy_updates * proxy_size)
    if not math.isclose(ratio, 1.0, rel_tol=0.01):
        lines.append(
            f"{counted(updates, 'update')} instead of {proxy_updates:,}, {ratio:.2g} times the tokens: longer runs "
            f"want lower rates ({HORIZON}), and weight decay divided by {ratio:.2g}; not applied"
        )
    return lines
