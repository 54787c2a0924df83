"""Hash routing (Roller et al. 2021): a fixed assignment that ignores content. A learned router must beat it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from grmoe import checks
from grmoe.routing.base import Router
from grmoe.routing.elastic import mix
from grmoe.routing.selection import TopK

_WORD = 0xFFFFFFFF
_BITS = 16
# Of earlier models: 0x9E3779B97F4A7C15 as a signed 64-bit integer, Fibonacci hashing.
_EARLIER = -7046029254386353131


class HashRouter(Router):
    """Expert = hash(token id + hash(seed)) mod N. Nothing is learned, and α has nothing to scale.

    Give each layer a seed of its own, as the language model does. Without token ids the id is the sign pattern of 16
    fixed random projections of the token, so that equal inputs go to the same expert.

    Models of earlier versions keep their hash, which groups neighbouring ids. Their projections tell them apart.
    """

    reads_prior: ClassVar[bool] = False
    own_choice: ClassVar[bool] = True
    projection_DB: Tensor

    def __init__(self, dim: int, num_experts: int, *, seed: int = 0, **router: Any) -> None:
        super().__init__(dim, num_experts, selection=TopK(1), **router)
        self.seed = checks.positive_int("seed", seed, at_least=0)
        self.earlier = False
        # The offset keeps seed 0 apart: its hash is 0.
        self._salt = int(mix(torch.tensor((self.seed + 0x9E3779B9) & _WORD, device="cpu")))
        self.register_buffer("projection_DB", self._projection())

    def _projection(self, earlier: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed if earlier else self._salt)
        return torch.randn(self.dim, _BITS, generator=generator, dtype=torch.float32, device="cpu")

    def check_seed(self) -> None:
        """Raise if projections loaded from a checkpoint belong to another seed, because ids would hash differently."""
        if self.projection_DB.is_meta:
            return
        loaded_DB = self.projection_DB.float().cpu()
        self.earlier = torch.equal(loaded_DB, self._projection(earlier=True))
        if not self.earlier and not torch.equal(loaded_DB, self._projection()):
            raise ValueError(
                f"seed must be the one the checkpoint was saved with, got {self.seed}. A language model saved when all "
                "layers shared one seed loads with router_options={'seed': [0, 0, …]}, one per MoE layer"
            )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.check_seed()

    def gate(self, x: Tensor, token_ids: Tensor | None) -> Tensor:
        if token_ids is None:
            powers = 2 ** torch.arange(_BITS, device=x.device)
            token_ids = ((x @ self.projection_DB.to(x.dtype) > 0) * powers).sum(-1)
        ids = token_ids.long()
        if self.earlier:
            expert = (((ids + 1 + self.seed) * _EARLIER >> 29) & 0x7FFFFFFF) % self.num_experts
        else:
            expert = mix((ids + self._salt) & _WORD) % self.num_experts
        chosen = expert.unsqueeze(-1) == torch.arange(self.num_experts, device=x.device)
        # Low enough for a softmax of exactly 0 and 1, and finite for code that computes with logits.
        # 0·x: a NaN token keeps a NaN gate here, as in every other router.
        return torch.where(chosen, 0.0, -1e4).to(x.dtype) + 0 * x.sum(-1, keepdim=True)
