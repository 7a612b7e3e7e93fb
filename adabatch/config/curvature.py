"""``job=curvature``: the Hessian-weighted noise scale at a checkpoint of a run, of the samples that came next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from adabatch import data, distributed
from adabatch.checkpoint import Checkpoints
from adabatch.config.build import Task
from adabatch.config.compose import ConfigError
from adabatch.gradients.curvature import CurvatureEstimate, hessian_noise_scale
from adabatch.stepping import to_device
from adabatch.plan import BatchLimits, split
from adabatch.progress import parse_count
from adabatch.runlog import text


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was measured, and where.

    Attributes:
        run: name of the run folder.
        step, sample: where the checkpoint stands; the first of the samples used is ``sample``.
        estimate: in samples; signal and noise in the loss's unit per unit of the squared learning rate.
        confidence: coverage of its interval.
    """

    run: str
    step: int
    sample: int
    estimate: CurvatureEstimate
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON, without infinity and NaN."""
        where = {"run": self.run, "step": self.step, "sample": self.sample, "confidence": self.confidence}
        return {**where, **self.estimate.to_dict()}

    def to_text(self) -> str:
        """The same as a block of lines."""
        one = self.estimate
        rows = (
            ("G'HG", f"{one.signal:.3g}", "curvature along the mean gradient G"),
            ("tr(H Sigma)", f"{one.noise:.3g}", "of the gradient covariance Sigma of one sample"),
            ("B_noise", self._scale(), "tr(H Sigma) / G'HG, in samples"),
            ("B_simple", text.quantity(one.simple), "tr(Sigma) / |G|^2 of the same gradients, in samples"),
            ("samples", f"{one.samples:,} + {one.curvature_samples:,}", f"gradients + Hessians, in {one.sets} sets"),
        )
        wide = max(len(value) for _, value, _ in rows)
        lines = [f"  {name:<12} {value:<{wide}}  {meaning}" for name, value, meaning in rows]
        title = f"{self.run}: curvature at step {self.step:,}, samples from {self.sample:,} on"
        state = f"  {one.state}" + (f": {one.reason}" if one.reason else f" ({text.percent(self.confidence)} interval)")
        return "\n".join([title, *lines, state])

    def _scale(self) -> str:
        one = self.estimate
        if one.state == "resolved":
            return f"{text.quantity(one.scale)} [{text.quantity(one.low)}, {text.quantity(one.high)}]"
        if one.state == "unresolved" and one.low > 0:
            return f"above {text.quantity(one.low)}"
        return one.state


def require_one_process(config: DictConfig) -> None:
    """Refuse several ranks, before they meet.

    Raises:
        ConfigError: for more than one.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        how = "FSDP2 shards" if config.parallelism.name == "fsdp" else "DistributedDataParallel"
        raise ConfigError(
            f"job=curvature differentiates twice through the plain model in one process, and {ranks} ranks were "
            f"started ({how}); start it without torchrun: adabatch curvature {config.resume or '<run folder>'}. The "
            f"checkpoints of sharded runs and of any number of ranks are read there"
        )


def diagnose(config: DictConfig, task: Task, world: distributed.World) -> Diagnosis:
    """Restore the model of the asked checkpoint, take the samples that came next, and measure. Nothing is written.

    Forward and backward run in the parameters' own precision, without dropout.

    Raises:
        ConfigError: without a run or such a checkpoint, for other data, and for more samples than there are.
        ValueError: for a model or loss that cannot be differentiated twice, and too few samples.
    """
    if config.resume is None:
        raise ConfigError("job=curvature is about a checkpoint of a run: give resume=<run folder>")
    settings, samples = config.curvature, parse_count(config.curvature.samples)
    checkpoints = Checkpoints(Path(config.resume, "checkpoints"))
    path = _chosen(checkpoints, settings.step)
    if samples > len(task.train_data):
        raise ConfigError(
            f"curvature.samples={samples} are more than the {len(task.train_data):,} training samples, and sets in "
            f"which a sample comes twice are not independent"
        )
    data.check_fingerprint(checkpoints.read_extra(path)["data"], data.fingerprint(task.train_data))
    model = task.model.to(world.device)
    progress = checkpoints.load_model(path, model=model)["controller"]["progress"]
    estimate = hessian_noise_scale(
        model,
        task.loss,
        _micro_batches(config, task, world, progress["samples"], samples),
        per_group=settings.per_group,
        per_hessian=settings.per_hessian,
        confidence=settings.confidence,
        custom_functions=settings.custom_functions,
    )
    return Diagnosis(Path(config.resume).name, progress["steps"], progress["samples"], estimate, settings.confidence)


def report(config: DictConfig, found: Diagnosis) -> None:
    """Print it, as the configuration has it."""
    print(json.dumps(found.to_dict(), allow_nan=False, indent=2) if config.curvature.json else found.to_text())


def _chosen(checkpoints: Checkpoints, step: int | None) -> Path:
    saved = checkpoints.at_steps()
    if not saved:
        raise ConfigError(f"the run has no complete checkpoint in {checkpoints.folder}; let it save one first")
    if step is None:
        latest = checkpoints.latest()
        assert latest is not None
        return latest
    if step not in saved:
        raise ConfigError(
            f"there is no complete checkpoint of step {step} in {checkpoints.folder}; there are: "
            f"{', '.join(map(str, saved))}"
        )
    return saved[step]


def _micro_batches(
    config: DictConfig, task: Task, world: distributed.World, first: int, samples: int
) -> Iterator[tuple[Any, int]]:
    """The samples from ``first`` on in full micro-batches: a rest that fills none is left out."""
    micro_batch = config.limits.micro_batch
    whole = BatchLimits(1, micro_batch, rounding="whole").floor(samples)
    if whole == 0:
        raise ConfigError(f"curvature.samples={samples} do not fill one micro-batch of {micro_batch}")
    limits = BatchLimits(1, micro_batch, rounding="none")
    plan = split(step=0, first_sample=first, global_batch=whole, limits=limits, measure=False)
    with data.stream(
        task.train_data, seed=config.order_seed, start=first, micro_batch=micro_batch, workers=config.workers
    ) as stream:
        for piece in stream.take(plan):
            yield to_device(piece.data, world.device), piece.samples
