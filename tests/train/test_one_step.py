"""The trainer's arithmetic: whole steps against hand-written ones, in fp64.

`Reference` uses the model as a function from tokens to logits and router logits. All else is written out here in plain
torch and shares no code with the trainer: the loss, its gradients' clipping, both optimisers, all schedules, the prior.

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
from grmoe.runs.config import TrainConfig
from grmoe.train.setup import Trainer, build_trainer
from grmoe.train.step import resolve, train_step

Settings = Callable[..., TrainConfig]

STEPS, FIRST, COUNT = 12, 3, 2  # the steps 3 and 4 of twelve
LR, LOAD_LOSS, Z_LOSS = 2e-3, 0.3, 0.05
# Large eps and a small bound on the gradient, because Adam is otherwise almost blind to the gradient's scale.
OPTIM = {
    "lr": LR, "warmup": 8, "floor": 0.2, "kappa_warmup": 2, "kappa_floor": 0.5, "frames_warmup": 5, "frames_floor": 0.0,
    "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.3, "clip": 0.2,
}  # fmt: skip
ROUTERS: dict[str, dict[str, Any]] = {
    "grassmann": {"router": "grassmann", "router_kappa": 2.0},
    "softmax": {
        "router": "softmax",
        "router_options": {"load_loss": LOAD_LOSS, "z_loss": Z_LOSS, "balance": True},
        "router_aux_loss_coef": 0.7,
    },
}


def make_trainer(settings: Settings, router: str) -> Trainer:
    """A trainer in fp64, with two MoE layers of different α, priors that are not zero, and two micro-batches."""
    config = settings(
        steps=STEPS,
        seed=5,
        model={"num_hidden_layers": 4, "alpha": [0.8, 1.7], **ROUTERS[router]},
        data={"micro_batch_size": 4},
        optim=OPTIM,
        routing={"overlap_weight": 0.3, "overlap_rho": 0.4, "overlap_pairs": "all", "prior_rate": 0.2},
        alpha={"schedule": "anneal", "low": 0.3},
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


class Reference:
    """`COUNT` steps by hand. The attributes are what a mistake in the trainer would change."""

    beta = 0.3
    rho_unit = "random overlap"
    kappa_factor = 5.0
    frames_factor = 1.0
    anneals = True
    prior_rate = 0.2
    decays_vectors = False
    clip = 0.2
    micro_batches = 2  # the mean of a micro-batch's loss counts 1/2
    coefficient = 0.7
    schedules = True

    def __init__(self, model: GrmoeForCausalLM, router: str) -> None:
        self.model, self.router = copy.deepcopy(model), router
        self.params = dict(self.model.named_parameters())
        self.m = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.v_frames = {n: p.new_zeros(p.shape[0]) for n, p in self.params.items() if n.endswith(".frames")}
        self.count = 0

    def buffers(self, name: str) -> list[Tensor]:
        return [t for n, t in self.model.named_buffers() if n.endswith(name)]

    # -- the loss ------------------------------------------------------------------------------------------

    def router_losses(self, logits_TN: Tensor) -> Tensor:
        """Load balancing N·Σ_e f_e P_e over the chosen two, and the z-loss."""
        if self.router == "grassmann":
            return logits_TN.new_zeros(())
        N, probs_TN = logits_TN.shape[-1], logits_TN.softmax(-1)
        share_N = one_hot(probs_TN.topk(2).indices, N).sum(1).double().mean(0) / 2
        balance = N * (share_N * probs_TN.mean(0)).sum()
        return LOAD_LOSS * balance + Z_LOSS * logits_TN.logsumexp(-1).square().mean()

    def overlap(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, U_NDK in self.params.items():
            if not name.endswith(".frames"):
                continue
            N, D, K = U_NDK.shape
            hinge = 0.4 * (K * K / D if self.rho_unit == "random overlap" else K)
            for e in range(N):
                for f in range(N):
                    if e != f:
                        total = total + (U_NDK[e].T @ U_NDK[f]).square().sum().sub(hinge).clamp(min=0)
        return total

    def step(self, step: int, batch_BS: Tensor) -> dict[str, float]:
        done = step / (STEPS - 1)
        for own, alpha in zip((0.8, 1.7), self.buffers("alpha_value"), strict=True):
            alpha.fill_(0.3 ** (1 - done) * own**done if self.anneals else own)

        cross_entropies, router_losses, chosen = [], [], []
        for rows_BS in batch_BS.split(4):
            out = self.model(input_ids=rows_BS[:, :-1], output_router_logits=True)
            cross_entropies.append(cross_entropy(out.logits.flatten(0, 1), rows_BS[:, 1:].flatten()))
            router_losses.append(sum(self.router_losses(logits) for logits in out.router_logits))
            chosen.append([one_hot(logits.topk(2).indices, 4).sum(1) for logits in out.router_logits])
        language = torch.stack(cross_entropies).sum() / self.micro_batches
        routing = self.coefficient * torch.stack(router_losses).sum() / self.micro_batches
        overlap = self.overlap()
        loss = language + routing + self.beta * overlap
        used = {name: p for name, p in self.params.items() if p.requires_grad}
        grads = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        self.update(step, {name: g * min(1.0, self.clip / (norm + 1e-6)) for name, g in grads.items()})
        self.update_priors(step, [torch.cat(layer) for layer in zip(*chosen, strict=True)])
        numbers = {"loss": language, "router_loss": routing, "overlap": overlap}
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
                lr = self.frames_factor * 0.003 * math.sqrt(p.shape[-1]) * frames
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
        """b ← b + η(1 − N·load), centred; load is an expert's share of the chosen pairs."""
        rate = self.prior_rate * (cosine(step, 8, 0.2) if self.schedules else 1.0)
        for log_prior, chosen_TN in zip(self.buffers("log_prior"), chosen, strict=True):
            load_N = chosen_TN.double().mean(0) / 2
            log_prior.add_(rate * (1 - 4 * load_N))
            log_prior.sub_(log_prior.mean())


def trained(settings: Settings, router: str) -> tuple[Trainer, GrmoeForCausalLM, list[Tensor], list[Any]]:
    """(the trainer after its steps, the model before them, the batches, the results)."""
    trainer = make_trainer(settings, router)
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
@pytest.mark.parametrize("steps", [1, 2])
def test_steps_equal_those_by_hand(settings: Settings, router: str, steps: int) -> None:
    trainer = make_trainer(settings, router)
    reference = Reference(trainer.model, router)
    batches = trainer.data.batches(trainer.rows, trainer.length, 5, 0, 1, start_step=FIRST)
    for step in range(FIRST, FIRST + steps):
        batch = next(batches)
        result = resolve(trainer, train_step(trainer, step, batch), step)
        expected = reference.step(step, batch)
        assert vars(result) == pytest.approx(expected, rel=1e-6)
    assert largest_difference(trainer, reference) < 1e-10


MISTAKES: dict[str, dict[str, Any]] = {
    "no overlap penalty": {"beta": 0.0},
    "absolute hinge": {"rho_unit": "k"},
    "κ at the rate of the weights": {"kappa_factor": 1.0},
    "frames ten times as fast": {"frames_factor": 10.0},
    "α does not follow its schedule": {"anneals": False},
    "the prior does not move": {"prior_rate": 0.0},
    "the prior moves the wrong way": {"prior_rate": -0.2},
    "weight decay on norms": {"decays_vectors": True},
    "no clipping": {"clip": math.inf},
    "micro-batches are summed": {"micro_batches": 1},
    "constant learning rates": {"schedules": False},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_would_be_noticed(settings: Settings, mistake: str) -> None:
    trainer, before, batches, _ = trained(settings, "grassmann")
    reference = Reference(before, "grassmann")
    for name, value in MISTAKES[mistake].items():
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
