"""On a CUDA device: the same numbers as on the CPU, and nothing waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from waiting import no_sync

from grmoe import GrassmannAdam, GrassmannRouter, bingham, certificates, geometry, overlap_penalty
from grmoe.optim import step_together
from grmoe.routing import ROUTERS, Mass, Threshold, TopK, build_router

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in ROUTERS],
    *[("grassmann", {"selection": s}) for s in (Mass(0.9, cap=4), TopK(2), Threshold(0.1))],
    *[
        ("grassmann", {"prior": "uniform", "linear": True, "concentration": c, "amortizer": a})
        for c in ("scalar", "diagonal")
        for a in (None, "affinity", "input")
    ],
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_routers_agree_with_the_cpu_and_never_wait(name: str, options: dict[str, Any]) -> None:
    if name == "grassmann":
        options = {"rank": 16, **options}
    router = build_router(name, 256, 8, **options).cuda()
    x = torch.randn(4, 128, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    router(x)  # cuBLAS sets itself up on first use
    with no_sync(), torch.autocast("cuda", dtype=torch.bfloat16):
        routing = router(x.clone().requires_grad_())
        loss = (routing.weights * torch.arange(8, device="cuda")).sum() + routing.aux_loss
        if loss.requires_grad:
            loss.backward()
        router.update_prior(0.01)
        router.alpha = 1.7
    twin = build_router(name, 256, 8, **options)
    twin.load_state_dict(router.state_dict())
    expected = twin.double().eval()(x.double().cpu()).probs
    # fp32 logits of size ten carry errors near 1e-6.
    assert (router.eval()(x).probs.double().cpu() - expected).abs().max() < 5e-6


def test_normalisers_never_wait() -> None:
    kappa = torch.tensor([0.4, 4.2, 100.0, 1000.0], device="cuda", dtype=torch.float64, requires_grad=True)
    bingham.log_kummer(48, 768, kappa)
    with no_sync():
        value = bingham.log_kummer(48, 768, kappa)
        value.sum().backward()
        bingham.log_normalizer(kappa.detach(), [1, 2, 3, 10], linear=kappa.detach())
    torch.testing.assert_close(value.cpu(), bingham.log_kummer(48, 768, kappa.cpu()), rtol=1e-12, atol=1e-12)


def test_optimizer_never_waits_and_does_not_drift() -> None:
    params = [torch.nn.Parameter(geometry.haar_frames(768, 48, 8).cuda()) for _ in range(3)]
    optimizer = GrassmannAdam(params)
    generator = torch.Generator("cuda").manual_seed(0)
    worst = 0.0
    for step in range(300):
        for p in params:
            p.grad = torch.randn(p.shape, device="cuda", generator=generator)
        if step > 0:  # the first step checks the frames
            with no_sync():
                optimizer.step()
        else:
            optimizer.step()
        if step % 30 == 29:
            worst = max(worst, *(float(geometry.orthonormality_error(p.detach().double())) for p in params))
    assert worst <= 1e-6


def optimizer_steps(together: bool, graph: bool) -> list[torch.Tensor]:
    """Parameters after ten steps. Each gradient comes from a kernel right before, and its memory is used again."""
    generator = torch.Generator("cuda").manual_seed(0)
    haar = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(4096, 4096, device="cuda")) for _ in range(4)]
    frames = [torch.nn.Parameter(geometry.haar_frames(768, 48, 8, generator=haar).cuda()) for _ in range(3)]
    optimizers = [torch.optim.AdamW(weights, lr=0.01, fused=True, capturable=graph), GrassmannAdam(frames)]
    noise = {p: torch.randn(p.shape, device="cuda", generator=generator) for p in (*weights, *frames)}

    def step() -> None:
        for p, each in noise.items():
            p.grad = each * 2
        if together:
            step_together(optimizers)
        else:
            for optimizer in optimizers:
                optimizer.step()
        for p, each in noise.items():
            p.grad = None
            each.mul_(-0.9).add_(torch.full_like(each, 1e-3))

    step()  # the first step checks the frames
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            step()
        for _ in range(9):
            recorded.replay()
    else:
        with no_sync():
            for _ in range(9):
                step()
    return [p.detach() for p in noise]


def test_optimisers_beside_each_other_give_the_same_bits() -> None:
    expected = optimizer_steps(together=False, graph=False)
    found = optimizer_steps(together=True, graph=False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_optimisers_beside_each_other_in_a_graph() -> None:
    expected = optimizer_steps(together=False, graph=True)
    found = optimizer_steps(together=True, graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compiled_router_takes_a_new_alpha() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    router = GrassmannRouter(256, 8, 16, selection=TopK(2)).cuda()
    compiled = torch.compile(router, fullgraph=True, backend=counter)
    x = torch.randn(512, 256, device="cuda")
    for alpha in (1.0, 2.0, 0.5):
        router.alpha = alpha
        torch.testing.assert_close(compiled(x).probs, router(x).probs, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_certificates_and_penalty_on_the_device() -> None:
    router = GrassmannRouter(128, 6, 8).cuda()
    routing = router(torch.randn(256, 128, device="cuda"))
    entropy = -torch.xlogy(routing.probs, routing.probs).sum(-1)
    bounds = certificates.entropy_bounds(routing.logits)
    assert (bounds.lower.bound <= entropy + 1e-5).all()
    assert (entropy <= bounds.upper.bound + 1e-5).all()
    spread = routing.logits.amax(-1) - routing.logits.amin(-1)
    assert (spread <= router.logit_range().bound + 1e-4).all()
    with no_sync():
        penalty = overlap_penalty(router.frames, 0.1, relative=True)
    expected = overlap_penalty(router.frames.detach().double().cpu(), 0.1, relative=True)
    assert float(penalty.detach()) == pytest.approx(float(expected), rel=1e-4)
