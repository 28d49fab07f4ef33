"""``python -m benchmarks [all | names...] [--json out.json] [--rounds 5] [--processes 1] [--replicas 2 8] [--quick]``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Phalanx next to JAX written by hand.")
    known = ", ".join(harness.WORKLOADS)
    parser.add_argument("names", nargs="*", metavar="names", default=["all"], help=f"of {known}; default: all")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each candidate (default 5)")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that measure so, one after another (default 1)"
    )
    parser.add_argument("--replicas", type=int, nargs="+", help="only these numbers of replicas")
    parser.add_argument("--quick", action="store_true", help="small sizes and one short round: checks, not figures")
    options = parser.parse_args()
    names = harness.WORKLOADS if options.names == ["all"] else options.names
    unknown = set(names) - set(harness.WORKLOADS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {known}")
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    effort = harness.Effort(1, 0.0, 1) if options.quick else harness.Effort(max(5, options.rounds))
    results: list[dict[str, Any]] = []
    for workload, replicas in harness.groups(names, options.replicas):
        print(f"{workload}, {replicas} replica{'s' * (replicas > 1)} ...", file=sys.stderr, flush=True)
        results += harness.run_group(workload, replicas, effort, options.quick, options.processes)
    settings = {**asdict(effort), "processes": options.processes, "quick": options.quick}
    report = {"environment": harness.environment(), "settings": settings, "results": results}
    harness.show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
