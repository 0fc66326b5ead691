"""Turn text into token ids and back: tokenizers, chat templates and the rules of a chat; below
models and data.
"""
