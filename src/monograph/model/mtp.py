"""Compute a head that predicts the token after the next one (multi-token prediction, MTP).

The head is one more block behind the decoder. With h_t the decoder's final hidden state at position t,
and x_t+1 the next token,

    u_t = fc [ norm_e(embedding(x_t+1)) ; norm_h(h_t) ]
    g_t = norm(block(u)_t)
    logits of x_t+2 = head(g_t)

The block attends to the positions up to t of the same document. Embedding and head are those of the
decoder. To predict further tokens, g_t takes the place of h_t, and the predicted token that of x_t+1.

The names of the parameters, the order of the two halves and the norms are those of Qwen3-Next and
Qwen 3.5. Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), and vLLM's qwen3_next_mtp.py and
qwen3_5_mtp.py, which say what is different in Qwen's files: one norm of h_t is the decoder's last one,
and there is one `fc`.

Shape suffixes: B batch, T positions, D hidden size, F rotated pairs of a head; 1 an axis of length 1.
"""

import torch
from torch import Tensor, nn

from monograph.model.config import LlamaConfig
from monograph.model.layers import Linear, make_norm
from monograph.model.mixer import LayerCache
from monograph.model.rope import CosSin
from monograph.ops.attention import Mask

# The prefix of the names of the head's parameters.
MTP_PREFIX = "mtp."


class MultiTokenPredictor(nn.Module):
    """The head; see above.

    Attributes:
        config: the configuration of a model whose only layer is the head's block
            (`LlamaConfig.of_mtp_layer`).
    """

    def __init__(self, config: LlamaConfig, block: nn.Module) -> None:
        """Make the head around its block.

        Args:
            config: see the class.
            block: a `Block` of this configuration.
        """
        super().__init__()
        self.config = config
        self.pre_fc_norm_embedding = make_norm(config, config.hidden_size)
        self.pre_fc_norm_hidden = make_norm(config, config.hidden_size)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([block])
        self.norm = make_norm(config, config.hidden_size)

    def forward(
        self,
        embedded_BTD: Tensor,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return g, [B, T, D].

        Args:
            embedded_BTD: the embeddings of the tokens after each position.
            hidden_BTD: h, the final hidden states of the positions.
            cos_sin_B1TF: cosine and sine of the positions; None: the block does not rotate.
            mask: which positions attend to which.
            cache: the block's view of a cache; None: the pass has no cache.
        """
        halves = [self.pre_fc_norm_embedding(embedded_BTD), self.pre_fc_norm_hidden(hidden_BTD)]
        joined_BTD = self.fc(torch.cat(halves, dim=-1))
        return self.norm(self.layers[0](joined_BTD, cos_sin_B1TF, mask, cache))
