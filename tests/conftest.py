"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every machine and in every run; a slow machine fails nothing.
settings.register_profile("adabatch", derandomize=True, database=None, deadline=None, max_examples=60)
settings.load_profile("adabatch")
