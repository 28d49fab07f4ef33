"""A report as a text for the terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from phalanx.preflight.checks import human, shown

if TYPE_CHECKING:
    from phalanx.preflight.hlo import Collective
    from phalanx.preflight.report import Report

_SHOWN = 12
"""Collectives and warnings that are listed."""

Rows = list[tuple[str, ...]]


def as_text(report: Report) -> str:
    """For `print`."""
    try:
        from rich.console import Console
    except ImportError:
        return _plain(report)
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(as_rich(report))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))  # rich fills lines up


def as_rich(report: Report) -> Any:
    """For rich."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    def table(title: str, columns: tuple[str, ...], rows: Rows) -> Any:
        made = Table(title=title, title_justify="left", show_header=any(columns), pad_edge=False, box=None)
        for i, column in enumerate(columns):
            made.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=i == 0)
        for row in rows:
            made.add_row(*map(escape, row))
        return made

    colour = {"fits": "green", "does not fit": "red", "fails": "red"}[report.verdict]
    parts: list[Any] = [f"[bold]{escape(heading(report))}[/]", f"[bold {colour}]{escape(report.message)}[/]"]
    for title, columns, rows in sections(report):
        if rows:
            parts += ["", table(title, columns, rows)]
    for warning in report.warnings[:_SHOWN]:
        parts += ["", f"[yellow]{escape(warning.kind)}[/] {escape(str(warning).partition(': ')[2])}"]
    if not report.compiles:
        parts += ["", escape(report.compiler_message)]
    return Group(*parts)


_NUMBERS = {"bytes", "share", "times", "seconds", "chips", "efficiency", "per device", "group"}


def _plain(report: Report) -> str:
    lines = [heading(report), report.message]
    for title, columns, rows in sections(report):
        if rows:
            table = [columns, *rows] if any(columns) else rows
            widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
            lines += ["", title, *("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in table)]
    lines += [line for w in report.warnings[:_SHOWN] for line in ("", str(w))]
    return "\n".join(lines if report.compiles else [*lines, "", report.compiler_message])


def heading(report: Report) -> str:
    """What was compiled, for what."""
    batch = "" if report.global_batch is None else f", {report.global_batch} rows in a batch"
    chips, n = report.target.num_chips, report.num_devices
    devices = f"{n} device{'s' * (n > 1)}" + (f" in {chips} chips" if report.target.chip and chips != n else "")
    quick = ", compiled with little optimization" if report.effort == "quick" else ""
    return f"{report.name} on {report.topology}: {devices}{batch}{quick}"


def sections(report: Report) -> list[tuple[str, tuple[str, ...], Rows]]:
    """The tables: title, columns and rows."""
    return [
        ("Memory of a device", ("", "bytes", "share"), memory_rows(report)),
        ("Largest tensors of a device", ("", "bytes", "where"), _largest(report)),
        ("Work of a step", ("", ""), work_rows(report)),
        ("Collectives", ("", "bytes", "times", "over", "group", "source"), collective_rows(report.collectives)),
        ("Scaling, as many rows for each replica", _SCALING, scaling_rows(report)),
    ]


_SCALING = ("chips", "topology", "seconds", "efficiency", "")

KINDS = {
    "params": "variables",
    "slots": "optimizer state",
    "inputs": "inputs",
    "constants": "constants",
    "padding": "padding of these to tiles",
    "outputs": "outputs",
    "temp": "intermediate values",
    "code": "program",
}


def memory_rows(report: Report) -> Rows:
    """Each kind with its bytes and its share of the memory there is."""
    b = report.bytes
    whole = b.available or b.total or 1
    rows: Rows = [(label, human(getattr(b, kind)), f"{getattr(b, kind) / whole:.1%}") for kind, label in KINDS.items()]
    rows = [row for row in rows if row[1] != "0 B"]
    rows.append(("total", human(b.total), f"{b.total / whole:.1%}"))
    if b.available is not None:
        rows.append(("available", human(b.available), ""))
    if b.aliased:
        rows.append(("results in the place of inputs", human(b.aliased), ""))
    return rows


def _largest(report: Report) -> Rows:
    return [(b.what, human(b.bytes), shown(b.line)) for b in report.largest_buffers[: 3 if report.fits else 8]]


def work_rows(report: Report) -> Rows:
    """Arithmetic, traffic, and the times these would take."""
    if not report.compiles:
        return [("compiled in", f"{report.compile_seconds:.1f} s")]
    rows: Rows = [
        ("compiled in", f"{report.compile_seconds:.1f} s"),
        ("arithmetic of all devices", f"{report.flops:.4g} FLOP"),
        ("memory traffic of a device", human(report.bytes_accessed)),
    ]
    time = report.step_time
    if time is not None:
        rows += [
            ("step time, at least", f"{seconds(time.seconds)}, bound by {time.bound}"),
            ("  compute", seconds(time.compute)),
            ("  memory", seconds(time.memory)),
            ("  communication", seconds(time.communication)),
        ]
    return rows


def collective_rows(collectives: list[Collective]) -> Rows:
    """The largest; the rest in one row."""
    rows: Rows = [
        (f"{c.kind} {c.dtype}", human(c.bytes), str(c.count), c.network or "-", str(c.group_size), shown(c.source))
        for c in collectives[:_SHOWN]
    ]
    rest = collectives[_SHOWN:]
    if rest:
        rows.append((f"{len(rest)} more", human(sum(c.bytes * c.count for c in rest)), "", "", "", ""))
    return rows


def scaling_rows(report: Report) -> Rows:
    """Where it was looked at."""
    return [
        (
            str(s.chips),
            s.topology,
            seconds(s.step_time.seconds_without_overlap),
            f"{s.efficiency:.1%}",
            "compiled" if s.compiled else "computed",
        )
        for s in report.__dict__.get("scaling", ())
    ]


def seconds(value: float) -> str:
    """As people read them."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
