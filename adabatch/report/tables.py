"""Tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``title`` over right-aligned columns, as plain text; heads may have several lines."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, padding=(0, 2), pad_edge=False)
    for column in head:
        drawn.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=500, highlight=False, markup=False, emoji=False, color_system=None).print(drawn)
    return "\n".join([title, *(f"  {line}".rstrip() for line in file.getvalue().splitlines())])
