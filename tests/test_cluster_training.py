"""The same numbers on one process with four devices, on four processes with one, and on two with two."""

from __future__ import annotations

import jax
import pytest
from cluster import TESTS, launch

pytestmark = pytest.mark.processes

GRIDS = [(1, 4), (4, 1), *([(2, 2)] if jax.__version_info__ >= (0, 11) else [])]


@pytest.fixture(scope="module")
def outcomes():
    found = {}
    for processes, devices in GRIDS:
        options = ("--devices-per-process", str(devices))
        outcome = launch(processes, TESTS / "cluster_training.py", options=options, timeout=250)
        assert outcome.code == 0, outcome.err[-5000:]
        found[processes, devices] = outcome
    return found


@pytest.fixture(scope="module")
def told(outcomes):
    return {grid: [said[0] for _, said in sorted(outcome.told().items())] for grid, outcome in outcomes.items()}


def test_every_process_tells_the_same(told):
    for (processes, _), results in told.items():
        assert len(results) == processes
        assert all(result == results[0] for result in results)


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_processes_do_not_change_the_numbers(told, grid):
    alone, together = told[1, 4][0], told[grid][0]
    assert together["same source"]["losses"] == pytest.approx(alone["same source"]["losses"], rel=1e-6, abs=1e-6)
    assert together["same source"]["weights"] == pytest.approx(alone["same source"]["weights"], rel=1e-6)
    assert len(together["same source"]["losses"]) == 10
    assert together["keras loop"] == pytest.approx(alone["keras loop"], rel=1e-6, abs=1e-6)
    assert together["uneven"] == alone["uneven"] == sum(i * i for i in range(1, 107))
    for name, values in alone["keras fit"]["history"].items():
        assert together["keras fit"]["history"][name] == pytest.approx(values, rel=1e-6, abs=1e-6)
    for name in ("order", "evaluated", "weights"):
        assert together["keras fit"][name] == pytest.approx(alone["keras fit"][name], rel=1e-5, abs=1e-5)


def test_all_rows_are_predicted_in_order_on_every_process(told):
    for results in told.values():
        assert all(result["keras fit"]["rows"] == 50 for result in results)


def test_files_are_written_by_one_process_and_callbacks_of_the_user_run_on_all(told, outcomes):
    for results in told.values():
        for result in results:
            fit = result["keras fit"]
            assert fit["loaded"] == pytest.approx(fit["weights"], rel=1e-6)
            assert fit["lines of the log"] == 3
            assert fit["heard"] == fit["history"]["loss"]
    err = outcomes[4, 1].err
    assert err.count("model.keras: written by process 0") == 2 * 3  # twice, as three of the four say


def test_what_is_printed_is_printed_once(outcomes):
    out = outcomes[4, 1].out
    assert "[0] Epoch 1/2" in out and "[0] plain: 5/5" in out
    for i in (1, 2, 3):
        assert f"[{i}] Epoch" not in out and f"[{i}] plain" not in out


def test_a_stop_that_one_process_asks_for_ends_all_after_the_same_epoch(told):
    assert told[1, 4][0]["stopped"] == 1
    assert all(result["stopped"] == 1 for grid in GRIDS[1:] for result in told[grid])


def test_initial_values_are_those_of_process_0(told, outcomes):
    for results in told.values():
        drawn, own, whole = results[0]["initial"]
        assert own == [1.0, 1.0] and whole == [0, 7]
        assert all(result["initial"] == results[0]["initial"] for result in results)
        assert len({x for row in drawn for x in row}) == 9
    assert outcomes[4, 1].err.count("Variable 'own' is the first") == 4


def test_the_seed_that_process_0_has_chosen_is_printed_once(outcomes):
    for (processes, _), outcome in outcomes.items():
        assert outcome.err.count("repeats the run") == (1 if processes > 1 else 0)
