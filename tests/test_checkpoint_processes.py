"""Checkpoints, audits and guards of two real processes: all see the same, and nobody is waited for for ever."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cluster import two_processes

import phalanx as px
from phalanx.checkpoint import files
from phalanx.errors import CheckpointError

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("checkpoint_worker.py")


def variables(n, fill):
    strategy = px.Mirrored(jax.devices()[:n])
    with strategy.scope():
        w = px.Variable(jnp.full(3, fill), name="w")
        own = px.Variable(fill, synchronization="on_read", aggregation="sum", name="own")
    return strategy, {"w": w, "own": own}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def told(directory):
    """What each scenario of the worker gave, on either process."""
    _, made = variables(4, 2.0)
    manager = px.CheckpointManager(directory / "four")
    manager.save(px.Checkpoint(variables=made), step=8)
    manager.wait()
    return two_processes(WORKER, directory)


def test_each_process_gets_its_own_back(told):
    for me, results in enumerate(told):
        assert results["saved_and_restored"] == {
            "step": 3,
            "values": [[1, 1, 1], 5.0 + me],
            "counter": 10 + me,
            "steps": [3],
        }


def test_what_two_processes_wrote_is_restored_by_one(told, directory):
    strategy, made = variables(3, 0.0)
    counter = []
    manager = px.CheckpointManager(directory / "both")
    files.verify(directory / "both" / "3")
    checkpoint = px.Checkpoint(variables=made)
    assert manager.restore_latest(checkpoint) == 3
    assert made["w"].numpy().tolist() == [1, 1, 1]
    assert float(made["own"].numpy()) == 11.0

    class Counter:
        state_dict = dict
        load_state_dict = counter.append

    with pytest.raises(CheckpointError, match="'counter' was saved by 2 processes, each with a state of its own"):
        manager.restore_latest(px.Checkpoint(variables=made, counter=Counter()))


def test_what_one_process_wrote_is_restored_by_two(told):
    for results in told:
        assert results["of_four_replicas"]["step"] == 8
        assert results["of_four_replicas"]["values"][0] == [2, 2, 2]
        assert results["of_four_replicas"]["sum"] == 8.0


def test_what_one_process_cannot_restore_none_does(told):
    first, second = (results["refused_by_one"] for results in told)
    assert "CheckpointError: Process 1 could not restore step 1" in first["result"]
    assert "CheckpointError: 'counter' cannot take its state from the checkpoint: not here" in second["result"]
    for results in (first, second):
        assert results["values"] == [[7, 7, 7], 1.0]
        assert results["counter"] == 7


def test_an_audit_names_the_process_on_all_of_them_and_repairs_its_replica(told):
    for results in told:
        assert results["audited"] == {"found": [["w", 1, 1, [1]]], "equal": True, "value": [1, 1, 1]}


def test_random_keys_are_variables_like_others(told):
    first, second = (results["random_keys"] for results in told)
    assert first == second
    assert (first["first"], first["assigned"]) == ([0, 3], [0, 7]), "the first process's"
    assert first["once"] == first["again"]
    assert first["once"][0][:2] != first["once"][0][2:], "each replica has its own"
    assert first["equal"]


def test_what_is_not_finite_on_one_process_stops_all_and_is_named_where_it_was(told):
    first, second = (results["guarded"] for results in told)
    assert first["value"] == second["value"] == [1, 1, 1]
    assert "At step 1 the gradient of Variable 'w' is not finite on replica 1" in second["result"]
    assert (
        "NonFiniteError: At step 1 the gradient of Variable 'w' is not finite on a replica of another"
        in first["result"]
    )


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("different_objects", "ArgumentError: save(step=1): the processes gave checkpoints of different objects"),
        ("different_calls", "the processes do different things: process 0: save(step=1), process 1: wait()"),
        ("cannot_be_written", "CheckpointError: The last checkpoint could not be written to /proc/no/such/place"),
    ],
)
def test_all_processes_hear_what_is_wrong(told, scenario, message):
    for results in told:
        assert message in results[scenario]["result"]
        assert results[scenario]["quick"]


@pytest.mark.parametrize(("alone", "missing"), [(0, 1), (1, 0)])
def test_a_process_that_saves_alone_is_told_who_is_missing(told, alone, missing):
    results = told[alone]["the_first_alone" if alone == 0 else "the_second_alone"]
    assert f"StrategyError: Checkpoint: process {missing} did not come within 2 s" in results["result"]
    assert "Every process must call save" in results["result"]
    assert results["quick"]
