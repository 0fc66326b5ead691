"""An OpenAI-compatible endpoint over the decode graph."""
