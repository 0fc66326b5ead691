# Run: pytest tests/benchmarks/test_loading.py
"""What loading a folder takes: the script runs, and its table has what it found. The bound itself
is a law.
"""

from __future__ import annotations

import pytest

from scripts import smoke


@pytest.mark.slow
def test_loading(script, monkeypatch, tmp_path, capsys):
    loading = script("loading")
    monkeypatch.setattr(loading, "TRAINED", {"lora, base in int8": {}})
    monkeypatch.setattr(loading, "OTHERS", ("export hf, merged",))
    quantised, exported = smoke(
        loading, monkeypatch, tmp_path / "found.json", "--before", str(loading.SRC)
    )["cases"]
    assert (
        0 < quantised["kept_bytes"] < quantised["peak_bytes"] and quantised["before_peak_bytes"] > 0
    )
    assert (
        exported["kept_bytes"] == 0
        and exported["folder_bytes"] == quantised["folder_bytes"] > 16_000_000
    )
    assert capsys.readouterr().out.count("| lora, base in int8 | 17 | 16 |") == 1
