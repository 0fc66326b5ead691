"""Text to token ids and back: tokenizers, chat templates, and the rules of a chat; models and data are built on it."""
