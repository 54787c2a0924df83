"""Training: one readable loop on PyTorch's own parts."""
