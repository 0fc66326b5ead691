"""Run: pytest tests/commands/test_families.py (models of other tools through every command)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from commands.forked import CommandServer
from commands.inputs import OWN, TINY, over
from monograph.model.families import FAMILIES
from monograph.model.layer_types import CONVOLUTION, LINEAR_ATTENTION, MAMBA
from monograph.model.torch_file import read
from monograph.text.tokenizer import Tokenizer
from reference import pieces
from reference.article import Pretraining, tokenizer

SHORT = over(OWN, "train.updates=1", "optim.lr=1e-2")
SIZES = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("family", [pytest.param("olmo3", marks=pytest.mark.slow), "qwen3"])
def test_a_folder_of_transformers_is_trained_measured_sampled_and_handed_back(
    server: CommandServer, here: Path, family: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    window = (
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
        if family == "qwen3"
        else {}
    )
    config = AutoConfig.for_model(
        family, **SIZES, pad_token_id=None, **(window or {"sliding_window": 8}), head_dim=8
    )
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(here / "hf")
    Tokenizer.bytes().save(here / "hf" / "tokenizer.json")

    done = server.run(
        here, "train", *SHORT[:1], *SHORT[2:], "model.init=hf", "--out", "run", "--json", figures=0
    )
    assert done.code == 0, done.err
    trained = json.loads(done.out.splitlines()[-1])
    assert trained["params"] == theirs.num_parameters()
    for of in ("hf", "run"):
        assert server.run(here, "evaluate", of, "--data", "texts").code == 0
        assert server.run(here, "generate", of, "alpha", "--max-tokens", "4").code == 0
    assert server.run(here, "train", "--resume", "run", figures=0).code == 0
    assert server.run(here, "export", "run", "--to", "out", "--format", "hf").code == 0

    after, report = AutoModelForCausalLM.from_pretrained(here / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(after) is type(theirs) and after.config.sliding_window == 8
    before, now = theirs.state_dict(), after.state_dict()
    assert all(not torch.equal(before[name], now[name]) for name in before if "mlp" in name), (
        "it was trained"
    )


# By day one family of each kind: dense, with windows, with experts, a hybrid with both.
# tests/model/test_families.py compares every family's loss with transformers' own, and
# tests/model/test_family_files.py what is read of its files.
DAY = {"llama", "mistral", "gpt_oss", "qwen3_5_moe_text"}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in DAY else pytest.mark.slow)
        for each in sorted(FAMILIES)
    ],
)
def test_a_folder_of_transformers_has_the_bits_per_byte_of_transformers_own_loss(
    server: CommandServer, here: Path, family: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    windows = {"mistral": {"sliding_window": 8}, "llama": {}}
    window = windows.get(
        family, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    )
    if FAMILIES[family].other_layer_type == LINEAR_ATTENTION:
        window = {
            "full_attention_interval": 2,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "head_dim": 8,
        }
    if FAMILIES[family].other_layer_type == MAMBA:
        window = {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        }
        if family == "bamba":
            window = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 8}
        if family == "nemotron_h":
            window = {
                "layers_block_type": ["mamba", "mlp", "attention"],
                "mamba_num_heads": 4,
                "mamba_head_dim": 8,
                "ssm_state_size": 8,
                "n_groups": 2,
            }
    elif family == "gemma4_text":  # its default has embeddings of each layer
        window = {"sliding_window": 8, "global_head_dim": 12, "hidden_size_per_layer_input": 0}
    elif FAMILIES[family].other_layer_type == CONVOLUTION:
        window = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
    elif FAMILIES[family].expert_width_key:
        window |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    sizes = SIZES | {"max_position_embeddings": 512, "pad_token_id": None}  # a document is one row
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes, **window, initializer_range=0.3)
    )
    theirs.save_pretrained(here / "hf")
    bytewise = Tokenizer.bytes()
    bytewise.save(here / "hf" / "tokenizer.json")
    done = server.run(here, "evaluate", "hf", "--data", "texts", "--json")
    assert done.code == 0, done.err

    nats, size = 0.0, 0
    for path in sorted((here / "texts").iterdir()):
        ids = torch.tensor([[bytewise.bos_id, *bytewise.encode(path.read_text()), bytewise.eos_id]])
        with torch.no_grad():
            nats += float(theirs(ids, labels=ids).loss) * (ids.shape[1] - 1)
        size += path.stat().st_size
    found = json.loads(done.out.splitlines()[-1])
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found["bits_per_byte"] > 8.1, "random weights are no better than guessing bytes"


@pytest.mark.parametrize("shape", [pytest.param("tinyllama", marks=pytest.mark.slow), "mistral"])
def test_a_sentencepiece_tokenizer_counts_the_texts_bytes_and_gains_no_space(
    server: CommandServer, here: Path, shape: str
) -> None:
    """Through training, scores, choices and export: the space before a text is none of its bytes
    and of none's text.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    paths = sorted((here / "texts").iterdir())
    words = pieces.engine(shape, texts=[path.read_text() for path in paths])
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": words.get_vocab_size(), "max_position_embeddings": 512}
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **sizes, initializer_range=0.3)
    )
    theirs.save_pretrained(here / "hf")
    words.save(str(here / "hf" / "tokenizer.json"))
    bos, eos = words.token_to_id("<s>"), words.token_to_id("</s>")

    done = server.run(here, "evaluate", "hf", "--data", "texts", "--json")
    assert done.code == 0, done.err
    nats = 0.0
    for path in paths:
        ids = torch.tensor(
            [[bos, *words.encode(path.read_text(), add_special_tokens=False).ids, eos]]
        )
        with torch.no_grad():
            nats += float(theirs(ids, labels=ids).loss) * (ids.shape[1] - 1)
    found = json.loads(done.out.splitlines()[-1])
    size = sum(path.stat().st_size for path in paths)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)

    choices = {"yes it is", "no", " a"}
    asked = [
        "--json",
        "--n",
        "3",
        "--temperature",
        "5",
        *(f"--choice={choice}" for choice in sorted(choices)),
    ]
    for prompt in ("", "alpha"):
        done = server.run(here, "generate", "hf", prompt, *asked)
        assert done.code == 0, done.err
        for each in json.loads(done.out.splitlines()[-1])["completions"]:
            begun = words.encode(prompt, add_special_tokens=False).ids
            whole = words.decode([*begun, *each["token_ids"]])
            assert each["text"] in choices and whole == prompt + each["text"]
    both = server.run(here, "generate", "hf", "", "alpha", *asked)
    assert both.code == 2 and "give an empty prompt alone" in both.err
    stopped = server.run(here, "generate", "hf", "", "--stop", " a")
    assert (
        stopped.code == 2
        and "begins with a space, as the tokenizer has every text begin" in stopped.err
    )

    done = server.run(
        here, "train", *SHORT[:1], *SHORT[2:], "model.init=hf", "--out", "run", figures=0
    )
    assert done.code == 0, done.err
    assert server.run(here, "export", "run", "--to", "out", "--format", "hf").code == 0
    back = AutoTokenizer.from_pretrained(here / "out")
    for text in ("alpha beta", "  gamma\n", "\u00e9"):
        ids = words.encode(text, add_special_tokens=False).ids
        assert back(text, add_special_tokens=False)["input_ids"] == ids
        assert back.decode(ids) == words.decode(ids)


@pytest.mark.slow
def test_the_articles_checkpoint_is_trained_on_and_exported(
    server: CommandServer, here: Path
) -> None:
    torch.manual_seed(0)
    state = Pretraining(vocabulary=259).state_dict()
    (here / "article").mkdir()
    torch.save({"model": state, "epoch": 1}, here / "article" / "model.pth")
    started = ["train", *SHORT, "model.init=article/model.pth", "--out", "run"]
    assert server.run(here, *started, figures=0).code == 0, (
        "the tokenizer is named, none lies beside the file"
    )
    scores = json.loads(server.run(here, "evaluate", "run", "--json").out.splitlines()[-1])
    assert scores["bits_per_byte"] > 0
    assert server.run(here, "train", "--resume", "run", figures=0).code == 0

    refused = server.run(here, "export", "article/model.pth", "--to", "out", "--format", "hf")
    assert refused.code == 3 and "there is no tokenizer.json" in refused.err
    Tokenizer.bytes().save(here / "article" / "tokenizer.json")
    assert server.run(here, "generate", "article/model.pth", "alpha", "--max-tokens", "4").code == 0
    assert (
        server.run(here, "export", "article/model.pth", "--to", "out", "--format", "hf").code == 0
    )
    _, weights = read(here / "article" / "model.pth", {})
    from safetensors.torch import load_file

    exported = load_file(here / "out" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_the_articles_tokenizer_is_read_as_its_library_reads_it_and_loses_nothing(
    server: CommandServer, here: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    paths = sorted((here / "texts").iterdir())
    for path in paths:
        path.write_text(path.read_text() + "\nx\u00b2 \ufb01ne")
    learned = tokenizer([path.read_text() for path in paths], 60, use_regex=True)
    learned.enable_padding(pad_id=2, pad_token="[PAD]")
    learned.save(str(here / "bpe_50K.json"))
    started = [
        "train",
        *over(TINY, "data.tokenizer=bpe_50K.json", "train.updates=1"),
        "--out",
        "run",
    ]
    done = server.run(here, *started, figures=0)
    assert done.code == 0, done.err
    for said in ("rewrites text (NFKC)", "puts a space before a text", "has no tokens for '!'"):
        assert said in done.err

    assert server.run(here, "export", "run", "--to", "out", "--format", "hf").code == 0
    theirs, words = (
        AutoModelForCausalLM.from_pretrained(here / "out"),
        AutoTokenizer.from_pretrained(here / "out"),
    )
    nats, size = 0.0, 0
    for path in paths:
        ids = words(path.read_text(), add_special_tokens=False)["input_ids"]
        size += len(words.decode(ids).encode())
        assert words.decode(ids).endswith("\nx2 fine")
        for begin in range(0, len(ids) + 1, 32):  # the model's positions
            row = torch.tensor([[0, *ids, 1][begin : begin + 33]])
            with torch.no_grad():
                nats += float(theirs(row, labels=row).loss) * (row.shape[1] - 1)
    found = json.loads(
        server.run(here, "evaluate", "out", "--data", "texts", "--json").out.splitlines()[-1]
    )
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)

    paths[3].write_text("alpha\nbeta\nalph\u00e9")
    for refused, place in (
        (("generate", "run", "alpha", "--choice", "beta", "--choice", "\u00e9"), "--choice"),
        (("generate", "run", "alph\u00e9"), "error"),
        (("evaluate", "run", "--data", "texts"), "texts/3.txt:3"),
        (("train", *over(started[1:-2], "train.seed=1"), "--out", "again"), "texts/3.txt:3"),
    ):
        done = server.run(here, *refused, figures=0)
        assert (
            done.code == 3
            and f"{place}: '\u00e9' in '" in done.err
            and "would become [UNK]" in done.err
        )


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (
            ["model.hidden_size=64"],
            3,
            "model.hidden_size = 64, but the weights in model.pth have 48",
        ),
        (["data.sequence_length=64"], 3, "longer than the model's max_position_embeddings = 40"),
        (["model.max_position_embeddings=64", "data.sequence_length=64"], 0, ""),
        (
            ["data.tokenizer=auto"],
            3,
            "copy the model's own there, or name one as data.tokenizer",
        ),
        (["model.init=other.pth"], 3, "other.pth: no such file; it is looked for from"),
        (["model.init=short.pth"], 3, "short.pth: not weights that torch.save wrote"),
    ],
)
def test_what_the_file_cannot_be_is_said_in_one_line(
    server: CommandServer, here: Path, given: list[str], code: int, said: str
) -> None:
    torch.save(Pretraining(vocabulary=259).state_dict(), here / "model.pth")
    (here / "short.pth").write_bytes(b"PK\3\4")
    done = server.run(
        here, "train", *over(["model.init=model.pth", *SHORT], *given), "--out", "run", figures=0
    )
    assert done.code == code, done.err
    assert said in done.err and "Traceback" not in done.err
