"""Alignments under DistributedDataParallel, over real gloo processes."""

from __future__ import annotations

import alignment_cases as truth
import gradient_cases as cases
import pytest
import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adabatch import distributed, gradients
from adabatch.alignment import Alignment
from adabatch.gradients.alignment import AlignmentTap
from adabatch.noise import Measurement

# Micro-batches of each rank.
LAYOUTS = {
    "two ranks": [[3, 1, 4, 2], [2, 2, 5, 1]],
    "two ranks, one each": [[3], [5]],
    "an odd number": [[3, 1, 4], [2, 2, 5]],
    "three ranks": [[2, 3], [1, 4], [5, 1]],
}

# Token weights or not, and the map.
CASES = [(tokens, update) for tokens in (False, True) for update in ("sign", "polar")]


def _optimizer(model: nn.Module, update: str) -> torch.optim.Optimizer:
    every = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(truth.matrices(model) if update == "polar" else every, lr=0.1)


def _every(sizes: list[list[int]]) -> list[list[Alignment]]:
    return [_alone(sizes, *case) for case in CASES]


def _alone(sizes: list[list[int]], tokens: bool, update: str) -> list[Alignment]:
    """A loop of its own, in which DDP averages: two windows, because DDP builds its buckets anew after the first."""
    model = DistributedDataParallel(cases.network(torch.float64), bucket_cap_mb=0.05)
    everyone = cases.pieces_of(sizes, tokens=tokens, dtype=torch.float64)
    mine = everyone[distributed.rank()]
    share = len(sizes) / sum(piece.weight for pieces in everyone for piece in pieces)
    measured = []
    mapping = truth.polar if update == "polar" else update
    with AlignmentTap(model, _optimizer(model, update), update=mapping) as align:
        for _ in range(2):
            model.zero_grad()
            for i, piece in enumerate(mine):
                model.require_backward_grad_sync = i == len(mine) - 1
                (cases.mean_loss(model, piece) * (piece.weight * share)).backward()
                align.note(piece.samples, piece.weight)
            measured.append(align.read().read())
    return measured


def _windows(sizes: list[list[int]], kind: str) -> tuple[list[Alignment], list[Measurement]]:
    """Accumulating windows, in which gradients may be summed over the ranks, measured by an ordinary tap as well."""
    model = DistributedDataParallel(cases.network(torch.float64), bucket_cap_mb=0.05)
    mine = cases.pieces_of(sizes, tokens=True, dtype=torch.float64)[distributed.rank()]
    optimizer = _optimizer(model, "sign")
    alignments, measurements = [], []
    with gradients.attach(model, kind=kind) as tap, AlignmentTap(model, optimizer, update="sign", tap=tap) as align:
        for step in range(3):
            model.zero_grad()
            align.measure(step != 1)
            with gradients.accumulate(tap, cases.plan(sizes)) as window:
                for piece in mine:
                    with window.micro_batch():
                        window.backward(cases.mean_loss(model, piece), samples=piece.samples, weight=piece.weight)
                        align.note(piece.samples, piece.weight)
            pending = align.read(window=window)
            assert (pending is None) == (step == 1)
            if pending is not None:
                alignments.append(pending.read())
            measurements.append(window.finish(optimizer).measurement.read())
    return alignments, measurements


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loop_of_its_own_agrees_with_sets_written_out(name: str) -> None:
    sizes = LAYOUTS[name]
    results = ranks.run(_every, len(sizes), sizes)
    assert all(found == results[0] for found in results), "ranks measured differently"
    for (tokens, update), measured in zip(CASES, results[0], strict=True):
        model = cases.network(torch.float64)
        chosen = [parameter for group in _optimizer(model, update).param_groups for parameter in group["params"]]
        everyone = cases.pieces_of(sizes, tokens=tokens, dtype=torch.float64)
        expected = truth.reference(model, everyone, chosen, truth.polar if update == "polar" else truth.sign)
        assert max(truth.difference(one, expected) for one in measured) < 1e-9


@pytest.mark.parametrize("kind", ["hooks", "ddp"])
def test_windows_agree_with_sets_written_out(kind: str) -> None:
    sizes = LAYOUTS["two ranks"]
    model = cases.network(torch.float64)
    everyone = cases.pieces_of(sizes, tokens=True, dtype=torch.float64)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = truth.reference(model, everyone, chosen, truth.sign)
    groups = everyone if kind == "ddp" else [[piece] for mine in everyone for piece in mine]
    for alignments, measurements in ranks.run(_windows, 2, sizes, kind):
        assert max(truth.difference(one, expected) for one in alignments) < 1e-12
        assert max(cases.difference(one, cases.reference(model, groups)) for one in measurements) < 1e-12
