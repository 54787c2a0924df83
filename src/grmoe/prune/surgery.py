"""`grmoe prune` from a model's folder to results: every method, measured on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from grmoe import checks, geometry
from grmoe.model import GrmoeForCausalLM
from grmoe.model.configuration_grmoe import GrmoeConfig
from grmoe.probe.losses import Measurement, increase, increase_by_domain, measure, within
from grmoe.probe.windows import Text, read_texts
from grmoe.prune.certificate import certificate_drop, certified
from grmoe.prune.choose import (
    MAX_DROPS,
    MAX_MERGES,
    RANDOM,
    Method,
    everywhere,
    methods,
    prediction_method,
    random_method,
)
from grmoe.prune.divergence import Divergence
from grmoe.prune.fisher import fisher_information, fisher_method
from grmoe.prune.gates import check_router, similarity
from grmoe.prune.layers import Layout, PrunableLayer, all_experts, install, prunable_layers
from grmoe.prune.results import (
    DRAWS,
    Outcome,
    Overlaps,
    PrunedResult,
    PruneResults,
    Result,
    TextResult,
    chance,
)
from grmoe.prune.small import size, small_model
from grmoe.runs.open import open_model
from grmoe.terminal import Progress, Steps, silent


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do: a number of experts for every layer, or the fewest that keep perplexity within a bound."""

    model: str | Path
    """Folder of a run or of an exported model."""
    experts: int | None = None
    """In every layer. None: as few as `max_increase` allows."""
    max_increase: float = 0.01
    """Bound on the relative increase of perplexity, where `experts` is None."""
    text: str | None = None
    """Calibration text. Default: the run's validation split."""
    checks: Sequence[str] = ()
    """Other texts, to measure on."""
    tokens: int | None = None
    """Of each text. Default: 8192, on a GPU 131072."""
    length: int | None = None
    """Tokens per window. Default: as trained."""
    checkpoint: str = "best"
    """Of a run: "best", "last" or a step."""

    def __str__(self) -> str:
        if self.experts is not None:
            return f"{self.experts} experts in every layer"
        return f"the fewest experts with perplexity at most {100 * self.max_increase:g} % higher"


def run(plan: Plan, progress: Progress = silent) -> Result:
    """Remove one expert per layer and step, by every method, until the plan is met. Returns the pruned model."""
    loaded = open_model(plan.model, plan.checkpoint, dtype="served")
    model, config = loaded.model, loaded.model.config
    check_router(config)
    config.budget = config.budget_curve = None  # a curve belongs to the experts it was calibrated with
    model.set_budget(None)
    goal = _fewest_experts(config) if plan.experts is None else _check_experts(plan.experts, config)
    # All text is read before anything is measured: a wrong file name should not cost minutes.
    texts = read_texts((plan.text, *plan.checks), loaded, plan.length, plan.tokens)
    pruning = _Pruning(model, texts, Steps(progress, _expected(config, goal, len(texts) - 1)))
    before = size(model)
    overlaps = tuple(_overlaps(layer) for layer in pruning.layers)

    outcomes: list[Outcome] = []
    chosen: Outcome | None = None
    while pruning.experts > goal:
        reached = pruning.remove_one()
        outcomes += reached
        best = _best(plan, reached)
        if best is None:
            break
        chosen = best
    experts = outcomes[0].experts if chosen is None else chosen.experts
    outcomes = [pruning.check(o) if o.experts == experts else o for o in outcomes]
    final = [o for o in outcomes if o.experts == experts]
    if chosen is not None:
        chosen = next(o for o in final if o.method == chosen.method)
        install(pruning.layers, chosen.layouts)
        loaded = replace(loaded, model=small_model(model, experts))
    else:
        install(pruning.layers, [all_experts(config.num_experts)] * len(pruning.layers))
    body = PruneResults(
        asked=str(plan),
        asked_experts=plan.experts,
        max_ppl_increase=plan.max_increase if plan.experts is None else None,
        router=config.router,
        trained_experts=config.num_experts,
        experts=experts,
        texts=tuple(map(_trained_result, texts, pruning.trained)),
        overlaps=overlaps,
        random_overlap=_random_overlap(config),
        before=before,
        after=None if chosen is None else size(loaded.model),
        chosen=chosen,
        outcomes=tuple(outcomes),
        certificates=tuple(map(certified, pruning.layers, _layouts(final, "certificate drop"))),
        random={
            kind: [chance([o.texts[i].loss for o in final if o.method == kind]) for i in range(len(texts))]
            for kind in RANDOM
        },
    )
    return Result(loaded=loaded, body=body)


def _layouts(outcomes: list[Outcome], method: str) -> tuple[Layout, ...]:
    return next(o.layouts for o in outcomes if o.method == method)


def _fewest_experts(config: GrmoeConfig) -> int:
    """The fewest experts a layer can have: at least two, and as many as the selection gives a token."""
    assert config.num_experts_per_tok is not None
    fewest = max(2, config.num_experts_per_tok if config.selection in ("topk", "mass", "at_least") else 2)
    checks.require(
        fewest < config.num_experts,
        f"the model must have more than {fewest} experts to prune, got {config.num_experts} with up to "
        f"{config.num_experts_per_tok} per token",
    )
    return fewest


def _check_experts(experts: int, config: GrmoeConfig) -> int:
    low, high = _fewest_experts(config), config.num_experts - 1
    checks.require(
        low <= experts <= high,
        f"experts must be from {low} to {high} for a model with {config.num_experts} experts and at most "
        f"{config.num_experts_per_tok} per token, got {experts}",
    )
    return experts


class _Pruning:
    """All methods side by side, each with its own layouts."""

    def __init__(self, model: GrmoeForCausalLM, texts: list[Text], step: Steps) -> None:
        self.model, self.texts, self.step = model, texts, step
        self.trained = [self._measure(text, "as trained") for text in texts]
        self.layers = prunable_layers(model, texts[0])
        self.divergence = Divergence(model, texts[0])
        self.experts = self.layers[0].num_experts
        self.methods: dict[tuple[str, int | None], Method] = {
            ("prediction", None): prediction_method(lambda: self._diverged("prediction")),
            **{(name, None): method for name, method in methods().items()},
            ("certificate drop", None): everywhere(certificate_drop),
            ("fisher drop", None): fisher_method(fisher_information(model, texts[0])),
            **{(kind, draw): random_method(kind, draw) for kind in RANDOM for draw in range(DRAWS)},
        }
        start: list[Layout] = [all_experts(self.experts)] * len(self.layers)
        self.layouts = dict.fromkeys(self.methods, start)

    def remove_one(self) -> list[Outcome]:
        """One expert fewer per layer, by every method."""
        self.experts -= 1
        reached = []
        for key, method in self.methods.items():
            name, draw = key
            self.layouts[key] = method(self.layers, self.layouts[key])
            install(self.layers, self.layouts[key])
            reached.append(
                Outcome(
                    method=name,
                    draw=draw,
                    experts=self.experts,
                    layouts=tuple(self.layouts[key]),
                    texts=(self._pruned_result(0, name),),
                    divergence=self._diverged(name) if draw is None else None,
                )
            )
        return reached

    def check(self, outcome: Outcome) -> Outcome:
        """The outcome, measured on the other texts too."""
        install(self.layers, outcome.layouts)
        others = (self._pruned_result(i, "check") for i in range(1, len(self.texts)))
        return replace(outcome, texts=(*outcome.texts, *others))

    def _pruned_result(self, text: int, stage: str) -> PrunedResult:
        measured = self._measure(self.texts[text], stage)
        return PrunedResult(
            loss=measured.loss,
            perplexity=measured.perplexity,
            experts_per_token=measured.experts_per_token,
            increase=increase(measured, self.trained[text]),
            domains=increase_by_domain(measured, self.trained[text]),
        )

    def _measure(self, text: Text, stage: str) -> Measurement:
        measured = measure(self.model, text)
        self.step(stage)
        return measured

    def _diverged(self, stage: str) -> float:
        value = self.divergence()
        self.step(stage)
        return value


def _best(plan: Plan, reached: list[Outcome]) -> Outcome | None:
    """The smallest divergence that the plan allows. Random methods are only a baseline.

    Not the lowest loss: that is partly luck, and the bound would then be compared with a lucky number.
    """
    allowed = [o for o in reached if o.draw is None]
    if plan.experts is None:
        first = ((o, o.texts[0]) for o in allowed)
        allowed = [o for o, text in first if within(plan.max_increase, text.increase, text.domains)]
    return min(allowed, key=lambda o: o.divergence or 0.0, default=None)


def _trained_result(text: Text, measured: Measurement) -> TextResult:
    return TextResult(
        text=text.name,
        tokens=text.tokens,
        loss=measured.loss,
        perplexity=measured.perplexity,
        experts_per_token=measured.experts_per_token,
    )


def _overlaps(layer: PrunableLayer) -> Overlaps:
    similar_NN = similarity(layer.router)
    pairs = similar_NN[torch.triu(torch.ones_like(similar_NN, dtype=torch.bool), 1)]
    return Overlaps(layer.block, float(pairs.min()), float(pairs.max()))


def _random_overlap(config: GrmoeConfig) -> float | None:
    if config.router != "grassmann":
        return None
    assert config.router_rank is not None
    return geometry.random_overlap(config.hidden_size, config.router_rank) / config.router_rank


def _expected(config: GrmoeConfig, goal: int, checks: int) -> int:
    """At most how many measurements `run` makes."""
    chosen = len(methods()) + 3  # and by prediction, certificate and Fisher information
    each = chosen + len(RANDOM) * DRAWS
    sizes = range(goal + 1, config.num_experts + 1)
    tried = sum(min(MAX_DROPS, n) + min(MAX_MERGES, n * (n - 1) // 2) for n in sizes)
    return 1 + checks * (1 + each) + len(sizes) * (each + chosen) + len(config.moe_layers) * tried
