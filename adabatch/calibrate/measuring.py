"""The noise scale at frozen weights, in several geometries over the same samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from adabatch import gradients, optimizers
from adabatch import plan as planning
from adabatch.alignment import Alignment, AlignmentEstimator
from adabatch.calibrate.branches import Bench, backward, opened
from adabatch.calibrate.snapshot import Snapshot
from adabatch.gradients import geometry
from adabatch.gradients.aligned import AlignmentTaps
from adabatch.gradients.preconditioned import VIEWS
from adabatch.gradients.updates import UPDATES, is_muon
from adabatch.noise import EUCLIDEAN, Estimate, Measurement, NoiseEstimator
from adabatch.plan import BatchPlan

GEOMETRIES = (EUCLIDEAN, *VIEWS, *UPDATES)
# So many windows are compared: as many as the estimators keep blocks.
WINDOWS = 32


def measurable(bench: Bench, wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Which of the ``wanted`` geometries this optimizer has, and why not for the others.

    Raises:
        ValueError: for a name that is none of ``GEOMETRIES``.
    """
    if unknown := [name for name in wanted if name not in GEOMETRIES]:
        raise ValueError(f"calibrate.geometries are some of {', '.join(GEOMETRIES)}, got {', '.join(unknown)}")
    found, refused = [], {}
    for name in dict.fromkeys(wanted):
        try:
            if name in VIEWS:
                geometry.rulers_for(name, bench.optimizer, bench.tap.layout)
            if name == "muon" and not any(map(is_muon, optimizers.each(bench.optimizer))):
                raise ValueError("no optimizer of this model is torch.optim.Muon")
            found.append(name)
        except ValueError as error:
            refused[name] = str(error)
    return found, refused


def noise_scales(
    bench: Bench,
    geometries: Sequence[str],
    *,
    samples: int,
    confidence: float = 0.95,
    dataset_size: int | None = None,
) -> dict[str, Estimate]:
    """Measure over about ``samples`` training samples from where the run stands; no optimizer step is taken.

    Args:
        geometries: of ``measurable``.
        samples: how many; they are rounded up to 32 equal windows of two micro-batches on each rank, or more.
        confidence: of the intervals.
        dataset_size: samples of a data set that is read by epochs, ``None`` to leave that correction out.
    """
    views = [name for name in geometries if name in VIEWS]
    rulers = geometry.rulers_for(views, bench.optimizer, bench.tap.layout) if views else ()
    snapshot = Snapshot(bench.plain_model, bench.optimizer)
    bench.tap.measure(False)
    tap = gradients.attach(bench.model, bench.optimizer, kind="hooks", rulers=rulers)
    taps = AlignmentTaps([name for name in geometries if name in UPDATES], bench.optimizer, tap)
    measured, alignments = [], []
    try:
        bench.model.train()
        with opened(bench, bench.start) as stream, taps:
            for plan in _windows(bench, samples):
                taps.measure(True)
                with gradients.accumulate(tap, plan) as window:
                    for micro_batch in stream.take(plan):
                        taps.note(micro_batch.samples, backward(bench, window, micro_batch))
                alignments.append({name: pending.read() for name, pending in taps.read(window).items()})
                measured.append(window.finish(bench.optimizer).measurement.read())
                bench.consumed += plan.global_batch
                for optimizer in optimizers.each(bench.optimizer):
                    optimizer.zero_grad()
    finally:
        tap.detach()
        snapshot.restore()
    return {
        name: estimate
        for name in geometries
        if (estimate := _estimate(name, measured, alignments, confidence, dataset_size)) is not None
    }


def _estimate(
    name: str,
    measured: Sequence[Measurement],
    alignments: Sequence[Mapping[str, Alignment]],
    confidence: float,
    dataset_size: int | None,
) -> Estimate | None:
    estimator: NoiseEstimator | AlignmentEstimator
    if name in UPDATES:
        estimator = AlignmentEstimator(geometry=name, confidence=confidence, dataset_size=dataset_size)
        windows = [one[name] for one in alignments]
    else:
        # With an error that is never reached the memory is as long as it can be.
        estimator = NoiseEstimator(
            relative_error=1e-6, confidence=confidence, dataset_size=dataset_size, geometry=name
        )
        windows = [one.seen_in(name) for one in measured]
    state = estimator.init()
    # An estimator looks back over half of what it was told, so it is told everything twice.
    for one in (*windows, *windows):
        state = estimator.update(state, one)
    return estimator.value(state)


def _windows(bench: Bench, samples: int) -> list[BatchPlan]:
    full = bench.limits.micro_batch * bench.world.size
    batch = full * max(2, math.ceil(samples / WINDOWS / full))
    return [
        planning.split(
            step=step,
            first_sample=bench.start + planning.samples_in(step, batch),
            global_batch=batch,
            limits=bench.limits,
            measure=True,
        )
        for step in range(WINDOWS)
    ]
