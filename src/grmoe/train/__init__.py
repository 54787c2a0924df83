"""Training: one loop (`loop.py`), one step (`step.py`), one objective (`objective.py`)."""
