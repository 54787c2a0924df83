"""Tokenizers: GPT-2's own files, any fast tokenizer of Hugging Face, or a byte-level BPE trained on the corpus.

Whatever it came from, it is saved in one form, `tokenizer.json` and `tokenizer_config.json`, which
`AutoTokenizer.from_pretrained` opens offline.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grmoe.checks import require
from grmoe.data.documents import Document
from grmoe.data.sources import optional
from grmoe.files import replace_folder, write_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
BPE = "bpe:"
SMALLEST_BPE = 257  # every byte, and the end of text
SAMPLE_BYTES = 64 * 2**20  # merges learned from more text hardly differ
GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class Named:
    """A tokenizer and its special tokens' names."""

    tokenizer: Tokenizer
    special: dict[str, str]  # eos_token, bos_token, pad_token, perhaps unk_token


def bpe_size(name: str) -> int | None:
    """Vocabulary of a tokenizer to be trained ('bpe:8192'); None for one that exists."""
    if not name.startswith(BPE):
        return None
    size = name.removeprefix(BPE)
    ok = size.isdecimal() and int(size) >= SMALLEST_BPE
    require(ok, f"tokenizer must be bpe:N with N >= {SMALLEST_BPE}, got {name!r}")
    return int(size)


def tokenizer_recipe(name: str) -> str:
    """What identifies a tokenizer: its name, and for a folder the content of its files."""
    folder = Path(name)
    if bpe_size(name) is not None or not folder.is_dir():
        return name
    digest = hashlib.sha256()
    for path in _tokenizer_files(folder):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{folder.resolve().name} (sha256 {digest.hexdigest()[:16]})"


def _tokenizer_files(folder: Path) -> list[Path]:
    if (folder / "tokenizer.json").exists():
        names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
        return [folder / name for name in names if (folder / name).exists()]
    for names in map(list, GPT2_FILES):
        if all((folder / name).exists() for name in names):
            return [folder / name for name in names]
    pairs = " or ".join(" and ".join(pair) for pair in GPT2_FILES)
    raise ValueError(f"tokenizer folder {folder} holds neither tokenizer.json, nor {pairs}")


def load(name: str) -> Named:
    """A tokenizer that exists: from a folder's files, or from the hub by name."""
    folder = Path(name)
    if not folder.is_dir():
        return _from_hub(name)
    tokenizers = optional("tokenizers")
    files = _tokenizer_files(folder)
    try:
        if files[0].name != "tokenizer.json":
            return _from_gpt2_files(*files)
        tokenizer = tokenizers.Tokenizer.from_file(str(files[0]))
        configs = [json.loads(path.read_text(encoding="utf-8")) for path in files[1:]]
    except Exception as error:  # the tokenizers library raises bare Exception for files it cannot read
        raise ValueError(f"tokenizer folder {folder} could not be read: {error}") from error
    special: dict[str, str | None] = {}
    for config in configs:
        for key in ("eos_token", "bos_token", "pad_token", "unk_token"):
            token = config.get(key)
            special.setdefault(key, token.get("content") if isinstance(token, dict) else token)
    return _named(tokenizer, special, name)


def _from_gpt2_files(vocab: Path, merges: Path) -> Named:
    optional("tokenizers")
    from tokenizers.models import BPE as Model

    lines = merges.read_text(encoding="utf-8").splitlines()
    pairs = [(left, right) for left, right in (line.split(" ") for line in lines if not _is_comment(line))]
    tokenizer = _byte_level(Model(vocab=json.loads(vocab.read_text(encoding="utf-8")), merges=pairs))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _named(tokenizer, {}, str(vocab.parent))


def _is_comment(line: str) -> bool:
    return not line or line.startswith("#version")


def _byte_level(model: Any) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _from_hub(name: str) -> Named:
    transformers = optional("transformers")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the hub's own, the network's, a proxy's
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"tokenizer {name!r} could not be loaded: {reason[0]} "
            f"(a folder with its files works without the hub, and bpe:8192 trains one)"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer {name!r} has no fast version")
    special = {key: getattr(loaded, key) for key in ("eos_token", "bos_token", "pad_token", "unk_token")}
    return _named(backend, special, name)


def _named(tokenizer: Tokenizer, special: dict[str, str | None], name: str) -> Named:
    """Fill in the special tokens as GPT-2 has them: one token ends, begins and pads."""
    candidates = (special.get("eos_token"), END_OF_TEXT, "</s>")
    end = next((t for t in candidates if t is not None and tokenizer.token_to_id(t) is not None), None)
    if end is None:
        raise ValueError(f"tokenizer {name} has no end-of-text token (eos_token)")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {key: token for key, token in special.items() if token is not None}
    return Named(tokenizer, {"bos_token": end, "pad_token": end} | known | {"eos_token": end})


def train(size: int, documents: Iterable[Document]) -> Named:
    """A byte-level BPE of `size` tokens from a sample of the training documents."""
    optional("tokenizers")
    from tokenizers import models, pre_tokenizers, trainers

    texts = sample(documents, SAMPLE_BYTES)
    require(bool(texts), "there is no document to train a tokenizer on")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return _named(tokenizer, {}, f"{BPE}{size}")


def sample(documents: Iterable[Document], budget: int) -> list[str]:
    """The training documents of smallest hash that fit into `budget` bytes, in the order they came.

    One pass, no need to know the size of the corpus, and the same documents whoever asks.
    """
    kept: list[tuple[int, int, str, int]] = []  # a heap: the largest hash first
    total = 0
    for order, document in enumerate(documents):
        if document.split != "train":
            continue
        digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
        heapq.heappush(kept, (-int.from_bytes(digest, "little"), order, document.text, document.size))
        total += document.size
        while total > budget and len(kept) > 1:
            total -= heapq.heappop(kept)[3]
    return [text for _, _, text, _ in sorted(kept, key=lambda item: item[1])]


def save(named: Named, folder: Path) -> dict[str, Any]:
    """Write the folder, whole or not at all; returns what index.json says about it."""
    content = named.tokenizer.to_str().encode()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **dict(sorted(named.special.items())),
    }
    with replace_folder(folder) as writing:
        write_file(writing / "tokenizer.json", content)
        write_file(writing / "tokenizer_config.json", json.dumps(config, indent=1).encode())
    return {
        "vocab_size": max(named.tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        "end_of_text": named.tokenizer.token_to_id(named.special["eos_token"]),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
