# Run what uses it: pytest tests/text/test_sentence_pieces.py
"""Tokenizers in SentencePiece's way, small, with every part as the published tokenizer.json of a
family has it.
"""

from __future__ import annotations

import json

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

MARK = "▁"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_METASPACE = {"replacement": MARK, "split": False}
TEXTS = [
    "The cat sat on the mat; the dog ran.\n  naïve 数据 the end",
    "  def read(self):\n\treturn self.the_cat",
] * 20
# What each has before and after the BPE, and its special tokens.
SHAPES = {
    "llama2": {"prepend": True, "normalized": True},
    "tinyllama": {"prepend": True},
    "phi3": {"prepend": True, "swallowing": ["<|user|>", "<|assistant|>", "<|end|>"]},
    "mistral": {"metaspace": {**_METASPACE, "prepend_scheme": "first"}},
    "always": {"metaspace": {**_METASPACE, "prepend_scheme": "always"}},
    "split": {"metaspace": {**_METASPACE, "prepend_scheme": "always", "split": True}},
    "gemma": {
        "replace": True,
        "names": ["<pad>", "<eos>", "<bos>", "<unk>"],
        "text": ["\n\n", "<h1>"],
    },
}


def engine(
    shape: str = "llama2",
    byte_fallback: bool = True,
    metaspace_decoder: bool = False,
    texts=TEXTS,
    vocabulary=200,
) -> Engine:
    """A tokenizer that learned some merges, completed as they are where a model of SentencePiece's
    was converted.
    """
    parts = SHAPES[shape]
    names = parts.get("names", ["<unk>", "<s>", "</s>"])
    learner = Engine(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Replace(" ", MARK)
    learner.pre_tokenizer = pre_tokenizers.Split(MARK, "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*names, *(_BYTES if byte_fallback else [])],
        show_progress=False,
    )
    trainer.vocab_size += 256 * byte_fallback
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    made = Engine(
        models.BPE(
            vocab=learned["vocab"],
            merges=_completed(learned["vocab"], ["".join(pair) for pair in learned["merges"]]),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    last = []
    if parts.get("prepend"):
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
        )
        last = [decoders.Strip(" ", 1, 0)]
    elif parts.get("replace"):
        made.normalizer = normalizers.Replace(" ", MARK)
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(**parts["metaspace"])
        last = [decoders.Strip(" ", 1, 0)]
    if metaspace_decoder:
        made.decoder = decoders.Metaspace(MARK, parts["metaspace"]["prepend_scheme"])
    else:
        made.decoder = decoders.Sequence(
            [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
        )
    special = [
        AddedToken(name, normalized=parts.get("normalized", False), special=True) for name in names
    ]
    made.add_special_tokens(special)
    made.add_special_tokens(
        [
            AddedToken(name, normalized=False, rstrip=True, special=True)
            for name in parts.get("swallowing", [])
        ]
    )
    made.add_tokens([AddedToken(text, normalized=False) for text in parts.get("text", [])])
    return made


def _completed(vocab: dict[str, int], learned: list[str]) -> list[tuple[str, str]]:
    cuts = [
        (text[:cut], text[cut:]) for text in dict.fromkeys(learned) for cut in range(1, len(text))
    ]
    return [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
