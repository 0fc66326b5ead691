"""Run: pytest tests/test_cards.py."""

from __future__ import annotations

import pytest

from monograph import cards, device
from monograph.cli import command_tree
from monograph.errors import UsageError


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4080 SUPER", 104.4e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 3060", 25.5e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
    ],
)
def test_a_card_is_known_by_the_name_its_driver_gives(name: str, bf16: float) -> None:
    rates = cards.card_rates(name)
    assert rates is not None
    assert rates.flops["bf16"] == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 2080 Ti",
        "NVIDIA A10G",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A1000",
        "NVIDIA L40",
        "AMD Instinct MI300X",
    ],
)
def test_a_card_that_only_resembles_a_known_one_has_no_rates(name: str) -> None:
    assert cards.card_rates(name) is None


def test_each_cards_rates_keep_the_ratios_of_its_tensor_cores() -> None:
    for short, card in cards.CARDS.items():
        flops = card.rates.flops
        if "bf16" in flops:
            assert flops["bf16"] / flops["tf32"] == pytest.approx(2, rel=0.03), short
        if "fp8" in flops:
            assert flops["fp8"] / flops["bf16"] == pytest.approx(2, rel=0.03), short


@pytest.mark.parametrize("name", ["4090", "rtx 4090", "NVIDIA GeForce RTX 4090", "RTX-4090"])
def test_a_card_is_found_however_it_is_spelled(name: str) -> None:
    card = device.card_device(name)
    assert (card.name, card.type, card.memory_bytes) == (
        "NVIDIA GeForce RTX 4090",
        "cuda",
        24 * 2**30,
    )
    assert card.peak_flops["bf16"] == 165.2e12 and card.bandwidth_bytes_per_s == 1.008e12


def test_cards_that_differ_in_memory_are_two() -> None:
    assert (
        device.card_device("A100 40GB").memory_bytes * 2
        == device.card_device("a100-80").memory_bytes
    )


@pytest.mark.parametrize("short", cards.CARDS)
def test_every_card_has_rates_and_a_link(short: str) -> None:
    card = device.card_device(short)
    assert card.peak_flops and card.bandwidth_bytes_per_s and card.link_bytes_per_s
    assert card.has_bf16 == ("bf16" in card.peak_flops)
    assert cards.card_rates(card.name) == cards.CARDS[short].rates


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("H20O", "H200"),
        ("4091", "4090"),
        ("a100", "A100-40"),
        ("4070 Ti SUPERB", "4070-Ti-SUPER"),
        ("zx", "--help"),
    ],
)
def test_an_unknown_card_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=rf"--device {name}: no such card; .*{hint}"):
        device.card_device(name)


def test_the_help_of_plan_lists_every_card() -> None:
    said = command_tree().commands["plan"].help
    assert all(short in said for short in cards.CARDS)
