"""``python -m benchmarks.plot out.json ratios.svg``: what Phalanx takes of each candidate's time, one dot for each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_LEAST = 1 / 64
"""What is smaller is drawn there."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw a report of the benchmarks.")
    parser.add_argument("report", type=Path, help="what `python -m benchmarks --json` wrote")
    parser.add_argument("picture", type=Path, help="an SVG or PNG file")
    options = parser.parse_args()
    draw(json.loads(options.report.read_text()), options.picture)


def draw(report: dict[str, Any], picture: Path) -> None:
    """Draw the ratios of a report, with the range of its rounds, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    rows = list(_ratios(report))
    figure, axes = pyplot.subplots(figsize=(11, 0.8 + 0.2 * len(rows)), layout="constrained")
    for y, (_, ratios) in enumerate(rows):
        colour = "tab:blue" if ratios[0] <= 1.05 else "tab:orange"
        ratios = [max(ratio, _LEAST) for ratio in ratios]
        axes.plot(ratios[1:], [y, y], color=colour, linewidth=1)
        axes.plot(ratios[0], y, "o", color=colour, markersize=4)
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", linewidth=0.3)
    env = report["environment"]
    axes.set_title(
        f"Phalanx's time divided by the candidate's (left of 1: faster); JAX {env['jax']}, {env['date']}", fontsize=9
    )
    figure.savefig(picture)
    pyplot.close(figure)


def _ratios(report: dict[str, Any]) -> Any:
    """For each candidate but Phalanx: what it is called; its median ratio, the smallest and the largest."""
    for result in report["results"]:
        ours, *others = result["candidates"]
        for other in others:
            ratios = [a / b for a, b in zip(ours["rounds"], other["rounds"])]
            label = f"{result['workload']}: {result['case']}, {result['replicas']} x, next to {other['name']}"
            yield label, (other["ratio"], min(ratios), max(ratios))


if __name__ == "__main__":
    main()
