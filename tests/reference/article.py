# Run what uses it: pytest tests/model/test_torch_file.py tests/text/test_tokenizer.py
"""The model of A. Tam's "Pretraining a Llama Model on Your Local GPU", for its state dict and as an
oracle.

Its tokenizer, too, which learns its alphabet from the text and has no token for any other byte.

The names of its modules and the tables that it keeps as buffers are the article's; the rest is as
plain as can be.
"""

from __future__ import annotations

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn


def tokenizer(
    texts,
    vocabulary=500,
    form="NFKC",
    alphabet=(),
    use_regex=False,
    space_first=True,
    unknown="[UNK]",
):
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token=unknown))
    made.normalizer = getattr(normalizers, form)()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space_first, use_regex=use_regex)
    made.decoder = decoders.ByteLevel()
    special = ["[BOT]", "[EOT]", "[PAD]", *([unknown] if unknown else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


class Rotary(nn.Module):
    def __init__(self, size, positions, base=10_000.0):
        super().__init__()
        frequencies = base ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(positions), torch.cat([frequencies, frequencies]))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x):
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        return x * self.cos[:length] + torch.cat([-second, first], dim=-1) * self.sin[:length]


class Attention(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.size = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, rotary):
        q, k, v = (
            p(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        scores = rotary(q) @ rotary(k).transpose(-1, -2) / self.size**0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.o_proj(
            (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        )


class Mlp(nn.Module):
    def __init__(self, width, wide):
        super().__init__()
        self.gate_proj = nn.Linear(width, wide, bias=False)
        self.up_proj = nn.Linear(width, wide, bias=False)
        self.down_proj = nn.Linear(wide, width, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width, wide, heads, groups):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = Attention(width, heads, groups)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = Mlp(width, wide)

    def forward(self, x, rotary):
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class Base(nn.Module):
    def __init__(self, vocabulary, positions, width, wide, layers, heads, groups):
        super().__init__()
        self.rotary_emb = Rotary(width // heads, positions)
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, wide, heads, groups) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary_emb)
        return self.norm(x)


class Pretraining(nn.Module):
    def __init__(self, vocabulary=70, positions=40, width=48, wide=80, layers=2, heads=6, groups=2):
        super().__init__()
        self.base_model = Base(vocabulary, positions, width, wide, layers, heads, groups)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.base_model(tokens))
