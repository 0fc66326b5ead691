"""One small instance of every class of `torch.nn`, with inputs that it takes: what an ensemble
holds or refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ROWS = 4


class Case(NamedTuple):
    """How to build a layer, and what one call of it takes: shapes of floats, or functions that draw
    a tensor.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[Any, ...]
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs)


def ids(most: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    """Draws whole numbers below `most`."""
    return lambda generator: torch.randint(most, shape, generator=generator)


def signs(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Draws 1 and -1."""
    return lambda generator: torch.randint(2, shape, generator=generator) * 2 - 1


def shares(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Draws numbers between 0 and 1."""
    return lambda generator: torch.rand(shape, generator=generator, dtype=torch.float64)


def pooled(spatial: int, layer: nn.Module, x: Tensor) -> Any:
    """What a layer that undoes pooling makes of what was pooled."""
    pool = getattr(nn.functional, f"max_pool{spatial}d")
    return layer(*pool(x, 2, return_indices=True))


VECTOR, LINE, PLANE, SPACE = (ROWS, 6), (ROWS, 4, 8), (ROWS, 4, 8, 8), (ROWS, 4, 6, 6, 6)
OF = {"1d": LINE, "2d": PLANE, "3d": SPACE}
PLAIN = (
    "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU RReLU ReLU "
    "ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Flatten Dropout AlphaDropout DataParallel"
).split()
TWO = "L1Loss MSELoss SmoothL1Loss HuberLoss PairwiseDistance CosineSimilarity".split()
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool": (3,),
    "AdaptiveMaxPool": (3,),
    "AvgPool": (2,),
    "MaxPool": (2,),
    "LPPool": (2, 2),
    "BatchNorm": (4,),
    "InstanceNorm": (4, 1e-5, 0.1, True, True),
    "Conv": (4, 6, 3),
    "ConvTranspose": (4, 6, 3),
    "CircularPad": (1,),
    "ConstantPad": (1, 0.5),
    "ReflectionPad": (1,),
    "ReplicationPad": (1,),
    "ZeroPad": (1,),
    "Dropout": (0.3,),
    "LazyBatchNorm": (),
    "LazyInstanceNorm": (),
    "LazyConv": (6, 3),
    "LazyConvTranspose": (6, 3),
}


def in_dimensions() -> dict[str, Case]:
    """The layers that exist for lines, planes and spaces."""
    found = {}
    for name, arguments in ARGUMENTS.items():
        for spatial, shape in OF.items():
            kind = getattr(nn, name + spatial)
            found[name + spatial] = Case(
                lambda kind=kind, arguments=arguments: kind(*arguments), (shape,)
            )
    for spatial, shape in OF.items():
        kind = getattr(nn, f"MaxUnpool{spatial}")
        found[kind.__name__] = Case(
            lambda kind=kind: kind(2), (shape,), lambda *a, n=int(spatial[0]): pooled(n, *a)
        )
    return found


def recurrent() -> dict[str, Case]:
    """Layers that go through a sequence, and their cells."""
    found = {}
    for name in ("RNN", "LSTM", "GRU"):
        kind, cell = getattr(nn, name), getattr(nn, f"{name}Cell")
        found[name] = Case(lambda kind=kind: kind(6, 5, batch_first=True), ((ROWS, 7, 6),))
        found[f"{name}Cell"] = Case(lambda cell=cell: cell(6, 5), (VECTOR,))
    return found


def losses() -> dict[str, Case]:
    """Losses, which members have their own outputs for."""
    found = {name: Case(getattr(nn, name), (VECTOR, VECTOR)) for name in TWO}
    log_shares = lambda layer, x, *of: layer(x.log_softmax(-1), *of)  # noqa: E731
    return found | {
        "BCELoss": Case(
            nn.BCELoss, (VECTOR, shares(*VECTOR)), lambda layer, x, y: layer(x.sigmoid(), y)
        ),
        "BCEWithLogitsLoss": Case(nn.BCEWithLogitsLoss, (VECTOR, shares(*VECTOR))),
        "CTCLoss": Case(
            nn.CTCLoss,
            ((ROWS, 7, 5), lambda g: 1 + ids(4, ROWS, 3)(g)),
            lambda layer, x, y: layer(x.log_softmax(-1).transpose(0, 1), y, [7] * ROWS, [3] * ROWS),
        ),
        "CosineEmbeddingLoss": Case(nn.CosineEmbeddingLoss, (VECTOR, VECTOR, signs(ROWS))),
        "CrossEntropyLoss": Case(nn.CrossEntropyLoss, (VECTOR, ids(6, ROWS))),
        "GaussianNLLLoss": Case(
            nn.GaussianNLLLoss, (VECTOR, VECTOR, lambda g: shares(*VECTOR)(g) + 0.1)
        ),
        "HingeEmbeddingLoss": Case(nn.HingeEmbeddingLoss, (VECTOR, signs(*VECTOR))),
        "KLDivLoss": Case(
            lambda: nn.KLDivLoss(reduction="batchmean"), (VECTOR, shares(*VECTOR)), log_shares
        ),
        "LinearCrossEntropyLoss": Case(
            lambda: nn.LinearCrossEntropyLoss(6, 5), (VECTOR, ids(5, ROWS))
        ),
        "MarginRankingLoss": Case(nn.MarginRankingLoss, ((ROWS,), (ROWS,), signs(ROWS))),
        "MultiLabelMarginLoss": Case(
            nn.MultiLabelMarginLoss, (VECTOR, lambda g: ids(6, *VECTOR)(g) - 1)
        ),
        "MultiLabelSoftMarginLoss": Case(nn.MultiLabelSoftMarginLoss, (VECTOR, shares(*VECTOR))),
        "MultiMarginLoss": Case(nn.MultiMarginLoss, (VECTOR, ids(6, ROWS))),
        "NLLLoss": Case(nn.NLLLoss, (VECTOR, ids(6, ROWS)), log_shares),
        "NLLLoss2d": Case(nn.NLLLoss, ((ROWS, 4, 8, 8), ids(4, ROWS, 8, 8))),
        "PoissonNLLLoss": Case(nn.PoissonNLLLoss, (VECTOR, shares(*VECTOR))),
        "SoftMarginLoss": Case(nn.SoftMarginLoss, (VECTOR, signs(*VECTOR))),
        "TripletMarginLoss": Case(nn.TripletMarginLoss, (VECTOR, VECTOR, VECTOR)),
        "TripletMarginWithDistanceLoss": Case(
            nn.TripletMarginWithDistanceLoss, (VECTOR, VECTOR, VECTOR)
        ),
        "AdaptiveLogSoftmaxWithLoss": Case(
            lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8], 2.0), (VECTOR, ids(12, ROWS))
        ),
    }


def layers() -> dict[str, Case]:
    """By the name of the class."""
    found = {name: Case(getattr(nn, name), (VECTOR,)) for name in PLAIN if name != "DataParallel"}
    found |= in_dimensions() | recurrent()
    # Torch 2.11 lacks one.
    found |= {name: case for name, case in losses().items() if hasattr(nn, name)}
    attention = (ROWS, 5, 8)
    transformer = {"dim_feedforward": 12, "batch_first": True}
    return found | {
        "DataParallel": Case(lambda: nn.DataParallel(nn.Linear(6, 5)), (VECTOR,)),
        "Bilinear": Case(lambda: nn.Bilinear(6, 6, 5), (VECTOR, VECTOR)),
        "ChannelShuffle": Case(lambda: nn.ChannelShuffle(2), (PLANE,)),
        "CrossMapLRN2d": Case(lambda: nn.CrossMapLRN2d(3), (PLANE,)),
        "Embedding": Case(lambda: nn.Embedding(11, 6), (ids(11, ROWS, 5),)),
        "EmbeddingBag": Case(lambda: nn.EmbeddingBag(11, 6), (ids(11, ROWS, 5),)),
        "FeatureAlphaDropout": Case(nn.FeatureAlphaDropout, (PLANE,)),
        "Fold": Case(lambda: nn.Fold((4, 4), 2), ((ROWS, 8, 9),)),
        "FractionalMaxPool2d": Case(lambda: nn.FractionalMaxPool2d(2, 3), (PLANE,)),
        "FractionalMaxPool3d": Case(lambda: nn.FractionalMaxPool3d(2, 3), (SPACE,)),
        "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), (PLANE,)),
        "LayerNorm": Case(lambda: nn.LayerNorm(6), (VECTOR,)),
        "LazyLinear": Case(lambda: nn.LazyLinear(5), (VECTOR,)),
        "Linear": Case(lambda: nn.Linear(6, 5), (VECTOR,)),
        "LocalResponseNorm": Case(lambda: nn.LocalResponseNorm(2), (PLANE,)),
        "LogSoftmax": Case(lambda: nn.LogSoftmax(-1), (VECTOR,)),
        "ModuleDict": Case(
            lambda: nn.ModuleDict({"one": nn.Linear(6, 5)}), (VECTOR,), lambda layer, x: layer["one"](x)
        ),
        "ModuleList": Case(lambda: nn.ModuleList([nn.Linear(6, 5)]), (VECTOR,), lambda layer, x: layer[0](x)),
        "MultiheadAttention": Case(
            lambda: nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), (attention,) * 3
        ),
        "ParameterDict": Case(
            lambda: nn.ParameterDict({"one": torch.randn(6)}), (VECTOR,), lambda layer, x: x * layer["one"]
        ),
        "ParameterList": Case(lambda: nn.ParameterList([torch.randn(6)]), (VECTOR,), lambda layer, x: x * layer[0]),
        "PixelShuffle": Case(lambda: nn.PixelShuffle(2), (PLANE,)),
        "PixelUnshuffle": Case(lambda: nn.PixelUnshuffle(2), (PLANE,)),
        "RMSNorm": Case(lambda: nn.RMSNorm(6), (VECTOR,)),
        "Sequential": Case(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True)), (VECTOR,)),
        "Softmax": Case(lambda: nn.Softmax(-1), (VECTOR,)),
        "Softmax2d": Case(nn.Softmax2d, (PLANE,)),
        "Softmin": Case(lambda: nn.Softmin(-1), (VECTOR,)),
        "SyncBatchNorm": Case(lambda: nn.SyncBatchNorm(4), (PLANE,)),
        "Threshold": Case(lambda: nn.Threshold(0.1, 0.5), (VECTOR,)),
        "Transformer": Case(
            lambda: nn.Transformer(8, 2, 1, 1, **transformer), (attention, attention)
        ),
        "TransformerDecoder": Case(
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, **transformer), 1), (attention, attention)
        ),
        "TransformerDecoderLayer": Case(
            lambda: nn.TransformerDecoderLayer(8, 2, **transformer), (attention, attention)
        ),
        "TransformerEncoder": Case(
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, **transformer), 1), (attention,)
        ),
        "TransformerEncoderLayer": Case(lambda: nn.TransformerEncoderLayer(8, 2, **transformer), (attention,)),
        "Unflatten": Case(lambda: nn.Unflatten(1, (2, 3)), (VECTOR,)),
        "Unfold": Case(lambda: nn.Unfold(2), (PLANE,)),
        "Upsample": Case(lambda: nn.Upsample(scale_factor=2, mode="bicubic"), (PLANE,)),
        "UpsamplingBilinear2d": Case(lambda: nn.UpsamplingBilinear2d(scale_factor=2), (PLANE,)),
        "UpsamplingNearest2d": Case(lambda: nn.UpsamplingNearest2d(scale_factor=2), (PLANE,)),
    }  # fmt: skip


class Scaled(nn.Module):
    """A layer whose first input is scaled by numbers of the member's own, so that a layer without
    weights has some.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layer, self.call, first = case.build(), case.call, case.inputs[0]
        self.scale = nn.Parameter(torch.ones(()) if callable(first) else 1 + torch.rand(first[-1]))

    def forward(self, first: Tensor, *further: Tensor) -> Any:
        """What the layer says."""
        first = first * self.scale if first.is_floating_point() else first
        return self.call(self.layer, first, *further)


def drawn(case: Case, seed: int) -> dict[str, Tensor]:
    """Inputs of a case."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        of(generator) if callable(of) else torch.randn(of, generator=generator, dtype=torch.float64)
        for of in case.inputs
    ]
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss of all numbers that a module says, weighted, as norms leave a plain sum no gradient."""
    outputs = [leaf for leaf in tree_leaves(model(*batch.values())) if isinstance(leaf, Tensor)]
    floats = [leaf.flatten() for leaf in outputs if leaf.is_floating_point()]
    losses = [(leaf * torch.arange(len(leaf), dtype=leaf.dtype).cos()).sum() for leaf in floats]
    return torch.stack(losses).sum().square(), torch.ones((), dtype=torch.int64)
