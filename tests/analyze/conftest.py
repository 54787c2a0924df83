"""A micro model, its tokenizer and a little text: see `micro_model`."""

from micro_model import make, texts, tokenizer

__all__ = ["make", "texts", "tokenizer"]
