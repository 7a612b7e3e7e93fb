"""The arms of peers.py: each library measures the same windows of 64 samples through its own public interface.

An arm builds its model with ``wrap`` (nothing, DistributedDataParallel or ``fully_shard``), takes one optimizer step
per window with a learning rate of 0, and says what the library tells its user at that moment. Libraries are imported
by their own arms only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from _peers_problems import GLOBAL_BATCH, Batch, Problem
from torch import nn

Wrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Reading:
    """What a library says: G^2 and S where it tells them apart, the noise scale in samples, its interval, and words."""

    scale: float
    signal: float | None = None
    noise: float | None = None
    low: float | None = None
    high: float | None = None
    words: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Arm(Protocol):
    """One library on one problem."""

    def step(self, batch: Batch) -> None: ...
    def reading(self) -> Reading | None: ...


def ratio(noise: float, signal: float) -> float:
    """noise / signal, inf when the signal is 0."""
    return noise / signal if signal else math.inf


def pieces(batch: Batch, count: int) -> Iterator[Batch]:
    """The batch in equal micro-batches."""
    return zip(*(part.chunk(count) for part in batch), strict=True)


class Plain:
    """The loop without any library, in as many micro-batches as the arm that it is compared with."""

    def __init__(self, task: Problem, wrap: Wrap, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.model = wrap(task.build())
        self.criterion = task.criterion()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def step(self, batch: Batch) -> None:
        for inputs, targets in pieces(batch, self.micro_batches):
            (self.criterion(self.model(inputs), targets) / self.micro_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reading(self) -> Reading | None:
        return None


class Adabatch(Plain):
    """The passive tap and the estimator; groups are micro-batches, or ranks."""

    def __init__(self, task: Problem, wrap: Wrap, micro_batches: int, **settings: float) -> None:
        from adabatch import gradients
        from adabatch.noise import NoiseEstimator

        super().__init__(task, wrap, micro_batches)
        self.tap = gradients.attach(self.model, self.optimizer)
        self.estimator = NoiseEstimator(**settings)
        self.state = self.estimator.init()

    def step(self, batch: Batch) -> None:
        for inputs, targets in pieces(batch, self.micro_batches):
            (self.criterion(self.model(inputs), targets) / self.micro_batches).backward()
            self.tap.note(samples=len(inputs))
        self.state = self.estimator.update(self.state, self.tap.read().read())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reading(self) -> Reading | None:
        estimate = self.estimator.value(self.state)
        if estimate is None:
            return None
        words = "" if estimate.resolved else f"unresolved, at least {estimate.low:.3g}"
        return Reading(estimate.scale, estimate.signal, estimate.noise, estimate.low, estimate.high, words)


class AdaptDL(Plain):
    """``GradientNoiseScale`` on DistributedDataParallel, whose ``no_sync`` tells it which micro-batches accumulate.

    AdaptDL's own loader chooses its accumulation from a model of the throughput, so its loop cannot be given a batch.
    The base batch is one micro-batch of one rank.
    """

    def __init__(self, task: Problem, wrap: Wrap, micro_batches: int) -> None:
        from adaptdl.torch.gradient_noise_scale import GradientNoiseScale

        super().__init__(task, lambda model: as_parallel(wrap(model)), micro_batches)
        self.gns = GradientNoiseScale(self.model, self.optimizer)
        self.base = GLOBAL_BATCH // micro_batches // torch.distributed.get_world_size()

    def step(self, batch: Batch) -> None:
        self.gns.reset_accumulation()
        for number, (inputs, targets) in enumerate(pieces(batch, self.micro_batches), start=1):
            last = number == self.micro_batches
            with contextlib.nullcontext() if last else self.model.no_sync():
                self.criterion(self.model(inputs), targets).backward()
        self.optimizer.step()

    def reading(self) -> Reading | None:
        signal, noise = self.gns.sqr_avg(), self.gns.var_avg() * self.base
        most = self.micro_batches * ranks()
        return Reading(ratio(noise, signal), signal, noise, words=f"gain {self.gns.gain(most):.3g} of {most}")


class AdaScale(Plain):
    """fairscale's wrapper around SGD; its averages are part of its state dict, and its base is one micro-batch."""

    def __init__(self, task: Problem, wrap: Wrap, micro_batches: int) -> None:
        from fairscale.optim import AdaScale as Wrapper

        super().__init__(task, wrap, micro_batches)
        self.optimizer = Wrapper(self.optimizer, num_gradients_to_accumulate=micro_batches)
        self.base = GLOBAL_BATCH // micro_batches // ranks()

    def reading(self) -> Reading | None:
        state = self.optimizer.state_dict()["state"]["adascale"]
        signal, noise = float(state["grad_sqr_avg"].sum()), float(state["grad_var_avg"].sum()) * self.base
        words = f"gain {self.optimizer.gain():.3g} of {self.optimizer.scale:.0f}"
        return Reading(ratio(noise, signal), signal, noise, words=words)


class GnsPytorch(Plain):
    """``compute_gns`` on the per-example losses of every tenth batch (its README: every hundredth), averaged as there.

    ``shares`` are its percentages of the parameters and of the batch; without them its defaults.
    """

    def __init__(self, task: Problem, wrap: Wrap, every: int = 10, **shares: float) -> None:
        from gns_pytorch import compute_gns

        super().__init__(task, wrap, 1)
        self.compute = compute_gns
        self.every, self.shares = every, shares
        self.per_example = task.criterion(reduction="none")
        self.steps = 0
        self.average: float | None = None

    def step(self, batch: Batch) -> None:
        losses = self.per_example(self.model(batch[0]), batch[1]).flatten()
        if self.steps % self.every == 0:
            value = self.compute(losses, self.model, **self.shares)
            self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        self.steps += 1
        self.optimizer.zero_grad()
        losses.mean().backward()
        self.optimizer.step()

    def reading(self) -> Reading | None:
        return None if self.average is None else Reading(self.average)


class TorchGqc(Plain):
    """``OptimizerWrapperGNS``, told to accumulate up to its limit by a tolerance below 0, read before the last draw.

    It forgets its history when it steps. Its noise scale is in draws: it steps once that is below their number.
    """

    def __init__(self, task: Problem, wrap: Wrap, micro_batches: int) -> None:
        from gradient_quality_control import OptimizerWrapperGNS

        super().__init__(task, wrap, micro_batches)
        self.draw = GLOBAL_BATCH // micro_batches // ranks()
        several = "sharded" if is_sharded(self.model) else "replicated"
        mode = several if ranks() > 1 else None
        self.optimizer = OptimizerWrapperGNS(self.optimizer, max_batch_draws=micro_batches, distributed_mode=mode)
        for group in self.optimizer.param_groups:
            group["noise_tolerance"] = -1.0
        self.last: float | None = None

    def step(self, batch: Batch) -> None:
        for number, (inputs, targets) in enumerate(pieces(batch, self.micro_batches), start=1):
            self.criterion(self.model(inputs), targets).backward()
            if number == self.micro_batches:
                self.last = float(self.optimizer.compute_approximate_gns()) * self.draw
            self.optimizer.step()

    def reading(self) -> Reading | None:
        return None if self.last is None else Reading(self.last)


class BackPack(Plain):
    """``BatchL2Grad``, groups of one sample. BackPACK has no noise scale: the formula and the averages are ours.

    Arithmetic means over the run of |g_bar|^2 and of the per-example |g_i|^2 (arXiv 1812.06162, appendix A.1).
    """

    def __init__(self, task: Problem, wrap: Wrap) -> None:
        from backpack import backpack, extend
        from backpack.extensions import BatchL2Grad

        super().__init__(task, lambda model: wrap(extend(model)), 1)
        self.criterion = extend(self.criterion)
        self.context = lambda: backpack(BatchL2Grad())
        self.total = torch.zeros(2, dtype=torch.float64)
        self.steps = 0

    def step(self, batch: Batch) -> None:
        with self.context():
            self.criterion(self.model(batch[0]), batch[1]).backward()
        parameters = list(self.model.parameters())
        own = len(batch[0]) ** 2 * sum(parameter.batch_l2 for parameter in parameters).mean()
        mean = sum(parameter.grad.square().sum() for parameter in parameters)
        self.total += torch.stack([mean, own]).double()
        self.steps += 1
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reading(self) -> Reading | None:
        mean, own = (self.total / self.steps).tolist()
        signal = (GLOBAL_BATCH * mean - own) / (GLOBAL_BATCH - 1)
        noise = own - signal
        return Reading(ratio(noise, signal), signal, noise)


def ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def as_parallel(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel, unless it is distributed already."""
    parallel = isinstance(model, nn.parallel.DistributedDataParallel) or is_sharded(model)
    return model if parallel else nn.parallel.DistributedDataParallel(model)


@dataclass(frozen=True)
class Kind:
    """An arm, the micro-batches that it and its plain loop run, and how it stands in the tables."""

    name: str
    build: Callable[[Problem, Wrap, int], Arm]
    micro_batches: int


KINDS = {
    "adabatch": Kind("adabatch", Adabatch, 8),
    "adabatch-long": Kind(
        "adabatch, relative_error=0.01",
        lambda task, wrap, micro_batches: Adabatch(task, wrap, micro_batches, relative_error=0.01),
        8,
    ),
    "adaptdl": Kind("AdaptDL", AdaptDL, 8),
    "adaptdl-difference": Kind("AdaptDL, one micro-batch", AdaptDL, 1),
    "adascale": Kind("fairscale AdaScale", AdaScale, 8),
    "gns-pytorch": Kind("gns-pytorch", lambda task, wrap, _: GnsPytorch(task, wrap), 1),
    "gns-pytorch-all": Kind(
        "gns-pytorch, all of it",
        lambda task, wrap, _: GnsPytorch(task, wrap, param_percentage=1.0, batch_percentage=1.0),
        1,
    ),
    "torch-gqc": Kind("torch-gqc GNS", TorchGqc, 8),
    "backpack": Kind("BackPACK BatchL2Grad", lambda task, wrap, _: BackPack(task, wrap), 1),
}
