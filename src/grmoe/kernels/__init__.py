"""Triton kernels behind the router and the experts. Import them only where `runtime.runs_on` says they run."""
