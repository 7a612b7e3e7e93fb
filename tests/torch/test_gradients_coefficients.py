"""Weights that losses were multiplied by, from which the tap finds the mean, and windows with nothing to compare."""

from __future__ import annotations

import dataclasses
import warnings

import gradient_cases as cases
import pytest
import torch
from torch import nn

from adabatch import gradients
from adabatch.gradients.taps import OneGroupWarning
from adabatch.noise import Measurement

SIZES = [3, 1, 4, 2]


def backwards(
    model: nn.Module, groups: list[cases.Piece], tap: gradients.Tap, coefficient: float | None = None
) -> None:
    """The window's backward passes: by each piece's share of the weight, or all by one coefficient."""
    total = sum(piece.weight for piece in groups)
    for piece in groups:
        loss = cases.mean_loss(model, piece)
        share = piece.weight / total if coefficient is None else coefficient
        (loss * share).backward()
        tap.note(piece.samples, piece.weight if coefficient is None else coefficient, loss)


def expected(model: nn.Module, groups: list[cases.Piece]) -> Measurement:
    return cases.reference(model, [[piece] for piece in groups])


# -- weights that the loss was multiplied by


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_tokens_over_another_divisor(early: bool, as_tensors: bool) -> None:
    """The divisor may be wrong by anything: Hugging Face's counts targets that are none, in some releases."""
    model, groups = cases.network(), cases.pieces(SIZES, tokens=True)
    with gradients.attach(model, early=early) as tap:
        for piece in groups:
            loss, weight = cases.mean_loss(model, piece), piece.weight / 77
            (loss * weight).backward()
            tap.note(piece.samples, torch.tensor(weight, dtype=torch.float64) if as_tensors else weight, loss)
        measured = tap.read(factor=None).read()
    should = expected(model, groups)
    assert measured.weight == pytest.approx(should.weight / 77)
    assert cases.difference(dataclasses.replace(measured, weight=should.weight), should) < 1e-6


def test_a_shorter_window_divided_as_a_whole_one() -> None:
    model = cases.network()
    with gradients.attach(model) as tap:
        for sizes in ([2, 2, 2, 2], [2, 2, 2]):
            model.zero_grad()
            groups = cases.pieces(sizes, tokens=False)
            backwards(model, groups, tap, coefficient=1 / 4)
            measured, should = tap.read(factor=None).read(), expected(model, groups)
            assert cases.difference(dataclasses.replace(measured, weight=should.weight), should) < 1e-6


def test_a_scale_and_coefficients_together() -> None:
    model, groups = cases.network(), cases.pieces([2, 2, 2], tokens=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for early in (False, True):
        model.zero_grad()
        with gradients.attach(model, optimizer, early=early) as tap:
            for piece in groups:
                loss = cases.mean_loss(model, piece)
                scaler.scale(loss * 0.25).backward()
                tap.note(piece.samples, 0.25, loss)
            scaler.unscale_(optimizer)
            measured, should = tap.read(factor=None, scaler=scaler).read(), expected(model, groups)
            assert cases.difference(dataclasses.replace(measured, weight=should.weight), should) < 1e-6
            scaler.update()


def test_a_window_without_weight_has_no_mean() -> None:
    model = cases.network()
    with gradients.attach(model) as tap:
        (cases.mean_loss(model, cases.pieces([2], tokens=False)[0]) * 0.0).backward()
        tap.note(0, 0.0)
        assert not tap.read(factor=None).read().finite


# -- nothing to compare


def _windows(tap: gradients.Tap, model: nn.Module, micro_batches: list[int]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in micro_batches:
            model.zero_grad()
            backwards(model, cases.pieces([2] * count, tokens=False), tap)
            assert tap.read().read().measurable == (count > 1 and tap.source.measuring)
    assert all(one.category is OneGroupWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_windows_of_one_group_are_warned_of_once() -> None:
    model = cases.network()
    with gradients.attach(model) as tap:
        assert _windows(tap, model, [1, 1]) == []
        (message,) = _windows(tap, model, [1, 1, 1, 1, 1, 1, 1])
        assert "first 3 windows had one group" in message and "accumulate 2 or more" in message


def test_windows_of_more_groups_are_not_warned_of() -> None:
    model = cases.network()
    with gradients.attach(model) as tap:
        assert _windows(tap, model, [1, 2, 1, 1, 1, 1]) == []
    with gradients.attach(nn.Sequential(model, nn.LayerNorm(6)), examples=True) as tap:
        assert _windows(tap, tap.model, [1, 1, 1, 1]) == []
    with gradients.attach(model) as tap:
        tap.measure(False)
        assert _windows(tap, model, [1, 1, 1, 1]) == []
