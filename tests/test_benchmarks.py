"""The benchmarks run, compare like with like, and take turns. What they measure is no business of a test."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

from benchmarks import by_hand, harness, peers, plot
from benchmarks.__main__ import main
from benchmarks.problems import training_problems

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmarks") / "report.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--replicas", "1", "2", "--json", str(path), "all"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return json.loads(path.read_text()), finished.stdout


@pytest.mark.slow
def test_every_workload_runs_and_is_reported(report):
    data, table = report
    without_libtpu = set() if importlib.util.find_spec("libtpu") else {"collectives"}
    assert {result["workload"] for result in data["results"]} == set(harness.WORKLOADS) - without_libtpu
    assert {result["replicas"] for result in data["results"] if result["workload"] == "step"} == {1, 2}
    for result in data["results"]:
        assert result["case"] in table
        assert len(result["candidates"]) >= 2
        for row in result["candidates"]:
            assert len(row["rounds"]) == data["settings"]["rounds"]
            assert 0 < row["min"] <= row["median"] <= row["max"]
            assert row["ratio"] > 0


@pytest.mark.slow
def test_the_report_says_where_and_with_what_it_was_measured(report):
    environment = report[0]["environment"]
    assert {"date", "machine", "cores", "load", "python", "jax", "phalanx"} <= set(environment)


@pytest.mark.slow
def test_the_report_can_be_drawn(report, tmp_path):
    plot.draw(report[0], tmp_path / "ratios.svg")
    drawn = (tmp_path / "ratios.svg").read_text()
    for result in report[0]["results"]:
        assert f"{result['workload']}: {result['case']}" in drawn


@pytest.mark.slow
def test_what_was_written_by_hand_computes_what_phalanx_computes(report):
    results = [
        result for result in report[0]["results"] if result["workload"] not in ("importing", "memory", "collectives")
    ]
    for result in results:
        first, *others = [row["check"] for row in result["candidates"]]
        assert all(map(math.isfinite, first))
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-3, atol=1e-6, err_msg=result["case"])


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tensorflow", "torch"])
def test_peers_compute_what_is_written_by_hand(module):
    pytest.importorskip(module)
    problem = next(iter(training_problems(quick=True).values()))
    setting = {"problem": problem.name, "optimizer": "Adam", "replicas": 2, "quick": True}
    peer = peers.Peer("the peer", module, "step", setting)
    step = by_hand.jit_step(problem, optax.adam(1e-3))
    np.testing.assert_allclose(peer.numbers(), [step() for _ in range(4)], rtol=1e-3)
    assert peer.round(2) > 0
    peer.end()


@pytest.mark.slow
def test_training_steps_are_compared_while_the_loss_goes_down(report):
    for result in (result for result in report[0]["results"] if result["workload"] in ("step", "loop")):
        losses = result["candidates"][0]["check"]
        assert losses[-1] < losses[0], result["case"]


def test_a_baseline_that_computes_something_else_is_refused():
    def candidates(other):
        return [harness.Candidate("a", int, lambda: [1.0, 2.0]), harness.Candidate("b", int, other)]

    effort = harness.Effort(1, 0.0, 1)
    assert len(harness.measure(candidates(lambda: [1.0, 2.0]), effort)) == 2
    for wrong in (lambda: [1.0, 2.1], lambda: [1.0], lambda: [1.0, math.nan], None):
        with pytest.raises(RuntimeError, match="'a' and 'b' do not compute the same"):
            harness.measure(candidates(wrong), effort)


def test_candidates_take_turns_and_preparations_are_not_steps():
    events = []
    a = harness.Candidate("a", lambda: events.append("a"))
    b = harness.Candidate("b", lambda: events.append("b"), prepare=lambda: events.append("prepare b"))
    rows = harness.measure([a, b], harness.Effort(rounds=3, seconds=0.0, steps=1))
    warm_up, rounds = events[:3], events[3:]
    assert warm_up == ["a", "prepare b", "b"]
    assert rounds == ["a", "prepare b", "b"] * 3
    assert [row["name"] for row in rows] == ["a", "b"]
    assert rows[0]["ratio"] == 1


def test_the_rounds_of_several_processes_are_one_result(monkeypatch):
    """Each process measures both candidates, and its rounds are compared with its own."""
    seconds = iter([(1.0, 2.0), (3.0, 12.0), (1.0, 1.0)])

    def run(command, **options):
        a, b = next(seconds)
        rows = [{"name": "a", "rounds": [a], "check": None}, {"name": "b", "rounds": [b], "check": None}]
        result = [{"workload": "w", "case": "c", "candidates": rows}]
        return subprocess.CompletedProcess(command, 0, json.dumps(result))

    monkeypatch.setattr(subprocess, "run", run)
    (result,) = harness.run_group("w", 1, harness.Effort(1), quick=True, processes=3)
    a, b = result["candidates"]
    assert (a["rounds"], b["rounds"]) == ([1.0, 3.0, 1.0], [2.0, 12.0, 1.0])
    assert (b["median"], b["min"], b["max"], b["ratio"]) == (2.0, 1.0, 12.0, 0.5)


def test_an_unknown_workload_is_named_together_with_the_known_ones(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "steps"])
    with pytest.raises(SystemExit):
        main()
    assert f"unknown: steps; there are {', '.join(harness.WORKLOADS)}" in capsys.readouterr().err
