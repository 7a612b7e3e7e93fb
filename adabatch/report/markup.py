"""HTML built so that text cannot become markup: whatever is not ``Markup`` is escaped."""

from __future__ import annotations

import html

_NO_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")


class Markup(str):
    """Text that is HTML already."""


def escape(value: object) -> Markup:
    """``value`` as HTML text, safe in elements and in quoted attributes."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(str(value).translate(_NO_CONTROLS), quote=True))


def element(name: str, *children: object, **attributes: object) -> Markup:
    """An element with escaped children and attributes; ``None`` children are left out, ``class_`` means ``class``."""
    inside = "".join(escape(child) for child in children if child is not None)
    return Markup(f"<{name}{_attributes(attributes)}>{inside}</{name}>")


def joined(*children: object) -> Markup:
    """Children one after another, without an element around them."""
    return Markup("".join(escape(child) for child in children if child is not None))


def _attributes(attributes: dict[str, object]) -> str:
    named = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    return "".join(f' {key}="{escape(value)}"' for key, value in named)
