"""Run: pytest tests/ops/test_layer_kernels.py (needs a CUDA device)

The kernels of products, of dense weights, of weights in 8 and 4 bits and of adapters, are as exact as
the modules or operators that they replace, and a row has the same bits alone as among others.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.frozen import FrozenWeight
from monograph.graph.lora import Adapted, Lora, adapt
from monograph.ops.rms_norm import rms_norm

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BASES = pytest.mark.parametrize("base", ["auto", "int8", "nf4"])
EPS = 1e-5
# Three blocks of nf4, so three programs share the sum of an adapter; 100 columns are two groups.
SUMMED = 192
ROWS = 67  # two tiles, or five of 16 rows


def kernels() -> Any:
    """Return the module; Triton, which it imports, is only where a card is."""
    from monograph.ops import layer_kernels

    return layer_kernels


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.cpu().double() - exact).norm() / exact.norm()).item()


class Case:
    """Linear layers that read one input, with adapters on a base, on the CPU."""

    def __init__(
        self,
        dtype: torch.dtype,
        base: Any,
        columns: tuple[int, ...] = (100, 16, 24),
        bias: bool = True,
        rank: int = 3,
        targets: Any = "all-linear",
        exact_scales: bool = False,
    ):
        self.dtype, self.columns = dtype, columns
        self.x = normal(ROWS, SUMMED, seed=0).to(dtype)
        # Gains of an fp32 model whose products are in 16 bits keep their precision.
        self.gain = (1 + 0.2 * normal(SUMMED, seed=1)).float()
        self.residual = normal(ROWS, sum(columns), seed=2).to(dtype)
        self.layers = nn.ModuleList(nn.Linear(SUMMED, each, bias=bias) for each in columns)
        for index, layer in enumerate(self.layers):
            # Layers and rows of different sizes, so that one's scale is not another's.
            size_N1 = 3.0**index * torch.linspace(0.2, 2, len(layer.weight))[:, None]
            layer.weight.data = size_N1 * normal(*layer.weight.shape, seed=3 + index).float() / 14
            if bias:
                layer.bias.data = normal(len(layer.bias), seed=6 + index).to(dtype)
        lora = Lora(rank, alpha=2.0 * rank, targets=targets, base=base, exact_scales=exact_scales)
        adapt(self.layers, lora)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Adapted):
                layer.lora_B.weight.data = normal(
                    *layer.lora_B.weight.shape, seed=9 + index
                ).float()
            if base == "auto":
                layer.weight.data = layer.weight.data.to(dtype)

    def outputs(self, norm: bool) -> list[Tensor]:
        """Return each layer's output by the modules, in the case's dtype."""
        x = rms_norm(self.x, self.gain, EPS) if norm else self.x
        with torch.no_grad():
            return [layer(x) for layer in self.layers]

    def exact_outputs(self, norm: bool) -> list[Tensor]:
        """Return each layer's output in fp64, by its equation."""
        x = self.x.double()
        x = rms_norm(x, self.gain.double(), EPS) if norm else x
        outputs = []
        for layer in self.layers:
            weight = layer.dense() if isinstance(layer, FrozenWeight) else layer.weight
            output = x @ weight.double().T
            if layer.bias is not None:
                output = output + layer.bias.double()
            if isinstance(layer, Adapted):
                a, b = layer.lora_A.weight.double(), layer.lora_B.weight.double()
                output = output + layer.scale * (x @ a.T) @ b.T
            outputs.append(output.detach())
        return outputs

    def tensors(self) -> list[Any]:
        """Return the layers as the kernels take them, on the card."""
        from monograph.decode.fast_projections import tensors_of

        return [tensors_of(layer) for layer in self.layers.cuda()]

    def norm(self) -> Any:
        from monograph.ops.decode_kernels import Norm

        return Norm(self.gain.cuda(), EPS)


@DTYPES
@BASES
@pytest.mark.parametrize("targets", ["all-linear", ["1", "2"]], ids=["all", "not the first"])
def test_layers_are_as_exact_as_their_modules(dtype: torch.dtype, base: Any, targets: Any) -> None:
    case = Case(dtype, base, targets=targets)
    exact = torch.cat(case.exact_outputs(norm=True), 1)
    modules = torch.cat(case.outputs(norm=True), 1)
    found = kernels().multiply(case.x.cuda(), case.tensors(), case.columns, case.norm())
    starts = [0, 100, 116, 140]
    for begin, end in zip(starts, starts[1:], strict=False):
        part = slice(begin, end)
        assert error(found[:, part], exact[:, part]) <= 2 * error(modules[:, part], exact[:, part])


@DTYPES
def test_a_folders_own_scales_and_numbers_of_4_bits_are_read(dtype: torch.dtype) -> None:
    """Its scales are fp32, and the numbers of its codes are other ones."""
    case = Case(dtype, "nf4", exact_scales=True)
    for layer in case.layers:
        layer.table.copy_(torch.linspace(-1, 1, 16) ** 3)
        assert layer.levels.dtype == torch.float32
    exact = torch.cat(case.exact_outputs(norm=True), 1)
    modules = torch.cat(case.outputs(norm=True), 1)
    found = kernels().multiply(case.x.cuda(), case.tensors(), case.columns, case.norm())
    assert error(found, exact) <= 2 * error(modules, exact)


@DTYPES
@BASES
def test_a_layer_with_a_residual_is_as_exact_as_its_module(dtype: torch.dtype, base: Any) -> None:
    case = Case(dtype, base, columns=(40,), bias=False, rank=70)
    exact = case.exact_outputs(norm=False)[0] + case.residual.double()
    module = case.outputs(norm=False)[0] + case.residual
    residual = case.residual.cuda()
    found = kernels().multiply(case.x.cuda(), case.tensors(), case.columns, None, residual)
    assert error(found, exact) <= 2 * error(module, exact)


@DTYPES
@BASES
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_product_is_as_exact_as_its_modules(
    dtype: torch.dtype, base: Any, activation: Any
) -> None:
    def combined(gate: Tensor, up: Tensor) -> Tensor:
        return (F.gelu(gate, approximate="tanh") if activation == "gelu" else F.silu(gate)) * up

    case = Case(dtype, base, columns=(40, 40), bias=False)
    exact, modules = combined(*case.exact_outputs(True)), combined(*case.outputs(True))
    gate, up = case.tensors()
    found = kernels().multiply_gated(case.x.cuda(), gate, up, 40, case.norm(), activation)
    assert error(found, exact) <= 2 * error(modules, exact)


def test_adapters_are_rounded_as_autocast_rounds_them() -> None:
    case = Case(torch.bfloat16, "int8", bias=False)
    exact = torch.cat(case.exact_outputs(norm=True), 1)
    with torch.autocast("cpu", torch.bfloat16):
        modules = torch.cat(case.outputs(norm=True), 1)
    x, layers, norm = case.x.cuda(), case.tensors(), case.norm()
    narrow = kernels().multiply(x, layers, case.columns, norm, rounds_adapters=True)
    assert error(narrow, exact) <= 2 * error(modules, exact)
    wide = kernels().multiply(x, layers, case.columns, norm)
    assert not torch.equal(narrow, wide)


@DTYPES
@BASES
def test_one_of_up_to_16_rows_has_the_same_bits_in_any_batch(dtype: torch.dtype, base: Any) -> None:
    case = Case(dtype, base, columns=(40, 40), bias=False)
    x, layers, norm = case.x.cuda(), case.tensors(), case.norm()

    def computed(rows: Tensor) -> tuple[Tensor, Tensor]:
        return (
            kernels().multiply(rows, layers, case.columns, norm),
            kernels().multiply_gated(rows, *layers, 40, norm, "silu"),
        )

    of_all = computed(x[:16].contiguous())
    for order in ([0], [3, 1], [15, *range(9)], list(range(15, -1, -1))):
        of_some = computed(x[order].contiguous())
        assert all(torch.equal(a[order], b) for a, b in zip(of_all, of_some, strict=True))


def test_a_dense_weight_has_the_bits_of_the_kernel_for_layers_side_by_side() -> None:
    case = Case(torch.bfloat16, "auto", targets=["0"])
    layers = [layer._replace(adapter=None) for layer in case.tensors()]
    weight = torch.cat([layer.stored[0] for layer in layers])
    bias = torch.cat([layer.bias_N for layer in layers])
    joined = kernels().project(case.x.cuda(), weight, case.norm(), bias)
    assert torch.equal(kernels().multiply(case.x.cuda(), layers, case.columns, case.norm()), joined)


class DenseCase:
    """Inputs of `project` and `project_gated`, and the numbers of torch's operators in a dtype."""

    def __init__(self, dtype: torch.dtype, rows: int = 20, summed: int = 192, columns: int = 72):
        self.x = normal(rows, summed, seed=0).to(dtype)
        self.gain = (0.2 * normal(summed, seed=1)).to(dtype)
        self.weight = (normal(columns, summed, seed=2) / summed**0.5).to(dtype)
        self.bias = normal(columns, seed=3).to(dtype)
        self.residual = normal(rows, columns, seed=4).to(dtype)

    def projected(self, wide: torch.dtype, centred: bool, parts: str) -> Tensor:
        x = self.x.to(wide)
        gain = self.gain.to(wide) + 1 if centred else self.gain.to(wide)
        x = rms_norm(x, gain, EPS) if "norm" in parts else x
        y = F.linear(x, self.weight.to(wide), self.bias.to(wide) if "bias" in parts else None)
        return y + self.residual.to(wide) if "residual" in parts else y

    def gated(self, wide: torch.dtype, activation: str) -> Tensor:
        x = rms_norm(self.x.to(wide), self.gain.to(wide), EPS)
        gate, up = F.linear(x, self.weight.to(wide)).chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if activation == "gelu" else F.silu(gate)) * up


@DTYPES
@pytest.mark.parametrize("parts", ["", "norm bias", "residual", "norm centred bias residual"])
def test_a_projection_is_as_exact_as_torchs(dtype: torch.dtype, parts: str) -> None:
    from monograph.ops.decode_kernels import Norm

    case, centred = DenseCase(dtype), "centred" in parts
    exact, torchs = (case.projected(wide, centred, parts) for wide in (torch.float64, dtype))
    found = kernels().project(
        case.x.cuda(),
        case.weight.cuda(),
        Norm(case.gain.cuda(), EPS, centred) if "norm" in parts else None,
        case.bias.cuda() if "bias" in parts else None,
        case.residual.cuda() if "residual" in parts else None,
    )
    assert error(found, exact) <= 2 * error(torchs, exact)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_projection_is_as_exact_as_torchs(dtype: torch.dtype, activation: Any) -> None:
    from monograph.ops.decode_kernels import Norm

    case = DenseCase(dtype)
    exact, torchs = (case.gated(wide, activation) for wide in (torch.float64, dtype))
    norm = Norm(case.gain.cuda(), EPS)
    found = kernels().project_gated(case.x.cuda(), case.weight.cuda(), norm, activation)
    assert error(found, exact) <= 2 * error(torchs, exact)


@DTYPES
def test_a_projected_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    from monograph.ops.decode_kernels import Norm

    case = DenseCase(dtype)
    norm = Norm(case.gain.cuda(), EPS)
    x, weight = case.x.cuda(), case.weight.cuda()
    of_all = kernels().project(x, weight, norm), kernels().project_gated(x, weight, norm, "silu")
    for order in ([0], [3, 1], list(range(16)), list(range(19, -1, -1))):
        rows = x[order].contiguous()
        of_some = (
            kernels().project(rows, weight, norm),
            kernels().project_gated(rows, weight, norm, "silu"),
        )
        assert all(torch.equal(a[order], b) for a, b in zip(of_all, of_some, strict=True))


KIB = 1024
TILES = [  # form, columns, KiB of shared memory; columns and channels of the tile
    ("dense", 1600, 227, (16, 512)),
    ("dense", 1601, 227, (32, 256)),
    ("dense", 6400, 227, (64, 128)),
    ("dense", 6401, 227, (64, 128)),
    ("int8", 1601, 227, (32, 256)),
    ("nf4", 1600, 227, (16, 256)),
    ("nf4", 6401, 227, (32, 256)),
    # A consumer card.
    ("dense", 1600, 99, (16, 256)),
    ("nf4", 6401, 99, (16, 128)),
]


@pytest.mark.parametrize(("form", "columns", "shared_kib", "expected"), TILES)
def test_a_tile_is_the_narrowest_whose_programs_run_at_once_if_it_fits(
    form: str,
    columns: int,
    shared_kib: int,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from monograph.ops.layer_kernels import tile_of  # imports Triton

    pretend(shared_kib, monkeypatch)
    tile = tile_of(form, columns, False, 16, torch.bfloat16, torch.device("cuda"))
    assert (tile.columns, tile.channels) == expected


def test_a_bank_changes_the_registers_of_a_tile_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from monograph.ops.layer_kernels import tile_of  # imports Triton

    pretend(227, monkeypatch)
    for capability, registers in (((8, 0), 255), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        arguments = ("dense", 6400, False, 16, torch.bfloat16, torch.device("cuda"))
        with_bank, without = tile_of(*arguments, has_bank=True), tile_of(*arguments)
        assert with_bank == without._replace(registers=registers)


def pretend(shared_kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a card with 100 multiprocessors and so much shared memory."""
    card = SimpleNamespace(
        shared_memory_per_block_optin=shared_kib * KIB, multi_processor_count=100
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("form", ["dense", "int8", "nf4"])
def test_tiles_of_64_rows_are_of_one_size_on_all_cards(
    form: str, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards differ in warps and registers, which change no bit; sums are of as many channels."""
    from monograph.ops.layer_kernels import tile_of  # imports Triton

    tiles = []
    for shared_kib in (227, 99):
        pretend(shared_kib, monkeypatch)
        tiles.append(tile_of(form, 6400, is_gated, 64, torch.bfloat16, torch.device("cuda")))
    large, small = tiles
    assert large.registers is None
    assert small._replace(warps=large.warps, registers=None) == large
    is_dense_gated = form == "dense" and is_gated
    assert (small.warps, small.registers) == ((8, None) if is_dense_gated else (4, 255))


# ── rows with their own adapters ──────────────────────────────────────────────────────────────

# Slots of 16 rows, among them the base's, and an adapter that rows on both sides of others have.
SLOTS = [1, 0, 2, 1, 3, 0, 2, 2, 4, 1, 0, 3, 4, 4, 1, 2]
RANKS = (3, 16, 5, 9)  # of the adapters in slots 1 to 4
SCALES = (2.0, 0.7, 1.3, 3.0)


class BankCase(Case):
    """The layers of a case, of which some have a bank of four adapters instead of one adapter."""

    def __init__(
        self,
        dtype: torch.dtype,
        base: Any,
        columns: tuple[int, ...] = (100, 16, 24),
        bias: bool = True,
        rank: int = 16,
        banked: tuple[int, ...] = (0, 1, 2),
        magnitudes: bool = False,
    ):
        super().__init__(dtype, base, columns, bias)
        self.rank = rank
        self.scale = torch.tensor([0.0, *SCALES])
        self.a, self.b, self.gain_of = {}, {}, {}
        for index in banked:
            self.a[index] = torch.zeros(5, rank, SUMMED)
            self.b[index] = torch.zeros(5, rank, columns[index])
            self.gain_of[index] = torch.zeros(5, columns[index])
            for slot, own_rank in enumerate(RANKS, start=1):
                seed = 20 + 10 * index + slot
                self.a[index][slot, :own_rank] = normal(own_rank, SUMMED, seed=seed).float() / 14
                b = normal(own_rank, columns[index], seed=seed + 100).float()
                self.b[index][slot, :own_rank] = b
                if magnitudes and slot % 2:
                    gain = 0.3 * normal(columns[index], seed=seed + 200).float()
                    self.gain_of[index][slot] = gain
        self.has_gains = magnitudes

    def plain(self) -> list[Any]:
        """Return the layers as the kernels take them, without adapters."""
        return [layer._replace(adapter=None) for layer in self.tensors()]

    def banked(self, slots: list[int]) -> list[Any]:
        """Return the layers as the kernels take them, with the bank."""
        slot = torch.tensor(slots).cuda()
        scale = self.scale.cuda()
        layers = self.plain()
        for index, a in self.a.items():
            gain = self.gain_of[index].cuda() if self.has_gains else None
            b = self.b[index].cuda()
            bank = kernels().LowRankBank(a.cuda(), b, scale, gain, slot)
            layers[index] = layers[index]._replace(adapter=bank)
        return layers

    def single(self, slot: int) -> list[Any]:
        """Return the layers as the kernels take them, with the adapter of one slot for all rows.

        It is padded to the bank's rank if its own is read in tiles of another size.
        """
        layers = self.plain()
        rank = RANKS[slot - 1] if self.rank <= 16 else self.rank
        for index in self.a:
            a = self.a[index][slot, :rank].contiguous().cuda()
            b = self.b[index][slot, :rank].T.contiguous().cuda()
            adapter = kernels().LowRank(a, b, SCALES[slot - 1])
            layers[index] = layers[index]._replace(adapter=adapter)
        return layers

    def by_equation(self, slots: list[int], dtype: torch.dtype) -> list[Tensor]:
        """Return each layer's output by its equation, in fp64, or in fp32 with the roundings of modules
        to the case's dtype.
        """
        x = rms_norm(self.x.double(), self.gain.double(), EPS)
        if dtype != torch.float64:
            x = rms_norm(self.x, self.gain, EPS).to(dtype)
        outputs = []
        for index, layer in enumerate(self.layers.cpu()):
            weight = layer.dense() if isinstance(layer, FrozenWeight) else layer.weight
            product = x @ weight.detach().to(dtype).T
            if dtype != torch.float64:
                product = product.to(self.dtype).to(dtype)
            y = product if layer.bias is None else product + layer.bias.detach().to(dtype)
            if index in self.a:
                a, b, gain = (
                    each[index][slots].to(dtype) for each in (self.a, self.b, self.gain_of)
                )
                low = torch.einsum("bk,brk->br", x, a) * self.scale[slots].to(dtype)[:, None]
                y = y + gain * product + torch.einsum("br,brn->bn", low, b)
            outputs.append(y if dtype == torch.float64 else y.to(self.dtype))
        return outputs

    def computed(self, layers: list[Any], rows: Any, wide: bool = True) -> list[Tensor]:
        """Return what the kernels compute of some rows: all layers, the last one, and a gated one."""
        x, norm = self.x[rows].contiguous().cuda(), self.norm()
        columns, rounds = list(self.columns), not wide
        residual = self.residual[rows, -columns[-1] :].contiguous().cuda()
        gate, up = (layer._replace(bias_N=None) for layer in layers[-2:])
        gated = kernels().multiply_gated(x, gate, up, columns[-1], norm, "silu", rounds)
        return [
            kernels().multiply(x, layers, columns, norm, None, rounds),
            kernels().multiply(x, layers[-1:], columns[-1:], None, residual, rounds),
            gated,
        ]


BANK_SHAPE: dict[str, Any] = {"columns": (100, 40, 40)}
# The bank's rank above that of all adapters, and above the ranks that are read at once.
BANKS = pytest.mark.parametrize(
    "options", [{}, {"rank": 70}, {"banked": (2,)}], ids=["all", "rank 70", "the last layer"]
)


@DTYPES
@BASES
@BANKS
def test_a_row_has_the_bits_that_its_adapter_alone_gives_it(
    dtype: torch.dtype, base: Any, options: dict[str, Any]
) -> None:
    """Whatever the other rows' adapters; a row of the base has those of no bank."""
    case = BankCase(dtype, base, **BANK_SHAPE, **options)
    rows = slice(0, 16)
    for wide in (True, False):
        found = case.computed(case.banked(SLOTS), rows, wide)
        for slot in range(5):
            layers = case.single(slot) if slot else case.plain()
            own = [row for row, each in enumerate(SLOTS) if each == slot]
            for ours, alone in zip(found, case.computed(layers, rows, wide), strict=True):
                assert torch.equal(ours[own], alone[own]), (slot, wide)


@DTYPES
@BASES
def test_one_of_up_to_16_rows_with_their_own_adapters_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, base: Any
) -> None:
    case = BankCase(dtype, base, **BANK_SHAPE, magnitudes=True)
    of_all = case.computed(case.banked(SLOTS), slice(0, 16))
    for order in ([0], [1], [4, 8], [15, *range(9)], list(range(15, -1, -1))):
        of_some = case.computed(case.banked([SLOTS[row] for row in order]), order)
        assert all(torch.equal(a[order], b) for a, b in zip(of_all, of_some, strict=True))


@DTYPES
@BASES
@pytest.mark.parametrize("magnitudes", [False, True])
def test_rows_with_their_own_adapters_are_as_exact_as_their_equation(
    dtype: torch.dtype, base: Any, magnitudes: bool
) -> None:
    """In more rows than those of a tile; each column of programs finds other adapters."""
    case = BankCase(dtype, base, magnitudes=magnitudes)
    slots = [(7 * row + row // 5) % 5 for row in range(ROWS)]
    exact = case.by_equation(slots, torch.float64)
    found = kernels().multiply(case.x.cuda(), case.banked(slots), case.columns, case.norm())
    found_by_layer = found.split(list(case.columns), 1)
    modules = case.by_equation(slots, torch.float32)
    for ours, module, expected in zip(found_by_layer, modules, exact, strict=True):
        assert error(ours, expected) <= 2 * error(module, expected)


def test_an_adapter_with_nan_changes_its_own_rows_alone() -> None:
    case = BankCase(torch.bfloat16, "nf4", **BANK_SHAPE, magnitudes=True)
    before = case.computed(case.banked(SLOTS), slice(0, 16))
    for index in case.a:
        case.a[index][2] = torch.nan
        case.b[index][4] = torch.inf
        case.gain_of[index][4] = torch.nan
    after = case.computed(case.banked(SLOTS), slice(0, 16))
    others = [row for row, slot in enumerate(SLOTS) if slot not in (2, 4)]
    own = [row for row, slot in enumerate(SLOTS) if slot in (2, 4)]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[others], b[others])
        assert not b[own].isfinite().any()
