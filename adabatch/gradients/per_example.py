"""Exact lengths of every example's gradient, a diagnostic: what the cheaper measurements are checked against.

    with per_example_norms(model) as norms:
        loss(model, batch).backward()
    norms.squares        # (samples,)

It costs about as much as the backward pass again. Nothing is changed: no graph, no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adabatch.gradients.normalisation import (
    NORMALISATIONS,
    Keeper,
    affine_gradients,
    normalise_of,
    require_independent,
    title,
    widened,
)
from adabatch.gradients.outer import Outer, probe, squared_lengths

# How far the examples' gradients may add up to something else than the parameter's own: rounding in half precision.
TOLERANCE = 2e-2

COVERED = "Linear, Embedding, Conv1d, Conv2d, LayerNorm, RMSNorm, GroupNorm"

# What one use of a module adds to its parameters' gradients: matrices as sums, or (examples, *parameter) as they are.
Parts = dict[str, Outer | Tensor]


def per_example_norms(model: nn.Module, *, samples: int | None = None, partial: bool = False) -> PerExampleNorms:
    """A context for one forward and one backward pass, after which it holds the length of each example's gradient.

    Covers the weights and biases of ``nn.Linear``, ``nn.Embedding``, ``nn.Conv1d``, ``nn.Conv2d`` and the normalisation
    layers, used any number of times and shared between modules. Every layer's output must have the examples along
    dimension 0. What is not covered is refused, and so is a parameter that is used outside of its module: a random
    projection of the examples' summed gradients is compared with the gradient that backward gives it.

    Args:
        model: a plain module, or DistributedDataParallel, where gradients are this rank's own.
        samples: examples in the batch; by default what all layers agree on.
        partial: leave out what is not covered, and list it.

    Raises:
        ValueError: on entering, for parameters that are not covered and for BatchNorm in training mode; on leaving, or
            from ``backward()``, when a layer's output has another size along dimension 0, when a parameter's gradient
            does not come from its module alone, and when no gradient came, or more than one backward pass.
    """
    return PerExampleNorms(model, samples, partial)


@dataclass(slots=True)
class _Record:
    """What is known of one parameter.

    Attributes:
        owner: the first module that holds it.
        uses: how often modules that hold it ran.
        parts: what arrived and is not yet in ``squares``; an example's matrices lie one behind the other.
        matrices: how many matrices the parameter holds, one below the other; 0 for one that multiplies or is added
            elementwise.
        squares: (samples,), once all has arrived.
        summed, whole: projections of the examples' summed gradients and of the parameter's own.
        length: of the parameter's own gradient.
    """

    name: str
    parameter: nn.Parameter
    owner: str
    matrices: int
    uses: int = 0
    parts: list[Any] = field(default_factory=list)
    squares: Tensor | None = None
    summed: Tensor | None = None
    whole: Tensor | None = None
    length: Tensor | None = None


class PerExampleNorms:
    """Squared lengths of the examples' gradients; made by ``per_example_norms``, and filled at the context's end.

    The loss of a batch is a mean, so example i's gradient is that of its part p_i l_i of the loss: with equal weights,
    1 / samples times the gradient of the example alone.

    Attributes:
        squares: over all covered parameters, (samples,), in double precision.
        modules: the same by module; a parameter that several share counts for the first.
        uncovered: names of the parameters that were left out.
    """

    squares: Tensor
    modules: dict[str, Tensor]

    def __init__(self, model: nn.Module, samples: int | None, partial: bool) -> None:
        self.uncovered: tuple[str, ...] = ()
        self._model = model
        self._samples = samples
        self._partial = partial
        self._records: dict[int, _Record] = {}
        self._handles: list[RemovableHandle] = []
        self._keeper = Keeper()

    def __enter__(self) -> Self:
        require_independent(self._model.named_modules())
        uncovered, self._records = _survey(self._model)
        if uncovered and not self._partial:
            raise ValueError(
                f"the gradients of single examples are not known for {', '.join(uncovered)}; covered are weights and "
                f"biases of {COVERED}. Use partial=True to leave the others out"
            )
        self.uncovered = uncovered
        for name, module in self._model.named_modules():
            if any(id(parameter) in self._records for parameter in module.parameters(recurse=False)):
                hook = torch.compiler.disable(self._forward_hook(name))
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        for record in self._records.values():
            self._handles.append(record.parameter.register_hook(self._parameter_hook(record)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None:
            self._conclude()

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            if not (torch.is_grad_enabled() and output.requires_grad):
                return
            kept = [self._keeper.keep(args[0] if args else next(iter(kwargs.values())))]
            for record in self._records_of(module):
                record.uses += 1
            output.register_hook(lambda delta: self._arrived(name, module, kept, delta))

        return hook

    @torch.no_grad()
    def _arrived(self, name: str, module: nn.Module, kept: list[Callable[[], Tensor]], delta: Tensor) -> None:
        """Backward has reached a module's output."""
        where = title(name, module)
        if not kept or any(record.squares is not None for record in self._records_of(module)):
            raise ValueError(
                f"the gradient arrived at {where} once more after it was complete: run one forward and one backward "
                f"pass in each context, and use use_reentrant=False in activation checkpointing"
            )
        inputs = kept.pop()()
        self._require_samples(where, module, delta)
        for attribute, part in _parts_of(module, inputs, delta.detach()).items():
            record = self._records.get(id(getattr(module, attribute)))
            if record is not None:
                record.parts.append(part)
                if len(record.parts) == record.uses:
                    _complete(record)

    def _require_samples(self, where: str, module: nn.Module, delta: Tensor) -> None:
        least = {nn.Conv1d: 3, nn.Conv2d: 4}.get(_kind(module), 2)
        if delta.dim() < least:
            raise ValueError(f"the output of {where} has shape {tuple(delta.shape)}, without a dimension for samples")
        if self._samples is None:
            self._samples = len(delta)
        if len(delta) != self._samples:
            raise ValueError(
                f"the output of {where} has {len(delta)} rows along dimension 0 in a batch of {self._samples} samples; "
                f"examples must lie along dimension 0 of every layer's output"
            )

    def _parameter_hook(self, record: _Record) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            with torch.no_grad():
                record.whole = _projected(record, gradient)
                record.length = torch.linalg.vector_norm(gradient, dtype=torch.float64)

        return hook

    def _records_of(self, module: nn.Module) -> Iterator[_Record]:
        found = (self._records.get(id(parameter)) for parameter in module.parameters(recurse=False))
        return (record for record in found if record is not None)

    @torch.no_grad()
    def _conclude(self) -> None:
        for record in self._records.values():
            if record.parts:
                _complete(record)
        arrived = [record for record in self._records.values() if record.whole is not None]
        if not arrived:
            raise ValueError(
                "no gradient arrived at a parameter that is covered: run forward and backward inside the context"
            )
        outside = [record.name for record in arrived if _off(record) > TOLERANCE]
        if outside and not self._partial:
            raise ValueError(
                f"the gradients of {', '.join(outside)} do not come from their modules' calls alone: the model also "
                f"uses them in another way, forward ran before this context, or the model was compiled before it. Use "
                f"partial=True to leave them out"
            )
        if self._samples is None:
            raise ValueError(f"no parameter is left; the samples' gradients are not known for {', '.join(outside)}")
        self.uncovered += tuple(outside)
        covered = [record for record in arrived if record.name not in outside and record.squares is not None]
        device = next(iter(self._records.values())).parameter.device
        self.squares = torch.zeros(self._samples, dtype=torch.float64, device=device)
        self.modules = {}
        for record in covered:
            self.squares += record.squares
            former = self.modules.get(record.owner)
            self.modules[record.owner] = record.squares if former is None else former + record.squares
        self._records = {}


def _survey(model: nn.Module) -> tuple[tuple[str, ...], dict[int, _Record]]:
    """Names of the trained parameters that some module holds which is not covered, and records of the others."""
    records: dict[int, _Record] = {}
    uncovered: dict[int, str] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for owner, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if not _is_covered(module):
                uncovered[id(parameter)] = names[id(parameter)]
            matrices = getattr(module, "groups", 1) if attribute == "weight" and _kind(module) else 0
            records.setdefault(id(parameter), _Record(names[id(parameter)], parameter, owner, matrices))
    return tuple(uncovered.values()), {place: record for place, record in records.items() if place not in uncovered}


def _kind(module: nn.Module) -> type[nn.Module] | None:
    """Which of the covered modules with a matrix it is; none for one with a forward of its own."""
    return next((kind for kind in _PARTS if isinstance(module, kind) and type(module).forward is kind.forward), None)


def _is_covered(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.sparse):
        return False
    if any(type(parameter).__name__ == "DTensor" for parameter in module.parameters(recurse=False)):
        return False
    return _kind(module) is not None or normalise_of(module, NORMALISATIONS) is not None


def _complete(record: _Record) -> None:
    """Take the lengths of all that has arrived, and let it go."""
    parts, record.parts = record.parts, []
    if record.matrices:
        record.summed = probe(parts, *_signs(_matrix(record), parts[0].right.device))
        record.squares = squared_lengths(parts, _matrix(record)).view(-1, record.matrices).sum(1)
    else:
        gradients = sum(parts).flatten(1)
        record.summed = gradients.sum(0) @ _sign(gradients.shape[1], 0, gradients.device)
        record.squares = gradients.square().sum(1)


def _matrix(record: _Record) -> tuple[int, int]:
    """The shape of each matrix that the parameter holds, one below the other."""
    rows = len(record.parameter)
    return rows // record.matrices, record.parameter.numel() // rows


def _projected(record: _Record, gradient: Tensor) -> Tensor:
    """A product of the parameter's gradient with random signs: its square is on average the gradient's own."""
    if not record.matrices:
        return gradient.flatten().double() @ _sign(gradient.numel(), 0, gradient.device)
    rows, columns = _signs(_matrix(record), gradient.device)
    gradient = widened(gradient).reshape(-1, len(columns))
    return (gradient @ columns.to(gradient.dtype)).view(-1, len(rows)).sum(0).double() @ rows


def _signs(shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    return _sign(shape[0], 0, device), _sign(shape[1], 1, device)


def _sign(size: int, seed: int, device: torch.device) -> Tensor:
    """Random signs, the same in every call."""
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    return (2 * signs - 1).to(device, torch.float64)


def _off(record: _Record) -> float:
    """How far the examples' gradients are from adding up to the parameter's, relative to the longer of the two."""
    if record.squares is None:
        return math.inf
    size = max(record.length.item(), record.squares.sum().sqrt().item())
    return abs((record.summed - record.whole).item()) / size if size > 0 else 0.0


# -- what a module's parameters get from one use of it


def _linear(module: nn.Linear, inputs: Tensor, delta: Tensor) -> Parts:
    left = delta.reshape(len(delta), -1, module.out_features)
    right = inputs.reshape(len(delta), -1, module.in_features)
    return {"weight": Outer(left, right), "bias": left.sum(1, dtype=torch.float64)}


def _embedding(module: nn.Embedding, inputs: Tensor, delta: Tensor) -> Parts:
    if module.padding_idx is not None:
        delta = delta.masked_fill((inputs == module.padding_idx)[..., None], 0)
    return {"weight": Outer(inputs.reshape(len(delta), -1), delta.reshape(len(delta), -1, module.embedding_dim))}


def _convolution(module: nn.Conv1d | nn.Conv2d, inputs: Tensor, delta: Tensor) -> Parts:
    """A convolution multiplies patches of its input, one at each position of its output, with a matrix per group."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    inputs = F.pad(inputs, module._reversed_padding_repeated_twice, mode)
    # A sequence is an image of height 1.
    flat = inputs.dim() == 3
    sides = [(1, *side) if flat else side for side in (module.kernel_size, module.dilation, module.stride)]
    kernel, dilation, stride = sides
    patches = F.unfold(inputs.unsqueeze(2) if flat else inputs, kernel, dilation=dilation, stride=stride)
    matrices = len(delta) * module.groups
    left = delta.reshape(matrices, module.out_channels // module.groups, -1).mT
    right = patches.reshape(matrices, -1, patches.shape[-1]).mT
    return {"weight": Outer(left, right), "bias": delta.flatten(2).sum(2, dtype=torch.float64)}


_PARTS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Parts]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
}


def _parts_of(module: nn.Module, inputs: Tensor, delta: Tensor) -> Parts:
    """What one use adds to the gradients of the module's weight and bias."""
    kind = _kind(module)
    if kind is not None:
        return _PARTS[kind](module, inputs, delta)
    normalise = normalise_of(module, NORMALISATIONS)
    assert normalise is not None
    return affine_gradients(module, normalise, inputs, delta.double())
