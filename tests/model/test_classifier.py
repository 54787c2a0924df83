"""A classifier of texts on the body of a language model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

import grmoe
from grmoe.model import GrmoeConfig, GrmoeForCausalLM, GrmoeForSequenceClassification
from grmoe.runs.open import open_model

Build = Callable[..., GrmoeForCausalLM]
PAD = 96


@pytest.fixture
def classifier(config: Callable[..., GrmoeConfig]) -> Callable[..., GrmoeForSequenceClassification]:
    def make(**changes: Any) -> GrmoeForSequenceClassification:
        torch.manual_seed(0)
        return GrmoeForSequenceClassification(config(num_labels=3, pad_token_id=PAD, **changes)).eval()

    return make


@pytest.mark.parametrize("router", ["grassmann", "softmax", "switch"])
def test_loss_and_gradients(classifier: Any, ids: torch.Tensor, router: str) -> None:
    """While training the routers' losses are part of the loss; every weight but unused embeddings has a gradient."""
    options = {"router_options": {"load_loss": 0.1}} if router != "grassmann" else {}
    model, labels = classifier(router=router, **options), torch.tensor([0, 2, 1])
    out = model(ids, labels=labels)
    assert out.logits.shape == (3, 3)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    assert out.aux_loss is None
    model.train()
    out = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits, labels) + out.aux_loss
    torch.testing.assert_close(out.loss, expected)
    assert (out.aux_loss > 0) == (router != "grassmann")
    out.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    groups = grmoe.split_parameters(model)
    assert any(p is model.score.weight for p in groups.rest)


def test_other_kinds_of_labels(classifier: Any, ids: torch.Tensor) -> None:
    several, number = classifier(), classifier()
    labels = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0]])
    out = several(ids, labels=labels)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, labels)
    torch.testing.assert_close(out.loss, expected)
    number.config.problem_type = "regression"
    out = number(ids, labels=labels)
    torch.testing.assert_close(out.loss, (out.logits - labels).square().mean())


# Without a mask, attention would see padding on the left.
@pytest.mark.parametrize(("side", "masked"), [("left", True), ("right", True), ("right", False)])
def test_the_last_token_that_is_no_padding_counts(
    classifier: Any, ids: torch.Tensor, side: str, masked: bool
) -> None:
    model = classifier()
    rows = [ids[0, :4], ids[1, :9], ids[2, :1]]
    assert PAD not in ids
    alone = torch.cat([model(row[None]).logits for row in rows])
    padded, mask = torch.full((3, 11), PAD), torch.zeros(3, 11, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(11 - len(row), 11)
        padded[i, where], mask[i, where] = row, 1
    if masked:
        model.config.pad_token_id = None  # the mask says it
        together = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    else:
        together = model(padded)
    torch.testing.assert_close(together.logits, alone, rtol=1e-4, atol=1e-5)


def test_padding_that_ends_texts_too_counts_where_the_mask_says_so(
    classifier: Any, ids: torch.Tensor
) -> None:
    """The end-of-text token is often the padding token. transformers would look at the token before it."""
    model = classifier()
    closed = torch.cat([ids, torch.full((3, 1), PAD)], dim=1)
    hidden = model.model(closed).last_hidden_state
    masked = model(closed, attention_mask=torch.ones_like(closed)).logits
    torch.testing.assert_close(masked, model.score(hidden[:, -1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(closed).logits, model.score(hidden[:, -2]), rtol=1e-4, atol=1e-5)


def test_an_end_that_is_not_known_is_refused(classifier: Any, ids: torch.Tensor) -> None:
    model = classifier()
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"the end of 3 sequences is not known: give attention_mask"):
        model(ids)
    assert model(ids[:1]).logits.shape == (1, 3)
    embedded = model.model.embed_tokens(ids)
    mask = torch.ones_like(ids)
    torch.testing.assert_close(
        model(inputs_embeds=embedded, attention_mask=mask).logits, model(ids, attention_mask=mask).logits
    )


def test_a_language_model_gives_the_body(build: Build, ids: torch.Tensor, tmp_path: Path) -> None:
    source = build()
    source.set_alpha(2.0)
    source.save_pretrained(tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, output_loading_info=True
    )
    assert type(model) is GrmoeForSequenceClassification
    assert set(info["missing_keys"]) == {"score.weight"}
    assert model.alpha == source.alpha
    theirs = source.model.state_dict()
    assert {name for name, t in model.model.state_dict().items() if not torch.equal(t, theirs[name])} == set()
    assert model.score.weight.shape == (5, 32)
    # N(0, 0.2²), 160 numbers: their deviation has a standard error of 6 %.
    assert 0.15 < float(model.score.weight.detach().std()) < 0.25


def test_saved_and_loaded(classifier: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    model = classifier()
    model.save_pretrained(tmp_path)
    again, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.num_labels == 3
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)


def test_commands_refuse_a_classifier_in_one_line(
    classifier: Any, saved: tuple[Path, GrmoeForCausalLM]
) -> None:
    folder, _ = saved  # with a tokenizer
    classifier().save_pretrained(folder)
    with pytest.raises(ValueError, match="must hold a language model, got GrmoeForSequenceClassification"):
        open_model(folder)


def test_the_trainer_takes_the_mean_over_micro_batches(
    classifier: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    """Without `accepts_loss_kwargs`, gradients of a step of three micro-batches were three times as large."""
    found = []
    for size in (3, 1):
        model = classifier()
        data = [{"input_ids": row, "labels": i} for i, row in enumerate(ids)]
        args = TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=3 // size,
            report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, max_grad_norm=0.0,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.score.parameters(), lr=0.1)
        before = model.score.weight.detach().clone()
        Trainer(model=model, args=args, train_dataset=data, optimizers=(optimizer, None)).train()
        found.append(model.score.weight.detach() - before)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
