"""`distribute_dataset` on arrays: batches, remainders, masks, order, placement, and what is refused."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError, UnevenBatchError


def rows_of(strategy, element):
    """The rows of an element in order."""
    return np.asarray(strategy.gather(element, 0)).tolist()


def batches(strategy, n, batch_size, **options):
    return [rows_of(strategy, e) for e in strategy.distribute_dataset(np.arange(n), batch_size, **options)]


# ---- batches -------------------------------------------------------------------------------------


def test_rows_come_in_order_an_equal_number_for_each_replica(strategy):
    n = strategy.num_replicas
    dataset = strategy.distribute_dataset(np.arange(16), batch_size=8)
    elements = list(dataset)
    assert len(dataset) == len(elements) == 2
    assert [x.tolist() for e in elements for x in e.values] == np.arange(16).reshape(2 * n, -1).tolist()


def test_elements_have_the_structure_of_the_source(strategy):
    source = {"x": np.ones((8, 2), np.float32), "y": (np.arange(8), None, [np.zeros((8, 1, 3), np.uint8)])}
    (element,) = strategy.distribute_dataset(source, batch_size=8)
    assert jax.tree.structure(element, is_leaf=lambda x: isinstance(x, px.PerReplica)) == jax.tree.structure(source)
    part = 8 // strategy.num_replicas
    leaves = jax.tree.leaves(element, is_leaf=lambda x: isinstance(x, px.PerReplica))
    assert [(x.shape, str(x.dtype)) for x in leaves] == [
        ((part, 2), "float32"),
        ((part,), "int32"),
        ((part, 1, 3), "uint8"),
    ]


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, px.Variable], ids=["numpy", "jax", "variable"])
def test_every_kind_of_array_is_a_source(strategy, make):
    (element,) = strategy.distribute_dataset(make(np.arange(8.0)), batch_size=8)
    assert rows_of(strategy, element) == np.arange(8.0).tolist()


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "complex64"])
def test_dtypes_are_kept(strategy, dtype):
    (element,) = strategy.distribute_dataset(np.ones((4, 2), jnp.dtype(dtype)), batch_size=4)
    assert element.dtype == jnp.dtype(dtype)


def test_a_dataset_can_be_iterated_again_and_by_two_at_once(strategy):
    dataset = strategy.distribute_dataset(np.arange(8), batch_size=4)
    assert [rows_of(strategy, e) for e in dataset] == [rows_of(strategy, e) for e in dataset]
    for first, second in zip(dataset, dataset):
        assert rows_of(strategy, first) == rows_of(strategy, second)


def test_later_changes_of_the_source_do_not_reach_elements(strategy):
    source = np.zeros(8, np.float32)
    (element,) = strategy.distribute_dataset(source, batch_size=8)
    source[:] = 7.0
    assert rows_of(strategy, element) == [0.0] * 8


def test_each_part_lies_on_its_replicas_device_alone(strategy):
    before = {id(a): a for a in jax.live_arrays()}
    (element,) = strategy.distribute_dataset(np.ones((8, 2), np.float32), batch_size=8)
    (whole,) = [a for a in jax.live_arrays() if id(a) not in before and a.size >= 16]
    assert whole.sharding.shard_shape(whole.shape)[0] == 1, "no device holds the rows of others"
    assert [x.devices() for x in element.values] == [{d} for d in strategy.devices]


# ---- the last batch ------------------------------------------------------------------------------


def test_a_smaller_last_batch_is_kept_when_it_divides(strategy):
    assert batches(strategy, 12, 8) == [list(range(8)), list(range(8, 12))]
    assert batches(strategy, 4, 8) == [list(range(4))]


@pytest.mark.parametrize(("n", "batch_size", "rows"), [(10, 8, 2), (9, 4, 1), (3, 8, 3)])
def test_a_batch_that_does_not_divide_is_an_error_with_three_ways_out(n, batch_size, rows):
    strategy = px.Mirrored(jax.devices()[:4])
    with pytest.raises(UnevenBatchError) as caught:
        strategy.distribute_dataset(np.arange(n), batch_size)
    assert str(caught.value) == (
        f"distribute_dataset: {n} rows in batches of {batch_size} on 4 replicas give a batch of {rows} rows, which does not"
        " divide by 4. Choose remainder='pad' (with mask=True for exact means), remainder='drop', or another batch_size."
    )


def test_dropping_leaves_the_last_batch_out(strategy):
    assert batches(strategy, 10, 4, remainder="drop") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches(strategy, 8, 4, remainder="drop") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches(strategy, 3, 4, remainder="drop") == []


def test_an_error_can_be_asked_for_where_the_last_batch_is_smaller(strategy):
    assert len(batches(strategy, 8, 4, remainder="error")) == 2
    with pytest.raises(UnevenBatchError, match="a batch of 4 rows, which is smaller than the others"):
        strategy.distribute_dataset(np.arange(12), 8, remainder="error")


@pytest.mark.parametrize("n", range(1, 10))
def test_padding_fills_up_with_rows_of_weight_zero(strategy, n):
    dataset = strategy.distribute_dataset((np.arange(n), np.ones((n, 2))), 4, remainder="pad", mask=True)
    seen, weights = [], []
    for x, y, weight in dataset:
        assert (x.shape[0], y.shape, weight.shape, weight.dtype) == (
            4 // strategy.num_replicas,
            (x.shape[0], 2),
            x.shape,
            np.float32,
        )
        seen += rows_of(strategy, x)
        weights += rows_of(strategy, weight)
    assert len(dataset) == -(-n // 4)
    assert seen[:n] == list(range(n))
    assert weights == [1.0] * n + [0.0] * (-n % 4)


def test_padding_makes_batches_divide_by_the_replicas(strategy):
    n = strategy.num_replicas
    rows, weights = zip(*strategy.distribute_dataset(np.arange(1, 6), 3, remainder="pad", mask=True))
    assert [len(rows_of(strategy, x)) for x in rows] == [-(-3 // n) * n] * 2
    kept = [a for x, w in zip(rows, weights) for a, b in zip(rows_of(strategy, x), rows_of(strategy, w)) if b]
    assert kept == [1, 2, 3, 4, 5]


def test_a_mask_is_appended_to_tuples_and_put_beside_anything_else(strategy):
    rows = np.ones(4)
    (as_tuple,) = strategy.distribute_dataset((rows, rows), 4, mask=True)
    (as_dict,) = strategy.distribute_dataset({"x": rows}, 4, mask=True)
    assert len(as_tuple) == 3
    assert [type(e).__name__ for e in as_dict] == ["dict", "PerReplica"]
    assert rows_of(strategy, as_dict[1]) == [1.0] * 4


def test_means_over_padded_batches_are_exact(strategy):
    values = np.arange(10, dtype=np.float32)
    with strategy.scope():
        total, count = (px.Variable(0.0, aggregation="sum") for _ in range(2))

    @px.function
    def step(element):
        def fn(x, weight):
            total.assign_add((x * weight).sum())
            count.assign_add(weight.sum())

        strategy.run(fn, args=element)

    for element in strategy.distribute_dataset(values, 4, remainder="pad", mask=True):
        step(element)
    assert float(total) / float(count) == values.mean()
    assert step.trace_count == 1, "the padded batch is like the others"


# ---- order ---------------------------------------------------------------------------------------


def shuffled(strategy, seed, epochs=1, n=12):
    dataset = strategy.distribute_dataset(np.arange(n), 4, shuffle=True, seed=seed)
    return [[row for e in dataset for row in rows_of(strategy, e)] for _ in range(epochs)]


def test_shuffling_depends_on_seed_and_epoch_alone(strategy):
    first, second = shuffled(strategy, 3, epochs=2)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second, "each epoch has an order of its own"
    assert shuffled(strategy, 3, epochs=2) == [first, second]
    assert shuffled(strategy, 4) != [first]
    assert shuffled(px.OneDevice(), 3, epochs=2) == [first, second], "whatever the number of replicas"


def test_rows_stay_together_when_shuffled(strategy):
    x = np.arange(8)
    for a, b in strategy.distribute_dataset((x, {"y": x * 10}), 4, shuffle=True, seed=0):
        assert rows_of(strategy, b["y"]) == [10 * row for row in rows_of(strategy, a)]


def test_a_seed_that_was_drawn_is_logged_so_that_the_run_can_be_repeated(strategy, caplog):
    with caplog.at_level(logging.INFO, logger="phalanx"):
        dataset = strategy.distribute_dataset(np.arange(12), 4, shuffle=True)
        strategy.distribute_dataset(np.arange(12), 8)
    message, plain = (r.message for r in caplog.records)
    n = strategy.num_replicas
    assert message.startswith(f"dataset: 12 rows, batches of 4 ({4 // n} per replica), shuffled with seed ")
    assert plain == f"dataset: 12 rows, batches of 8 ({8 // n} per replica)"
    order = [row for e in dataset for row in rows_of(strategy, e)]
    assert shuffled(strategy, int(message.rsplit(" ", 1)[1])) == [order]


# ---- training ------------------------------------------------------------------------------------


def test_batches_of_one_shape_are_one_trace(strategy):
    step = px.function(lambda e: strategy.reduce("sum", strategy.run(lambda x: x.sum(), args=(e,))))
    totals = [float(step(e)) for _ in range(2) for e in strategy.distribute_dataset(np.arange(16.0), 8)]
    assert totals == [28.0, 92.0] * 2
    assert step.trace_count == 1


def test_strict_refuses_to_drop_rows(strategy):
    px.strict(True)
    strategy.distribute_dataset(np.arange(8), 4, remainder="drop")
    with pytest.raises(UnevenBatchError, match="remainder='drop' leaves out 2 of 10 rows, and px.strict is on"):
        strategy.distribute_dataset(np.arange(10), 4, remainder="drop")


# ---- what is refused -----------------------------------------------------------------------------

ROWS = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("source", "options", "error", "words"),
    [
        (ROWS, {"batch_size": 0}, ArgumentError, "batch_size must be a positive int, got 0"),
        (ROWS, {"batch_size": -4}, ArgumentError, "batch_size must be a positive int, got -4"),
        (ROWS, {"batch_size": 2.0}, ArgumentError, "batch_size must be a positive int, got 2.0"),
        (ROWS, {"batch_size": True}, ArgumentError, "batch_size must be a positive int, got True"),
        (ROWS, {"batch_size": None}, ArgumentError, "arrays need batch_size"),
        (ROWS, {"remainder": "keep"}, ArgumentError, "remainder must be one of 'auto', 'pad', 'drop', 'error', got 'keep'"),
        (ROWS, {"remainder": None}, ArgumentError, "remainder must be one of"),
        (ROWS, {"mask": 1}, ArgumentTypeError, "mask takes True or False, got 1"),
        (ROWS, {"shuffle": "yes"}, ArgumentTypeError, "shuffle takes True or False, got 'yes'"),
        (ROWS, {"seed": -1}, ArgumentError, "seed must be an int from 0 on, or None, got -1"),
        (ROWS, {"seed": "a"}, ArgumentError, "seed must be an int from 0 on"),
        ((ROWS, ROWS[:3]), {}, ArgumentError, r"differ in their number of rows \(source\[0\]: 4, source\[1\]: 3\)"),
        (ROWS[:0], {}, ArgumentError, r"the source is empty \(0 rows\)"),
        ((), {}, ArgumentError, "there is no array in the source"),
        ({}, {}, ArgumentError, "there is no array in the source"),
        (None, {}, ArgumentError, "there is no array in the source None"),
        ({"x": ROWS, "t": np.array(["a"] * 4)}, {}, ArgumentTypeError, r"source\['t'\] is not numeric \(dtype <U1\)"),
        ({"x": np.array([None] * 4)}, {}, ArgumentTypeError, r"source\['x'\] is not numeric \(dtype object\)"),
        (np.zeros(4, [("a", "f4")]), {}, ArgumentTypeError, "source is not numeric"),
        (np.array(3.0), {}, ArgumentError, "source is 0-d and has no rows"),
        ((ROWS, 3), {}, ArgumentTypeError, r"source\[1\] is a int, 3"),
        ({"x": [1.0]}, {}, ArgumentTypeError, r"source\['x'\]\[0\] is a float, 1.0. Make lists arrays with np.asarray"),
        ("text", {}, ArgumentTypeError, "got str 'text'"),
        ({1: ROWS, "a": ROWS}, {}, ArgumentTypeError, "cannot take the source apart"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(strategy, source, options, error, words):
    with pytest.raises(error, match=words):
        strategy.distribute_dataset(source, **{"batch_size": 4, **options})


def test_a_dataset_shows_what_it_is():
    strategy = px.Mirrored(jax.devices()[:2])
    dataset = strategy.distribute_dataset(np.arange(10), 4)
    assert repr(dataset) == "<dataset of 10 rows, 3 batches of 4 on Mirrored(cpu:0-1)>"
