"""The kinds of a model's layers, by the words that `layer_types` of a config.json has for them."""

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"  # attention with a window
LINEAR_ATTENTION = "linear_attention"  # a gated delta net
