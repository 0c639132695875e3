"""A small SVG canvas: boxes, texts and arrows in a fixed set of colors that are readable on light and dark pages.

A drawing is its own document, shown by a page as an image, so its colors follow the reader's color scheme by a media
query. The same calls give the same bytes.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

# Name: (fill, line, text) on a light page, and on a dark one.
_COLORS: dict[str, tuple[tuple[str, str, str], tuple[str, str, str]]] = {
    "plain": (("#ffffff", "#8b98a5", "#1f2933"), ("#20262d", "#7d8a97", "#e6ebf0")),
    "soft": (("#f3f5f7", "#c3ccd5", "#1f2933"), ("#191d23", "#3d4752", "#e6ebf0")),
    "teal": (("#d9f2ee", "#0f766e", "#0b3b37"), ("#123f3b", "#5eead4", "#dffaf5")),
    "amber": (("#fdf0d5", "#b45309", "#4a2a05"), ("#47310f", "#fbbf24", "#fff3d6")),
    "violet": (("#ece6fb", "#6d28d9", "#2e1065"), ("#33225a", "#c4b5fd", "#f1ebff")),
    "rose": (("#fde4e6", "#be123c", "#4c0519"), ("#4a1a26", "#fda4af", "#ffe9ec")),
}
_MUTED = ("#52606d", "#a9b4bf")
_FONT = "font-family: system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_MONO = "font-family: ui-monospace, 'SFMono-Regular', Menlo, Consolas, monospace"
SIZE = 15  # of ordinary text
LINE = 20  # from one line of text to the next


class Canvas:
    """A drawing of a given size, in pixels at its natural size."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._size = (width, height)
        self._title = title
        self._description = description
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *, color: str = "plain", radius: int = 8) -> None:
        """A rectangle with its left upper corner at (x, y)."""
        self._parts.append(
            f'<rect class="{color}" x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
            f'height="{_number(height)}" rx="{radius}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        lines: str,
        *,
        color: str = "muted",
        anchor: str = "start",
        size: int = SIZE,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Lines of text, divided by newlines; (x, y) is the base line of the first."""
        style = ' font-weight="600"' if bold else ""
        kind = f"{color}-text mono" if mono else f"{color}-text"
        for number, line in enumerate(lines.split("\n")):
            self._parts.append(
                f'<text class="{kind}" x="{_number(x)}" y="{_number(y + number * LINE * size / SIZE)}" '
                f'font-size="{size}" text-anchor="{anchor}"{style}>{escape(line)}</text>'
            )

    def labelled_box(
        self, x: float, y: float, width: float, height: float, lines: str, *, color: str = "plain", mono: bool = False
    ) -> None:
        """A box with lines of text in its middle, the first of them bold."""
        self.box(x, y, width, height, color=color)
        count = lines.count("\n") + 1
        first = y + height / 2 - (count - 1) * LINE / 2 + SIZE * 0.35
        for number, line in enumerate(lines.split("\n")):
            self.text(
                x + width / 2, first + number * LINE, line, color=color, anchor="middle", bold=number == 0, mono=mono
            )

    def arrow(self, points: list[tuple[float, float]], *, color: str = "plain", both_ends: bool = False) -> None:
        """A line through points with a head at its end, or at both."""
        path = " ".join(f"{'ML'[number > 0]}{_number(x)} {_number(y)}" for number, (x, y) in enumerate(points))
        start = f' marker-start="url(#{color}-head)"' if both_ends else ""
        self._parts.append(f'<path class="{color}-line" d="{path}"{start} marker-end="url(#{color}-head)"/>')

    def to_svg(self) -> str:
        """The drawing as an SVG document."""
        width, height = self._size
        heads = "".join(
            f'<marker id="{name}-head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path class="{name}-head" d="M0 0L10 5L0 10z"/></marker>'
            for name in _COLORS
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title description">\n'
            f'<title id="title">{escape(self._title)}</title>\n'
            f'<desc id="description">{escape(self._description)}</desc>\n'
            f"<style>\n{_style()}</style>\n<defs>{heads}</defs>\n" + "\n".join(self._parts) + "\n</svg>\n"
        )


def _style() -> str:
    rules = [
        f"text {{ {_FONT} }}",
        f".mono {{ {_MONO} }}",
        "path { fill: none; stroke-width: 2 }",
        "rect { stroke-width: 1.5 }",
    ]
    light = _scheme(0)
    dark = [f"  {rule}" for rule in _scheme(1)]
    return "\n".join([*rules, *light, "@media (prefers-color-scheme: dark) {", *dark, "}"]) + "\n"


def _scheme(which: int) -> list[str]:
    rules = [f".muted-text {{ fill: {_MUTED[which]} }}"]
    for name, schemes in _COLORS.items():
        fill, line, text = schemes[which]
        rules += [
            f".{name} {{ fill: {fill}; stroke: {line} }}",
            f".{name}-text {{ fill: {text} }}",
            f".{name}-line {{ stroke: {line} }}",
            f".{name}-head {{ fill: {line}; stroke: none }}",
        ]
    return rules


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
