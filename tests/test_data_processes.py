"""Feeding on two real processes: the right rows on each, equally many batches on both, and nothing that hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import two_processes

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("feeding_worker.py")


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each scenario of the worker gave, on either process."""
    return two_processes(WORKER)


def both(told: list[dict[str, Any]], scenario: str) -> tuple[Any, Any]:
    first, second = (results[scenario] for results in told)
    return first, second


def everyones(elements: list[Any], column: int = 0) -> list[list[float]]:
    """The rows of all processes in each element."""
    return [element[column][1] for element in elements]


def own(elements: list[Any], column: int = 0) -> list[list[float]]:
    """The rows of the process itself in each element."""
    return [element[column][0] for element in elements]


def refused(told: list[dict[str, Any]], scenario: str) -> str:
    """The error that both processes end in, soon."""
    first, second = both(told, scenario)
    assert first["quick"] and second["quick"]
    assert first["result"] == second["result"]
    return first["result"]


# ---- auto_shard="data": the same source everywhere -----------------------------------------------


def test_each_process_sends_its_replicas_their_rows_and_the_order_is_the_sources(told):
    first, second = both(told, "same_arrays")
    assert (first["length"], second["length"]) == (3, 3)
    assert own(first["elements"]) == [[0, 1], [4, 5], [8, 9]]
    assert own(second["elements"]) == [[2, 3], [6, 7], [9, 9]]
    for results in (first, second):
        assert everyones(results["elements"]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
        assert everyones(results["elements"], 1) == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]


def test_generators_are_split_the_same_way(told):
    first, second = both(told, "same_generator")
    assert (own(first), own(second)) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert everyones(first) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_seed_that_is_drawn_is_the_same_on_all_processes(told):
    first, second = both(told, "drawn_seed")
    assert first["seed"] == second["seed"]
    assert everyones(first["elements"]) == everyones(second["elements"])
    assert sorted(row for rows in everyones(first["elements"]) for row in rows) == list(range(8))


def test_sources_that_are_not_the_same_are_refused(told):
    assert "the processes differ in rows: [8, 9]" in refused(told, "other_number_of_rows")
    message = refused(told, "generators_of_other_length")
    assert (
        "in element 1 the processes have [0, 4] rows. With auto_shard='data' all must have the same source" in message
    )


def test_options_that_are_not_the_same_are_refused(told):
    assert "the processes differ in batch_size: [4, 8]" in refused(told, "other_options")


# ---- auto_shard="off": each its own part ---------------------------------------------------------


def test_a_process_that_has_run_out_feeds_padding_until_all_have(told):
    first, second = both(told, "padded_until_all_are_done")
    assert (first["length"], second["length"]) == (4, 4)
    for results in (first, second):
        assert everyones(results["elements"], 1) == [[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 0]]
    rows = [(row, weight) for r in (first, second) for rows, weights in zip(own(r["elements"]), own(r["elements"], 1))
            for row, weight in zip(rows, weights)]  # fmt: skip
    assert [row for row, weight in rows if weight] == [0, 1, 2, *range(100, 107)]


def test_a_process_may_have_no_rows_at_all(told):
    first, second = both(told, "one_has_nothing")
    assert (own(first, 1), own(second, 1)) == ([[0, 0], [0, 0]], [[1, 1], [1, 0]])
    assert own(second) == [[100, 101], [102, 102]]


def test_a_process_without_rows_is_told_no_classes(told):
    said = refused(told, "one_has_nothing_of_a_class")
    assert "a process has no rows from the start (the processes have [0, 2])" in said


def test_no_rows_on_any_process_are_an_error(told):
    assert "the source is empty" in refused(told, "none_has_anything")


def test_with_drop_all_processes_stop_together(told):
    first, second = both(told, "dropped_together")
    assert (own(first), own(second)) == ([[0, 1], [2, 3]], [[100, 101], [102, 103]])


def test_with_auto_processes_with_unequal_rows_are_refused_on_all(told):
    assert "in element 2 the processes have [0, 2] rows for [1, 1] replicas" in refused(told, "uneven")


def test_other_kinds_of_rows_are_refused_on_all(told):
    message = refused(told, "other_kind_of_rows")
    assert "the processes have different kinds of rows" in message and "(3,)" in message and "(4,)" in message


def test_a_batch_of_all_processes_must_divide_by_the_replicas(told):
    message = refused(told, "batch_that_does_not_divide")
    assert "the batch of all processes has 3 rows, which does not divide by 2." in message


def test_the_function_of_each_process_is_told_which_it_is(told):
    first, second = both(told, "from_function")
    assert (own(first), own(second)) == ([[0, 1], [2, 3]], [[100, 101], [102, 103]])


def test_a_pass_is_resumed_also_where_one_process_had_run_out(told):
    for results in both(told, "resumed"):
        assert everyones(results["rest"], 1) == everyones(results["resumed"], 1) == [[0, 0, 1, 0]]
    assert own(both(told, "resumed")[1]["resumed"]) == [[106, 106]]


# ---- trouble on one process is soon known on the other -------------------------------------------


def test_an_error_in_one_source_is_told_to_all(told):
    first, second = both(told, "one_fails")
    assert second["result"] == "OSError: disk on fire"
    assert "process 1 failed with OSError: disk on fire (at element 1)" in first["result"]
    assert first["quick"] and second["quick"]


def test_a_process_that_left_its_loop_is_named(told):
    first, second = both(told, "one_leaves")
    assert second["result"] == 1
    assert "StrategyError: distribute_dataset: process 1 left its loop" in first["result"]
    assert first["quick"]


def test_a_process_that_does_not_come_is_named(told):
    first, _ = both(told, "one_does_not_come")
    assert (
        "process 1 did not come within 1 s. Every process must make its datasets, and iterate them" in first["result"]
    )


def test_all_processes_may_leave_their_loops(told):
    for results in both(told, "all_leave"):
        assert results == {"result": [2, 2, 2], "quick": True}


# ---- what can be read where ----------------------------------------------------------------------


def test_results_are_readable_and_equal_on_every_process(told):
    first, second = both(told, "readable_everywhere")
    assert first["predictions"] == second["predictions"] == [0, 10, 20, 30, 40]
    for name in ("loss", "variable", "count"):
        assert first[name] == second[name]
    assert first["count"] == 5
    assert sum(first["own part"] + second["own part"]) == pytest.approx(first["loss"])
    assert first["own components"] == second["own components"] == 1
    assert "Replica 1 of" in first["other part"]["result"] and "strategy.gather" in first["other part"]["result"]


def test_a_strategy_of_one_process_needs_no_other(told):
    first, second = both(told, "strategy_of_one_process")
    assert (own(first), second) == ([[0, 1], [0, 1]], None)


def test_progress_is_printed_by_process_0_alone(told):
    first, second = both(told, "progress_is_printed_once")
    assert first.startswith("epoch 1: 1/1")
    assert second == ""
