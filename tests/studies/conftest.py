"""Prepared text and a configuration small enough to train in a second: see `small_runs`."""

from small_runs import make_settings, prepared, settings

__all__ = ["make_settings", "prepared", "settings"]
