"""Tokenizers: GPT-2's own files, any fast tokenizer of Hugging Face, or a byte-level BPE trained on the corpus.

All of them are saved in the same form, `tokenizer.json` and `tokenizer_config.json`, which
`AutoTokenizer.from_pretrained` opens offline.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grmoe.checks import require
from grmoe.data.cutting import PIECE, cut_runs, cut_text
from grmoe.data.documents import Document
from grmoe.data.sources import optional
from grmoe.files import replace_folder, write_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")  # names that models give it
_SPECIAL = ("eos_token", "bos_token", "pad_token", "unk_token")
_TEMPLATE = "chat_template.jinja"
_HUB_NAME = re.compile(r"(?!.*\.json$)\w[\w.-]*(/\w[\w.-]*)?")
_HUB_SECONDS = 10.0
BPE = "bpe:"
_SMALLEST_BPE = 257  # all 256 bytes, and the end-of-text token
_SAMPLE_BYTES = 64 * 2**20  # more text hardly changes the merges
_LONGEST_WORD = 1024  # characters: every merge looks through all words, so long ones take for ever
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and the names of its special tokens."""

    tokenizer: Tokenizer
    special: dict[str, str]
    """eos_token, bos_token, pad_token, and unk_token if it has one."""
    chat_template: str | None = None
    """Turns a conversation into text: a template of Jinja."""


def bpe_size(name: str) -> int | None:
    """Vocabulary size of a tokenizer to train ('bpe:8192'); None for an existing tokenizer."""
    if not name.startswith(BPE):
        return None
    size = name.removeprefix(BPE)
    ok = size.isdecimal() and int(size) >= _SMALLEST_BPE
    require(ok, f"tokenizer must be bpe:N with N >= {_SMALLEST_BPE}, got {name!r}")
    return int(size)


def tokenizer_recipe(name: str) -> str:
    """What identifies a tokenizer: its name, and the content of its files if it is a file or a folder."""
    path = Path(name)
    if bpe_size(name) is not None or not path.exists():
        return name
    digest = hashlib.sha256()
    for file in _tokenizer_files(path):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{path.resolve().name} (sha256 {digest.hexdigest()[:16]})"


def _tokenizer_files(path: Path) -> list[Path]:
    """The files of a tokenizer, given as a folder or as its tokenizer.json. The main one comes first."""
    if path.is_file():
        beside = path.name == "tokenizer.json"  # another name is a file of its own
        return [path, *(_companions(path.parent) if beside else [])]
    folder = path
    if (folder / "tokenizer.json").exists():
        return [folder / "tokenizer.json", *_companions(folder)]
    for names in map(list, _GPT2_FILES):
        if all((folder / name).exists() for name in names):
            return [folder / name for name in names]
    pairs = " or ".join(" and ".join(pair) for pair in _GPT2_FILES)
    raise ValueError(f"tokenizer folder {folder} holds neither tokenizer.json nor {pairs}")


def _companions(folder: Path) -> list[Path]:
    """Files that name the special tokens and the chat template."""
    names = ("tokenizer_config.json", "special_tokens_map.json", _TEMPLATE)
    return [folder / name for name in names if (folder / name).is_file()]


def load(name: str) -> LoadedTokenizer:
    """Load an existing tokenizer: from a folder, from a tokenizer.json, or from the hub by name."""
    place = Path(name)
    if not place.exists():
        return _from_hub(name)
    tokenizers = optional("tokenizers")
    files = _tokenizer_files(place)
    gpt2 = place.is_dir() and files[0].name != "tokenizer.json"
    try:
        if gpt2:
            return _from_gpt2_files(*files)
        tokenizer = tokenizers.Tokenizer.from_file(str(files[0]))
        texts = {path.name: path.read_text(encoding="utf-8") for path in files[1:]}
        template = texts.pop(_TEMPLATE, None)
        configs = [json.loads(text) for text in texts.values()]
    except Exception as error:  # the tokenizers library raises bare Exception for files it cannot read
        raise ValueError(f"tokenizer {place} could not be read: {error}") from error
    objects = all(isinstance(config, dict) for config in configs)
    require(objects, f"tokenizer {place}: {', '.join(texts)} must hold a JSON object")
    special: dict[str, str | None] = {}
    for config in configs:
        for key in _SPECIAL:
            token = config.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            special.setdefault(key, token if isinstance(token, str) else None)
        template = template or _template(config.get("chat_template"))
    return _with_special_tokens(tokenizer, special, name, template)


def _template(given: Any) -> str | None:
    """The chat template of a tokenizer's configuration. Several have names; the one to use is "default"."""
    if isinstance(given, list):
        given = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
    if isinstance(given, dict):
        given = given.get("default")
    return given if isinstance(given, str) else None


def _from_gpt2_files(vocab: Path, merges: Path) -> LoadedTokenizer:
    optional("tokenizers")
    from tokenizers.models import BPE as Model

    lines = merges.read_text(encoding="utf-8").splitlines()
    pairs = [(left, right) for left, right in (line.split(" ") for line in lines if not _is_comment(line))]
    tokenizer = _byte_level(Model(vocab=json.loads(vocab.read_text(encoding="utf-8")), merges=pairs))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _with_special_tokens(tokenizer, {}, str(vocab.parent))


def _is_comment(line: str) -> bool:
    return not line or line.startswith("#version")


def _byte_level(model: Any) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _why_unreachable(name: str) -> str:
    """Why the hub does not answer; empty if it does. One question: transformers would try for a minute."""
    hub = optional("huggingface_hub")
    if hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        hub.HfApi().model_info(name, timeout=_HUB_SECONDS)
    except hub.errors.HfHubHTTPError:
        return ""  # it answered: what is wrong is known better by who loads
    except Exception as error:  # of the network, a proxy or the machine
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def _from_hub(name: str) -> LoadedTokenizer:
    advice = "give its tokenizer.json or a folder with its files, or bpe:8192 to train one"
    require(bool(_HUB_NAME.fullmatch(name)), f"tokenizer {name} is neither a file nor a folder: {advice}")
    transformers = optional("transformers")
    unreachable = _why_unreachable(name)
    try:
        # A cached tokenizer opens without the hub. No question is asked, and no code of the hub runs.
        loaded = transformers.AutoTokenizer.from_pretrained(
            name, local_files_only=bool(unreachable), trust_remote_code=False
        )
    except Exception as error:  # from the hub, the network or a proxy
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if unreachable:
            reason = f"it is not in the local cache, and the hub cannot be asked ({unreachable})"
        raise ValueError(f"tokenizer {name!r} could not be loaded: {reason}; {advice}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer {name!r} has no fast version")
    special = {key: getattr(loaded, key) for key in _SPECIAL}
    return _with_special_tokens(backend, special, name, _template(loaded.chat_template))


def _with_special_tokens(
    tokenizer: Tokenizer, special: dict[str, str | None], name: str, chat_template: str | None = None
) -> LoadedTokenizer:
    """Fill in missing special tokens as GPT-2 does: the end-of-text token also begins and pads."""
    candidates = (special.get("eos_token"), *_ENDS)
    end = next((t for t in candidates if t is not None and tokenizer.token_to_id(t) is not None), None)
    if end is None:
        raise ValueError(
            f"tokenizer {name} has no end-of-text token: name one of its tokens in tokenizer_config.json beside it, "
            'as {"eos_token": "…"}'
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {key: token for key, token in special.items() if token is not None}
    special_tokens = {"bos_token": end, "pad_token": end} | known | {"eos_token": end}
    return LoadedTokenizer(tokenizer, special_tokens, chat_template)


def train(size: int, documents: Iterable[Document]) -> LoadedTokenizer:
    """Train a byte-level BPE of `size` tokens on a sample of the training documents."""
    optional("tokenizers")
    from tokenizers import models, pre_tokenizers, trainers

    texts = sample(documents, _SAMPLE_BYTES)
    require(bool(texts), "there is no document to train a tokenizer on")
    long = (piece for text in texts for piece in cut_text(text, PIECE))
    pieces = (piece for text in long for piece in cut_runs(text, _LONGEST_WORD))
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return _with_special_tokens(tokenizer, {}, f"{BPE}{size}")


def sample(documents: Iterable[Document], budget: int) -> list[str]:
    """A sample of the training documents of at most `budget` bytes: those with the smallest hashes, in their order.

    One pass, without knowing the size of the corpus. The sample depends on the documents alone.
    """
    kept: list[tuple[int, int, str, int]] = []  # a heap with the largest hash first
    total = 0
    for order, document in enumerate(documents):
        if document.split != "train":
            continue
        digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
        heapq.heappush(kept, (-int.from_bytes(digest, "little"), order, document.text, document.size))
        total += document.size
        while total > budget and len(kept) > 1:
            total -= heapq.heappop(kept)[3]
    # The last document may be longer than the budget. A character has at least one byte.
    return [text[:budget] for _, _, text, _ in sorted(kept, key=lambda item: item[1])]


def save(loaded: LoadedTokenizer, folder: Path) -> dict[str, Any]:
    """Write the folder atomically. Returns the entry for index.json."""
    content = loaded.tokenizer.to_str().encode()
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **dict(sorted(loaded.special.items())),
    }
    if loaded.chat_template is not None:
        config["chat_template"] = loaded.chat_template
    with replace_folder(folder) as writing:
        write_file(writing / "tokenizer.json", content)
        write_file(writing / "tokenizer_config.json", json.dumps(config, indent=1).encode())
    return {
        "vocab_size": max(loaded.tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        "end_of_text": loaded.tokenizer.token_to_id(loaded.special["eos_token"]),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
