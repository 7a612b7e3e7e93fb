"""When gradients travel over the ranks: after every micro-batch, or after a window's last one only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from adabatch.gradients.layout import Layout

# Synchronise each micro-batch (memory stays small), or the last only (fewer collectives; under FSDP2 every rank then
# holds a whole gradient from one micro-batch to the next).
CHOICES = ("each", "last")


class Synchroniser:
    """Keeps gradients on their rank, or lets them travel; under DistributedDataParallel and FSDP2.

    Attributes:
        each: whether every micro-batch is synchronised. Under FSDP2 that is the default.
    """

    def __init__(self, layout: Layout, choice: str | None = None) -> None:
        """
        Raises:
            ValueError: for a choice that is unknown or not to be had.
        """
        if choice is not None and choice not in CHOICES:
            raise ValueError(f"sync must be one of {', '.join(CHOICES)} or None, got {choice!r}")
        if choice == "each" and layout.shards is None:
            raise ValueError(
                "sync='each' is for FSDP2, where it saves memory; elsewhere only the last micro-batch is synchronised "
                "(sync='last' or None)"
            )
        self._layout = layout
        self.each = layout.shards is not None and choice != "last"

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's forward and backward: its gradients travel when it is the last one, or all do."""
        if last or self.each:
            yield
            return
        with ExitStack() as quiet:
            for module in self._layout.parallel:
                quiet.enter_context(module.no_sync())
            for root in self._layout.shards.roots if self._layout.shards else ():
                root.set_requires_gradient_sync(False)
                quiet.callback(root.set_requires_gradient_sync, True)
            yield
