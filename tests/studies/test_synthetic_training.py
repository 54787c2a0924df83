"""All seeds in one tensor program compute what each seed would compute alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grmoe import geometry
from grmoe.routing import ROUTERS, GrassmannRouter, Router, SoftmaxRouter, build_router
from grmoe.routing.metrics import summarize
from grmoe.studies.intervals import out_of, plus_minus, student, wilson
from grmoe.studies.synthetic.evaluation import (
    best_matching,
    confusion,
    frame_recovery,
    matched_accuracy,
    score,
    sweep_dial,
)
from grmoe.studies.synthetic.methods import METHODS, find_methods
from grmoe.studies.synthetic.task import Setting, Task
from grmoe.studies.synthetic.training import Overlap, StackedRouters, Training, mixture_output, train

SMALL = Setting("small", rho=0.05, sigma2=0.05)


def small_task(seeds: int = 3) -> Task:
    return Task(SMALL, seeds, num_experts=4, dim=32, rank=6, out_dim=16, seed=0)


def make(name: str, seed: int) -> Router:
    if name == "hash":
        return build_router("hash", 32, 4)
    options = {"rank": 6} if name == "grassmann" else {}
    return build_router(name, 32, 4, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize("name", ROUTERS)
def test_stacked_routers_equal_single_ones(name: str) -> None:
    x = torch.randn(3, 40, 32, generator=torch.Generator().manual_seed(1))
    alone = [make(name, s) for s in range(3)]
    stacked = StackedRouters([make(name, s) for s in range(3)])
    together = stacked(x, train=True)
    for s, router in enumerate(alone):
        routing = router(x[s])
        torch.testing.assert_close(together.logits[s], routing.logits)
        torch.testing.assert_close(together.weights[s], routing.weights)
        torch.testing.assert_close(together.aux_loss[s], routing.aux_loss)
        assert summarize(stacked.buffers["counter.sums"][s], 4).tokens == 40
        expected = router.read_metrics().entropy
        assert summarize(stacked.buffers["counter.sums"][s], 4).entropy == pytest.approx(expected, rel=1e-5)


def test_stacked_prior_update_equals_single_ones() -> None:
    x = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(2))
    alone = [make("grassmann", s) for s in range(3)]
    stacked = StackedRouters([make("grassmann", s) for s in range(3)])
    stacked(x, train=True)
    stacked.update_prior(0.3)
    for s, router in enumerate(alone):
        router(x[s])
        router.update_prior(0.3)
        torch.testing.assert_close(stacked.buffers["log_prior"][s], router.log_prior)
    assert float(stacked.buffers["log_prior"].abs().max()) > 0
    assert float(stacked.buffers["counter.prior_sums"].abs().max()) == 0


def test_mixture_output_is_the_weighted_sum() -> None:
    task = small_task(2)
    x, _ = task.tokens(16)
    routing = StackedRouters([make("softmax", s) for s in range(2)])(x, train=False)
    y = mixture_output(x, task.maps_SNDO, routing)
    naive = sum(routing.weights[1, 5, e] * (x[1, 5] @ task.maps_SNDO[1, e]) for e in range(4))
    torch.testing.assert_close(y[1, 5], naive)
    routing = StackedRouters([make("soft_moe", s) for s in range(2)])(x, train=False)
    y = mixture_output(x, task.maps_SNDO, routing)
    assert routing.slots is not None
    naive = torch.zeros(16)
    for e in range(4):
        slot = (routing.slots.to_slots[0, :, e, 0].unsqueeze(-1) * x[0]).sum(0)
        naive = naive + routing.slots.from_slots[0, 3, e, 0] * (slot @ task.maps_SNDO[0, e])
    torch.testing.assert_close(y[0, 3], naive)


def test_seeds_do_not_influence_each_other() -> None:
    """A seed with a poisoned task leaves its neighbours' training untouched."""
    runs = []
    for poison in (False, True):
        task = small_task()
        if poison:
            task.maps_SNDO[2] = float("nan")
        runs.append(train(task, grassmann, Training(steps=3, batch=32)))
    torch.testing.assert_close(runs[0].maps_SNDO[:2], runs[1].maps_SNDO[:2])
    torch.testing.assert_close(runs[0].routers.params["frames"][:2], runs[1].routers.params["frames"][:2])
    assert runs[1].maps_SNDO[2].isnan().any()


def grassmann(seed: int) -> GrassmannRouter:
    return GrassmannRouter(32, 4, 6, generator=torch.Generator().manual_seed(seed))


def test_rates_and_settings_train_together_as_they_do_alone() -> None:
    """Entries of one program, in any order of rates, equal separate trainings."""
    config, settings = Training(steps=4, batch=32), (SMALL, Setting("other", rho=0.3, sigma2=0.2))

    def task(setting: Setting) -> Task:
        return Task(setting, 2, num_experts=4, dim=32, rank=6, out_dim=3, seed=0)

    joined = Task.joined([task(s) for s in settings]).repeated(2)
    rates = [3.0, 1.0, 1.0, 3.0, 0.1, 1.0, 3.0, 0.1]
    together = train(joined, grassmann, config, rates=rates, overlap=Overlap(0.5, relative=True))
    for i, rate in enumerate(rates):
        place = i % 4  # settings × seeds, repeated
        scaled = replace(config, lr=rate * config.lr, frame_lr=rate * config.frame_lr)
        alone = train(task(settings[place // 2]), grassmann, scaled, overlap=Overlap(0.5, relative=True))
        # fp32, and other batches round otherwise.
        close = {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(together.maps_SNDO[i], alone.maps_SNDO[place % 2], **close)
        frames = together.routers.params["frames"][i]
        torch.testing.assert_close(frames, alone.routers.params["frames"][place % 2], **close)
    with pytest.raises(ValueError, match="rates must have one factor per entry, 8, got 1"):
        train(joined, grassmann, config, rates=[1.0])


def test_overlap_term_pushes_frames_apart_only_above_its_hinge() -> None:
    def overlap_after(overlap: Overlap | None) -> float:
        trained = train(small_task(2), grassmann, Training(steps=12, batch=32), overlap=overlap)
        frames = trained.routers.params["frames"].detach()
        i, j = torch.triu_indices(4, 4, offset=1)
        return float(geometry.overlap(frames)[:, i, j].mean())

    without = overlap_after(None)
    assert overlap_after(Overlap(rho=0.99, weight=1.0)) == pytest.approx(without, rel=1e-6)  # never reached
    assert overlap_after(Overlap(rho=0.5, relative=True, weight=1.0)) < 0.8 * without


def test_tokens_are_counted_once() -> None:
    """Load and entropy are those of the held-out tokens, each counted once and routed in groups as in training."""
    task = small_task(2)
    trained = train(task, grassmann, Training(steps=2, batch=32))
    x, label = task.tokens(128, 9)
    scores = score(task, trained, x, label, group=32)
    routing = trained.routers(x, train=False)
    led = torch.stack([torch.bincount(row, minlength=4) for row in routing.probs.argmax(-1)])
    for s, mine in enumerate(scores):
        assert mine.leading_min_load == pytest.approx(float(led[s].min()) / 128)
        entropy = -torch.xlogy(routing.probs[s], routing.probs[s]).sum(-1).mean()
        assert mine.entropy == pytest.approx(float(entropy), rel=1e-5)
        error = mixture_output(x, trained.maps_SNDO, routing)[s] - task.targets(x, label)[s]
        variance = task.targets(x, label)[s].square().mean()
        assert mine.loss == pytest.approx(float(error.square().mean() / variance), rel=1e-4)


def test_grassmann_router_finds_the_classes_and_a_linear_one_cannot() -> None:
    task = small_task(4)
    config = Training(steps=400, batch=128, lr=0.02, frame_lr=0.3)
    x, label = task.tokens(1024, 9)
    found = train(
        task,
        lambda s: GrassmannRouter(32, 4, 6, kappa=1.0, generator=torch.Generator().manual_seed(s)),
        config,
    )
    scores = score(task, found, x, label, group=128)
    assert min(s.share for s in scores) > 0.95
    assert not any(s.leading_collapsed for s in scores)
    recovery = frame_recovery(task, found.routers)
    assert recovery is not None
    overlap = torch.tensor(recovery)
    assert overlap.diagonal().min() > 0.8
    assert (overlap - torch.diag(overlap.diagonal())).max() < 0.3
    # Tokens are symmetric about the origin: even with labels a linear gate stays far below.
    linear = train(
        task,
        lambda s: SoftmaxRouter(32, 4, 1, generator=torch.Generator().manual_seed(s)),
        config,
        supervised=True,
    )
    scores = score(task, linear, x, label, group=128)
    assert max(s.share for s in scores) < 0.6
    assert frame_recovery(task, linear.routers) is None


def test_dial_sweep_is_monotone_inside_its_certificates_and_leaves_alpha_alone() -> None:
    x = torch.randn(3, 200, 32, generator=torch.Generator().manual_seed(4))
    for name in ("grassmann", "softmax"):
        stacked = StackedRouters([make(name, s) for s in range(3)])
        sweep = sweep_dial(stacked, x, [0.25, 1.0, 4.0, 16.0])
        entropy = torch.tensor(sweep.entropy_AS)
        assert (entropy.diff(dim=0) < 0).all()
        mean = entropy.mean(-1)
        assert (torch.tensor(sweep.lower) <= mean + 1e-6).all()
        assert (mean <= torch.tensor(sweep.upper) + 1e-6).all()
        assert (torch.tensor(sweep.paper_lower) <= torch.tensor(sweep.lower) + 1e-6).all()
        assert (sweep.outside, sweep.paper_outside, sweep.tokens) == (0, 0, 4 * 3 * 200)
        assert sweep.falling_seeds() == 3
        part = sweep_dial(stacked, x, [0.25, 1.0, 4.0, 16.0], slice(1, 3))
        assert [row[1:] for row in sweep.entropy_AS] == part.entropy_AS
        rising = replace(part, entropy_AS=[[1.0, 1.0], [0.9, 1.1], [0.5, 0.5], [0.1, 0.1]])
        assert rising.falling_seeds() == 1
        assert torch.equal(stacked.alpha, torch.ones(3))


def test_matching_undoes_any_renaming_of_experts() -> None:
    g = torch.Generator().manual_seed(0)
    label = torch.randint(5, (400,), generator=g)
    rename = torch.randperm(5, generator=g)
    assert matched_accuracy(rename[label], label, 5) == 1.0
    wrong = rename[label].clone()
    wrong[:100] = (wrong[:100] + 1) % 5
    assert matched_accuracy(wrong, label, 5) == pytest.approx(0.75)
    counts = confusion(torch.tensor([0, 0, 2]), torch.tensor([1, 1, 0]), 3)
    assert counts.tolist() == [[0, 2, 0], [0, 0, 0], [1, 0, 0]]
    rows, columns = best_matching(counts)
    assert int(counts[rows, columns].sum()) == 3


def test_intervals_match_known_values() -> None:
    # Wilson at 0 of 50 and 5 of 50, z = 1.96 (R's prop.test without continuity correction).
    assert wilson(0, 50) == pytest.approx((0.0, 0.07135), abs=1e-4)
    assert wilson(5, 50) == pytest.approx((0.04348, 0.21360), abs=1e-4)
    assert wilson(50, 50)[1] == pytest.approx(1.0)
    assert wilson(0, 0) == (0.0, 1.0)
    # t of one degree of freedom at 97.5 % is 12.706; the deviation of (1, 3) over √2 is 1.
    assert student([1.0, 3.0]) == pytest.approx(12.706, rel=1e-4)
    assert student([1.0]) is None
    assert (plus_minus(2.0, 0.25, 2), plus_minus(2.0, None, 1, "+")) == ("2.00 ± 0.25", "+2.0")
    assert out_of(3, 50) == "3/50 (2–16 %)"


def test_methods_are_the_papers_rows_and_ours() -> None:
    with_paper = [m.key for m in METHODS if m.paper]
    # Eight rows of the paper. Softmax is tried with noise too; GrMoE as in the paper, with two hinges, and as ours.
    assert len(with_paper) == 11
    assert {m.router for m in METHODS} == set(ROUTERS) - {"grassmann_soft_moe"}  # beyond the paper
    assert [m.key for m in find_methods(["grmoe", "switch"])] == ["switch", "grmoe"]
    with pytest.raises(ValueError, match=r"method must be one of 'softmax_top1', .*, got 'banana'"):
        find_methods(["banana"])
    literal = find_methods(["grmoe_paper", "grmoe_paper_no_overlap", "grmoe_paper_low_hinge"])
    assert [None if m.overlap is None else m.overlap.rho for m in literal] == [0.3, None, 0.5]
    for method in literal:
        gate = method.builder(32, 4, 6, 64)(3)
        assert isinstance(gate, GrassmannRouter)
        assert (gate.scaling, gate.prior, gate.max_experts()) == ("raw", "paper", 4)
    noisy = find_methods(["softmax_noise"])[0].builder(32, 4, 6, 64)(3)
    assert isinstance(noisy, SoftmaxRouter)
    assert noisy.noise == 1.0
    for method in METHODS:
        assert method.overlap is None or method.router == "grassmann"
        router = method.builder(32, 4, 6, 64)(3)
        assert isinstance(router, ROUTERS[method.router])
        assert router.num_experts == 4
