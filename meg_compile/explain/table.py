"""Plain text tables and numbers for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> str:
    """Aligned columns under a header; the columns in `right` are aligned to the right."""
    cells = [list(map(str, header)), *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    at_right = set(right)

    def line(row: Sequence[str]) -> str:
        parts = (c.rjust(w) if i in at_right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  " + "  ".join(parts).rstrip()

    return "\n".join([line(cells[0]), line(["-" * w for w in widths]), *map(line, cells[1:])])


def human_bytes(n: float) -> str:
    """Bytes with a binary unit: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def human_flops(part: float, total: float) -> tuple[str, str]:
    """A number of operations and all of them, in a unit that fits all: ("0.99", "1.2 GFLOPs")."""
    unit, scale = next((u, s) for u, s in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)) if total >= s or u == "K")
    return f"{part / scale:.4g}", f"{total / scale:.4g} {unit}FLOPs"


def human_count(n: float) -> str:
    """A count with a decimal unit: 8324358144 -> "8.32 B"."""
    for unit in ("", " K", " M", " B"):
        if abs(n) < 1000:
            return f"{n:.0f}" if not unit else f"{n:.2f}{unit}"
        n /= 1000
    return f"{n:.2f} T"
