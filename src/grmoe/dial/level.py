"""Even loads: a bias for the choice of experts, so that every expert receives its share of the tokens at a setting.

Training evens out the load of the trained setting. With fewer experts per token the load is another one. The bias
changes which experts are chosen where gates are close. The weights stay those of the gate. A bias that costs more than
0.3 % of perplexity is not used: then the load stays uneven.

Legend: T tokens, N experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grmoe.dial.meter import Meter, Point
from grmoe.dial.setting import Setting, at_least, mass, rounded_weight
from grmoe.dial.target import Target, meets
from grmoe.model import GrmoeForCausalLM
from grmoe.probe.gates import affine_gates
from grmoe.probe.losses import increase
from grmoe.probe.windows import Text
from grmoe.routing.selection import NO_LIMIT, largest

TOKENS = 32768  # of the text, evenly spread
EVEN = 0.05  # CV of the load of a layer that is even enough
STEPS, RATE, DECAY = 100, 0.2, 0.98
LOOK = 5  # steps between two looks at the load: a look waits for the device
MAX_COST = 0.003  # of perplexity: an even load must be nearly free
MAX_MORE = 0.05  # of the experts per token: what an even load may take where a target bounds the perplexity
_GIVE = (0.0, 0.01, 0.03, 0.1, 0.2)  # changes of τ that are tried for an even load within the target


class Levels:
    """Levels settings by the gates that a model has on a text at its present setting.

    Another setting of one layer moves the inputs of the next a little. What remains uneven is measured afterwards.
    """

    def __init__(self, model: GrmoeForCausalLM, text: Text) -> None:
        every = max(1, text.tokens // TOKENS)
        self.gates = affine_gates(model, text.inputs_WS[::every])
        self.known: dict[Setting, Setting] = {}

    def __call__(self, setting: Setting) -> Setting:
        """The setting with a bias that evens out its load, if that is uneven. A threshold or a dense gate has none."""
        if setting.selection not in ("mass", "at_least", "topk"):
            return setting
        if setting not in self.known:
            self.known[setting] = self._level(setting)
        return self.known[setting]

    def _level(self, setting: Setting) -> Setting:
        plain = replace(setting, level=None)
        layers = len(self.gates)
        biases = plain.bias or [[0.0] * self.gates[0].a_TN.shape[-1]] * layers
        caps = setting.caps or (setting.cap,) * layers
        tau = NO_LIMIT if setting.tau is None else setting.tau
        tau = -tau if setting.selection == "at_least" else tau
        levels = []
        for gate, alpha, bias, cap in zip(self.gates, setting.alphas, biases, caps, strict=True):
            logits_TN = gate.a_TN + alpha * gate.b_TN
            level_N = even_bias(logits_TN + logits_TN.new_tensor(bias), tau, cap)
            levels.append(tuple(round(value, 4) for value in level_N.tolist()))
        if not any(map(any, levels)):
            return plain
        levelled = replace(plain, level=tuple(levels))
        return self._as_many(levelled, plain) if setting.selection == "at_least" else levelled

    def _as_many(self, levelled: Setting, plain: Setting) -> Setting:
        """With the least weight at which as many experts are computed as before: a bias moves what weights the choice
        sees, and so the experts per token."""
        assert plain.tau is not None
        count = int((self._further(plain) >= plain.tau).sum())
        if not count:
            return levelled
        weights = self._further(levelled).topk(count).values
        return replace(levelled, tau=rounded_weight(float(weights[-1])))

    def _further(self, setting: Setting) -> Tensor:
        """Weights of the experts after the first, up to the cap, as the choice sees them: all tokens of all layers."""
        found = []
        for gate, alpha, bias in zip(
            self.gates, setting.alphas, setting.bias or [[0.0]] * len(self.gates), strict=True
        ):
            logits_TN = gate.a_TN + alpha * gate.b_TN + gate.b_TN.new_tensor(bias)
            found.append(torch.softmax(logits_TN, -1).topk(setting.cap, -1).values[:, 1:].flatten())
        return torch.cat(found)

    def measure(self, meter: Meter, point: Point) -> Point:
        """The point with an even load, or as it is where that costs too much."""
        levelled = meter.measure(self(point.setting), point.family)
        return levelled if increase(levelled.measured, point.measured).value <= MAX_COST else point

    def within(self, target: Target, meter: Meter, chosen: Point) -> Point:
        """The chosen point with an even load.

        That changes the experts and the loss a little. Where it breaks the target, τ gives way, as long as that is
        nearly free: 5 % more experts, or 0.3 % more perplexity where the target bounds the experts. Where nothing
        helps, the point stays as it is.
        """
        if chosen is meter.trained:
            return chosen
        setting, sign = chosen.setting, 1 if target.kind == "perplexity" else -1
        # The same experts per token take the same time, so a target of speed asks nothing of τ.
        has_room = setting.selection in ("mass", "at_least") and target.kind != "throughput"
        for change in _GIVE if has_room else _GIVE[:1]:
            near = chosen
            if change and setting.tau is not None:
                # More experts: a larger mass, a smaller weight.
                more = sign if setting.selection == "mass" else -sign
                rule = mass if setting.selection == "mass" else at_least
                tau = min(1.0, setting.tau * (1 + more * change))
                near = meter.measure(rule(setting.alphas, tau, setting.cap, setting.norms), chosen.family)
            levelled = self.measure(meter, near)
            if not _is_cheap(levelled, chosen, target):
                break
            if (levelled is not near or self(near.setting) == near.setting) and (
                target.kind == "throughput" or meets(target, levelled, meter.trained, lambda _: None)
            ):
                return levelled
        return chosen


def _is_cheap(levelled: Point, chosen: Point, target: Target) -> bool:
    """Whether a target that bounds one of experts and perplexity pays little of the other for an even load."""
    if target.kind == "perplexity":
        return levelled.experts_per_token <= (1 + MAX_MORE) * chosen.experts_per_token
    return increase(levelled.measured, chosen.measured).value <= MAX_COST


def even_bias(logits_TN: Tensor, tau: float, cap: int) -> Tensor:
    """b_N with a load of CV at most `EVEN` under "the most probable experts of softmax(ℓ + b), at most cap, up to τ".

    b ← b + η(1 − N·share), the rule of the balanced prior, with a falling η. It starts at zero and stops as soon as the
    load is even enough, because a larger bias costs more.
    """
    N = logits_TN.shape[-1]
    bias_N = best_N = logits_TN.new_zeros(N)
    least = logits_TN.new_full((), torch.inf)
    for step in range(STEPS):
        chosen_TN = largest(torch.softmax(logits_TN + bias_N, -1), tau, cap)
        load_N = chosen_TN.to(logits_TN.dtype).mean(0)
        excess_N = N * load_N / load_N.sum() - 1
        spread = excess_N.square().mean().sqrt()
        best_N, least = torch.where(spread < least, bias_N, best_N), torch.minimum(spread, least)
        if step % LOOK == 0 and bool(least <= EVEN):
            break
        # Once the load is even enough the bias stays, until the next look.
        bias_N = torch.where(least <= EVEN, bias_N, bias_N - RATE * DECAY**step * excess_N)
    return best_N - best_N.mean()
