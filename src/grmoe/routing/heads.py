"""The Grassmann gate over attention heads in place of experts."""

from __future__ import annotations

from typing import ClassVar

from grmoe.routing.grassmann import GrassmannRouter


class HeadRouter(GrassmannRouter):
    """A `GrassmannRouter` that chooses attention heads: `num_experts` is the number of heads.

    What belongs to experts does not reach it: α of the model, budgets, the entropy term, the overlap penalty.
    """

    of_experts: ClassVar[bool] = False
