"""From text to token shards (`prepare`), and from token shards to batches (`TokenDataset`)."""

from grmoe.data.dataset import TokenDataset, unigram_perplexity
from grmoe.data.prepare import prepare

__all__ = ["TokenDataset", "prepare", "unigram_perplexity"]
