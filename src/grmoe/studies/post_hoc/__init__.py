"""The dial after training, beside softmax models trained again (`grmoe reproduce post-hoc`)."""

from grmoe.studies.post_hoc.study import STUDY

__all__ = ["STUDY"]
