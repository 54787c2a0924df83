"""The gate from its scores on, by a kernel, against PyTorch in fp64: outputs, selection and both gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grmoe.kernels.choose import _backward_plain, choose_reference
from grmoe.routing import Dense, Mass, Selection, Threshold, TopK
from grmoe.routing.budget import Budget
from grmoe.routing.fused import GateParts, fused_choice

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts(prior: Tensor, posterior: bool = True) -> GateParts:
    return GateParts(lambda x: x, prior, posterior)


@pytest.mark.parametrize("alpha", [1.3, 0.0])
@pytest.mark.parametrize("posterior", [True, False])
@pytest.mark.parametrize(
    "policy", [Dense(), TopK(2), TopK(2, renormalize=False), Mass(0.7, cap=3), Threshold(0.3)], ids=str
)
def test_outputs_and_gradients(policy: Selection, posterior: bool, alpha: float) -> None:
    scores, prior, dial = 2 * draw(3, 7, 5), 0.5 * draw(5, seed=1), torch.tensor(alpha)
    budget = Budget(policy, 5)
    leaves = [t.clone().requires_grad_() for t in (scores, prior)]
    found = fused_choice(leaves[0], parts(leaves[1], posterior), dial, budget)
    wide = [t.double().requires_grad_() for t in (scores, prior)]
    logits, probs, weights = choose_reference(
        wide[0], wide[1], dial.double(), found.selected, posterior, policy.renormalize
    )
    assert torch.equal(found.selected, budget.select(probs, False))
    upstream = [draw(3, 7, 5, seed=s) for s in (2, 3, 4)]
    ours, expected = (found.logits, found.probs, found.weights), (logits, probs, weights)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    sum((u * a).sum() for u, a in zip(upstream, ours, strict=True)).backward()  # type: ignore[union-attr]
    sum((u * b).sum() for u, b in zip(upstream, expected, strict=True)).backward()  # type: ignore[union-attr]
    flat = tuple(u.reshape(-1, 5) for u in upstream)
    options = (posterior, policy.renormalize)
    plain = _backward_plain(flat, scores.reshape(-1, 5), prior, dial, found.selected.reshape(-1, 5), options)
    for a, b, c in zip(leaves, wide, plain, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(c.view(b.shape).double(), b.grad, rtol=1e-5, atol=1e-5)


def test_renormalised_weights_where_a_bias_picks_vanished_gates() -> None:
    """They were 0/0. In fp64 no gate vanishes."""
    scores, prior, one = draw(7, 5), torch.tensor([0.0, 0.3, -130.0, 0.1, -130.7]), torch.tensor(1.0)
    budget = Budget(TopK(2, renormalize=True), 5)
    budget.biased = True
    budget.set_bias([0.0, 0.0, 500.0, 0.0, 500.0])
    leaf, wide = scores.clone().requires_grad_(), scores.double().requires_grad_()
    found = fused_choice(leaf, parts(prior), one, budget)
    assert not found.probs[:, [2, 4]].any()
    *_, weights = choose_reference(wide, prior.double(), one.double(), found.selected, True, True)
    # Logits near 130 are rounded by 8e-6, and weights by as much.
    torch.testing.assert_close(found.weights.double(), weights, rtol=0, atol=2e-5)
    upstream = draw(7, 5, seed=2)
    (found.weights * upstream).sum().backward()
    (weights * upstream).sum().backward()
    assert leaf.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=0, atol=5e-5)


def test_numbers_per_sequence_and_the_weights_own_alpha() -> None:
    scores, prior = 2 * draw(3, 7, 5), 0.5 * draw(5, seed=1)
    alpha = torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1)
    budget = Budget(Mass(0.6), 5)
    budget.set_weight_alpha(1.0)
    budget.tau = torch.tensor([0.3, 0.6, 0.9]).view(3, 1, 1)
    with torch.no_grad():
        found = fused_choice(scores, parts(prior), alpha, budget)
    chosen = budget.select(torch.softmax(alpha * (scores + prior), -1), False)
    assert torch.equal(found.selected, chosen)
    probs = torch.softmax(scores + prior, -1)
    torch.testing.assert_close(found.probs, probs)
    kept = torch.where(chosen, probs, 0.0)
    if budget.policy.renormalize:
        kept = kept / kept.sum(-1, keepdim=True)
    torch.testing.assert_close(found.weights, kept)
