"""Grassmannian Mixture-of-Experts: experts own subspaces, one dial sets the sparsity after training."""

__version__ = "0.1.0"
