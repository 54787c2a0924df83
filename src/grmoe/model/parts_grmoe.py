"""What the model takes from the rest of grmoe.

This file travels with exported models, and so do all that import it. Where grmoe is not installed, the same names come
from `grmoe_routing.py`, which is generated. One file decides for all of them: with classes from both places,
`isinstance` would fail.
"""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

try:
    from grmoe import checks
    from grmoe.attention import (
        attend_causally,
        attend_one,
        can_attend_causally,
        can_attend_one,
        rotate,
        rotate_reference,
    )
    from grmoe.compiling import realize
    from grmoe.experts import BACKENDS, Dispatch, ExpertWeights, pick_backend
    from grmoe.head import IGNORED, divergence, next_token_loss
    from grmoe.layer import MoE, as_autocast
    from grmoe.linears import add_product, feed_forward_few, project_few, takes_few
    from grmoe.regularizers import overlap_penalty
    from grmoe.routing import (
        ROUTERS,
        AtLeast,
        Dense,
        FrameRouter,
        HashRouter,
        HeadRouter,
        LayerNumbers,
        Mass,
        Router,
        RoutingMetrics,
        Selection,
        SlotRouter,
        Threshold,
        TopK,
        all_routers,
        build_router,
        check_curve,
        curve_numbers,
        curve_room,
        read_metrics_of,
        routers,
        set_alpha,
        set_layer_numbers,
        update_priors,
    )
    from grmoe.routing.selection import numbers
except ImportError:
    from .grmoe_routing import *  # type: ignore[import-not-found]  # noqa: F403

    class _Known(PreTrainedConfig):
        """Keeps `AutoTokenizer` from asking whether to run this code: a tokenizer needs none of it.

        transformers asks if it does not know the model type. It takes a class of its own, by the name of its module,
        only where code is not trusted. So the code of each exported model stays in charge of that model.
        """

        model_type = "grmoe"
        __module__ = "transformers.models.grmoe"

    if "grmoe" not in CONFIG_MAPPING:
        CONFIG_MAPPING.register("grmoe", _Known)

__all__ = [
    "BACKENDS", "IGNORED", "ROUTERS", "AtLeast", "Dense", "Dispatch", "ExpertWeights", "FrameRouter", "HashRouter",
    "HeadRouter", "LayerNumbers", "Mass", "MoE", "Router", "RoutingMetrics", "Selection", "SlotRouter", "Threshold",
    "TopK", "add_product", "all_routers", "as_autocast", "attend_causally", "attend_one", "build_router",
    "can_attend_causally", "can_attend_one", "check_curve", "checks", "curve_numbers", "curve_room", "divergence",
    "feed_forward_few", "next_token_loss", "numbers", "overlap_penalty", "pick_backend", "project_few",
    "read_metrics_of", "realize", "rotate", "rotate_reference", "routers", "set_alpha", "set_layer_numbers",
    "takes_few", "update_priors",
]  # fmt: skip
