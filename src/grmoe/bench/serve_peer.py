"""The peer of `grmoe bench serve`: an Olmoe under transformers' continuous batching.

Each number of clients gets a manager of its own, made for that load and started before the timing. Otherwise
transformers sizes it by the first call and keeps it: after one client it would compute one answer at a time for all
numbers that follow. In the peer's favour:
- Prompts are random and share no beginning. Blocks are therefore not hashed to be shared.
- Cache and batch hold the whole load, so no answer is put aside and no prompt is held back. A batch has at most the
  tokens that transformers chooses itself.
- A token counts when transformers has written it down, not when it reaches the client.
CUDA graphs: transformers has a decoding step of its own only with flash attention, and it captures its sizes at the
start. With SDPA all steps are of one kind. Then the paddings below keep the sizes few: a decoding step is not padded
beyond the clients, and the cache that it reads has one size. A size that no warm-up met is captured in a timed round.
Rates are medians of rounds for that reason too.
"""

from __future__ import annotations

from typing import Any

from grmoe.bench.serve_load import Answer

MAX_BATCH_TOKENS = 8192  # what transformers takes where memory allows
_WAIT = 1.0  # seconds until we look whether the thread still runs


def settings(clients: int, length: int, tokens: int, graphs: bool) -> Any:
    """The `ContinuousBatchingConfig` for this load."""
    from transformers import ContinuousBatchingConfig

    blocks = (
        length + tokens
    ) // ContinuousBatchingConfig.block_size + 2  # per request; it may take one too many
    return ContinuousBatchingConfig(
        max_requests_per_batch=clients,
        num_blocks=clients * blocks,
        max_batch_tokens=max(clients, min(clients * length, MAX_BATCH_TOKENS)),
        safety_margin=0.0,
        allow_block_sharing=False,
        use_cuda_graph=graphs,
        q_padding_interval_size=clients,
        kv_padding_interval_size=clients * (length + tokens),
    )


class Peer:
    """A model of transformers as a `Server`."""

    def __init__(self, model: Any, graphs: bool) -> None:
        self.model, self.graphs = model, graphs
        self.manager: Any = None

    def prepare(self, clients: int, length: int, tokens: int) -> None:
        from transformers import GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        self.close()
        # No token ends an answer.
        greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        hints = WorkloadHints(max_prompt_length=length, max_generated_length=tokens, num_requests=clients)
        self.manager = self.model.init_continuous_batching(
            generation_config=greedy,
            continuous_batching_config=settings(clients, length, tokens, self.graphs),
            workload_hints=hints,
        )
        self.manager.warmup()
        self.manager.start()

    def ask(self, prompt: list[int], tokens: int) -> str:
        # None: the thread has ended. `answer` says why.
        return str(self.manager.add_request(prompt, max_new_tokens=tokens, record_timestamps=True))

    def answer(self) -> Answer:
        while True:
            result = self.manager.get_result(timeout=_WAIT)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError(
                        f"the manager stopped: {self.manager.background_thread_status.fatal_error}"
                    )
            elif result.error is not None:
                raise RuntimeError(result.error)
            elif result.is_finished():
                times = result.timestamps
                return Answer(result.request_id, times[0], times[-1], len(result.generated_tokens))

    def close(self) -> None:
        """End the manager's thread, which Python would wait for, and free its cache."""
        if self.manager is not None:
            self.manager.stop(block=True, hard_stop=True)
            self.manager.destroy()
            self.manager = None
