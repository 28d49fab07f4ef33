"""A profile as a page of its own: no scripts, no other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_COLOURS = {
    "compute": "#2a9d5c",
    "collectives": "#7b5cd6",
    "input": "#e09f3e",
    "host": "#3b82c4",
    "compilation": "#d1495b",
}
_MOST_SPANS = 4000
"""On a page; the longest ones are shown."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
svg { width: 100%; height: auto; background: #f6f6f4; border-radius: 4px; }
text { font: 11px system-ui, sans-serif; fill: #555; }
.verdict { font-size: 1.2rem; font-weight: 600; }
li { list-style: none; } ul { padding: 0; }
.box { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.5em; border-radius: 2px; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } svg { background: #242424; } text { fill: #aaa; } }
"""

Spans = Sequence[tuple[str, str, float, float, str]]
"""Lane, kind, start, seconds, name."""


def page(head: str, verdict: str, shares: Sequence[tuple[str, str, float]], spans: Spans) -> str:
    """The whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Profile of a training step</title><style>{_STYLE}</style></head><body><h1>Profile of a training step</h1>"
        f'<p>{escape(head)}</p><p class="verdict">{escape(verdict)}</p>{_bar(shares)}<ul>{_legend(shares)}</ul>'
        f"<h2>A few steps</h2>{_timeline(spans)}</body></html>"
    )


def _bar(shares: Sequence[tuple[str, str, float]]) -> str:
    parts, x = [], 0.0
    for label, kind, share in shares:
        parts.append(_box(x * 1000, 0, share * 1000, 40, kind, f"{label}: {share:.1%}"))
        x += share
    return f'<svg viewBox="0 0 1000 40" role="img" aria-label="Shares of a step">{"".join(parts)}</svg>'


def _legend(shares: Sequence[tuple[str, str, float]]) -> str:
    return "".join(
        f'<li><span class="box" style="background:{_COLOURS[kind]}"></span>{escape(label)}: {share:.1%}</li>'
        for label, kind, share in shares
    )


def _timeline(spans: Spans) -> str:
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(lane for lane, *_ in spans))}
    end = max((start + seconds for _, _, start, seconds, _ in spans), default=0.0) or 1.0
    shown = sorted(sorted(spans, key=lambda span: -span[3])[:_MOST_SPANS], key=lambda span: span[2])
    left, width, height = 120, 880, 26
    parts = [f'<text x="4" y="{i * height + 17}">{escape(lane)}</text>' for lane, i in lanes.items()]
    for lane, kind, start, seconds, name in shown:
        what = f"{name or kind}: {seconds * 1e3:.3f} ms"
        parts.append(
            _box(left + start / end * width, lanes[lane] * height + 3, seconds / end * width, height - 6, kind, what)
        )
    bottom = len(lanes) * height + 18
    parts.append(f'<text x="{left}" y="{bottom - 4}">0</text>')
    parts.append(f'<text x="1000" y="{bottom - 4}" text-anchor="end">{end * 1e3:.2f} ms</text>')
    return f'<svg viewBox="0 0 1000 {bottom}" role="img" aria-label="Timeline">{"".join(parts)}</svg>'


def _box(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{height}" fill="{_COLOURS[kind]}">'
        f"<title>{escape(title)}</title></rect>"
    )
