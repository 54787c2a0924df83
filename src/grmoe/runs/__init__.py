"""A run's folder: its configuration, checkpoints, log, results, export and model card."""
