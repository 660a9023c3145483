"""Numbers and tables as people read them, the same on a screen and in a document."""

from __future__ import annotations

_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def duration(seconds: float) -> str:
    """`48 s`, `22.5 min` or `12.3 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(nbytes: float) -> str:
    """Decimal, three digits: `26.3 MB`, `11.7 TB`."""
    factor, unit = next(((f, u) for f, u in _BYTE_UNITS if nbytes >= f), (1, "B"))
    return f"{nbytes / factor:.3g} {unit}"
