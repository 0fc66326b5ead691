"""An endpoint over the decode graph, in the protocols of OpenAI and of Anthropic."""
