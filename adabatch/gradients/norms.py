"""Norms of gradients, without copies: squares in single precision, sums of squares in double.

torch's single-precision norm of one large CPU tensor adds everything up in single precision, and is low by 3e-4 at five
million elements (measured). An estimate that subtracts two such norms cannot bear that, so large tensors are cut into
chunks whose norms are put together in double precision. It costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adabatch.gradients.layout import BULK_ELEMENTS, HALF, Alike

# Elements of one chunk: its norm is right to 1e-7.
CHUNK = 4096


def pieces(gradient: Tensor) -> Tensor:
    """Norms of parts of ``gradient``, a scalar or a vector; the norm of these is the gradient's. |g|^2 is re^2 + im^2.

    Raises:
        ValueError: for a sparse gradient.
    """
    if gradient.layout != torch.strided:
        raise ValueError("a gradient is sparse, which is not supported; set sparse=False in the embedding it is from")
    dtype = torch.float32 if gradient.dtype in HALF else None
    if gradient.numel() <= BULK_ELEMENTS:
        return torch.linalg.vector_norm(gradient, dtype=dtype)
    if not gradient.is_contiguous():
        # Row by row, whatever the strides: making it contiguous would be a copy.
        return torch.linalg.vector_norm(gradient, dim=tuple(range(1, gradient.dim())) or 0, dtype=dtype)
    flat = gradient.view(-1)
    whole = flat.numel() // CHUNK * CHUNK
    if whole == flat.numel():
        return torch.linalg.vector_norm(flat.view(-1, CHUNK), dim=1, dtype=dtype)
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.cat((norms, rest.view(1)))


def each(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The ``pieces`` of every gradient; small ones by one kernel where the device has it.

    Raises:
        ValueError: for a sparse gradient.
    """
    small = [gradient for gradient in gradients if gradient.numel() <= BULK_ELEMENTS]
    norms = iter(_bulk(small) if small else ())
    return [next(norms) if gradient.numel() <= BULK_ELEMENTS else pieces(gradient) for gradient in gradients]


def together(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of norms, in double precision; 0 for none."""
    scalars = [part for part in parts if part.dim() == 0]
    vectors = [part for part in parts if part.dim() > 0]
    if scalars:
        vectors.append(torch.stack(scalars))
    if not vectors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.cat(vectors) if len(vectors) > 1 else vectors[0], dtype=torch.float64)


def gradient_norms(alike: Sequence[Alike]) -> tuple[list[Tensor], list[Tensor]]:
    """All gradients that exist, the small and the large ones of each dtype, and their ``pieces``.

    Raises:
        ValueError: when no parameter has a gradient, or one is sparse.
    """
    gradients: list[Tensor] = []
    norms: list[Tensor] = []
    for parameters in alike:
        small, large = parameters.gradients()
        gradients += small + large
        norms += [*(_bulk(small) if small else ()), *map(pieces, large)]
    if not norms:
        raise ValueError("no parameter has a gradient: backward did not reach the model, or zero_grad() came before")
    return gradients, norms


def _bulk(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Scalar norms of small gradients of one dtype, by one kernel where the device has it."""
    if any(gradient.layout != torch.strided for gradient in gradients):
        return [pieces(gradient) for gradient in gradients]
    return torch._foreach_norm(gradients, 2, torch.float32 if gradients[0].dtype in HALF else None)
