"""Random-number states of one rank as plain JSON: torch on the CPU and on CUDA, Python's ``random``, NumPy.

A state is restored only where it was taken: on the same rank of the same number of ranks. Otherwise every rank gets a
seed of its own, a function of the saved seed, the rank and the samples consumed.
"""

from __future__ import annotations

import base64
import hashlib
import random
import sys
from typing import Any

import torch


def file_of(rank: int) -> str:
    """The name of the file with rank ``rank``'s states."""
    return f"rng-{rank:05d}.json"


def take() -> dict[str, Any]:
    """This process's states; ``cuda`` (current device) and ``numpy`` are None where they are not in use."""
    version, words, gauss = random.getstate()
    return {
        "seed": torch.initial_seed(),
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "python": [version, list(words), gauss],
        "numpy": _take_numpy(),
    }


def put(states: dict[str, Any]) -> list[str]:
    """Restore this process's states; returns what could not be restored, which then is as it was."""
    lacking = []
    torch.set_rng_state(_tensor(states["torch"]))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if torch.cuda.is_available() and states["cuda"] is not None:
        torch.cuda.set_rng_state(_tensor(states["cuda"]))
    elif torch.cuda.is_available() or states["cuda"] is not None:
        lacking.append("CUDA")
    if states["numpy"] is not None and not _put_numpy(states["numpy"]):
        lacking.append("NumPy")
    return lacking


def derive(seed: int, rank: int, samples: int) -> int:
    """A 64-bit seed for one rank, from the saved seed and the samples consumed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {rank} {samples}".encode()).digest()[:8], "little")


def seed_all(seed: int) -> None:
    """Seed every generator of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _take_numpy() -> dict[str, Any] | None:
    if "numpy" not in sys.modules:
        return None
    # The global generator, which is a Mersenne twister unless somebody replaced it by a kind with another state.
    state = sys.modules["numpy"].random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    inner = state["state"]
    return {"key": inner["key"].tolist(), "pos": inner["pos"], "has_gauss": state["has_gauss"], "gauss": state["gauss"]}


def _put_numpy(state: dict[str, Any]) -> bool:
    try:
        import numpy
    except ImportError:
        return False
    words = numpy.array(state["key"], dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", words, state["pos"], state["has_gauss"], state["gauss"]))
    return True


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
