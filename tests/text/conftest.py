"""The text tests share small texts, a tokenizer and a new interpreter with the data tests."""

from data.conftest import _own_cache, python, texts, trained

__all__ = ["_own_cache", "python", "texts", "trained"]
