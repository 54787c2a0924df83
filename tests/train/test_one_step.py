"""The trainer's arithmetic: whole steps against hand-written ones, in fp64.

`Reference` uses the model as a function from tokens to logits and router logits. All else is written out here in plain
torch and shares no code with the trainer: the loss, its gradients' clipping, both optimisers, all schedules, the prior,
and the random budgets.

Legend: B sequences, S tokens of a sequence, T tokens, V vocabulary, N experts, D width, K rank of a subspace.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from grmoe.model import GrmoeForCausalLM
from grmoe.parallel.world import ParallelConfig, start
from grmoe.routing import routers
from grmoe.runs.config import TrainConfig
from grmoe.train.setup import Trainer, build_trainer
from grmoe.train.step import resolve, train_step

Settings = Callable[..., TrainConfig]

STEPS, FIRST, COUNT = 12, 3, 2  # the steps 3 and 4 of twelve
NO_LIMIT = 2.0  # more than all experts hold together
LR, LOAD_LOSS, Z_LOSS = 2e-3, 0.3, 0.05
# Large eps and a small bound on the gradient, because Adam is otherwise almost blind to the gradient's scale.
OPTIM = {
    "lr": LR, "warmup": 8, "floor": 0.2, "kappa_warmup": 2, "kappa_floor": 0.5, "frames_warmup": 5, "frames_floor": 0.0,
    "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.3, "clip": 0.2,
}  # fmt: skip
ROUTERS: dict[str, dict[str, Any]] = {
    "grassmann": {"router": "grassmann", "router_kappa": 2.0, "router_aux_loss_coef": 0.7},
    "softmax": {
        "router": "softmax",
        "router_options": {"load_loss": LOAD_LOSS, "z_loss": Z_LOSS, "balance": True},
        "router_aux_loss_coef": 0.7,
    },
}

ROUTING = {
    "overlap_weight": 0.3, "overlap_rho": 0.4, "overlap_pairs": "all", "prior_rate": 0.2, "entropy_weight": 0.4,
    "entropy_target": 0.6,
}  # fmt: skip
ELASTIC: dict[str, dict[str, Any]] = {
    "off": {"unit": "off"},
    "on": {},
    "distilled": {"distill": 600.0},  # new experts change predictions by very little
}


def make_trainer(
    settings: Settings, router: str, elastic: str = "off", routing: dict[str, Any] | None = None
) -> Trainer:
    """A trainer in fp64, with two MoE layers of different α, priors that are not zero, and two micro-batches."""
    config = settings(
        steps=STEPS,
        seed=5,
        model={"num_hidden_layers": 4, "alpha": [0.8, 1.7], **ROUTERS[router]},
        data={"micro_batch_size": 4},
        optim=OPTIM,
        routing=ROUTING | (routing or {}),
        alpha={"schedule": "anneal", "low": 0.3},
        elastic=ELASTIC[elastic],
    )
    trainer = build_trainer(config, start(ParallelConfig(), "cpu"))
    trainer.model.double()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in trainer.model.named_buffers():
            if name.endswith("log_prior"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=g, dtype=torch.float64))
        for p in trainer.model.parameters():
            if p.ndim == 1:  # norms and log κ start at a constant
                p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return trainer


def cosine(step: int, warmup: int, floor: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    t = (step - warmup) / (STEPS - 1 - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * t)) / 2


def mixed(word: int) -> int:
    """The hash "lowbias32"."""
    word = ((word ^ word >> 16) * 0x7FEB352D) % 2**32
    word = ((word ^ word >> 15) * 0x846CA68B) % 2**32
    return word ^ word >> 16


def uniform(key: int, layer: int, index: int) -> float:
    return (mixed((index + mixed((layer + mixed(key)) % 2**32)) % 2**32) >> 8) / 2**24


class Reference:
    """`COUNT` steps by hand. The attributes are what a mistake in the trainer would change."""

    beta = 0.3
    rho = 0.4
    rho_unit = "random overlap"
    sampled_pairs: int | None = None
    is_unbiased = True
    kappa_factor = 1.0
    frames_factor = 1.0
    anneals = True
    prior_rate = 0.2
    entropy_weight = 0.4
    entropy_target = 0.6 * math.log(4)
    leading_weight = 0.01  # only with random budgets
    leading_step = "before"
    decays_vectors = False
    clip = 0.2
    micro_batches = 2  # the mean of a micro-batch's loss counts 1/2
    coefficient = 0.7
    schedules = True
    seed = 5
    micro_batch_rows = 4  # a micro-batch's tokens are numbered after those before it
    layers_differ = True
    prior_counts = "candidates"
    distill = 600.0
    teacher_learns = False
    full_share = 0.5  # of the two passes

    def __init__(self, model: GrmoeForCausalLM, router: str, elastic: str = "off") -> None:
        self.model, self.router, self.elastic = copy.deepcopy(model), router, elastic
        for found in routers(self.model):
            found.budget.elastic, found.budget.balances = None, "computed"  # both are written out here
            found.use_leading(0.0)  # and so is this
        self.params = dict(self.model.named_parameters())
        self.m = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.v_frames = {n: p.new_zeros(p.shape[0]) for n, p in self.params.items() if n.endswith(".frames")}
        self.count = 0
        # Per layer, of the step before. The trainer's first step has not been.
        self.leading_N = [torch.full((4,), 0.25, dtype=torch.float64) for _ in routers(self.model)]

    def buffers(self, name: str) -> list[Tensor]:
        return [t for n, t in self.model.named_buffers() if n.endswith(name)]

    # -- the loss ------------------------------------------------------------------------------------------

    def router_losses(self, logits_TN: Tensor, chosen_TN: Tensor, leading_N: Tensor) -> Tensor:
        """Load balancing N·Σ_e f_e P_e over the experts of the full budget, z-loss, entropy term and leading term."""
        N, probs_TN = logits_TN.shape[-1], logits_TN.softmax(-1)
        H_T = -(probs_TN * probs_TN.log()).sum(-1)
        entropy = self.entropy_weight * (H_T - self.entropy_target).square().mean()
        if self.elastic != "off":
            if self.leading_step == "this":
                leading_N = one_hot(probs_TN.argmax(-1), N).double().mean(0)
            entropy = entropy + self.leading_weight * N * (probs_TN @ leading_N).mean()
        if self.router == "grassmann":
            return entropy
        share_N = chosen_TN.sum(0) / chosen_TN.sum()
        balance = N * (share_N * probs_TN.mean(0)).sum()
        return LOAD_LOSS * balance + Z_LOSS * logits_TN.logsumexp(-1).square().mean() + entropy

    def overlap(self, step: int) -> Tensor:
        """Σ_{e≠f} max(0, ‖U_eᵀU_f‖² − hinge), or the pairs of a sample, each for #pairs/M pairs."""
        pairs = [(e, f) for e in range(4) for f in range(e + 1, 4)]
        weight = 2.0  # a pair of experts is two ordered pairs
        if self.sampled_pairs is not None:
            g = torch.Generator().manual_seed((self.seed * 10**9 + step) * 10**5)
            kept = torch.randperm(len(pairs), generator=g)[: self.sampled_pairs].tolist()
            weight *= len(pairs) / len(kept) if self.is_unbiased else 1.0
            pairs = [pairs[i] for i in kept]
        total = torch.zeros((), dtype=torch.float64)
        for name, U_NDK in self.params.items():
            if not name.endswith(".frames"):
                continue
            _, D, K = U_NDK.shape
            hinge = self.rho * (K * K / D if self.rho_unit == "random overlap" else K)
            for e, f in pairs:
                total = total + weight * (U_NDK[e].T @ U_NDK[f]).square().sum().sub(hinge).clamp(min=0)
        return total

    def limits(self, step: int, first_row: int, S: int) -> list[Any]:
        """For each layer and token: the mass from which on no expert is added."""
        if self.elastic == "off":
            return [NO_LIMIT, NO_LIMIT]
        word = 0
        for value in (self.seed, 0, step):
            word = mixed((word + value) % 2**32)
        key = mixed(word ^ 1) >> 1
        tokens = range(first_row * S, (first_row + 4) * S)
        layers = (1, 2) if self.layers_differ else (1, 1)
        drawn = [[uniform(key, layer, token) for token in tokens] for layer in layers]
        return [torch.tensor(u, dtype=torch.float64).view(4, S, 1) for u in drawn]

    def forward(self, rows_BS: Tensor, limits: list[Any]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """(logits, cross-entropy, ΣR, chosen experts of each layer: computed and candidates)."""
        for router, limit in zip(routers(self.model), limits, strict=True):
            router.budget.tau = torch.as_tensor(limit)
        out = self.model(input_ids=rows_BS[:, :-1], output_router_logits=True)
        logits_TV = out.logits.flatten(0, 1)
        chosen: dict[str, Any] = {"computed": [], "candidates": [], "leading": []}
        for logits_TN, limit in zip(out.router_logits, limits, strict=True):
            probs_TN = logits_TN.detach().softmax(-1)
            first_TN, two_TN = (one_hot(probs_TN.topk(k).indices, 4).sum(1).double() for k in (1, 2))
            enough_T1 = probs_TN.max(-1, keepdim=True).values >= torch.as_tensor(limit).reshape(-1, 1)
            chosen["computed"].append(torch.where(enough_T1, first_TN, two_TN))
            chosen["candidates"].append(two_TN)
            chosen["leading"].append(first_TN)
        layers = zip(out.router_logits, chosen["candidates"], self.leading_N, strict=True)
        R = [self.router_losses(*layer) for layer in layers]
        CE = cross_entropy(logits_TV, rows_BS[:, 1:].flatten())
        return logits_TV, CE, torch.stack(R).sum(), chosen

    def step(self, step: int, batch_BS: Tensor) -> dict[str, float]:
        done = step / (STEPS - 1)
        for own, alpha in zip((0.8, 1.7), self.buffers("alpha_value"), strict=True):
            alpha.fill_(0.3 ** (1 - done) * own**done if self.anneals else own)

        M, cross_entropies, router_losses, divergences = [], [], [], []
        counted, leads = [], []
        for number, rows_BS in enumerate(batch_BS.split(4)):
            limits = self.limits(step, number * self.micro_batch_rows, rows_BS.shape[1] - 1)
            logits_TV, CE, R, chosen = self.forward(rows_BS, limits)
            M.append(CE + self.coefficient * R)
            cross_entropies.append(CE)
            router_losses.append(self.coefficient * R)
            if self.elastic == "distilled":
                full_TV, full_CE, full_R, _ = self.forward(rows_BS, [NO_LIMIT, NO_LIMIT])
                p_TV, q_TV = full_TV.softmax(-1), logits_TV.softmax(-1)
                p_TV = p_TV if self.teacher_learns else p_TV.detach()
                divergences.append((p_TV * (p_TV / q_TV).log()).sum(-1).mean())
                M[-1] = (1 - self.full_share) * M[-1] + self.full_share * (
                    full_CE + self.coefficient * full_R
                )
            counted.append(chosen[self.prior_counts])
            leads.append(chosen["leading"])
        language, routing = (
            torch.stack(parts).sum() / self.micro_batches for parts in (cross_entropies, router_losses)
        )
        divergence = torch.stack(divergences or [torch.zeros(())]).sum() / self.micro_batches
        overlap = self.overlap(step)
        loss = torch.stack(M).sum() / self.micro_batches + self.distill * divergence + self.beta * overlap
        used = {name: p for name, p in self.params.items() if p.requires_grad}
        grads = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        self.update(step, {name: g * min(1.0, self.clip / (norm + 1e-6)) for name, g in grads.items()})
        self.update_priors(step, [torch.cat(layer) for layer in zip(*counted, strict=True)])
        self.leading_N = [torch.cat(layer).mean(0) for layer in zip(*leads, strict=True)]
        numbers = {"loss": language, "router_loss": routing, "divergence": divergence, "overlap": overlap}
        return {name: float(value.detach()) for name, value in numbers.items()} | {"norm": norm}

    # -- the updates ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, step: int, grads: dict[str, Tensor]) -> None:
        self.count += 1
        weights, kappa, frames = (
            cosine(step, *s) if self.schedules else 1.0 for s in ((8, 0.2), (2, 0.5), (5, 0.0))
        )
        for name, g in grads.items():
            p = self.params[name]
            if name.endswith(".frames"):
                lr = self.frames_factor * LR * math.sqrt(p.shape[-2] * p.shape[-1]) * frames
                for e in range(p.shape[0]):
                    self.move_frame(name, e, g[e], lr)
            elif name.endswith(".log_kappa"):
                self.adamw(name, g, self.kappa_factor * LR * kappa, 0.0)
            else:
                self.adamw(name, g, LR * weights, 0.3 if p.ndim > 1 or self.decays_vectors else 0.0)

    def adamw(self, name: str, g: Tensor, lr: float, decay: float) -> None:
        p, (b1, b2), t = self.params[name], (0.8, 0.9), self.count
        self.m[name] = b1 * self.m[name] + (1 - b1) * g
        self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
        p.mul_(1 - lr * decay)
        p.sub_(lr * self.m[name] / (1 - b1**t) / ((self.v[name] / (1 - b2**t)).sqrt() + 1e-3))

    def move_frame(self, name: str, e: int, G: Tensor, lr: float) -> None:
        """Riemannian Adam on the Grassmann manifold, with the polar factor by SVD."""
        U, (b1, b2), t = self.params[name][e], (0.9, 0.999), self.count
        H = G - U @ (U.T @ G)
        m = self.m[name][e]
        m = b1 * (m - U @ (U.T @ m)) + (1 - b1) * H
        v = b2 * self.v_frames[name][e] + (1 - b2) * H.square().sum()
        self.m[name][e], self.v_frames[name][e] = m, v
        xi = lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)
        left, _, right = torch.linalg.svd(U - xi, full_matrices=False)
        U.copy_(left @ right)

    @torch.no_grad()
    def update_priors(self, step: int, chosen: list[Tensor]) -> None:
        """b ← b + η(1 − N·load), centred; a token divides one unit of load among its experts."""
        rate = self.prior_rate * (cosine(step, 8, 0.2) if self.schedules else 1.0)
        for log_prior, chosen_TN in zip(self.buffers("log_prior"), chosen, strict=True):
            load_N = (chosen_TN / chosen_TN.sum(-1, keepdim=True)).mean(0)
            log_prior.add_(rate * (1 - 4 * load_N))
            log_prior.sub_(log_prior.mean())


def trained(
    settings: Settings, router: str, elastic: str = "off"
) -> tuple[Trainer, GrmoeForCausalLM, list[Tensor], list[Any]]:
    """(the trainer after its steps, the model before them, the batches, the results)."""
    trainer = make_trainer(settings, router, elastic)
    before = copy.deepcopy(trainer.model)
    batches = trainer.data.batches(trainer.rows, trainer.length, 5, 0, 1, start_step=FIRST)
    seen, results = [], []
    for step in range(FIRST, FIRST + COUNT):
        seen.append(next(batches))
        results.append(resolve(trainer, train_step(trainer, step, seen[-1]), step))
    return trainer, before, seen, results


def largest_difference(trainer: Trainer, reference: Reference) -> float:
    """Over all weights and priors."""
    ours = dict(trainer.model.named_parameters()) | dict(trainer.model.named_buffers())
    theirs = reference.params | dict(reference.model.named_buffers())
    names = [*reference.params, *(n for n in theirs if n.endswith("log_prior"))]
    return max(float((ours[n] - theirs[n]).detach().abs().max()) for n in names)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("steps", "elastic"), [(1, "off"), (2, "off"), (2, "on"), (2, "distilled")])
def test_steps_equal_those_by_hand(settings: Settings, router: str, steps: int, elastic: str) -> None:
    trainer = make_trainer(settings, router, elastic)
    reference = Reference(trainer.model, router, elastic)
    batches = trainer.data.batches(trainer.rows, trainer.length, 5, 0, 1, start_step=FIRST)
    for step in range(FIRST, FIRST + steps):
        batch = next(batches)
        result = resolve(trainer, train_step(trainer, step, batch), step)
        expected = reference.step(step, batch)
        assert vars(result) == pytest.approx(expected, rel=1e-6)
    assert largest_difference(trainer, reference) < 1e-9
    shares = [found.leading_share for found in routers(trainer.model)]
    if elastic == "off":
        assert shares == [None, None]
    else:
        torch.testing.assert_close(shares, reference.leading_N)


@pytest.mark.parametrize("mistake", [None, "random unit", "all pairs", "not scaled up"])
def test_the_papers_penalty(settings: Settings, mistake: str | None) -> None:
    """ρ₀ in the paper's unit, ‖UᵀU'‖² ≤ ρ₀k, over M random pairs per step."""
    routing = {"overlap_rho": 0.25, "overlap_unit": "absolute", "overlap_pairs": 4}
    trainer = make_trainer(settings, "grassmann", routing=routing)
    reference = Reference(trainer.model, "grassmann")
    reference.rho, reference.rho_unit, reference.sampled_pairs = 0.25, "k", 4
    if mistake == "random unit":
        reference.rho_unit = "random overlap"
    if mistake == "all pairs":
        reference.sampled_pairs = None
    reference.is_unbiased = mistake != "not scaled up"
    batches = trainer.data.batches(trainer.rows, trainer.length, 5, 0, 1, start_step=FIRST)
    batch = next(batches)
    result = resolve(trainer, train_step(trainer, FIRST, batch), FIRST)
    expected = reference.step(FIRST, batch)
    assert result.overlap > 0.1
    if mistake is None:
        assert vars(result) == pytest.approx(expected, rel=1e-6)
    assert (largest_difference(trainer, reference) < 1e-9) == (mistake is None)


MISTAKES: dict[str, dict[str, Any]] = {
    "no overlap penalty": {"beta": 0.0},
    "absolute hinge": {"rho_unit": "k"},
    "κ at five times the rate of the weights": {"kappa_factor": 5.0},
    "frames ten times as fast": {"frames_factor": 10.0},
    "α does not follow its schedule": {"anneals": False},
    "the prior does not move": {"prior_rate": 0.0},
    "the prior moves the wrong way": {"prior_rate": -0.2},
    "weight decay on norms": {"decays_vectors": True},
    "no entropy term": {"entropy_weight": 0.0},
    "the entropy's target in nats": {"entropy_target": 0.6},
    "no clipping": {"clip": math.inf},
    "micro-batches are summed": {"micro_batches": 1},
    "constant learning rates": {"schedules": False},
}


ELASTIC_MISTAKES: dict[str, dict[str, Any]] = {
    "budgets of another seed": {"seed": 6},
    "micro-batches draw the same budgets": {"micro_batch_rows": 0},
    "layers draw the same budgets": {"layers_differ": False},
    "the prior counts what was computed": {"prior_counts": "computed"},
    "no leading term": {"leading_weight": 0.0},
    "a leading term from this step's leads": {"leading_step": "this"},
    "no distillation": {"distill": 0.0},
    "the full budget learns from the drawn one": {"teacher_learns": True},
    "the full budget is not trained": {"full_share": 0.0},
}


@pytest.mark.parametrize("mistake", [*MISTAKES, *ELASTIC_MISTAKES])
def test_every_mistake_would_be_noticed(settings: Settings, mistake: str) -> None:
    elastic = "distilled" if mistake in ELASTIC_MISTAKES else "off"
    trainer, before, batches, _ = trained(settings, "grassmann", elastic)
    reference = Reference(before, "grassmann", elastic)
    for name, value in {**MISTAKES, **ELASTIC_MISTAKES}[mistake].items():
        assert getattr(Reference, name) != value
        setattr(reference, name, value)
    for step, batch in enumerate(batches, FIRST):
        reference.step(step, batch)
    assert largest_difference(trainer, reference) > 1e-6


def test_a_wrong_router_coefficient_would_be_noticed(settings: Settings) -> None:
    trainer, before, batches, _ = trained(settings, "softmax")
    reference = Reference(before, "softmax")
    reference.coefficient = 1.0
    for step, batch in enumerate(batches, FIRST):
        reference.step(step, batch)
    assert largest_difference(trainer, reference) > 1e-6
