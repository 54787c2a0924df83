"""Generating text from a saved model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TextStreamer


def stream(model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int, temperature: float) -> None:
    """Print the continuation of a prompt. Temperature 0 takes the most probable token each time.

    Text stops at the end of the model's context, with a message, because the model has no later positions.
    """
    ids = tokenizer(prompt, return_tensors="pt", verbose=False).input_ids.to(model.device)
    given, longest = ids.shape[1], model.config.max_position_embeddings
    if given == 0:
        raise ValueError(f"prompt must hold at least one token, got {prompt!r}")
    if given >= longest:
        raise ValueError(
            f"prompt must leave room in the model's context of {longest} tokens, got {given} tokens"
        )
    if given + max_new_tokens > longest:
        room = longest - given
        print(
            f"at most {room} new tokens: the model's context ends at {longest}", file=sys.stderr, flush=True
        )
        max_new_tokens = room
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        **sampling,
    )
