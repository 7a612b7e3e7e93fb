"""From a wanted global batch to what each rank runs: the only place where batch sizes are multiplied.

Vocabulary: the *global batch* is the samples of one optimizer step over all ranks; a *micro-batch* is the samples of
one forward/backward on one rank and is set by memory. A plan says which samples a step takes and how every rank
splits its share. All ranks run the same number of micro-batches, so that their collectives pair up; a rank whose
share is used up runs an empty micro-batch of weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

ROUNDINGS = ("micro_batch", "whole", "world", "none")


@dataclass(frozen=True, slots=True)
class Scales:
    """What moves with the batch, as multipliers of the values configured at the reference batch.

    Attributes:
        kappa: global batch over reference batch.
        lr: learning-rate multiplier.
        beta1_exponent, beta2_exponent: Adam's betas become ``beta ** exponent`` (1 leaves one alone).
        eps: multiplier of Adam's epsilon.
        weight_decay: multiplier of the decoupled weight decay.
        clip: multiplier of the gradient-norm threshold.
        second_moment: power of the global batch's change that the noise part of Adam's second moment is divided by: 1,
            or 0, which leaves it alone.
        step_counter: reference steps that Adam's step counter counts as one; the counter is divided by its change
            (1 leaves it alone).
        momentum_buffer: learning-rate multiplier that SGD's momentum buffer belongs to; the buffer is divided by its
            change (1 leaves it alone).
    """

    kappa: float = 1.0
    lr: float = 1.0
    beta1_exponent: float = 1.0
    beta2_exponent: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0
    clip: float = 1.0
    second_moment: float = 0.0
    step_counter: float = 1.0
    momentum_buffer: float = 1.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The batches that a run may use on its ranks.

    Args:
        world: number of ranks.
        micro_batch: most samples that one rank runs in one forward/backward.
        min_batch, max_batch: bounds of the global batch, in samples.
        rounding: ``micro_batch`` rounds adaptive batches to ``world * micro_batch`` (to ``world`` below one full
            micro-batch per rank), so that shapes stay few; ``whole`` allows full micro-batches only, for models whose
            gradient depends on the micro-batch's size (batch normalisation); ``world`` gives every rank the same
            share; ``none`` allows any batch, shares differing by at most one sample.

    Raises:
        ValueError: when no batch within the bounds can be made, with all the numbers and the nearest batches.
    """

    world: int = 1
    micro_batch: int = 8
    min_batch: int = 1
    max_batch: int = 2**40
    rounding: str = "micro_batch"

    def __post_init__(self) -> None:
        for name in ("world", "micro_batch", "min_batch", "max_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"limits.{name} must be a whole number of at least 1, got {value!r}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"limits.rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")
        if self.min_batch > self.max_batch:
            raise ValueError(f"limits.min_batch={self.min_batch} is above limits.max_batch={self.max_batch}")
        if self.floor(self.max_batch) < self.min_batch:
            raise ValueError(
                f"no global batch in [{self.min_batch}, {self.max_batch}] can be made from {self._numbers()}; "
                f"{self._nearest(self.max_batch)}"
            )

    def floor(self, batch: float) -> int:
        """The largest makeable batch that is at most ``batch``, or 0; bounds are not applied."""
        quantum = self._quantum(batch)
        return int(batch // quantum) * quantum

    def ceil(self, batch: float) -> int:
        """The smallest makeable batch that is at least ``batch``; bounds are not applied."""
        quantum = self._quantum(batch)
        return math.ceil(batch / quantum) * quantum

    def realise(self, wanted: float) -> int:
        """The makeable batch within the bounds that is nearest to ``wanted`` on a logarithmic scale."""
        low, high = self.ceil(self.min_batch), self.floor(self.max_batch)
        if not wanted > low:
            return low
        if wanted >= high:
            return high
        below, above = self.floor(wanted), self.ceil(wanted)
        return below if wanted * wanted < below * above else above

    def require(self, batch: int, name: str) -> int:
        """Return ``batch`` when it can be made exactly within the bounds, and raise otherwise.

        Raises:
            ValueError: naming ``name``, the batch, the world size, the micro-batch and the nearest batches.
        """
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise ValueError(f"{name} must be a whole number of samples, got {batch!r}")
        if not self.min_batch <= batch <= self.max_batch:
            raise ValueError(
                f"{name}={batch} is outside limits.min_batch={self.min_batch} .. limits.max_batch={self.max_batch}"
            )
        if self.floor(batch) != batch:
            raise ValueError(
                f"{name}={batch} cannot be made from {self._numbers()}; {self._nearest(batch)}, "
                f"or set limits.rounding=none to let the ranks' shares differ by one sample"
            )
        return batch

    @property
    def fewest_measurable(self) -> int:
        """The smallest batch in which two groups of samples can be compared."""
        return 2 * self.micro_batch if self.rounding == "whole" and self.world == 1 else 2

    @property
    def fewest_alignable(self) -> int:
        """The smallest batch in which sets of two sizes, of which none is the whole, can be compared with their rest."""
        groups = self.world if self.world > 2 else 3 if self.world == 1 else 4
        return groups * self.micro_batch if self.rounding == "whole" else groups

    def _quantum(self, batch: float) -> int:
        full = self.world * self.micro_batch
        if self.rounding == "none":
            return 1
        if self.rounding == "whole":
            return full
        return full if self.rounding == "micro_batch" and batch >= full else self.world

    def _numbers(self) -> str:
        return f"{self.world} ranks x micro-batch {self.micro_batch} (rounding: {self.rounding})"

    def _nearest(self, batch: int) -> str:
        candidates = sorted({self.floor(batch), self.ceil(batch)} - {0})
        return "the nearest that can: " + " or ".join(map(str, candidates))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One optimizer step, decided beforehand: which samples, how split, and at which scales.

    Attributes:
        step: index of this optimizer step, from 0.
        first_sample: first position of the sample order that this step takes.
        global_batch: samples of the step over all ranks.
        world: number of ranks.
        micro_batch: most samples of one micro-batch in this step.
        micro_batches: micro-batches that every rank runs.
        measure: whether the gradient noise is measured in this step.
        schedule: value of the learning-rate schedule, a multiplier of the configured rate.
        scales: what moves with the batch.
        drift: whether the gradient is compared with the optimizer's momentum, too.
        by_kind: scales of the optimizers, by their kind, or of parameter groups, by their ``adabatch_kind``, that have
            a rule of their own; ``scales`` are those of all others.
        varied: whether the micro-batches are smaller than they need be, to learn what a step costs.
        align: whether alignments are measured in this step.
    """

    step: int
    first_sample: int
    global_batch: int
    world: int
    micro_batch: int
    micro_batches: int
    measure: bool = True
    schedule: float = 1.0
    scales: Scales = field(default_factory=Scales)
    drift: bool = False
    by_kind: Mapping[str, Scales] = field(default_factory=dict)
    varied: bool = False
    align: bool = False

    @property
    def last_sample(self) -> int:
        """One past the last position that this step takes."""
        return self.first_sample + self.global_batch

    def share(self, rank: int) -> int:
        """How many samples ``rank`` takes: the positions p of the step with p = rank modulo the world size."""
        return _congruent_below(self.last_sample, rank, self.world) - _congruent_below(
            self.first_sample, rank, self.world
        )

    def pieces(self, rank: int) -> tuple[int, ...]:
        """Samples of each of ``rank``'s micro-batches, full ones first; empty ones fill up to the common number."""
        left = self.share(rank)
        sizes = []
        for _ in range(self.micro_batches):
            size = min(left, self.micro_batch)
            sizes.append(size)
            left -= size
        return tuple(sizes)


def split(
    *,
    step: int,
    first_sample: int,
    global_batch: int,
    limits: BatchLimits,
    measure: bool,
    drift: bool = False,
    align: bool = False,
    schedule: float = 1.0,
    scales: Scales | None = None,
    by_kind: Mapping[str, Scales] | None = None,
) -> BatchPlan:
    """Plan one step: split ``global_batch`` over the ranks and into micro-batches.

    A measured step needs two groups of samples to compare. When one rank would run everything in one micro-batch, the
    window is split in two halves, unless micro-batches have to be whole. A step whose alignments are measured is split
    in four or more, where it has as many samples, so that sets of several sizes can be compared.
    """
    largest_share = math.ceil(global_batch / limits.world)
    micro_batch = min(limits.micro_batch, largest_share)
    if measure and halved_alone(limits) and micro_batch == global_batch > 1:
        micro_batch = math.ceil(global_batch / 2)
    if align and limits.rounding != "whole":
        micro_batch = min(micro_batch, math.ceil(largest_share / _aligned_pieces(limits.world)))
    return BatchPlan(
        step=step,
        first_sample=first_sample,
        global_batch=global_batch,
        world=limits.world,
        micro_batch=micro_batch,
        micro_batches=math.ceil(largest_share / micro_batch),
        measure=measure,
        drift=drift,
        schedule=schedule,
        scales=scales or Scales(),
        by_kind=by_kind or {},
        align=align,
    )


def _aligned_pieces(world: int) -> int:
    """Micro-batches of each rank that give sets of two sizes, and of a third where the rest of a set is mapped."""
    return {1: 4, 2: 2}.get(world, 1)


def halved_alone(limits: BatchLimits) -> bool:
    """Whether a measured window that would be one micro-batch is split in two: the groups of one rank come so."""
    return limits.world == 1 and limits.rounding != "whole"


def varied(plan: BatchPlan, limits: BatchLimits) -> BatchPlan:
    """The same samples in micro-batches of half the size, or in three or more where there was one micro-batch.

    The plan itself where micro-batches cannot be smaller.
    """
    if plan.micro_batch == 1 or limits.rounding == "whole":
        return plan
    micro_batch = math.ceil(plan.micro_batch / 2) if plan.micro_batches > 1 else max(plan.micro_batch // 3, 1)
    largest_share = math.ceil(plan.global_batch / plan.world)
    return replace(
        plan, micro_batch=micro_batch, micro_batches=math.ceil(largest_share / micro_batch), varied=True
    )


def data_efficiency(batch: float, critical_batch: float) -> float:
    """Share of the samples that a tiny batch would have needed: 1/(1 + B/B_crit) (arXiv 1812.06162, section 2)."""
    return 0.0 if critical_batch <= 0 else 1 / (1 + batch / critical_batch)


def step_efficiency(batch: float, critical_batch: float) -> float:
    """Progress of a step against that of a huge batch: 1/(1 + B_crit/B)."""
    return 1 / (1 + critical_batch / batch)


def steps_at(samples: int, global_batch: int) -> int:
    """Optimizer steps that ``samples`` make at a constant ``global_batch``; a last partial batch is a step."""
    return math.ceil(samples / global_batch)


def samples_in(steps: int, global_batch: int) -> int:
    """Samples that ``steps`` optimizer steps of ``global_batch`` consume."""
    return steps * global_batch


def _congruent_below(end: int, residue: int, modulus: int) -> int:
    """How many p in [0, end) have p = residue modulo ``modulus``."""
    return (end - residue + modulus - 1) // modulus if end > residue else 0
