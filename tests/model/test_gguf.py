# Run: pytest tests/model/test_gguf.py
"""GGUF files: what is refused, what is warned of, and that a failed write leaves nothing. Law 11
holds the content.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers

from chats import speaking
from monograph.errors import DiskFull, InputRefused, MonographError, UsageError
from monograph.model import gguf as ours
from monograph.model.config import LlamaConfig
from monograph.model.exports import find_export
from monograph.model.families import FAMILIES
from monograph.model.gguf import FILE, interleave_rotary_pairs, save_gguf
from monograph.model.gguf_words import split_pattern_name
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION
from monograph.model.llama import Llama
from monograph.model.rope import cos_sin, rotate
from monograph.model.scaling import Llama3Scaling, LongScaling, YarnScaling
from monograph.text.tokenizer import Tokenizer
from monograph.text.tokenizer_file import KNOWN_PATTERNS
from reference import article, pieces

gguf = pytest.importorskip(
    "gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'"
)

SMALL = LlamaConfig(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)


def refuse(line: str) -> None:
    raise AssertionError(f"nothing was to be warned of: {line}")


def test_the_keys_are_the_models(tmp_path: Path) -> None:
    config = replace(
        SMALL,
        model_type="qwen3",
        head_dim=16,
        num_key_value_heads=1,
        rope_theta=5e5,
        rms_norm_eps=1e-6,
    )
    save_gguf(Llama(config).bfloat16(), tmp_path / "out", Tokenizer.bytes(), None, refuse)
    fields = {
        name: field.contents()
        for name, field in gguf.GGUFReader(tmp_path / "out" / FILE).fields.items()
    }
    wanted = {
        "general.architecture": "qwen3",
        "general.file_type": gguf.LlamaFileType.MOSTLY_BF16,
        "qwen3.context_length": 64,
        "qwen3.embedding_length": 64,
        "qwen3.block_count": 2,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 2,
        "qwen3.attention.head_count_kv": 1,
        "qwen3.attention.key_length": 16,
        "qwen3.attention.value_length": 16,
        "qwen3.rope.dimension_count": 16,
        "qwen3.rope.freq_base": 5e5,
        "qwen3.vocab_size": 259,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {name: fields.get(name) for name in wanted} == wanted
    assert fields["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert fields["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    (tmp_path / "out" / "Modelfile").read_text().index("FROM ./model.gguf\n")


@pytest.mark.parametrize("rotary_dim", [8, 6, 2])
def test_rotary_pairs_become_neighbours(rotary_dim: int) -> None:
    """Rotating halves and then reordering is reordering and then rotating neighbours, as llama.cpp
    does. The channels after the first `rotary_dim` of a head stay where they are.
    """
    generator = torch.Generator().manual_seed(0)
    heads_BHTD = torch.randn(1, 3, 5, 8, generator=generator, dtype=torch.float64)
    config = replace(
        SMALL,
        model_type="bamba",
        hidden_size=24,
        head_dim=8,
        num_attention_heads=3,
        num_key_value_heads=3,
        partial_rotary_factor=rotary_dim / 8,
    )
    turn = cos_sin(torch.arange(5)[None], config, torch.float64)

    def reordered(x_BHTD: torch.Tensor) -> torch.Tensor:
        return (
            interleave_rotary_pairs(x_BHTD.transpose(2, 3).reshape(24, 5), 8, rotary_dim)
            .reshape(1, 3, 8, 5)
            .transpose(2, 3)
        )

    x_BHTD = reordered(heads_BHTD)
    first, second = x_BHTD[..., 0:rotary_dim:2], x_BHTD[..., 1:rotary_dim:2]
    pairs = (first * turn[0] - second * turn[1], second * turn[0] + first * turn[1])
    rotated = torch.stack(pairs, dim=-1).flatten(-2)
    rotated = torch.cat([rotated, x_BHTD[..., rotary_dim:]], dim=-1)
    assert torch.equal(rotated, reordered(rotate(heads_BHTD, turn)))


_MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "dtype", "why"),
    [
        (
            {"model_type": "mistral", "sliding_window": 63},
            "f32",
            "sliding_window = 63 is below max_position_embeddings",
        ),
        (
            {"model_type": "qwen2", "rope_scaling": Llama3Scaling()},
            "f32",
            "'llama3' is not computed by llama.cpp for a q",
        ),
        (
            {"model_type": "qwen3", "attention_bias": True},
            "f32",
            "attention_bias = true is not computed",
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 4096, "rope_local_theta": 50.0},
            "f32",
            "layer_types and rope_local_theta: llama.cpp computes a window and a base of 10000 in all .* but each 6th",
        ),
        (
            {
                "model_type": "olmo3",
                "sliding_window": 8,
                "layer_types": (FULL_ATTENTION, SLIDING_ATTENTION),
            },
            "f32",
            "but each 4th; export",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": (0, 1)},
            "f32",
            "no_rope_layers: llama.cpp rotates all layers",
        ),
        (
            {"model_type": "gemma4_text"},
            "f32",
            r"layer_types: llama.cpp loads a gemma4_text only if some layer has a window; export it with --format hf",
        ),
        (
            {"model_type": "gemma3_text", "query_pre_attn_scalar": 5},
            "f32",
            "query_pre_attn_scalar = 5 is not head_dim",
        ),
        ({"rope_scaling": YarnScaling(4.0, 1.3, 16)}, "f32", "'yarn' with attention_factor = 1.3"),
        (
            {"model_type": "qwen3_5_text", "linear_key_head_dim": 6, "linear_value_head_dim": 8},
            "f32",
            "linear_key_head_dim = 6 and linear_value_head_dim = 8 are one size in llama.cpp",
        ),
        (
            {"model_type": "smollm3", "rope_scaling": Llama3Scaling()},
            "f32",
            "'llama3' is not computed by llama.cpp for a smollm3",
        ),
        *(
            (
                {"model_type": family, "head_dim": 16},
                "f32",
                f"head_dim = 16 and num_attention_heads = 2: llama.cpp loads a {family} only if .* hidden_size = 64",
            )
            for family in ("qwen2", "olmo2", "olmo3", "phi3")
        ),
        (
            {
                "model_type": "qwen3_5_text",
                "layer_types": (LINEAR_ATTENTION, LINEAR_ATTENTION),
                "rms_norm_eps": 1e-6,
            },
            "f32",
            "layer_types: llama.cpp loads a qwen3_5_text only with layers of both kinds, not with 'linear_attention'",
        ),
        (
            {"model_type": "qwen3_5_text", "rms_norm_eps": 1e-6},
            "f32",
            "layer_types: llama.cpp loads a qwen3_5_text only with layers of both kinds, not with 'full_attention'",
        ),
        (
            {"model_type": "qwen3_5_text", "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION)},
            "f32",
            "rms_norm_eps = 1e-05: llama.cpp adds it to the lengths of a delta net's keys, too",
        ),
        (
            _MIXTURE,
            "f32",
            "norm_topk_prob = False: llama.cpp computes qwen3_moe with True; export it with --format hf",
        ),
        (
            _MIXTURE | {"norm_topk_prob": True, "mlp_only_layers": (1,)},
            "f32",
            r"mlp_only_layers = \(1,\): llama.cpp",
        ),
        (
            _MIXTURE | {"norm_topk_prob": True, "moe_intermediate_size": 24},
            "q8_0",
            "moe_intermediate_size = 24 is not",
        ),
        (
            _MIXTURE | {"model_type": "olmoe", "num_key_value_heads": 1},
            "f32",
            "num_key_value_heads = 1: llama.cpp computes olmoe with 2",
        ),
        (
            _MIXTURE | {"model_type": "olmoe", "num_key_value_heads": 2, "clip_qkv": 3.0},
            "f32",
            "clip_qkv = 3.0: llama.cpp computes olmoe with None",
        ),
        ({"intermediate_size": 100}, "q8_0", "intermediate_size = 100 is not a multiple of 32"),
        (
            {
                "model_type": "qwen3_next",
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "norm_topk_prob": True,
            }
            | {
                "shared_expert_intermediate_size": 48,
                "layer_types": (LINEAR_ATTENTION, FULL_ATTENTION),
                "rms_norm_eps": 1e-6,
            },
            "q4_k_m",
            "shared_expert_intermediate_size = 48 is not a multiple of 32, a block of q4_k_m: use --dtype f16",
        ),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(
    tmp_path: Path, changes: dict, dtype: str, why: str
) -> None:
    with pytest.raises(InputRefused, match=why):
        save_gguf(
            Llama(replace(SMALL, **changes)), tmp_path / "out", Tokenizer.bytes(), dtype, refuse
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dtype", "weight", "kind"),
    [("f16", 1e5, "f16"), ("q8_0", 1e7, "q8_0"), ("q4_k_m", 1e5, "q5_0")],
)
def test_a_weight_that_does_not_fit_is_refused(
    tmp_path: Path, dtype: str, weight: float, kind: str
) -> None:
    model = Llama(SMALL)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = weight
    message = f"blk.1.ffn_up.weight: a weight of {weight:.3g} does not fit {kind}"
    with pytest.raises(InputRefused, match=re.escape(message)):
        save_gguf(model, tmp_path / "out", Tokenizer.bytes(), dtype, refuse)
    assert not list(tmp_path.iterdir())


def test_only_split_patterns_that_are_known_to_be_right_have_a_name() -> None:
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    named = {}
    for name, pattern in KNOWN_PATTERNS.items():
        for whole_words in (False, True):
            split = {"type": "Split", "pattern": {"Regex": pattern}}
            part = {"type": "Sequence", "pretokenizers": [split, last]}
            try:
                named[name, whole_words] = split_pattern_name(
                    {"pre_tokenizer": part, "model": {"ignore_merges": whole_words}}
                )
            except InputRefused as error:
                assert "not known to be one of llama.cpp's" in str(error)
    names = {("qwen2", False): "qwen2", ("qwen3.5", False): "qwen35"}
    assert named == {**names, ("llama3", True): "llama-bpe", ("llama3", False): "smaug-bpe"}
    for part in (
        {**last, "use_regex": True},
        {"type": "Sequence", "pretokenizers": [{**last, "use_regex": True}]},
    ):
        assert (
            split_pattern_name({"pre_tokenizer": part, "model": {"ignore_merges": False}})
            == "gpt-2"
        )
    digits = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits"}, {**last, "use_regex": True}],
    }
    with pytest.raises(InputRefused, match="Digits, ByteLevel"):
        split_pattern_name({"pre_tokenizer": digits, "model": {"ignore_merges": False}})


def test_stop_tokens_beyond_three_are_refused_and_those_with_a_known_name_need_no_place(
    tmp_path: Path,
) -> None:
    tokenizer = speaking(tmp_path / "a", "headers", stops=[1, 5, 6])
    model = Llama(replace(SMALL, vocab_size=tokenizer.vocab_size))
    with pytest.raises(
        InputRefused, match=r"4 tokens end a text \(.*<\|eot\|>\), and a GGUF file can name three"
    ):
        save_gguf(model, tmp_path / "out", tokenizer, None, refuse)
    known = tokenizer.special["<|im_end|>"]
    tokenizer = speaking(tmp_path / "b", "headers", stops=[1, 5, known])
    save_gguf(model, tmp_path / "out", tokenizer, None, refuse)
    fields = gguf.GGUFReader(tmp_path / "out" / FILE).fields
    ids = [fields[f"tokenizer.ggml.{kind}_token_id"].contents() for kind in ("eos", "eot", "eom")]
    assert ids == [1, 5, tokenizer.special["<|eot|>"]]


def test_the_end_of_a_base_that_was_given_another_tokenizer_stays_one(tmp_path: Path) -> None:
    """As in the Hugging Face folder's generation_config.json, and not warned of as none of this
    model's.
    """
    tokenizer = speaking(tmp_path / "a", "headers", stops=[])
    known = tokenizer.special["<|im_end|>"]
    model = Llama(replace(SMALL, vocab_size=tokenizer.vocab_size, eos_token_id=known))
    save_gguf(model, tmp_path / "out", tokenizer, None, refuse)
    assert 'PARAMETER stop "<|im_end|>"' in (tmp_path / "out" / "Modelfile").read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"space_first": True}, "puts a space before a text, which is"),
        ({"form": "NFKC"}, r"rewrites text \(NFKC\)"),
        ({"alphabet": []}, "has no tokens for '!'"),
    ],
)
def test_a_tokenizer_that_changes_text_as_llama_cpp_does_not_is_refused(
    tmp_path: Path, changed, said
) -> None:
    plain = {
        "space_first": False,
        "form": "NFC",
        "use_regex": True,
        "alphabet": pre_tokenizers.ByteLevel.alphabet(),
    }
    for made, expected in (
        (plain | changed, pytest.raises(InputRefused, match=said)),
        (plain, nullcontext()),
    ):
        tokenizer = Tokenizer(
            json.loads(article.tokenizer(["the cat"] * 9, 300, **made).to_str()), "x"
        )
        model = Llama(replace(SMALL, vocab_size=tokenizer.vocab_size))
        with expected:
            save_gguf(model, tmp_path / "out", tokenizer, None, lambda line: None)
        assert (tmp_path / "out").exists() == (made == plain)


@pytest.mark.parametrize(
    ("shape", "merges", "said"),
    [
        ("mistral", None, "leaves out one space at the beginning"),
        ("llama2", None, "the spaces next to the special token '<unk>' are not text"),
        ("phi3", None, r"the spaces next to the special token '<\|user\|>'"),
        ("tinyllama", lambda merges: merges[:-1], "are tokens, as their join is, but no merge"),
        ("tinyllama", lambda merges: [*merges, merges[0]], "do not follow one another"),
    ],
)
def test_sentence_pieces_that_llama_cpp_would_read_otherwise_are_refused(
    tmp_path: Path, shape, merges, said
) -> None:
    content = json.loads(pieces.engine(shape).to_str())
    if merges:
        content["model"]["merges"] = merges(content["model"]["merges"])
    tokenizer = Tokenizer(content, "x")
    with pytest.raises(InputRefused, match=said):
        save_gguf(
            Llama(replace(SMALL, vocab_size=tokenizer.vocab_size)),
            tmp_path / "out",
            tokenizer,
            None,
            lambda line: None,
        )
    assert not (tmp_path / "out").exists()


def test_what_llama_cpp_will_do_otherwise_is_said(tmp_path: Path) -> None:
    lines: list[str] = []
    tokenizer = speaking(tmp_path / "a", "json")
    (tmp_path / "a" / "chat_template.jinja").write_text(
        "{{ messages[0].content }}\nAnswer: {{ messages[-1].content }}"
    )
    tokenizer = Tokenizer.from_file(tmp_path / "a")
    model = Llama(replace(SMALL, vocab_size=tokenizer.vocab_size))
    save_gguf(model, tmp_path / "out", tokenizer, None, lines.append)
    said = "\n".join(lines)
    assert "the chat template does not begin with <|bos|>" in said
    assert "ends an answer with no special token" in said
    assert (
        "llama.cpp stops at <|im_end|>, which does not end a text of this model" in said
        and len(lines) == 3
    )


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel write part of the file and then refuse, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (100, 20_000, 200_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(
                DiskFull,
                match="no space left to write the model .File too large.; nothing was kept",
            ):
                save_gguf(Llama(SMALL), tmp_path / "out", Tokenizer.bytes(), None, refuse)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not list(tmp_path.iterdir())


def test_any_user_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        save_gguf(Llama(SMALL), tmp_path / "out", Tokenizer.bytes(), None, refuse)
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = [], 0
    stored = ours._encode

    class Counted(bytearray):
        nbytes = property(len)

        def __del__(self) -> None:
            alive.remove(len(self))

    def counting(*arguments):
        nonlocal most
        data = Counted(stored(*arguments).tobytes())
        alive.append(len(data))
        most = max(most, len(alive))
        return data

    monkeypatch.setattr(ours, "_encode", counting)
    save_gguf(Llama(SMALL), tmp_path / "out", Tokenizer.bytes(), "f16", refuse)
    assert 1 <= most <= 2, "the one that is written and the one that replaces it"


def test_without_the_package_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"needs the package gguf: .* install '?gguf") as raised:
        find_export("gguf", "f16")
    assert isinstance(raised.value, MonographError) and raised.value.exit_code == 2
    find_export("hf", None)


def test_a_read_only_place_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(ours, "_encode", refused)
    with pytest.raises(InputRefused, match="cannot be written"):
        save_gguf(Llama(SMALL), tmp_path / "out", Tokenizer.bytes(), None, refuse)
    assert not list(tmp_path.iterdir())


def test_a_gpt_oss_has_a_window_and_longrope_is_warned_of(tmp_path: Path) -> None:
    whole = replace(
        SMALL, model_type="gpt_oss", attention_bias=True, num_experts=2, num_experts_per_tok=1
    )
    save_gguf(Llama(whole), tmp_path / "whole", Tokenizer.bytes(), None, refuse)
    fields = gguf.GGUFReader(tmp_path / "whole" / FILE).fields
    assert fields["gpt-oss.attention.sliding_window"].contents() == 64
    said = list[str]()
    stretched = replace(
        SMALL, model_type="phi3", rope_scaling=LongScaling((1.0,) * 16, (2.0,) * 16, 1.1, 64, 128)
    )
    save_gguf(Llama(stretched), tmp_path / "long", Tokenizer.bytes(), None, said.append)
    assert "with a context above 64 llama.cpp takes long_factor" in said[0]


def test_a_family_that_llama_cpp_does_not_know_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "llama", FAMILIES["llama"]._replace(llama_cpp=None))
    model = Llama(LlamaConfig.preset("nano", vocab_size=Tokenizer.bytes().vocab_size))
    with pytest.raises(InputRefused, match="model_type = 'llama': llama.cpp knows no such family"):
        save_gguf(model, tmp_path / "out", Tokenizer.bytes(), "f32", print)
    assert not (tmp_path / "out").exists()
