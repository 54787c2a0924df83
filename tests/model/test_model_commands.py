"""`grmoe info` and `grmoe generate`."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from grmoe.cli import app
from grmoe.model import GrmoeForCausalLM


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_info_of_a_preset() -> None:
    code, text = run("info", "1.3b", "--context", "2048")
    assert code == 0
    for part in ("4.135 G", "1.294 G", "16 of width 2752", "2,048 tokens of context"):
        assert part in text


def test_info_of_a_folder(saved: tuple[Path, GrmoeForCausalLM]) -> None:
    code, text = run("info", str(saved[0]))
    assert code == 0
    assert "4 × 32, 4 heads of 8, 2 for keys" in text


def test_info_of_nothing() -> None:
    code, text = run("info", "no-such-model")
    assert code == 2
    assert "model must be one of tiny, small" in text


def test_another_kind_of_model_is_refused(saved: tuple[Path, GrmoeForCausalLM]) -> None:
    LlamaConfig().save_pretrained(saved[0])
    (saved[0] / "tokenizer.json").unlink()  # not what is wrong
    for arguments in (["info", str(saved[0])], ["generate", str(saved[0]), "--prompt", "x"]):
        code, text = run(*arguments)
        assert code == 2
        assert "must hold a GrMoE model, got 'llama'" in text
        assert "docs/howto/own-model.md" in text


def test_generate_continues_the_prompt(saved: tuple[Path, GrmoeForCausalLM]) -> None:
    texts = []
    for alpha in ([], ["--alpha", "9"]):
        code, text = run("generate", str(saved[0]), "--prompt", "def main", "--max-new-tokens", "12", *alpha)
        assert code == 0, text
        assert text.startswith("def main")
        assert "2.00 experts per token and layer" in text
        texts.append(text)
    assert "α = 1:" in texts[0]
    assert "α = 9:" in texts[1]
    again = run("generate", str(saved[0]), "--prompt", "def main", "--max-new-tokens", "12")
    assert again == (0, texts[0])  # the seed is fixed
    greedy = ["generate", str(saved[0]), "--prompt", "def main", "--temperature", "0", "--seed"]
    assert run(*greedy, "1") == run(*greedy, "2")


def test_generate_ends_with_the_context_and_says_so(saved: tuple[Path, GrmoeForCausalLM]) -> None:
    folder, model = saved
    longest = model.config.max_position_embeddings
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    word = len(tokenizer(" main").input_ids)
    fits = (longest - 8) // word
    given = len(tokenizer("def" + " main" * fits).input_ids)
    arguments = ["generate", str(folder), "--temperature", "0", "--prompt"]
    code, text = run(*arguments, "def" + " main" * fits, "--max-new-tokens", str(longest - given))
    assert code == 0
    assert "context" not in text
    code, cut = run(*arguments, "def" + " main" * fits, "--max-new-tokens", "100")
    assert code == 0
    notice = f"at most {longest - given} new tokens: the model's context ends at {longest}\n"
    assert cut.replace(notice, "") == text
    assert notice in cut
    code, text = run(*arguments, "def" + " main" * longest)
    assert code == 2
    assert f"prompt must leave room in the model's context of {longest} tokens, got" in " ".join(text.split())


def test_generate_says_what_is_missing(saved: tuple[Path, GrmoeForCausalLM], tmp_path: Path) -> None:
    code, text = run("generate", str(tmp_path / "nowhere"), "--prompt", "x")
    assert code == 2
    assert "neither a run of `grmoe train` nor an exported model" in " ".join(text.split())
    code, text = run("generate", str(saved[0]), "--prompt", "")
    assert code == 2
    assert "prompt must hold at least one token" in text
    (saved[0] / "tokenizer.json").unlink()
    code, text = run("generate", str(saved[0]), "--prompt", "x")
    assert code == 2
    assert "tokenizer.json is missing" in text
