"""In which lengths of the gradient the noise scale is measured: by name, or as the optimizer suggests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adabatch.gradients.layout import Layout
from adabatch.gradients.preconditioned import FAMILIES, VIEWS, Preconditioned, family
from adabatch.gradients.rulers import Instrument
from adabatch.gradients.updates import is_muon

NAMES = ("auto", "euclidean", *VIEWS, "layers", "groups")

# The square-root form: on a byte-level GPT of 0.4 million parameters under AdamW its noise scale read 82, 84 and 105
# while the batch of half efficiency was measured as 138, 190 and 195; the other form read 1455, 118 and 2133.
ADAPTIVE = "adam_sqrt"

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

# What wrappers put into the names of the modules inside them.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def rulers_for(
    names: str | Sequence[str],
    optimizers: Optimizers,
    layout: Layout,
    *,
    depth: int = 1,
) -> tuple[Instrument, ...]:
    """What ``attach(rulers=...)`` takes so that these lengths are measured beside the Euclidean one, which always is.

    Args:
        names: of ``NAMES``. ``auto`` is ``suggested``; ``adam`` and ``adam_sqrt`` are the preconditioned lengths of
            ``preconditioned.Preconditioned``, which share their work when both are asked for; ``layers`` and ``groups``
            are the Euclidean lengths of the gradient's parts, by ``layers`` and by ``parameter_groups``.
        optimizers: of the model's parameters, all of them.
        layout: from ``layout.survey`` of the same model.
        depth: of ``layers``.

    Raises:
        ValueError: for an unknown name, or a preconditioned length where the optimizers have none or their state is
            sharded.
    """
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in NAMES:
            raise ValueError(f"a geometry is one of {', '.join(NAMES)}, got {name!r}")
    optimizers = _each(optimizers)
    chosen = {suggested(optimizers, layout) if name == "auto" else name for name in names}
    made: list[Instrument] = []
    if views := [view for view in VIEWS if view in chosen]:
        _require_second_moments(views, optimizers, layout)
        made.append(Preconditioned(views, optimizers, layout))
    if "layers" in chosen:
        made.append(layers(layout, depth))
    if "groups" in chosen:
        made.append(parameter_groups(optimizers, layout))
    return tuple(made)


def suggested(optimizers: Optimizers, layout: Layout) -> str:
    """``adam_sqrt`` where the optimizers have a second moment that we know, otherwise ``euclidean``.

    Muon's matrices have no say beside it: no quadratic length suits their step (``aligned.suggested``). Under FSDP2 it
    is ``euclidean``.
    """
    judged = [optimizer for optimizer in _each(optimizers) if not is_muon(optimizer)]
    return ADAPTIVE if judged and not layout.sharded and all(map(family, judged)) else "euclidean"


def layers(layout: Layout, depth: int = 1) -> Parts:
    """The Euclidean length by layer: ``layer:blocks.0``.

    A layer is named by the first ``depth`` parts of its module's path, where a number belongs to the part before it,
    and without the names that wrappers put there. Parameters of the root module itself go by their own names.

    Raises:
        ValueError: for a depth below 1.
    """
    if depth < 1:
        raise ValueError(f"the depth of layers must be 1 or more, got {depth}")
    wrappers = (*_WRAPPERS, "module") if layout.parallel else _WRAPPERS
    return Parts(
        [f"layer:{_layer(name, depth, wrappers)}" for name in layout.names],
        layout.device,
    )


def parameter_groups(optimizers: Optimizers, layout: Layout) -> Parts:
    """The Euclidean length by parameter group: ``group:0``, or ``group:1.0`` for the second of several optimizers.

    Parameters that are in no group now are left out.
    """
    optimizers = _each(optimizers)
    found = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            name = f"group:{index}" if len(optimizers) == 1 else f"group:{number}.{index}"
            found |= {id(parameter): name for parameter in group["params"]}
    return Parts([found.get(id(parameter)) for parameter in layout.parameters], layout.device)


class Parts:
    """Euclidean lengths of parts of the gradient, from the norms that were taken anyhow; an ``Instrument``.

    Args:
        places: the part that each parameter belongs to, ``None`` for none.
        device: of the parameters.
    """

    def __init__(self, places: Sequence[str | None], device: torch.device) -> None:
        self.device = device
        self.names = tuple(dict.fromkeys(place for place in places if place is not None))
        numbers = {name: number for number, name in enumerate(self.names)}
        self.places = [None if place is None else numbers[place] for place in places]

    def open(self) -> None:
        """Nothing depends on the optimizer's state."""

    def reading(self) -> _PartsReading:
        """Begin to add up one gradient of the whole model."""
        return _PartsReading(self)


class _PartsReading:
    """One gradient of the whole model on its way through ``Parts``."""

    def __init__(self, ruler: Parts) -> None:
        self._ruler = ruler
        self._norms: dict[int, Tensor] = {}

    def see(
        self,
        indices: Sequence[int],
        gradients: Sequence[Tensor],
        norms: Sequence[Tensor],
    ) -> None:
        """Take norms in."""
        self._norms.update(zip(indices, norms))

    def total(self) -> Tensor:
        """Squared lengths, (parts,)."""
        parts: list[list[Tensor]] = [[] for _ in self._ruler.names]
        for index in sorted(self._norms):
            place = self._ruler.places[index]
            if place is not None:
                parts[place].append(self._norms[index].reshape(-1))
        sizes = [sum(map(len, part)) for part in parts]
        found = [norm for part in parts for norm in part]
        joined = torch.cat(found) if found else torch.zeros(0, device=self._ruler.device)
        norms = torch._foreach_norm(joined.split(sizes), 2, torch.float64)
        return torch.stack(norms).square()


def _each(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def _layer(name: str, depth: int, wrappers: Sequence[str]) -> str:
    *path, own = [part for part in name.split(".") if part not in wrappers]
    if not path:
        return own
    begins = [place for place, part in enumerate(path) if place == 0 or not part.isdigit()]
    return ".".join(path[: begins[depth]] if depth < len(begins) else path)


def _require_second_moments(views: Sequence[str], optimizers: Sequence[torch.optim.Optimizer], layout: Layout) -> None:
    asked, known = (
        " and ".join(views),
        ", ".join(one.optimizer.__name__ for one in FAMILIES),
    )
    if layout.sharded:
        raise ValueError(
            f"{asked} under FSDP2 would need every rank's second moments on every rank: optimizer states are sharded, "
            f"while a group's gradient is whole. Use 'euclidean', 'layers' or 'groups', or DistributedDataParallel"
        )
    others = [type(one).__name__ for one in optimizers if not family(one) and not is_muon(one)]
    if others or not any(map(family, optimizers)):
        raise ValueError(
            f"{asked} needs an optimizer with a second moment ({known}; beside them Muon, whose parameters are left "
            f"out), but the model is trained by {', '.join(type(one).__name__ for one in optimizers) or 'none'}. "
            f"Lengths under different optimizers have no common unit: use 'euclidean' or 'groups'"
        )
    held = {
        id(parameter)
        for one in optimizers
        if family(one)
        for group in one.param_groups
        for parameter in group["params"]
    }
    if not held & layout.known:
        raise ValueError(
            f"{asked}: the optimizers hold none of the model's trainable parameters (first: {layout.names[0]!r}); hand "
            f"over the optimizers that train this model"
        )
