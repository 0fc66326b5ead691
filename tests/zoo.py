"""Models of many kinds, as their users write them, each with a loss and a batch: what an ensemble
has to hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from batches import VOCABULARY, ragged, tiny_llama
from monograph.loss import token_loss

ROWS, LENGTH, CLASSES = 4, 12, 5
Batch = dict[str, Tensor]
LANGUAGE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


class Kind(NamedTuple):
    """A kind of model: how to build one from its seed, its loss, and a batch from a seed."""

    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
    batch: Callable[[int], Batch]


class MLP(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, vectors: Tensor) -> Tensor:
        """[B, 8] to [B, CLASSES]."""
        return self.down(F.relu(self.up(vectors)))


class Conv(nn.Module):
    """What batching gets wrong most easily: groups, padding modes, positive dimensions, norms,
    in-place operations.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(3, 6, 3, padding=1, groups=3)
        self.norm, self.groups = nn.BatchNorm2d(6), nn.GroupNorm(2, 4)
        self.reflect = nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect")
        self.prelu, self.pool, self.head = nn.PReLU(4), nn.MaxPool2d(2), nn.Linear(4, CLASSES)
        self.layer_norm = nn.LayerNorm([4, 4], elementwise_affine=False)
        self.bare = nn.Parameter(torch.randn(4))
        self.dropout, self.channels = nn.Dropout(dropout), nn.Dropout2d(0.2)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, 8, 8] to probabilities [B, CLASSES]."""
        hidden = F.relu(self.norm(self.depthwise(images)), inplace=True)
        hidden = self.layer_norm(
            self.pool(self.channels(self.prelu(self.groups(self.reflect(hidden)))))
        )
        vectors = (
            torch.cat([hidden.mean((2, 3)), hidden.flatten(2).amax(2)], 1)
            .unflatten(1, (2, 4))
            .sum(1)
        )
        vectors = vectors * self.bare
        vectors += 1
        return self.head(self.dropout(vectors)).softmax(dim=1)


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(VOCABULARY, 32, padding_idx=3),
            nn.Linear(32, VOCABULARY),
        )
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        """[B, T] to scores [B, T, VOCABULARY]."""
        return (self.head(self.encoder(self.embed(input_ids))),)


class Recurrent(nn.Module):
    """A language model of layers over time, one of them with its weight's norm apart, and one that
    reads backwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(24, VOCABULARY)
        self.lstm = weight_norm(nn.LSTM(16, 12, 2, batch_first=True, proj_size=8), "weight_hh_l0")
        self.gru = nn.GRU(8, 12, batch_first=True, bidirectional=True)
        self.norm, self.dropout = nn.BatchNorm1d(24, momentum=None), nn.Dropout(0.2)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, None]:
        """[B, T] to scores [B, T, VOCABULARY], and no loss."""
        hidden = self.gru(self.lstm(self.embed(input_ids))[0])[0]
        return self.head(self.dropout(self.norm(hidden.mT).mT)), None


def seeded(
    build: Callable[..., nn.Module], *arguments: Any, **options: Any
) -> Callable[[int], nn.Module]:
    """Builds a module with its numbers drawn from a seed."""

    def build_one(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return build(*arguments, **options).double()

    return build_one


def transformer(name: str, **sizes: Any) -> Callable[[int], nn.Module]:
    """Builds a model of transformers by the stem of its classes, such as "LlamaForCausalLM".

    Only the call imports the library, which takes a second that a mere collection of tests need
    not.
    """

    def build(seed: int) -> nn.Module:
        import transformers

        heads = (
            "ForCausalLM",
            "LMHeadModel",
            "ForMaskedLM",
            "ForConditionalGeneration",
            "ForImage",
        )
        head = next(head for head in heads if head in name)
        config = getattr(transformers, name[: name.index(head)] + "Config")
        return seeded(getattr(transformers, name), config(**sizes))(seed)

    return build


def tokens(seed: int) -> Batch:
    """Random ids and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


def masked(seed: int) -> Batch:
    """The same with padding on the right."""
    lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=torch.Generator().manual_seed(seed))
    return tokens(seed) | {"attention_mask": (torch.arange(LENGTH) < lengths).long()}


def translated(seed: int) -> Batch:
    """Ids for an encoder and for a decoder."""
    batch = tokens(seed)
    return batch | {"decoder_input_ids": batch["labels"].roll(1, 1)}


def classified(*shape: int) -> Callable[[int], Batch]:
    """Random inputs of a shape, with classes."""

    def drawn(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)
        return {"inputs": inputs, "labels": torch.randint(CLASSES, (ROWS,), generator=generator)}

    return drawn


def of_tokens(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every token."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    scores = module(**inputs)[0]
    labels = batch["labels"]
    return F.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), reduction="sum"
    ), torch.ones_like(labels).sum()


def of_classes(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every row."""
    scores = module(batch["inputs"])
    scores = scores if isinstance(scores, Tensor) else scores[0]
    labels = batch["labels"]
    return F.cross_entropy(scores, labels, reduction="sum"), torch.ones_like(labels).sum()


def zoo() -> dict[str, Kind]:
    """All of them; the language models and the pictures' are transformers' own, unmodified."""
    grouped = LANGUAGE | {"num_key_value_heads": 2}
    t5 = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 1,
        "num_heads": 4,
    }
    sizes = {k: v for k, v in LANGUAGE.items() if k != "vocab_size"}
    picture = sizes | {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
    resnet = {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_labels": CLASSES,
        "layer_type": "basic",
    }  # fmt: skip
    llama = transformer(
        "LlamaForCausalLM", **grouped, tie_word_embeddings=True, attention_dropout=0.2
    )
    bert = transformer("BertForMaskedLM", **LANGUAGE | {"num_hidden_layers": 2})
    return {
        "our llama": Kind(
            lambda seed: tiny_llama(
                torch.float64, seed, num_hidden_layers=1, tie_word_embeddings=True, pad_token_id=3
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our mixture": Kind(
            lambda seed: tiny_llama(
                torch.float64,
                seed,
                num_hidden_layers=1,
                model_type="gpt_oss",
                num_experts=5,
                num_experts_per_tok=2,
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our gemma": Kind(
            lambda seed: tiny_llama(
                torch.float64,
                seed,
                model_type="gemma3_text",
                sliding_window=5,
                rope_local_theta=1e2,
                layer_types=("sliding_attention", "full_attention"),
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our qwen3_5": Kind(
            lambda seed: tiny_llama(
                torch.float64,
                seed,
                model_type="qwen3_5_text",
                layer_types=("linear_attention", "full_attention"),
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our granite4": Kind(
            lambda seed: tiny_llama(
                torch.float64,
                seed,
                model_type="granitemoehybrid",
                layer_types=("mamba", "full_attention"),
                mamba_d_state=8,
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our nemotron_h": Kind(
            lambda seed: tiny_llama(
                torch.float64,
                seed,
                model_type="nemotron_h",
                num_hidden_layers=3,
                layer_types=("mamba", "mlp", "full_attention"),
                mamba_d_state=8,
                tie_word_embeddings=False,
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our lfm2": Kind(
            lambda seed: tiny_llama(
                torch.float64, seed, model_type="lfm2", layer_types=("conv", "full_attention")
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our glm4": Kind(
            lambda seed: tiny_llama(
                torch.float64, seed, model_type="glm4", partial_rotary_factor=0.5
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our gemma4": Kind(
            lambda seed: tiny_llama(
                torch.float64,
                seed,
                model_type="gemma4_text",
                sliding_window=5,
                rope_local_theta=1e2,
                layer_types=("sliding_attention", "full_attention"),
                global_head_dim=12,
                attention_k_eq_v=True,
                num_global_key_value_heads=1,
                final_logit_softcapping=3.0,
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our small gemma4": Kind(
            lambda seed: tiny_llama(
                torch.float64,
                seed,
                model_type="gemma4_text",
                num_hidden_layers=3,
                layer_types=("full_attention",) * 3,
                num_kv_shared_layers=2,
                use_double_wide_mlp=True,
                hidden_size_per_layer_input=6,
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "our gemma4 with experts": Kind(
            lambda seed: tiny_llama(
                torch.float64,
                seed,
                model_type="gemma4_text",
                num_experts=5,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
            ),
            token_loss,
            lambda s: ragged(ROWS, s),
        ),
        "mlp": Kind(seeded(MLP), of_classes, classified(8)),
        "conv": Kind(seeded(Conv, 0.3), of_classes, classified(3, 8, 8)),
        "encoder": Kind(seeded(Encoder), of_tokens, tokens),
        "llama": Kind(llama, of_tokens, tokens),
        "llama, padded": Kind(llama, of_tokens, masked),
        "llama, eager attention": Kind(
            transformer("LlamaForCausalLM", **grouped, attn_implementation="eager"),
            of_tokens,
            masked,
        ),
        "qwen2": Kind(transformer("Qwen2ForCausalLM", **grouped), of_tokens, tokens),
        "gpt2": Kind(transformer("GPT2LMHeadModel", **LANGUAGE), of_tokens, tokens),
        "lstm": Kind(seeded(Recurrent), of_tokens, tokens),
        "t5": Kind(transformer("T5ForConditionalGeneration", **t5), of_tokens, translated),
        "bert": Kind(bert, of_tokens, tokens),
        "bert, padded": Kind(bert, of_tokens, masked),
        "vit": Kind(
            transformer("ViTForImageClassification", **picture), of_classes, classified(3, 16, 16)
        ),
        "resnet": Kind(
            transformer("ResNetForImageClassification", **resnet), of_classes, classified(3, 32, 32)
        ),
    }
