"""``python -m benchmarks [names...] [--json out.json] [--rounds 5] [--replicas 2 8] [--quick]``."""

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
    parser.add_argument("names", nargs="*", metavar="names", help=f"of {', '.join(harness.WORKLOADS)}; default: all")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each candidate (default 5)")
    parser.add_argument("--replicas", type=int, nargs="+", help="only these numbers of replicas")
    parser.add_argument("--quick", action="store_true", help="small sizes and one short round: checks, not figures")
    options = parser.parse_args()
    unknown = set(options.names) - set(harness.WORKLOADS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(harness.WORKLOADS)}")
    effort = harness.Effort(1, 0.0, 1) if options.quick else harness.Effort(max(5, options.rounds))
    results: list[dict[str, Any]] = []
    for workload, replicas in harness.groups(options.names or harness.WORKLOADS, options.replicas):
        print(f"{workload}, {replicas} replica{'s' * (replicas > 1)} ...", file=sys.stderr, flush=True)
        results += harness.run_group(workload, replicas, effort, options.quick)
    settings = {**asdict(effort), "quick": options.quick}
    report = {"environment": harness.environment(), "settings": settings, "results": results}
    harness.show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
