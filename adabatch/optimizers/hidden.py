"""Which of a model's parameters are the matrices inside the network, for optimizers such as Muon."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def hidden_matrices(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Names of the trainable matrices that map between hidden layers, in the model's order.

    Without ``patterns`` these are the two-dimensional parameters of modules that are neither an ``nn.Embedding`` nor
    the output layer, which is taken to be the ``nn.Linear`` that the model registered last (embeddings include what is
    tied to them). A matrix that the root module holds by itself, such as learned positions, is none.

    Args:
        model: whose parameters are looked over.
        patterns: of names, as in ``fnmatch``: the two-dimensional ones among those that match are taken instead.

    Raises:
        ValueError: for a pattern that matches no two-dimensional parameter.
    """
    matrices = {name: one for name, one in model.named_parameters() if one.requires_grad and one.dim() == 2}
    if patterns is not None:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in matrices):
                raise ValueError(f"{pattern!r} matches no trainable matrix; there are {', '.join(matrices) or 'none'}")
        return [name for name in matrices if any(fnmatchcase(name, pattern) for pattern in patterns)]
    outside = {id(one) for one in _outside(model)}
    return [name for name, one in matrices.items() if id(one) not in outside]


def _outside(model: nn.Module) -> list[nn.Parameter]:
    embeddings = [one.weight for one in model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
    return [*embeddings, *model.parameters(recurse=False), *(one.weight for one in linear[-1:])]
