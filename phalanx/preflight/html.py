"""A report as one page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from phalanx.preflight.checks import human, shown
from phalanx.preflight.text import (
    KINDS,
    collective_rows,
    heading,
    memory_rows,
    scaling_rows,
    seconds,
    work_rows,
)

if TYPE_CHECKING:
    from phalanx.preflight.report import Report

_COLOURS = {
    "params": "#3f51b5",
    "slots": "#7e57c2",
    "inputs": "#26a69a",
    "constants": "#8d6e63",
    "padding": "#b0bec5",
    "outputs": "#66bb6a",
    "temp": "#ffa726",
    "code": "#78909c",
}

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
.verdict { border-radius: .4rem; color: #fff; padding: .5rem .8rem; overflow-wrap: anywhere; }
.fits { background: #2e7d32; } .bad { background: #c62828; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; min-width: 60%; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; }
td.n { text-align: right; white-space: nowrap; }
svg { display: block; height: auto; max-width: 100%; }
svg text { fill: currentColor; font-size: 12px; }
pre { background: #8882; overflow-x: auto; padding: .6rem; white-space: pre-wrap; }
li { margin-bottom: .5rem; overflow-wrap: anywhere; }
.key { display: inline-block; margin-right: 1rem; white-space: nowrap; }
.key i { border-radius: 2px; display: inline-block; height: .8em; margin-right: .3em; width: .8em; }
"""


def page(report: Report) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escape(heading(report))}</h1>",
        f'<p class="verdict {"fits" if report.fits else "bad"}">{escape(report.message)}</p>',
        "<h2>Memory of a device</h2>",
        memory_bar(report),
        _table(("", "bytes", "share"), memory_rows(report)),
        "<h2>Largest tensors</h2>",
        _table(("", "bytes", "where"), [(b.what, human(b.bytes), shown(b.line)) for b in report.largest_buffers]),
        "<h2>Work of a step</h2>",
        _table(("", ""), work_rows(report)),
    ]
    roofline = roofline_plot(report)
    if roofline:
        parts += ["<h2>Roofline</h2>", roofline]
    if report.collectives:
        columns = ("", "bytes", "times", "over", "group", "source")
        parts += ["<h2>Collectives</h2>", _table(columns, collective_rows(report.collectives))]
    scaling = scaling_plot(report)
    if scaling:
        sizes = _table(("chips", "topology", "step", "efficiency", ""), scaling_rows(report))
        parts += ["<h2>Scaling, as many rows for each replica</h2>", scaling, sizes]
    if report.warnings:
        items = "".join(
            f"<li><b>{escape(w.kind)}</b> {escape(str(w).partition(': ')[2])}</li>" for w in report.warnings
        )
        parts += ["<h2>Warnings</h2>", f"<ul>{items}</ul>"]
    if report.compiler_message:
        parts += ["<h2>The compiler's message</h2>", f"<pre>{escape(report.compiler_message)}</pre>"]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.name)} on {escape(report.topology)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


_NUMBERS = {"bytes", "share", "times", "group", "chips", "step", "efficiency"}


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns) if any(columns) else ""
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="n">{escape(cell)}</td>' if column in _NUMBERS else f"<td>{escape(cell)}</td>"
            for column, cell in zip(columns, row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'


def _svg(width: int, height: int, inner: list[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{escape(label)}">'
        + "".join(inner)
        + "</svg>"
    )


def memory_bar(report: Report) -> str:
    """One bar: each kind of memory in its colour, and a mark where the memory ends."""
    b = report.bytes
    width, x = 640, 0.0
    whole = max(b.total, b.available or 0, 1)
    inner, keys = [], []
    for kind, colour in _COLOURS.items():
        amount = getattr(b, kind)
        if not amount:
            continue
        w = width * amount / whole
        title = f"{KINDS[kind]}: {human(amount)}"
        inner.append(
            f'<rect x="{x:.1f}" y="4" width="{w:.1f}" height="34" fill="{colour}"><title>{escape(title)}</title></rect>'
        )
        keys.append(f'<span class="key"><i style="background:{colour}"></i>{escape(title)}</span>')
        x += w
    if b.available is not None:
        end = width * b.available / whole
        inner.append(f'<line x1="{end:.1f}" y1="0" x2="{end:.1f}" y2="42" stroke="currentColor" stroke-width="2"/>')
        anchor = "end" if end > width / 2 else "start"
        inner.append(f'<text x="{end:.1f}" y="56" text-anchor="{anchor}">{human(b.available)} available</text>')
    return _svg(width, 62, inner, "memory of a device") + f"<p>{''.join(keys)}</p>"


class _Axes:
    """Logarithmic axes."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], logarithmic_y: bool = True) -> None:
        self.width, self.height = 640, 320
        self._x, self._y, self._log_y = x, y, logarithmic_y

    def at(self, x: float, y: float) -> tuple[float, float]:
        fx = math.log(x / self._x[0]) / math.log(self._x[1] / self._x[0])
        low, high = self._y
        fy = math.log(y / low) / math.log(high / low) if self._log_y else (y - low) / (high - low)
        return 60 + fx * (self.width - 80), self.height - 40 - fy * (self.height - 60)

    def frame(self, x_label: str, y_label: str) -> list[str]:
        left, bottom = self.at(self._x[0], self._y[0])
        right, top = self.at(self._x[1], self._y[1])
        return [
            f'<path d="M{left:.0f} {top:.0f}V{bottom:.0f}H{right:.0f}" fill="none" stroke="currentColor"/>',
            f'<text x="{(left + right) / 2:.0f}" y="{self.height - 6}" text-anchor="middle">{escape(x_label)}</text>',
            f'<text x="4" y="12">{escape(y_label)}</text>',
        ]

    def tick_x(self, x: float, text: str) -> str:
        px, py = self.at(x, self._y[0])
        return f'<text x="{px:.1f}" y="{py + 16:.1f}" text-anchor="middle">{escape(text)}</text>'

    def tick_y(self, y: float, text: str) -> str:
        px, py = self.at(self._x[0], y)
        return f'<text x="{px - 6:.1f}" y="{py + 4:.1f}" text-anchor="end">{escape(text)}</text>'

    def line(self, points: list[tuple[float, float]], colour: str, dashed: bool = False) -> str:
        path = "L".join("{:.1f} {:.1f}".format(*self.at(*p)) for p in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'

    def dot(self, x: float, y: float, colour: str, title: str, hollow: bool = False) -> str:
        px, py = self.at(x, y)
        fill = "none" if hollow else colour
        return (
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2">'
            f"<title>{escape(title)}</title></circle>"
        )


def roofline_plot(report: Report) -> str:
    """What the chip allows for each FLOP per byte, and where the step is."""
    chip, time = report.target.chip, report.step_time
    if chip is None or time is None or not report.bytes_accessed or not report.flops:
        return ""
    peak, bandwidth = chip.flops["bfloat16"] / chip.devices, chip.hbm_bandwidth / chip.devices
    intensity = report.flops_per_device / report.bytes_accessed
    ridge = peak / bandwidth
    x = (min(intensity, ridge) / 30, max(intensity, ridge) * 30)
    axes = _Axes(x, (bandwidth * x[0], peak * 3))
    reached = min(peak, bandwidth * intensity)
    inner = axes.frame("FLOP for each byte of memory traffic", "FLOP/s of a device")
    inner += [
        axes.line([(x[0], bandwidth * x[0]), (ridge, peak), (x[1], peak)], "#3f51b5"),
        axes.dot(intensity, reached, "#ffa726", f"{report.name}: at most {reached:.3g} FLOP/s"),
        axes.tick_x(intensity, f"{intensity:.3g}"),
        axes.tick_y(peak, f"{peak:.3g}"),
    ]
    if abs(math.log(ridge / intensity)) > 0.5:
        inner.append(axes.tick_x(ridge, f"{ridge:.3g}"))
    return _svg(axes.width, axes.height, inner, f"roofline: {intensity:.3g} FLOP per byte")


def scaling_plot(report: Report) -> str:
    """Efficiency by number of chips; hollow where it is computed."""
    points = report.__dict__.get("scaling", ())
    if len(points) < 2:
        return ""
    axes = _Axes((points[0].chips * 0.8, points[-1].chips * 1.25), (0.0, 1.05), logarithmic_y=False)
    inner = axes.frame("chips", "efficiency")
    inner += [axes.tick_y(y, f"{y:.0%}") for y in (0.25, 0.5, 0.75, 1.0)]
    inner.append(axes.line([(s.chips, min(1.05, s.efficiency)) for s in points], "#3f51b5"))
    for s in points:
        title = f"{s.chips} chips ({'compiled' if s.compiled else 'computed'}): {s.efficiency:.1%}, {seconds(s.step_time.seconds_without_overlap)}"
        inner.append(axes.dot(s.chips, min(1.05, s.efficiency), "#3f51b5", title, hollow=not s.compiled))
        inner.append(axes.tick_x(s.chips, str(s.chips)))
    return _svg(axes.width, axes.height, inner, "scaling efficiency")
