"""Groups of one sample: per-example gradients of the normalisation layers, seen from a hook on each of them.

The gradient at a layer's output and the layer's input give every example's gradient of the layer's weight and bias, in
one pass over an activation that is there anyway (arXiv 2411.00999). The loss of a micro-batch is a mean, so what is
seen of example i is p_i g_i already. What this measures is the noise scale of those layers' parameters; what it says
about the whole model's is for ``adabatch.slope`` to find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from adabatch.gradients.layout import Layout
from adabatch.gradients.normalisation import (
    NORMALISATIONS,
    Keeper,
    Normalise,
    NormLayer,
    affine_gradients,
    norm_layers,
    require_batch_first,
    require_independent,
)
from adabatch.gradients.norms import pieces, together
from adabatch.noise import NORM_LAYERS

# The view of a window in which these groups are measured.
VIEW = NORM_LAYERS

# How far the examples' gradients may add up to something else than the parameter's own: rounding in half precision.
TOLERANCE = 2e-2

ONCE = (
    "call note() after each backward, add the losses up for one backward, and use use_reentrant=False in activation "
    "checkpointing"
)
COMPILED = "single examples are measured outside of the graph, behind every normalisation layer; use kind='hooks'"


@dataclass(slots=True)
class _Seen:
    """What one micro-batch's backward has shown so far.

    Attributes:
        gradients: per-example gradients (examples, *parameter) by parameter, summed over the uses of the parameter.
        increments: what backward adds to the parameter's ``.grad``; ``None`` where nobody will compare.
        fault: the first thing that went wrong.
    """

    gradients: dict[int, Tensor] = field(default_factory=dict)
    increments: dict[int, Tensor | None] = field(default_factory=dict)
    fault: str | None = None


class NormLayerRuler:
    """The squared length of a gradient in the normalisation layers' parameters alone; a ``rulers.Ruler``."""

    name = VIEW

    def __init__(self, indices: frozenset[int]) -> None:
        self.indices = indices

    def open(self) -> None:
        """Nothing depends on the optimizer."""

    def square(self, index: int, gradient: Tensor) -> Tensor | None:
        """Squared length of parameter ``index``'s gradient, a scalar; ``None`` outside normalisation layers."""
        return together([pieces(gradient)], gradient.device).square() if index in self.indices else None


class ExampleSource:
    """A hook on every normalisation layer: every example is a group, seen in these layers' parameters only.

    The hooks change nothing: no graph, no gradient. They look at the weights and biases of ``nn.LayerNorm``,
    ``nn.RMSNorm`` and ``nn.GroupNorm`` that are trained, also when a layer runs several times in one forward pass,
    under autocast, activation checkpointing, ``no_sync`` and DDP, where they see this rank's own gradients. The first
    gradient of each parameter is compared with the sum over its examples, for which the host waits once for the device.

    ``torch.compile`` breaks its graph at each of them, so the source stays on its layers, idle, while it does not
    measure, and must be there before the first forward pass.

    Args:
        layout: of the model.
        model: what the loop calls.
        sample_dimension: which dimension of the layers' inputs counts examples; 1 for sequences first. ``None`` is 0,
            and refused for models that say ``batch_first=False``. GroupNorm has them along 0.
        rows: names of layers whose input is flattened to (examples x rows, ...), every example's rows one behind the
            other, with their number of rows.
        normalisations: kinds of layers and how each computes its output without weight and bias; for other kinds than
            torch's. Their output must be that, times ``weight``, plus ``bias`` if they have one.

    Attributes:
        ruler: the same view of a mean gradient, whose squared length belongs beside what ``collect`` returns.

    Raises:
        ValueError: for a model without a trained normalisation layer, with BatchNorm in training mode, or in which
            samples are not along dimension 0 and no ``sample_dimension`` was given; for unknown names in ``rows``.
    """

    kind = "examples"
    groups = "one group per sample, normalisation layers only"
    by_rank = False
    by_example = True

    def __init__(
        self,
        layout: Layout,
        model: nn.Module,
        *,
        sample_dimension: int | None = None,
        rows: Mapping[str, int] | None = None,
        normalisations: Mapping[type[nn.Module], Normalise] = NORMALISATIONS,
    ) -> None:
        self._layout = layout
        self._layers = norm_layers(layout, model, sample_dimension or 0, rows or {}, normalisations)
        if sample_dimension is None:
            require_batch_first(model)
        self._coupling = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        require_independent(self._coupling)
        self._indices = sorted({index for layer in self._layers for index in layer.indices.values()})
        self.ruler = NormLayerRuler(frozenset(self._indices))
        self._keeper = Keeper()
        self._measuring = False
        self._seen = _Seen()
        self._unverified = set() if layout.sharded else set(self._indices)
        self._square: Tensor | None = None
        self._handles: list[RemovableHandle] = [
            layer.module.register_forward_hook(
                torch.compiler.disable(self._forward_hook(layer), reason=COMPILED), with_kwargs=True
            )
            for layer in self._layers
        ]
        # A shard's own hooks never fire: autograd knows the whole parameter only.
        if not layout.sharded:
            self._handles += [layout.parameters[index].register_hook(self._hook(index)) for index in self._indices]

    @property
    def measuring(self) -> bool:
        """Whether the hooks are at work, or idle."""
        return self._measuring

    @property
    def reduction(self) -> float:
        """What a gradient is divided by, relative to the sum over all groups: DDP and FSDP2 take means over ranks."""
        if self._layout.shards is not None:
            return self._layout.shards.divisor
        return self._layout.world if self._layout.parallel else 1

    def measure(self, on: bool) -> None:
        """Let the hooks work, or be idle."""
        self._measuring = on

    def open(self, summing: bool = False) -> None:
        """Begin a window: forget what was seen outside of it. The sum over ranks is DDP's business here.

        Raises:
            ValueError: when a BatchNorm couples the examples of a micro-batch.
        """
        if self._measuring:
            require_independent(self._coupling)
        self._seen = _Seen()
        self._square = None

    def close_micro_batch(self, weight: float | Tensor, last: bool | None = None, *, examples: int) -> None:
        """Take in the micro-batch whose backward is done; one of weight 0 has no groups.

        Args:
            weight: of the micro-batch's loss.
            examples: in the micro-batch; those of weight 0 count, such as padding.

        Raises:
            ValueError: when the hooks did not fire, backward ran twice, an input's dimension of samples has another
                size, or the examples' gradients do not add up to what a parameter got. It names the layer.
        """
        if not self._measuring:
            return
        seen, self._seen = self._seen, _Seen()
        if seen.fault:
            raise ValueError(seen.fault)
        if not isinstance(weight, Tensor) and weight == 0:
            return
        self._require_seen(seen)
        self._require_examples(seen, examples)
        self._verify(seen)
        # They are few numbers, so that one copy of all costs less than a norm of each.
        gradients = torch.cat([seen.gradients[index].flatten() for index in sorted(seen.gradients)])
        square = together([pieces(gradients)], self._layout.device).square()
        self._square = square if self._square is None else self._square + square

    def collect(self) -> Tensor | None:
        """sum(|p_i g_i|^2) over the window's examples on this rank, (1,); ``None`` when not measured."""
        square, self._square = self._square, None
        if not self._measuring:
            return None
        return torch.zeros(1, dtype=torch.float64, device=self._layout.device) if square is None else square.view(1)

    def detach(self) -> None:
        """Remove every hook."""
        self._measuring = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- hooks

    def _forward_hook(self, layer: NormLayer) -> Callable[..., None]:
        needs_input = "weight" in layer.indices

        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            if not (self._measuring and torch.is_grad_enabled() and output.requires_grad):
                return
            inputs = args[0] if args else next(iter(kwargs.values()))
            waiting = [self._keeper.keep(inputs) if needs_input else _nothing]
            output.register_hook(lambda delta: self._arrived(layer, waiting, delta))

        return hook

    def _arrived(self, layer: NormLayer, waiting: list[Callable[[], Tensor | None]], delta: Tensor) -> None:
        """Backward has reached a layer's output; its input is let go with this."""
        if not self._measuring:
            return
        if not waiting:
            self._fault(f"the gradient arrived twice at {layer} in one micro-batch; {ONCE}")
            return
        size, rows = delta.shape[layer.dimension], layer.rows
        if size % rows:
            self._fault(
                f"{layer} has an input of size {size} along dimension {layer.dimension}, which is no multiple "
                f"of its rows={rows}"
            )
            return
        with torch.no_grad():
            gradients = affine_gradients(
                layer.module,
                layer.normalise,
                _given_back(layer, waiting.pop()),
                delta.detach(),
                dimension=layer.dimension,
                rows=rows,
            )
        for name, gradient in gradients.items():
            self._add(layer, layer.indices[name], gradient)

    def _add(self, layer: NormLayer, index: int, gradient: Tensor) -> None:
        """One use of a parameter more: an example's gradients are added up before any length is taken."""
        former = self._seen.gradients.get(index)
        if former is not None and former.shape != gradient.shape:
            self._fault(f"{layer} ran with inputs of {len(former)} and of {len(gradient)} samples in one micro-batch")
            return
        self._seen.gradients[index] = gradient if former is None else former + gradient

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if not self._measuring:
                return
            if index in self._seen.increments:
                name = self._layout.names[index]
                self._fault(f"the gradient of parameter {name!r} arrived twice in one micro-batch; {ONCE}")
            self._seen.increments[index] = gradient if index in self._unverified else None

        return hook

    def _fault(self, words: str) -> None:
        self._seen.fault = self._seen.fault or words

    # -- checks

    def _require_seen(self, seen: _Seen) -> None:
        if not seen.gradients and not seen.increments:
            raise ValueError(
                f"no gradient arrived at any of the {len(self._layers)} normalisation layers (first: "
                f"{self._layers[0]}): backward did not reach the tapped model, its layers were replaced after "
                f"attach(), or note() came before backward"
            )
        for layer in self._layers:
            if any(index in seen.increments and index not in seen.gradients for index in layer.indices.values()):
                raise ValueError(
                    f"{layer} has a gradient, but its hook did not fire: the model uses its parameters without calling "
                    f"it, or torch.compile had compiled it before the tap was there. In the first case measure with "
                    f"kind='hooks'; in the second attach before the first forward pass, or after torch._dynamo.reset()"
                )

    def _require_examples(self, seen: _Seen, examples: int) -> None:
        for layer in self._layers:
            for index in layer.indices.values():
                if index in seen.gradients and len(seen.gradients[index]) != examples:
                    found = len(seen.gradients[index])
                    raise ValueError(
                        f"{layer} has {found} samples along dimension {layer.dimension} of its input, in a micro-batch "
                        f"of {examples}. If the input is flattened to (samples x rows, ...), give its rows per sample "
                        f"(rows={{{layer.name!r}: ...}}); if another dimension counts samples, give sample_dimension; "
                        f"padding counts, as samples of weight 0; or measure with kind='hooks'"
                    )

    def _verify(self, seen: _Seen) -> None:
        """Once for every parameter: its examples' gradients add up to what it got."""
        for index in sorted(self._unverified & seen.gradients.keys()):
            increment = seen.increments.get(index)
            if increment is None:
                continue
            off = _distance(seen.gradients[index], increment)
            if not math.isfinite(off):
                continue
            self._unverified.discard(index)
            if off > TOLERANCE:
                raise ValueError(
                    f"the samples' gradients of parameter {self._layout.names[index]!r} add up to something else than "
                    f"its gradient (off by {off:.1e} of it): the model also uses it outside of its layer, or the layer "
                    f"computes something else than weight x normalised input + bias; measure with kind='hooks'"
                )


def _distance(gradients: Tensor, increment: Tensor) -> float:
    """How far the examples' ``gradients`` are from adding up to ``increment``, relative to the longer of the two.

    NaN when both are 0, or a number is not finite.
    """
    lengths = [pieces(gradients), pieces(increment), pieces(gradients.sum(0) - increment)]
    examples, whole, off = torch.stack([together([length], increment.device) for length in lengths]).tolist()
    return off / max(examples, whole) if max(examples, whole) > 0 else math.nan


def _given_back(layer: NormLayer, kept: Callable[[], Tensor | None]) -> Tensor | None:
    """The layer's input.

    Raises:
        ValueError: when it was changed in place meanwhile.
    """
    try:
        return kept()
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise ValueError(
            f"the input of {layer} was changed in place after the layer had run, and is needed to see single samples; "
            f"write x = x + y for x += y there, or measure with kind='hooks'"
        ) from error


def _nothing() -> None:
    """The input of a layer whose weight is not trained."""
