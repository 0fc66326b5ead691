"""Run: pytest tests/decode/test_sampling.py"""

from __future__ import annotations

import math
import random

import pytest
import torch

from monograph.decode.knobs import Chain, chain_of, join_chains, knobs_of, new_knobs, write_rows
from monograph.decode.sampling import Sampling
from monograph.errors import UsageError

WRONG = [
    ("temperature", -1.0, "expected a number from 0 to 1e+06"),
    ("temperature", math.nan, "expected a number from 0 to 1e+06"),
    ("temperature", math.inf, "expected a number from 0 to 1e+06"),
    ("temperature", "hot", "temperature = 'hot': expected a number"),
    ("top_k", -1, "expected a whole number from 0"),
    ("top_k", 2.5, "expected a whole number from 0"),
    ("top_k", True, "expected a whole number from 0"),
    ("top_p", 1.5, "expected a number from 0 to 1"),
    ("min_p", -0.1, "expected a number from 0 to 1"),
    ("typical_p", 2, "expected a number from 0 to 1"),
    ("repetition_penalty", 0, "expected a number from 1e-06 to 1e+06"),
    ("frequency_penalty", math.inf, "expected a number from -1e+06"),
    ("seed", -1, "expected a whole number from 0"),
    ("seed", 2**63, "expected a whole number from 0"),
    ("penalty_scope", "prompt", "expected one of output, all"),
    (
        "order",
        "vllm",
        "there is no stage 'vllm'; expected hf or llama_cpp, or with commas any of temperature, top_n_",
    ),
    ("order", "top_k,temperature,top_k", "top_k is named twice"),
    ("order", "top_k,,temperature", "there is no stage ''"),
    ("order", "mirostat", "there is no stage 'mirostat'"),
    ("order", 3, "order = 3: expected hf or llama_cpp"),
    ("top_a", 1.1, "expected a number from 0 to 1"),
    ("dry_base", 0.5, "expected a number from 1 to"),
    ("penalty_last_n", -2, "expected a whole number from -1"),
    ("dry_sequence_breakers", "ab", "expected a list of texts, none of them empty"),
    ("dry_sequence_breakers", [""], "expected a list of texts, none of them empty"),
    ("logit_bias", [1], "expected biases by token id"),
    ("logit_bias", {-1: 1.0}, "logit_bias has the id -1: expected a token id"),
    ("logit_bias", {"a": 1.0}, "logit_bias has the id 'a': expected a token id"),
    ("logit_bias", {7: math.inf}, "logit_bias[7] = inf: expected a number"),
    ("logit_bias", {7: math.nan}, "logit_bias[7] = nan: expected a number"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), WRONG, ids=[f"{name}={value}" for name, value, _ in WRONG]
)
def test_a_value_out_of_range_is_refused_in_one_line(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        Sampling(**{name: value})  # type: ignore[arg-type]
    assert (
        message in str(refused.value)
        and name in str(refused.value)
        and "\n" not in str(refused.value)
    )


def test_a_bias_for_an_id_that_is_not_there_is_refused() -> None:
    Sampling(logit_bias={9: -math.inf}).check_vocabulary(10)
    with pytest.raises(UsageError, match="logit_bias has the id 10: expected an id below 10"):
        Sampling(logit_bias={10: 1.0}).check_vocabulary(10)


def test_a_chain_has_the_stages_that_are_needed_in_the_request_s_order() -> None:
    assert chain_of([Sampling()]).stages == ("temperature",)
    assert chain_of([Sampling(0, top_k=5, seed=3)]).stages == (), (
        "filters do not matter at temperature 0"
    )
    options = {"top_k": 40, "top_p": 0.9, "typical_p": 0.5, "presence_penalty": 1.0}
    assert chain_of([Sampling(**options)]).stages == (
        "frequency_presence",
        "temperature",
        "top_k",
        "top_p",
        "typical",
    )
    llama_cpp = chain_of(
        [Sampling(**options, order="llama_cpp"), Sampling(order="llama_cpp", temperature_range=0.1)]
    )
    assert llama_cpp.stages == (
        "frequency_presence",
        "top_k",
        "typical",
        "top_p",
        "dynamic_temperature",
    )
    assert chain_of([Sampling(xtc_probability=0.5, xtc_threshold=0.6)]).stages == ("temperature",)
    many = chain_of([Sampling(logit_bias={1: 1.0, 2: 1.0, 3: 1.0}, min_tokens=1)], stop_ids=1)
    assert (many.bias_length, many.stop_length, many.samples_at_random) == (4, 1, True)
    assert hash(many) == hash(Chain(*vars(many).values()))
    named = Sampling(min_p=0.1, top_k=3, mirostat_tau=3, order="min_p, temperature ,top_k")
    assert chain_of([named]).stages == ("min_p", "temperature", "top_k", "mirostat")
    with pytest.raises(UsageError, match="leaves out top_p, which is on"):
        chain_of([Sampling(top_p=0.5, order="temperature")])
    with pytest.raises(UsageError, match="expected one order"):
        chain_of([Sampling(), Sampling(order="llama_cpp")])


def test_a_chain_serves_what_it_has_room_for() -> None:
    chain = chain_of(
        [Sampling(top_p=0.9, typical_p=0.9, temperature_range=0.1, logit_bias={1: 1.0, 2: 1.0})]
    )
    for served in (
        Sampling(),
        Sampling(0),
        Sampling(0, top_k=3),
        Sampling(logit_bias={5: 1.0}),
        Sampling(top_p=0.1),
    ):
        assert chain.covers(chain_of([served]))
    wide = Sampling(logit_bias=dict.fromkeys(range(3), 1.0))
    swapped = Sampling(top_p=0.9, typical_p=0.9, order="llama_cpp")
    for refused in (Sampling(top_k=3), Sampling(min_tokens=1), wide, swapped):
        assert not chain.covers(chain_of([refused], 1))
    short = chain_of([Sampling(top_k=40), Sampling(0), Sampling(top_k=9, top_p=0.5)])
    assert short.likeliest_count == 128 and chain_of([Sampling(top_k=1)]).likeliest_count == 64
    assert (
        chain_of([Sampling(top_k=1), Sampling()]).likeliest_count
        is chain_of([Sampling(top_k=500)]).likeliest_count
        is None
    )
    for served in (
        Sampling(top_k=64),
        Sampling(0),
        Sampling(0, top_k=500),
        Sampling(top_k=1, top_p=0.9),
    ):
        assert short.covers(chain_of([served]))
    assert not any(short.covers(chain_of([each])) for each in (Sampling(), Sampling(top_k=65))), (
        "they may keep more"
    )
    assert not chain_of([Sampling()]).covers(chain_of([Sampling(temperature_range=0.1)]))
    assert not Chain().covers(chain_of([Sampling()]))


@pytest.mark.parametrize("few", [False, True])
def test_a_joint_chain_is_the_smallest_that_covers_all(few: bool) -> None:
    kinds = [
        Sampling(0), Sampling(top_k=3), Sampling(top_k=5, top_p=0.9), Sampling(logit_bias={1: 1.0}, top_k=1),
        Sampling(temperature_range=0.1, top_k=2), Sampling(mirostat_tau=1.0, top_k=9), Sampling(min_tokens=2, top_k=1),
        *([] if few else [Sampling(), Sampling(frequency_penalty=0.1, logprobs=2)]),
    ]  # fmt: skip
    whole, draws = chain_of(kinds, 1), random.Random(0)
    for _ in range(50):
        some = draws.sample(kinds, draws.randrange(1, len(kinds)))
        expected, found = (
            chain_of(some, 1),
            join_chains([chain_of([each], 1) for each in some], whole),
        )
        assert found.stages == expected.stages and all(
            found.covers(chain_of([each], 1)) for each in some
        )
        assert (found.likeliest_count is None) == (expected.likeliest_count is None) and (
            found.logprobs is None
        ) == (expected.logprobs is None)


def test_a_row_is_written_and_nothing_else() -> None:
    sampling = Sampling(0.5, top_k=7, min_p=0.5, logit_bias={3: -math.inf}, min_tokens=2)
    chain = chain_of([sampling], stop_ids=2)
    knobs = new_knobs(chain, 3, torch.device("cpu"))
    before = {name: value.clone() for name, value in knobs.items()}
    write_rows(knobs, [1], [knobs_of(sampling, chain, [8, 9])])
    for name, value in knobs.items():
        assert torch.equal(value[[0, 2]], before[name][[0, 2]]), name
    row = {name: value[1].tolist() for name, value in knobs.items()}
    assert (
        row["stop_ids"] == [8, 9] and row["bias_ids"] == [3] and row["bias_values"] == [-math.inf]
    )
    assert (row["temperature"], row["top_k"], row["min_tokens"]) == (0.5, 7, 2)
    assert row["log_min_p"] == pytest.approx(math.log(0.5)) and before["log_min_p"][0] == -math.inf
    assert new_knobs(Chain(), 2, torch.device("cpu")) == {}
