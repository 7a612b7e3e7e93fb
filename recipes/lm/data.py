"""Sequences of tokens from text: the standard library's source by default, or any text file or folder.

Documents are held out whole, chosen by a hash of their name, so that the split stays when files are added.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adabatch.data import cached

STDLIB = "stdlib"
TOKENIZERS = ("bytes", "bpe")

_BYTES = 256
_END = b"\0"  # ends a document; text holds no such byte
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_FEW = 20  # with fewer files than this, documents are pieces of files
_PIECE = 2**16  # bytes of such a piece, up to its next line end


@dataclass(frozen=True, slots=True)
class Document:
    name: str
    text: bytes


@dataclass(frozen=True, slots=True)
class Corpus:
    """What the recipe trains and evaluates on.

    Attributes:
        train, held_out: the two splits.
        vocabulary: number of distinct tokens.
        decode: token ids -> text.
    """

    train: Sequences
    held_out: Sequences
    vocabulary: int
    decode: Callable[[Sequence[int]], str]


class Sequences:
    """Windows of ``sequence_length + 1`` tokens that overlap in one: each token but the first is a target once.

    A batch is an int64 tensor (samples, sequence_length + 1): inputs are all but the last, targets all but the first.

    Args:
        tokens: one-dimensional integer tensor.
        sequence_length: targets of a sample.

    Raises:
        ValueError: when the tokens make no single window.
    """

    deterministic = True
    collated = True

    def __init__(self, tokens: Tensor, sequence_length: int) -> None:
        if sequence_length < 1 or len(tokens) <= sequence_length:
            raise ValueError(
                f"{len(tokens)} tokens make no sample of sequence_length={sequence_length} (+ 1 target); use a longer "
                f"text or a shorter sequence"
            )
        self.sequence_length = sequence_length
        self.tokens = tokens
        self._windows = tokens.unfold(0, sequence_length + 1, sequence_length)  # a view

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index].long()

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self._windows[indices].long()

    def fingerprint(self) -> dict[str, Any]:
        digest = sha256(self.tokens.view(torch.uint8).numpy()).hexdigest()
        return {"tokens": len(self.tokens), "sequence_length": self.sequence_length, "sha256": digest}


def load(
    path: str = STDLIB,
    sequence_length: int = 64,
    tokenizer: str = "bytes",
    vocabulary: int = 4096,
    held_out: float = 0.05,
    pattern: str = "*",
) -> Corpus:
    """Read, split and tokenise a corpus.

    Args:
        path: ``stdlib``, a text file, or a folder.
        sequence_length: tokens of a sample.
        tokenizer: ``bytes``, or ``bpe`` to train a byte-level BPE on the training split (needs ``tokenizers``; the
            result is cached).
        vocabulary: tokens of the BPE, at least 257.
        held_out: share of the documents that are kept for evaluation.
        pattern: file names to read in a folder, such as ``*.txt``.

    Raises:
        ValueError: when there is no text, a split would be empty, or the tokenizer is unknown.
    """
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"data.tokenizer must be one of {', '.join(TOKENIZERS)}, got {tokenizer!r}")
    splits = split_documents(read_documents(path, pattern), held_out)
    if tokenizer == "bytes":
        tokens, decode = [byte_tokens(split) for split in splits], decode_bytes
    else:
        tokens, decode = _bpe(splits, vocabulary)
    train, evaluation = (Sequences(part, sequence_length) for part in tokens)
    return Corpus(train, evaluation, _BYTES if tokenizer == "bytes" else vocabulary, decode)


def read_documents(path: str = STDLIB, pattern: str = "*") -> list[Document]:
    """The texts under ``path`` in the order of their names; a handful of files is cut into pieces."""
    root = Path(sysconfig.get_path("stdlib") if path == STDLIB else path).expanduser()
    if not root.exists():
        raise ValueError(f"data.path={path!r} is neither {STDLIB!r} nor an existing file or folder")
    files = [root] if root.is_file() else sorted(_files(root, "*.py" if path == STDLIB else pattern))
    names = [file.relative_to(root.parent if root.is_file() else root).as_posix() for file in files]
    documents = [Document(name, file.read_bytes()) for name, file in zip(names, files, strict=True)]
    documents = [document for document in documents if document.text and _END not in document.text]
    if not documents:
        raise ValueError(f"data.path={path!r} holds no text file that matches {pattern!r}")
    return documents if len(documents) >= _FEW else [piece for document in documents for piece in _pieces(document)]


def split_documents(documents: list[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """The training and the held-out documents."""
    if not 0 < held_out < 1:
        raise ValueError(f"data.held_out must be a share between 0 and 1, got {held_out}")
    chosen = {document.name for document in documents if _draw(document.name) < held_out}
    if not chosen:
        chosen = {min((document.name for document in documents), key=_draw)}
    splits = tuple([document for document in documents if (document.name in chosen) == kept] for kept in (False, True))
    if not splits[0]:
        raise ValueError(f"{len(documents)} document(s) with held_out={held_out} leave nothing to train on")
    return splits


def byte_tokens(documents: list[Document]) -> Tensor:
    """The documents' bytes, each document ended by a zero: a uint8 tensor."""
    return torch.frombuffer(bytearray(b"".join(document.text + _END for document in documents)), dtype=torch.uint8)


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def _files(root: Path, pattern: str) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if Path(name).match(pattern) and not name.startswith("."))


def _pieces(document: Document) -> Iterator[Document]:
    """Cut a document at line ends into pieces of about 64 KiB."""
    start = 0
    while start < len(document.text):
        stop = document.text.find(b"\n", start + _PIECE) + 1 or len(document.text)
        yield Document(f"{document.name}#{start}", document.text[start:stop])
        start = stop


def _draw(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "big") / 2**48


def _bpe(
    splits: tuple[list[Document], list[Document]], vocabulary: int
) -> tuple[list[Tensor], Callable[[Sequence[int]], str]]:
    """Tokens of both splits under a byte-level BPE trained on the first, from the cache when they were made before."""
    content = sha256(b"".join(byte_tokens(split).numpy().tobytes() + _END for split in splits))
    name = f"bpe-{vocabulary}-{content.hexdigest()[:24]}"
    tensors = cached(name, lambda: _make_bpe(splits, vocabulary))
    tokenizer = _tokenizers().Tokenizer.from_str(bytes(tensors["tokenizer"].tolist()).decode())
    return [tensors["train"], tensors["held_out"]], lambda tokens: tokenizer.decode(list(tokens))


def _make_bpe(splits: tuple[list[Document], list[Document]], vocabulary: int) -> dict[str, Tensor]:
    library = _tokenizers()
    if vocabulary < _BYTES + 1:
        raise ValueError(f"a byte-level BPE needs data.vocabulary of at least {_BYTES + 1}, got {vocabulary}")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [[document.text.decode("utf-8", errors="replace") for document in split] for split in splits]
    tokenizer.train_from_iterator(texts[0], trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(
            f"the text supports a BPE of {tokenizer.get_vocab_size()} tokens, not data.vocabulary={vocabulary}"
        )
    train, held_out = (_encode(tokenizer, split) for split in texts)
    saved = torch.frombuffer(bytearray(tokenizer.to_str().encode()), dtype=torch.uint8)
    return {"train": train, "held_out": held_out, "tokenizer": saved}


def _encode(tokenizer: Any, texts: list[str]) -> Tensor:
    """All texts as one tensor, each ended by the token ``<|end|>``; int16 when the ids fit."""
    end = [tokenizer.token_to_id("<|end|>")]
    dtype = torch.int16 if tokenizer.get_vocab_size() <= 2**15 else torch.int32
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return torch.cat([torch.tensor(text.ids + end, dtype=dtype) for text in encoded])


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "data.tokenizer=bpe needs the package tokenizers: pip install tokenizers, or use data.tokenizer=bytes"
        ) from None
    return tokenizers
