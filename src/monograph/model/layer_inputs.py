"""What each layer of a Gemma 4 gets of the embedded tokens, beside the residual stream.

A second table has P numbers for each token and layer. With a projection of the embedded token they are
the layer's input. Layer l of L gets for token t, whose embedding is e,

    x_l = (norm(W e / sqrt(D))_l + sqrt(P) E[t]_l) / sqrt(2)

where W is [L P, D], E is [V, L P], and the norm is over the P numbers of a layer. At its end, a layer adds
norm(U (act(G h) * x_l)) to the residual stream h, where G is [P, D] and U is [D, P].

The parameters belong to the decoder and its blocks, as in files, so these are functions of both.

Shape suffixes: B batch, T positions, D hidden size, L layers, P width of a layer's input.
Source: transformers' modeling_gemma4.py (`get_per_layer_inputs`, `project_per_layer_inputs`,
`Gemma4TextDecoderLayer`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from monograph.model.config import LlamaConfig
from monograph.model.layers import ACTIVATIONS, Linear, make_norm, make_scale

# The names of the decoder's modules: the table and its factor, the projection and its norm.
_TABLE = "embed_tokens_per_layer"
_TABLE_SCALE = "scale_embedded_per_layer"
_PROJECTION = "per_layer_model_projection"
_PROJECTION_NORM = "per_layer_projection_norm"
# The modules of a block.
_GATE = "per_layer_input_gate"
_OUTPUT = "per_layer_projection"
_OUTPUT_NORM = "post_per_layer_input_norm"


def add_to_decoder(decoder: nn.Module, config: LlamaConfig) -> None:
    """Add the modules that give the layers' inputs, without values."""
    width = config.hidden_size_per_layer_input
    widths = config.num_hidden_layers * width
    rows = config.vocab_size_per_layer_input or config.vocab_size
    padding = None if config.family.trains_padding else config.pad_token_id
    # Given a weight, nn.Embedding does not sample one.
    table = nn.Embedding(rows, widths, padding, _weight=torch.empty(rows, widths))
    decoder.add_module(_TABLE, table)
    decoder.add_module(_PROJECTION, Linear(config.hidden_size, widths, bias=False))
    decoder.add_module(_PROJECTION_NORM, make_norm(config, width))
    # transformers keeps the factor of the table in fp32. It is made on the CPU even if the model is built on
    # the meta device, whose tensors have no numbers.
    factor = torch.tensor(width**0.5, dtype=torch.float32, device="cpu").item()
    decoder.add_module(_TABLE_SCALE, make_scale(factor))


def table_of(decoder: nn.Module) -> nn.Embedding:
    """Return the second table of embeddings, [V, L P]."""
    table: nn.Embedding = getattr(decoder, _TABLE)
    return table


def modules_of_decoder(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules that `add_to_decoder` has added."""
    return [getattr(decoder, name) for name in (_TABLE, _PROJECTION, _PROJECTION_NORM)]


def inputs_of_layers(
    decoder: nn.Module, config: LlamaConfig, tokens_BT: Tensor, embedded_BTD: Tensor
) -> tuple[Tensor, ...]:
    """Return x_l for each layer l, [B, T, P] each, in the dtype of the embedded tokens."""
    table, projection, norm = modules_of_decoder(decoder)
    split = (config.num_hidden_layers, config.hidden_size_per_layer_input)
    projected_BTLP = (projection(embedded_BTD) * config.hidden_size**-0.5).unflatten(-1, split)
    scale_table = getattr(decoder, _TABLE_SCALE)
    looked_up_BTLP = scale_table(table(tokens_BT)).to(embedded_BTD.dtype).unflatten(-1, split)
    both_BTLP = (norm(projected_BTLP) + looked_up_BTLP) * 2**-0.5
    return both_BTLP.unbind(2)


def add_to_block(block: nn.Module, config: LlamaConfig) -> None:
    """Add the modules with which a block reads its input, without values."""
    width = config.hidden_size_per_layer_input
    block.add_module(_GATE, Linear(config.hidden_size, width, bias=False))
    block.add_module(_OUTPUT, Linear(width, config.hidden_size, bias=False))
    block.add_module(_OUTPUT_NORM, make_norm(config, config.hidden_size))


def branch(block: Any, activation: str, hidden_BTD: Tensor, input_BTP: Tensor) -> Tensor:
    """Return norm(U (act(G h) * x)), [B, T, D], which the block adds to h."""
    gated_BTP = ACTIVATIONS[activation](getattr(block, _GATE)(hidden_BTD)) * input_BTP
    return getattr(block, _OUTPUT_NORM)(getattr(block, _OUTPUT)(gated_BTP))
