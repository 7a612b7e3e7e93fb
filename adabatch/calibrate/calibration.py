"""The measured critical batch at one point of a run: noise scales, branches, the fit, and their ratio c."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adabatch.calibrate.branches import Bench, Branch, run
from adabatch.calibrate.fitting import Bound, Critical, exponent, fit, ratio
from adabatch.calibrate.measuring import GEOMETRIES, measurable, noise_scales
from adabatch.calibrate.snapshot import Snapshot
from adabatch.calibrate.tuning import Tuned, tune
from adabatch.noise import Estimate
from adabatch.plan import BatchLimits, samples_in, steps_at
from adabatch.policies import supported_scale

# A branch of fewer steps has no time for its momentum, let alone for its cooldown.
FEWEST_STEPS = 8
# Why a geometry that the optimizer has is missing.
UNMEASURED = "no window could be measured: gradients are not finite, or the second moment is too young"
# At least so many batches, or there is no form of e(B) to see.
FEWEST_BATCHES = 3

# One branch: its batch, samples, octaves of the learning rate, and pair.
Place = tuple[int, int, float, int]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a calibration is made.

    Args:
        multiples: of the present batch, that are compared; made by the limits.
        batches: compared in their place.
        samples: of each branch.
        pairs: sets of branches over the same samples; the intervals are over these.
        halvings: how often the samples of the smallest batch are halved, for what fewer of them achieve.
        cooldown: last share of a branch over which its learning rate falls to 0.
        widest: octaves by which a learning rate may differ from where its search begins.
        noise_samples: over which the noise scales are measured.
        geometries: in which they are.
        confidence: of all intervals.

    Raises:
        ValueError: for numbers out of range.
    """

    multiples: Sequence[float] = (0.25, 1.0, 4.0, 16.0)
    batches: Sequence[int] = ()
    samples: int = 8192
    pairs: int = 4
    halvings: int = 5
    cooldown: float = 0.3
    widest: float = 4.0
    noise_samples: int = 8192
    geometries: Sequence[str] = GEOMETRIES
    confidence: float = 0.95

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("pairs", 2), ("halvings", 1), ("noise_samples", 1), ("widest", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"calibrate.{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.cooldown <= 1:
            raise ValueError(f"calibrate.cooldown must be in (0, 1], got {self.cooldown}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found at one point of a run.

    Attributes:
        batches: that were compared, the smallest first.
        lengths: samples of the smallest batch's branches, the longest first, which is that of all others.
        short: the smallest batch tuned, by its samples.
        large: the others tuned, by batch.
        rates: the best learning rate by batch, of the first parameter group.
        critical: the critical batch.
        exponent: d log(best learning rate) / d log(batch).
        noise: the noise scales at frozen weights, by geometry.
        refused: geometries that this optimizer does not have, and why.
        ratios: critical batch over noise scale, by geometry.
        left_out: batches that were not used, and why.
        samples, seconds: what it cost, in branches and for the noise scales.
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    short: dict[int, Tuned]
    large: dict[int, Tuned]
    rates: dict[int, float]
    critical: Critical
    exponent: Bound
    noise: dict[str, Estimate]
    refused: dict[str, str]
    ratios: dict[str, Bound]
    left_out: dict[int, str]
    samples: int
    seconds: float


def calibrate(
    bench: Bench,
    settings: Settings,
    *,
    present: int,
    geometry: str | None = None,
    dataset_size: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    known: dict[Place, float] | None = None,
    noise: dict[str, Estimate] | None = None,
) -> Calibration:
    """Measure the critical batch and the noise scales where ``bench`` stands; it stands there again afterwards.

    Every rank calls it.

    Args:
        bench: the run, at the point to calibrate at.
        settings: how.
        present: the run's present batch.
        geometry: by which scaling rules that need a noise scale go; the first that is measured by default.
        dataset_size: as for ``noise_scales``.
        say: is told how it goes.
        known: losses of branches that were run here before, under the same settings but for the pairs; new ones are
            added.
        noise: the noise scales, where they were measured here before.

    Raises:
        ValueError: when fewer than three batches can be compared, for unknown geometries, and when a batch's loss is
            not finite at any learning rate.
    """
    began, before = time.perf_counter(), bench.consumed
    batches, left_out = choose(bench.limits, settings, present)
    geometries, refused = measurable(bench, settings.geometries)
    if noise is None:
        noise = noise_scales(
            bench, geometries, samples=settings.noise_samples, confidence=settings.confidence, dataset_size=dataset_size
        )
        for name, one in noise.items():
            say(f"noise scale, {name}: {one.scale:.4g} [{one.low:.4g}, {one.high:.4g}]")
    refused |= {name: UNMEASURED for name in geometries if name not in noise}
    rule_by = noise.get(geometry or "", next(iter(noise.values()), None))
    branching = _Branching(bench, settings, None if rule_by is None else supported_scale(rule_by), say, known)
    lengths = [settings.samples >> halving for halving in range(settings.halvings + 1)]
    lengths = [length for length in lengths if steps_at(length, batches[0]) >= FEWEST_STEPS]
    short = branching.tuned([(batches[0], length) for length in lengths])
    large = branching.tuned([(batch, settings.samples) for batch in batches[1:]], short[0].octaves)
    by_length, by_batch = dict(zip(lengths, short)), dict(zip(batches[1:], large))
    critical = fitted(by_length, by_batch, batches[0], settings.confidence)
    whole = {batches[0]: short[0], **by_batch}
    rates = {batch: bench.rate(batch, branching.noise_scale) * 2.0**one.octaves for batch, one in whole.items()}
    smooth = {batch: one for batch, one in whole.items() if one.smooth}
    return Calibration(
        batches=tuple(batches),
        lengths=tuple(lengths),
        short=by_length,
        large=by_batch,
        rates=rates,
        critical=critical,
        exponent=exponent(
            {batch: rates[batch] for batch in smooth},
            {batch: one.shifts for batch, one in smooth.items()},
            confidence=settings.confidence,
        ),
        noise=noise,
        refused=refused,
        ratios={name: ratio(critical.batch, _bound(one)) for name, one in noise.items()},
        left_out=left_out,
        samples=bench.consumed - before,
        seconds=time.perf_counter() - began,
    )


def choose(limits: BatchLimits, settings: Settings, present: int) -> tuple[list[int], dict[int, str]]:
    """The batches that are compared, and those that are not, with the reason.

    Raises:
        ValueError: when fewer than three are left.
    """
    free = BatchLimits(limits.world, limits.micro_batch, rounding=limits.rounding)
    if settings.batches:
        wanted = [free.require(batch, "a batch of calibrate.batches") for batch in settings.batches]
    else:
        wanted = [free.realise(multiple * present) for multiple in settings.multiples]
    wanted = sorted(set(wanted))
    long = {batch: steps_at(settings.samples, batch) for batch in wanted}
    left_out = {
        batch: f"{settings.samples:,} samples are {steps} steps of it, and fewer than {FEWEST_STEPS} tell nothing"
        for batch, steps in long.items()
        if steps < FEWEST_STEPS
    }
    kept = [batch for batch in wanted if batch not in left_out]
    if len(kept) < FEWEST_BATCHES:
        listed, why = ", ".join(map(str, kept)), "; ".join(f"{batch}: {reason}" for batch, reason in left_out.items())
        raise ValueError(
            f"calibration compares {FEWEST_BATCHES} or more batches, and there are {listed or 'none'}"
            f"{f' ({why})' if why else ''}; set calibrate.batches, or calibrate.samples to "
            f"{samples_in(FEWEST_STEPS, max(wanted))} or more"
        )
    return kept, left_out


def fitted(short: dict[int, Tuned], large: dict[int, Tuned], smallest: int, confidence: float) -> Critical:
    """The critical batch from tuned branches; not when the smallest batch's optima are at the end of their grid.

    A larger batch whose optimum is there is left out.
    """
    unknown = Bound(None, None, None)
    if at_an_end := [samples for samples, one in short.items() if not one.interior]:
        whose = f"batch {smallest} ({at_an_end[0]:,} samples)"
        return Critical(unknown, {}, {}, f"no optimum inside of the learning rates of {whose}: raise calibrate.widest")
    inside = {batch: one.losses for batch, one in large.items() if one.interior}
    if len(inside) + 1 < FEWEST_BATCHES:
        whose = "batches " + ", ".join(str(batch) for batch in large if batch not in inside)
        return Critical(unknown, {}, {}, f"no optimum inside of the learning rates of {whose}: raise calibrate.widest")
    lengths = {samples: one.losses for samples, one in short.items()}
    return fit(lengths, inside, smallest=smallest, confidence=confidence)


class _Branching:
    """Tunes batches and lengths one after another, each from the optimum of the one before."""

    def __init__(
        self,
        bench: Bench,
        settings: Settings,
        noise_scale: float | None,
        say: Callable[[str], None],
        known: dict[Place, float] | None,
    ) -> None:
        self._bench, self._settings, self._say = bench, settings, say
        self._snapshot = Snapshot(bench.plain_model, bench.optimizer)
        self.noise_scale = noise_scale if noise_scale is None or math.isfinite(noise_scale) else None
        self._known = {} if known is None else known

    def tuned(self, wanted: Sequence[tuple[int, int]], start: float = 0.0) -> list[Tuned]:
        """For each batch and number of samples."""
        found: list[Tuned] = []
        for batch, samples in wanted:
            start = float(round(found[-1].octaves if found else start))
            one = tune(self._branch(batch, samples), self._settings.pairs, start=start, widest=self._settings.widest)
            found.append(one)
            where = f"2^{one.octaves:+.2f} of the rule's rate" if one.interior else "no optimum inside of the grid"
            self._say(f"batch {batch}, {samples:,} samples: loss {sum(one.losses) / len(one.losses):.5f}, {where}")
        return found

    def _branch(self, batch: int, samples: int) -> Callable[[float, int], float]:
        def branch(octaves: float, pair: int) -> float:
            place = (batch, samples, octaves, pair)
            if place in self._known:
                return self._known[place]
            one = Branch(
                batch=batch,
                samples=samples,
                first_sample=self._bench.start + pair * self._settings.samples,
                octaves=octaves,
                cooldown=self._settings.cooldown,
                noise_scale=self.noise_scale,
            )
            self._known[place] = run(self._bench, one, self._snapshot)
            return self._known[place]

        return branch


def _bound(estimate: Estimate) -> Bound:
    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return Bound(finite(estimate.scale), estimate.low, finite(estimate.high))
