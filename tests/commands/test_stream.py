# Run: pytest tests/commands/test_stream.py
"""`train.memory=stream` as a person types it: the same files as a run on the device, in and out."""

from __future__ import annotations

import functools
import json
import signal

import pytest

from commands.inputs import TINY, newest, over, with_texts

DEEPER = over(
    TINY, "model.num_hidden_layers=3", "model.tie_word_embeddings=false", "train.micro_batch=2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_texts(tmp_path_factory.mktemp("streamed"))


@pytest.fixture(scope="module")
def monograph(server):
    return server


def weights(run):
    return [
        (newest(run) / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")
    ]


@pytest.fixture(scope="module")
def trained(folder, monograph):
    """What a command says that trains, and leaves in a folder that is named by its memory and
    precision.
    """

    @functools.cache
    def train(memory, precision):
        settings = over(DEEPER, f"train.precision={precision}", f"train.memory={memory}")
        out = ["--out", f"{memory}-{precision}", "--json"]
        done = monograph.run(folder, "train", *settings, *out, page=int(memory == "stream"))
        assert done.code == 0, done.err
        return json.loads(done.out.splitlines()[-1])

    return train


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_the_same_files_as_on_the_device(folder, trained, precision):
    found = {memory: trained(memory, precision) for memory in ("device", "stream")}
    assert weights(folder / f"stream-{precision}") == weights(folder / f"device-{precision}")
    same = ("train_loss", "eval_loss", "tokens", "params")
    assert [found["stream"][key] for key in same] == [found["device"][key] for key in same]
    rows = [
        json.loads(line)
        for line in (folder / f"stream-{precision}" / "metrics.jsonl").read_text().splitlines()
    ]
    [memory] = [row["memory"] for row in rows if "memory" in row]
    assert (
        sum(memory["homes"].values()) >= 12 * found["stream"]["params"]
        and memory["device"]["slots and staging buffers"] > 0
    )


@pytest.mark.slow
def test_killed_and_taken_up_in_the_other_way(folder, monograph):
    longer = over(DEEPER, "train.updates=24", "train.save_every=4")
    assert monograph.run(folder, "train", *longer, "--out", "never-killed", figures=0).code == 0
    first = [*longer, "train.memory=device", "--out", "moved"]
    for arguments, at in ((first, 6), (["--resume", "moved", "train.memory=stream"], 14)):
        command = monograph.start(folder, "train", *arguments, figures=0)
        command.until(lambda at=at: (folder / "moved").exists() and _reached(folder / "moved", at))
        command.signal(signal.SIGKILL)
        command.wait()
    assert (
        monograph.run(folder, "train", "--resume", "moved", "train.memory=device", figures=0).code
        == 0
    )
    assert weights(folder / "moved") == weights(folder / "never-killed")


def _reached(run, update):
    return any(int(path.name[5:]) >= update for path in run.glob("checkpoints/step-*"))


def test_a_folder_is_finetuned(folder, monograph, trained):
    trained("device", "bf16")
    assert monograph.run(folder, "export", "device-bf16", "--to", "hf").code == 0
    tuned = [setting for setting in DEEPER if not setting.startswith(("model.", "data.tokenizer"))]
    tuned += ["model.init=hf", "train.memory=stream", "--out", "tuned", "--json"]
    done = monograph.run(folder, "train", *tuned, figures=0)
    assert done.code == 0, done.err
    assert monograph.run(folder, "evaluate", "tuned", "--json").code == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.compile=whole"], "with it train.compile is blocks or none"),
        (["train.remat=offload"], "with it train.remat is none, full, pointwise or a number"),
        (
            [
                "optim.name=adamw",
                "optim.state=bf16",
                "optim.master_weights=false",
                "train.precision=bf16",
            ],
            "and train.memory = stream keeps them in full precision",
        ),
        (["model.init=own.py:build"], "has no begin"),
    ],
)
def test_what_does_not_go_with_it(folder, monograph, settings, words):
    (folder / "own.py").write_text(
        "from torch import nn\n\ndef build(vocab_size):\n"
        "    model = nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))\n"
        "    model.lm_head = model[1]\n    return model\n"
    )
    base = (
        [s for s in DEEPER if not s.startswith("model.")]
        if "model.init=own.py:build" in settings
        else DEEPER
    )
    done = monograph.run(folder, "train", *over(base, *settings), "train.memory=stream")
    assert done.code == 2 and words in done.err and "Traceback" not in done.err
