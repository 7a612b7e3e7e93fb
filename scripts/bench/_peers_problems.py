"""The problems of peers.py: frozen weights whose G and Sigma are known, and the stream of samples that all arms see.

Regression: d inputs with the variances lambda_j, weights that are ``offset`` away from the best ones along the first
axis, targets with noise of variance s, and the mean square error. A sample's gradient is 2 x (x.u - e) with u the
offset, and by Wick's formula for Gaussian x

    G = 2 Lambda u        tr Sigma = 4 ((u' Lambda u + s) tr Lambda + |Lambda u|^2)

Classification: a small network on a data set of which samples are drawn with replacement, so that G and Sigma are
those of the data set; both come from all its per-example gradients, in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

GLOBAL_BATCH = 64
SEED = 20250711
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Truth:
    """|G|^2 and tr Sigma of the mean loss."""

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        return self.noise / self.signal if self.signal else math.inf


class Regression:
    """One large axis and many small ones: d_eff is about 740, and the noise scale is 51 (1 + s / offset^2) + 1."""

    inputs, small = 1000, 0.05

    def __init__(self, offset: float, target_variance: float) -> None:
        self.offset = offset
        self.target_variance = target_variance
        self.variances = torch.full((self.inputs,), self.small)
        self.variances[0] = 1.0
        self.criterion = nn.MSELoss

    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(self.inputs, 1, bias=False))
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].weight[0, 0] = self.offset
        return model

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(samples, self.inputs, generator=generator).mul_(self.variances.sqrt())
        return inputs, math.sqrt(self.target_variance) * torch.randn(samples, 1, generator=generator)

    def truth(self) -> Truth:
        signal = (2.0 * self.offset * self.variances[0].item()) ** 2
        spread = self.offset**2 * self.variances[0].item() + self.target_variance
        return Truth(signal, 4.0 * spread * self.variances.double().sum().item() + signal)


class Classification:
    """Ten overlapping clusters in 32 dimensions and a network of 2,762 parameters at its initial weights."""

    samples, inputs, classes = 4096, 32, 10

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        centres = torch.randn(self.classes, self.inputs, generator=generator)
        self.labels = torch.randint(self.classes, (self.samples,), generator=generator)
        self.points = centres[self.labels] + 4.0 * torch.randn(self.samples, self.inputs, generator=generator)
        self.criterion = nn.CrossEntropyLoss

    def build(self) -> nn.Module:
        torch.manual_seed(SEED)
        return nn.Sequential(nn.Linear(self.inputs, 64), nn.Tanh(), nn.Linear(64, self.classes))

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(self.samples, (samples,), generator=generator)
        return self.points[chosen], self.labels[chosen]

    def truth(self) -> Truth:
        model = self.build().double()
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(values: dict[str, Tensor], point: Tensor, label: Tensor) -> Tensor:
            return nn.functional.cross_entropy(torch.func.functional_call(model, values, (point[None],)), label[None])

        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, self.points.double(), self.labels)
        flat = torch.cat([value.flatten(1) for value in gradients.values()], dim=1)
        signal = flat.mean(0).square().sum().item()
        return Truth(signal, flat.square().sum(1).mean().item() - signal)


class Digits:
    """For timing: a network of 0.4 or 3.8 million parameters on random images; nothing about it is known."""

    inputs, classes = 784, 10

    def __init__(self, *widths: int) -> None:
        self.widths = widths
        self.criterion = nn.CrossEntropyLoss

    def build(self) -> nn.Module:
        torch.manual_seed(SEED)
        layers: list[nn.Module] = []
        width = self.inputs
        for following in self.widths:
            layers += [nn.Linear(width, following), nn.ReLU()]
            width = following
        return nn.Sequential(*layers, nn.Linear(width, self.classes))

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        images = torch.randn(samples, self.inputs, generator=generator)
        return images, torch.randint(self.classes, (samples,), generator=generator)


class Opposed(Regression):
    """At the optimum, and every sample's gradient comes again with the other sign in the next eight samples.

    The mean gradient of a window is 0 and those of its micro-batches are not, so that G^2 is negative in each window,
    and so is every average of it. No scale is true here; what a library says is the question.
    """

    def __init__(self) -> None:
        super().__init__(0.0, 1.0)

    def draw(self, samples: int, generator: torch.Generator) -> Batch:
        inputs, targets = (part.reshape(-1, 8, part.shape[1]) for part in super().draw(samples // 2, generator))
        twice = torch.stack([inputs, inputs], dim=1), torch.stack([targets, -targets], dim=1)
        return twice[0].flatten(0, 2), twice[1].flatten(0, 2)


Problem = Regression | Classification | Digits

PROBLEMS = {
    "regression: scale 0.85 B": lambda: Regression(1.0, 0.05),
    "regression: scale 10 B": lambda: Regression(1.0, 11.5),
    "classification": Classification,
    "regression: scale 320 B": lambda: Regression(1.0, 400.0),
    "regression at its optimum": lambda: Regression(0.0, 1.0),
    "opposed pairs": Opposed,
}
TIMED = {"0.4M": lambda: Digits(400, 200), "3.8M": lambda: Digits(1600, 1600)}


@lru_cache
def problem(name: str) -> Problem:
    return {**PROBLEMS, **TIMED}[name]()


def stream(task: Problem, repeat: int) -> Iterator[Batch]:
    """Batches of 64 samples, the same ones for every arm."""
    generator = torch.Generator().manual_seed(SEED + 1 + repeat)
    while True:
        yield task.draw(GLOBAL_BATCH, generator)
