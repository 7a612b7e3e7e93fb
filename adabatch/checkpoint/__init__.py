"""Checkpoints: saved aside and renamed into place, verified before they are read, never half there.

A checkpoint is a folder ``step-0000000120``: model and optimizer tensors as a torch distributed checkpoint, and plain
JSON for all that is not a tensor. ``manifest.json`` lists the size and SHA-256 of every file.
"""

from __future__ import annotations

from adabatch.checkpoint.files import CheckpointError, Manifest
from adabatch.checkpoint.folder import Checkpoints, Choice

__all__ = ["CheckpointError", "Checkpoints", "Choice", "Manifest"]
