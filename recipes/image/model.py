"""A small convolutional network without batch normalisation, so that samples of a batch stay independent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Images (samples, channels, size, size) -> logits (samples, classes).

    Each stage halves the image with a strided convolution, so that no work is spent on what pooling would drop.

    Args:
        channels: of the images.
        size: of the images in pixels, a multiple of 4 of at least 8.
        classes: number of classes.
        width: channels after the first stage; the later ones have two and four times as many.
        hidden: width of the layer before the last.
        dropout: before the last layer.
    """

    def __init__(
        self,
        channels: int = 1,
        size: int = 28,
        classes: int = 10,
        width: int = 16,
        hidden: int = 48,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if size < 8 or size % 4:
            raise ValueError(f"model.size must be a multiple of 4 of at least 8 pixels, got {size}")
        self.stages = nn.Sequential(
            nn.Conv2d(channels, width, 5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
        )
        side = -(-size // 8)
        self.hidden = nn.Linear(4 * width * side * side, hidden)
        self.dropout = dropout
        self.head = nn.Linear(hidden, classes)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.hidden(self.stages(images).flatten(1)))
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        return self.head(x)

    def _initialise(self) -> None:
        """He initialisation, and a head that first says little about the class."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.head.weight, std=0.1 * self.head.in_features**-0.5)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
    """The mean cross entropy over images, in nats; no weight, since every sample counts once."""
    images, labels = batch
    return F.cross_entropy(at_least_single(model(images)), labels), None


def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, float]]:
    """Summed cross entropy in nats and correct answers, each with the number of images."""
    images, labels = batch
    logits = at_least_single(model(images))
    correct = (logits.argmax(dim=1) == labels).sum()
    return {"loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)), "accuracy": (correct, len(labels))}


def at_least_single(logits: Tensor) -> Tensor:
    """Logits in single precision when autocast made them in half."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
