"""One file per stage between the penalties and the draw: each narrows the candidates, or scales their scores."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from monograph.decode.candidates import Candidates
from monograph.decode.filters.cutoffs import epsilon, eta, mirostat, top_a
from monograph.decode.filters.min_p import min_p
from monograph.decode.filters.temperature import dynamic_temperature, temperature
from monograph.decode.filters.top_k import top_k
from monograph.decode.filters.top_n_sigma import top_n_sigma
from monograph.decode.filters.top_p import top_p
from monograph.decode.filters.typical import typical
from monograph.decode.filters.xtc import xtc

FILTERS: dict[str, Callable[[Candidates, dict[str, Tensor]], Candidates]] = {
    "temperature": temperature,
    "dynamic_temperature": dynamic_temperature,
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "top_a": top_a,
    "typical": typical,
    "epsilon": epsilon,
    "eta": eta,
    "xtc": xtc,
    "mirostat": mirostat,
}
