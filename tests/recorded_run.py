"""Metrics of made-up training runs, written through the real log, for tests of what reads them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from adabatch.plan import BatchLimits, split
from adabatch.runlog import RunLog


class SyntheticRun:
    """A made-up run with the records of a real one: noise scale rising, batch growing, learning rate decaying.

    Args:
        start, top: first and largest global batch. ``start == top`` makes a run without decisions.
        samples: length of the run.
        every: steps between two ``step`` records.
        fixed, per_micro_batch: seconds of a step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int = 8,
        top: int = 64,
        samples: int = 40_000,
        every: int = 4,
        world: int = 2,
        micro_batch: int = 8,
        fixed: float = 0.02,
        per_micro_batch: float = 0.03,
        target: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.folder, self.top, self.samples, self.every, self.target = folder, top, samples, every, target
        self.limits = BatchLimits(world=world, micro_batch=micro_batch)
        self.fixed, self.per_micro_batch = fixed, per_micro_batch
        self.random = random.Random(seed)
        self.done = dict(step=0, samples=0, tokens=0, seconds=0.0, time=1.76e9)
        self.batch, self.changed_at, self.skipped = start, 0, 0

    def scale(self) -> float:
        return 14 + 100 * (self.done["samples"] / self.samples) ** 0.8

    def estimate(self) -> dict[str, Any]:
        """Unresolved for the first eighth of the run, then an interval that narrows."""
        progress = self.done["samples"] / self.samples
        scale = self.scale() * math.exp(self.random.gauss(0, 0.05))
        width = 1.15 + 0.35 * math.exp(-4 * progress)
        resolved = progress > 0.125
        high = scale * width if resolved else math.inf
        return dict(scale=scale, scale_low=scale / width, scale_high=high, resolved=resolved)

    def loss(self, held_out: bool = False) -> float:
        progress = self.done["samples"] / self.samples
        noise = 0.004 if held_out else 0.35 / math.sqrt(self.batch)
        return 1.6 + 3.9 * math.exp(-7 * progress) - 0.2 * progress + self.random.gauss(0.03 * held_out, noise)

    def advance(self) -> None:
        batch = min(self.batch, self.samples - self.done["samples"])
        plan = split(step=0, first_sample=0, global_batch=batch, limits=self.limits, measure=True)
        seconds = (self.fixed + self.per_micro_batch * plan.micro_batches) * math.exp(self.random.gauss(0, 0.03))
        self.done["step"] += 1
        self.done["samples"] += batch
        self.done["tokens"] += 64 * batch
        self.done["seconds"] += seconds
        self.done["time"] += seconds
        self.plan, self.speed = plan, batch / seconds

    def step_record(self) -> dict[str, Any]:
        estimate = self.estimate()
        progress = self.done["samples"] / self.samples
        return dict(
            self.done,
            **estimate,
            loss=self.loss(),
            global_batch=self.batch,
            micro_batch=self.plan.micro_batch,
            micro_batches=self.plan.micro_batches,
            world=self.limits.world,
            lr=1e-3 * math.sqrt(self.batch / 8) * min(1, 20 * progress, 0.1 + 1.8 * (1 - progress)),
            grad_norm=1.4 - progress,
            signal=0.5,
            noise=0.5 * estimate["scale"],
            efficiency=1 / (1 + self.batch / estimate["scale"]),
            samples_per_second=self.speed,
            skipped=self.skipped,
        )

    def decide(self, log: RunLog) -> None:
        estimate, previous = self.estimate(), self.batch
        supported = estimate["scale"] if estimate["resolved"] else estimate["scale_low"]
        wanted = supported * (1 / self.target - 1)
        dwelling = self.done["samples"] - self.changed_at < 2_000
        if not dwelling and wanted > 1.5 * previous and previous < self.top:
            self.batch, self.changed_at = 2 * previous, self.done["samples"]
        evidence = f"noise scale {estimate['scale']:.3g} at target efficiency {self.target:g} wants {wanted:.3g}"
        if not estimate["resolved"]:
            evidence = f"noise scale above {supported:.3g} (unresolved) wants {wanted:.3g}"
        changed = self.batch != previous
        held = "within 2,000 samples of the last change" if dwelling else "within the dead band"
        reason = f"grow {previous} to {self.batch}: {evidence}" if changed else f"hold {previous}: {evidence}; {held}"
        decision = dict(previous=previous, batch=self.batch, changed=changed, wanted=wanted, reason=reason)
        log.decision(dict(self.done, **decision, **estimate, policy="target_efficiency"))

    def train(self, log: RunLog, until: int, evaluate_every: int = 2_500) -> None:
        """Train until ``until`` samples."""
        while self.done["samples"] < until:
            before = self.done["samples"] // evaluate_every
            self.advance()
            if self.done["step"] % self.every == 0 or self.done["samples"] == self.samples:
                log.step(self.step_record())
            if self.done["step"] % 16 == 0 and self.top > self.batch:
                self.decide(log)
            if self.done["samples"] // evaluate_every > before:
                accuracy = 0.9 - 0.6 * math.exp(-6 * self.done["samples"] / self.samples)
                log.evaluation(dict(self.done, loss=self.loss(held_out=True), accuracy=accuracy))

    def start_record(self) -> dict[str, Any]:
        config = {
            "policy": {"name": "target_efficiency", "target_efficiency": self.target},
            "limits": {"micro_batch": self.limits.micro_batch, "max_batch": self.top},
            "model": {"name": "gpt", "layers": 4, "width": 128},
        }
        return dict(
            self.done,
            world=self.limits.world,
            config=config,
            program="recipes/lm/train.py",
            arguments=["policy.target_efficiency=0.5", "seed=0"],
            versions={"python": "3.11.7", "torch": "2.13.0"},
        )

    def log(self, **settings: Any) -> RunLog:
        known = dict(loggers=("jsonl",), total_samples=self.samples, target_efficiency=self.target)
        return RunLog(self.folder, **{**known, **settings})


def grown_run(folder: Path, **settings: Any) -> SyntheticRun:
    """8 to 64, killed at 60 % with a torn line, resumed from 50 % with another target, and finished."""
    run = SyntheticRun(folder, **settings)
    with run.log() as log:
        log.start(run.start_record())
        run.train(log, run.samples // 2)
        log.checkpoint(dict(run.done, path="checkpoints/step"))
        saved = (dict(run.done), run.batch, run.changed_at)
        run.train(log, run.samples * 6 // 10)
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind":"step","step":')
    run.done, run.batch, run.changed_at = saved
    run.target = 0.45
    with run.log(resumed_at=run.done["samples"]) as log:
        change = dict(key="policy.target_efficiency", old=0.5, new=0.45, outcome="applied from here on")
        log.start(run.start_record())
        log.resume(dict(run.done, from_step=run.done["step"], changes=[change]))
        run.skipped = 2
        run.train(log, run.samples)
        log.end(dict(run.done, reason="the sample budget is used up"))
    return run
