"""The dial after training: experts per token chosen for a target, on calibration text, with certificates."""

from grmoe.dial.setting import Setting, apply, current

__all__ = ["Setting", "apply", "current"]
