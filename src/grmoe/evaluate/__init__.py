"""`grmoe eval`: perplexity of texts (`texts`, `perplexity`) and lm-evaluation-harness tasks (`harness`), at any α."""
