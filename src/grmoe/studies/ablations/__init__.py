"""Ablations: one setting of GrMoE at a time, beside the default (`grmoe reproduce ablations`)."""

from grmoe.studies.ablations.study import STUDY

__all__ = ["STUDY"]
