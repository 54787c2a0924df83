"""Everything that exported folders do where grmoe is not installed, in one process. Started by `test_remote.py`.

Its working folder holds `first` and `second`, two copies of one exported model, and what the package computed.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

TRUST: Any = {"trust_remote_code": True}
EXPECTED = torch.load("expected.pt")
IDS = EXPECTED["ids"]


def refuse_to_answer(question: str = "") -> str:
    print("transformers asks:", question, file=sys.stderr, flush=True)
    os._exit(3)  # an exception here would be taken for the answer "no"


builtins.input = refuse_to_answer


def run_card(name: str) -> None:
    """The lines of the model card, as written."""
    [code] = re.findall(r"```python\n(.*?)```", Path(name, "README.md").read_text(), re.DOTALL)
    assert f'"{name}"' in code
    exec(compile(code, f"{name}/README.md", "exec"), {})


def load(name: str, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(name, **TRUST, **options)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.data = tensor.data.clone()  # BLAS rounds otherwise where a file is mapped to odd addresses
    return model


def equals_the_package(model: Any) -> None:
    assert torch.equal(model(IDS).logits, EXPECTED["logits"])
    text = model.generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(text, EXPECTED["text"])
    for name in ("reference", "grouped", "eager", "grouped_mm"):
        model.set_experts_implementation(name)
        torch.testing.assert_close(model(IDS).logits, EXPECTED["logits"], atol=1e-5, rtol=1e-5)
    model.set_experts_implementation("auto")
    for budget, logits in EXPECTED["budgets"].items():
        model.set_budget(budget)
        assert torch.equal(model(IDS).logits, logits)
    with pytest.raises(ValueError, match="from 1 to 3 experts per token"):
        model.set_budget(4)
    model.set_alpha(2.0)


def trains(model: Any) -> None:
    model.train()(IDS, labels=IDS).loss.backward()
    model.update_priors(0.1)
    float(model.overlap_penalty(0.5))
    assert model.alpha == [2.0, 2.0]
    assert len(model.routing_metrics()) == 2


def copies_share_operators() -> None:
    """An operator that is registered twice is freed under the copy that came first."""
    bundles = [module for name, module in sys.modules.items() if name.endswith(".grmoe_routing")]
    assert len(bundles) > 2  # transformers loads one for the configuration and one for the model
    for name in ("_realize", "_grouped_op"):
        [operator] = {getattr(bundle, name) for bundle in bundles}
        space, _, short = operator._qualname.partition("::")
        assert operator._opoverload is getattr(getattr(torch.ops, space), short).default
        assert space.startswith("grmoe_bundle_")


def frames_of(model: Any) -> list[torch.Tensor]:
    return [p.detach() for name, p in model.named_parameters() if name.endswith(".frames")]


def error_of(frames: list[torch.Tensor]) -> float:
    return max(float((U.mT @ U - torch.eye(U.shape[-1])).abs().max()) for U in frames)


def trainer_keeps_subspaces(model: Any) -> None:
    """The Trainer's own AdamW, saved, loaded again and trained on. It warns, with the line that helps."""
    before = [U.clone() for U in frames_of(model)]
    data = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        output_dir="trained", max_steps=3, learning_rate=1e-2, per_device_train_batch_size=3, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        assert error_of(frames_of(model)) < 0.1  # one step of AdamW
        trainer.save_model("trained")
    smoothing = TrainingArguments("trained", label_smoothing_factor=0.1, report_to="none", use_cpu=True)
    smooth = Trainer(model=model, args=smoothing).compute_loss
    logits = model(IDS).logits[:, :-1].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, IDS[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(smooth(model, {"input_ids": IDS, "labels": IDS}), wanted)
    said = [str(w.message) for w in caught if "ModelOptimizer" in str(w.message)]
    assert len(said) == 1, said
    assert "optimizers=(grmoe.ModelOptimizer(model, lr=3e-4), None)" in said[0]
    again = load("trained")
    assert error_of(frames_of(again)) < 1e-5
    assert max(float((a - b).abs().max()) for a, b in zip(before, frames_of(again), strict=True)) > 1e-2
    again.train()(IDS, labels=IDS).loss.backward()


def classifies() -> None:
    """The language model's body with another head: loaded without questions, trained, saved with its code, loaded."""
    model = AutoModelForSequenceClassification.from_pretrained("first", num_labels=3, **TRUST)
    assert type(model).__name__ == "GrmoeForSequenceClassification"
    body = AutoModel.from_pretrained("first", **TRUST).state_dict()
    assert all(torch.equal(tensor, body[name]) for name, tensor in model.model.state_dict().items())
    mask = torch.ones_like(IDS)
    model(IDS, attention_mask=mask, labels=torch.tensor([0, 2, 1])).loss.backward()
    model.save_pretrained("classifier")
    again = AutoModelForSequenceClassification.from_pretrained("classifier", **TRUST)
    wanted = model(IDS, attention_mask=mask).logits
    torch.testing.assert_close(again(IDS, attention_mask=mask).logits, wanted, atol=1e-5, rtol=1e-5)
    # Saved as a language model, the folder still has the code of the classifier.
    AutoModelForSequenceClassification.from_pretrained("again", num_labels=3, **TRUST)


def the_bundle_alone() -> None:
    """Routers and layer from the one generated file."""
    sys.path.insert(0, "first")
    import grmoe_routing as g

    state, x, y, bound = torch.load("layer.pt")
    layer = g.MoE(16, 8, 4, selection=g.Mass(0.8, cap=3))
    layer.load_state_dict(state)
    assert torch.equal(layer(x), y)
    torch.testing.assert_close(layer.truncation(x).bound, bound)
    for name in g.ROUTERS:
        options = {"rank": 4} if name == "grassmann" else {}
        router = g.build_router(name, 16, 4, **options)
        assert torch.isfinite(router(x).probs).all(), name
        router.read_metrics()
    uniform = g.build_router(
        "grassmann", 16, 4, rank=4, prior="uniform", concentration="diagonal", linear=True
    )
    assert torch.isfinite(uniform(x).probs).all()
    assert bool(uniform.logit_range().holds)
    g.MoE(16, 8, 4, backend="grouped")(x)
    with pytest.raises(ValueError, match="triton"):
        g.MoE(16, 8, 4, backend="triton")(x)


def main() -> None:
    try:
        import grmoe  # noqa: F401
    except ImportError:
        pass
    else:
        sys.exit("grmoe is installed here")
    run_card("first")
    assert AutoConfig.from_pretrained("first", **TRUST).router == "grassmann"
    assert load("first").budget == 1.5
    model = load("first", alpha=2.0)
    AutoTokenizer.from_pretrained("second")  # asks nothing, before any code of this copy was loaded
    other = load("second", alpha=2.0)
    for each in (model, other):
        equals_the_package(each)
        trains(each)
    copies_share_operators()
    # A model loaded so can be saved, code included, and loaded again.
    model.save_pretrained("again")
    assert load("again").alpha == [2.0, 2.0]
    assert Path("again", "grmoe_routing.py").is_file()
    trainer_keeps_subspaces(other)
    equals_the_package(load("first", alpha=2.0))  # the other copies changed nothing here
    assert type(AutoModel.from_pretrained("first", **TRUST)).__name__ == "GrmoeModel"
    classifies()
    the_bundle_alone()
    print("loaded by", type(model).__module__.split(".")[0])


main()
