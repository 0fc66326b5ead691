"""The shape of a Llama: its sizes by their Hugging Face names, checked, with presets. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from monograph.errors import InputRefused

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of rotary wavelengths beyond the context of pre-training; see `rope.inverse_frequencies`.

    Attributes:
        factor: by how much wavelengths longer than the low-frequency border are stretched, at least 1.
        low_freq_factor: that border is original_max_position_embeddings / low_freq_factor tokens.
        high_freq_factor: wavelengths below original_max_position_embeddings / high_freq_factor tokens are kept.
        original_max_position_embeddings: context length of pre-training, tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_number(f"rope_scaling.{name}", getattr(self, name))
        _check_whole("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise InputRefused(
                f"rope_scaling.factor = {self.factor}, low_freq_factor = {self.low_freq_factor}, high_freq_factor = "
                f"{self.high_freq_factor}: expected a factor of at least 1 and low below high"
            )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a Llama, by their Hugging Face names.

    Attributes:
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU layer.
        num_hidden_layers: blocks.
        num_attention_heads: query heads; hidden_size must be a multiple (transformers refuses anything else).
        num_key_value_heads: key-value heads; must divide num_attention_heads. 0: as many as query heads.
        head_dim: width of a head, even. 0: hidden_size / num_attention_heads.
        max_position_embeddings: longest sequence, tokens.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: None, or how the wavelengths are stretched.
        tie_word_embeddings: the head is the embedding matrix.
        initializer_range: standard deviation of the initial weights, see `Llama`.
        bos_token_id: id that begins a document, if the vocabulary has one.
        eos_token_id: id or ids that end a document.

    Raises:
        InputRefused: a value of the wrong type or out of range, or heads that do not divide; the message names the key.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in _REQUIRED:
            _check_whole(name, getattr(self, name))
        # A frozen dataclass sets its derived fields this way.
        if self.num_key_value_heads == 0:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", max(1, self.hidden_size // self.num_attention_heads))
        for name in _SIZES:
            _check_whole(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            _check_number(name, getattr(self, name))
        if self.initializer_range > 1:
            raise InputRefused(f"initializer_range = {self.initializer_range}: expected at most 1, transformers' limit")
        if not isinstance(self.tie_word_embeddings, bool):
            raise InputRefused(f"tie_word_embeddings = {self.tie_word_embeddings!r}: expected true or false")
        self._check_heads()
        self._check_ids()

    def _check_heads(self) -> None:
        for whole, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise InputRefused(
                    f"{whole} = {getattr(self, whole)} is not a multiple of {part} = {getattr(self, part)}; change one"
                )
        if self.head_dim % 2:
            raise InputRefused(
                f"head_dim = {self.head_dim} is odd, and rotary embedding turns pairs; change it, or hidden_size = "
                f"{self.hidden_size} and num_attention_heads = {self.num_attention_heads} that it comes from"
            )

    def _check_ids(self) -> None:
        eos = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        for name, value in (("bos_token_id", self.bos_token_id), *(("eos_token_id", item) for item in eos)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise InputRefused(f"{name} = {value!r}: expected a token id, a whole number of at least 0")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> LlamaConfig:
        """A named shape, with any of its values replaced.

        | name | parameters | vocabulary | layers | hidden | ffn | heads x dim | kv heads | head | positions |
        |---|---|---|---|---|---|---|---|---|---|
        | nano | 131,392 | 512 | 2 | 64 | 192 | 2 x 32 | 1 | tied | 2,048 |
        | micro | 2,361,024 | 4,096 | 4 | 192 | 512 | 6 x 32 | 2 | tied | 2,048 |
        | 124m | 123,587,328 | 50,304 | 12 | 768 | 2,048 | 6 x 128 | 6 | tied | 2,048 |
        | llama-179m | 179,448,576 | 50,000 | 12 | 768 | 3,072 | 12 x 64 | 3 | untied | 2,048 |
        | 1b | 1,235,814,400 | 128,256 | 16 | 2,048 | 8,192 | 32 x 64 | 8 | tied | 131,072 |
        | 8b | 8,030,261,248 | 128,256 | 32 | 4,096 | 14,336 | 32 x 128 | 8 | untied | 131,072 |

        The first three take their tokenizer's vocabulary (`vocab_size=`). 124m is GPT-2 small's size with heads of 128,
        where GPU attention is fastest; llama-179m is that of A. Tam, "Pretraining a Llama Model on Your Local GPU"
        (Machine Learning Mastery); 1b and 8b are Llama-3.2-1B and Llama-3.1-8B. nano and micro start from weights of
        standard deviation sqrt(2 / (5 hidden_size)) (Nguyen and Salazar, arXiv 1910.05895): 0.02 is small for their
        width, and micro was 0.1 bits per byte behind with it after 200 updates.

        Raises:
            InputRefused: no such preset or key, or values that do not fit together.
        """
        if name not in _SHAPES:
            raise InputRefused(f"preset = {name!r}: expected one of {', '.join(_SHAPES)}")
        unknown = sorted(set(overrides) - {field.name for field in fields(cls)})
        if unknown:
            raise InputRefused(f"unknown key {unknown[0]!r}: the sizes of a Llama are {', '.join(_SIZES)}")
        shape = dict(zip(_SIZES, _SHAPES[name], strict=False))  # head_dim and positions follow from the rest
        return cls(**{**shape, **_BEYOND_SHAPE[name], **overrides})

    @classmethod
    def from_hf(cls, values: dict[str, Any]) -> LlamaConfig:
        """The content of a Hugging Face config.json of a Llama, as transformers 4 or 5 writes it.

        Raises:
            InputRefused: another architecture, a variant that this Llama does not compute, or a wrong or missing value.
        """
        for key, expected in _COMPUTED.items():
            if values.get(key, expected) != expected:
                raise InputRefused(f"{key} = {values[key]!r} is not supported: only {expected!r} is")
        for key in ("model_type", *_REQUIRED):
            if values.get(key) is None:
                raise InputRefused(f"the key {key} is missing")
        names = {field.name for field in fields(cls)} - {"rope_scaling"}
        sizes: dict[str, Any] = {"rms_norm_eps": 1e-6}  # transformers' own default, where the file does not say
        sizes |= {name: values[name] for name in names if values.get(name) is not None}
        for key in sorted(sizes.keys() & _SIZES):  # 0 means "derived" in this class only, not in the file
            _check_whole(key, sizes[key])
        if isinstance(values.get("eos_token_id"), list):
            sizes["eos_token_id"] = tuple(values["eos_token_id"])
        theta, scaling = _rope_from_hf(values)
        return cls(**{**sizes, "rope_theta": theta, "rope_scaling": scaling})

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json, in the form that transformers 4 and 5 and other readers of the format know."""
        values = asdict(self)
        if self.rope_scaling is not None:
            values["rope_scaling"]["rope_type"] = "llama3"
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        return {"architectures": ["LlamaForCausalLM"], **_COMPUTED, **values}

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one block's parameters, by their names inside the block."""
        query, key_value = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden, wide = self.hidden_size, self.intermediate_size
        return {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key_value, hidden),
            "self_attn.v_proj.weight": (key_value, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }

    def outer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters outside the blocks, by their full names; a tied head is not listed."""
        embedding = (self.vocab_size, self.hidden_size)
        head = {} if self.tie_word_embeddings else {"lm_head.weight": embedding}
        return {"model.embed_tokens.weight": embedding, "model.norm.weight": (self.hidden_size,), **head}

    def parameter_count(self) -> int:
        """Number of parameters, a tied head counted once."""
        in_a_layer = sum(math.prod(shape) for shape in self.layer_shapes().values())
        return self.num_hidden_layers * in_a_layer + sum(math.prod(shape) for shape in self.outer_shapes().values())


# Keys of a Llama's config.json that change what is computed, with the one value that is computed here.
_COMPUTED: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _rope_from_hf(values: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    # transformers 5 writes one dictionary `rope_parameters`, 4 wrote `rope_theta` beside `rope_scaling`.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise InputRefused(f"rope_scaling = {rope!r}: expected a table or null")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise InputRefused(f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported: only 1 is")
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise InputRefused(f"rope_type = {kind!r} is not supported: only 'default' and 'llama3' are")
    names = [field.name for field in fields(Llama3Scaling)]
    missing = [name for name in names if name not in rope]
    if missing:
        raise InputRefused(f"the key {missing[0]} of the llama3 rope scaling is missing")
    return theta, Llama3Scaling(**{name: rope[name] for name in names})


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputRefused(f"{name} = {value!r}: expected a whole number of at least 1")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise InputRefused(f"{name} = {value!r}: expected a positive number")


# vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads
_SHAPES: dict[str, tuple[int, ...]] = {
    "nano": (512, 64, 192, 2, 2, 1),
    "micro": (4096, 192, 512, 4, 6, 2),
    "124m": (50_304, 768, 2048, 12, 6, 6),
    "llama-179m": (50_000, 768, 3072, 12, 12, 3),
    "1b": (128_256, 2048, 8192, 16, 32, 8),
    "8b": (128_256, 4096, 14_336, 32, 32, 8),
}
_LLAMA_3: dict[str, Any] = {
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
_BEYOND_SHAPE: dict[str, dict[str, Any]] = {
    "nano": {"tie_word_embeddings": True, "initializer_range": 0.08},
    "micro": {"tie_word_embeddings": True, "initializer_range": 0.046},
    "124m": {"tie_word_embeddings": True},
    "llama-179m": {},
    "1b": {**_LLAMA_3, "tie_word_embeddings": True, "rope_scaling": Llama3Scaling(factor=32.0)},
    "8b": {**_LLAMA_3, "rope_scaling": Llama3Scaling()},
}
