"""Batches that the replicas cannot share equally: kept, filled up, dropped or refused; and every row counts once."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from feeding import parts_of, replicas, rows_of, whole

import phalanx as px
from phalanx.errors import ArgumentError, UnevenBatchError

BATCH = 8


def ten(kind: str):
    """Ten rows in batches of four, as an array (whose end is known) and as batches (whose end is not)."""
    rows = np.arange(10.0, dtype=np.float32)
    return (rows, 4) if kind == "array" else ([rows[:4], rows[4:8], rows[8:]], None)


@pytest.fixture(params=["array", "batches"])
def kind(request):
    return request.param


# ---- the four modes ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_auto_keeps_a_smaller_last_batch_that_divides(kind, n):
    assert rows_of(replicas(n).distribute_dataset(*ten(kind)))[-1] == [8, 9]


def test_auto_refuses_one_that_does_not_and_names_sizes_and_ways_out(kind):
    message = (
        r"2 rows, which does not divide by 4. Choose remainder='pad' \(with mask=True for exact means\),"
        " remainder='drop', or another batch_size"
    )
    with pytest.raises(UnevenBatchError, match=message):
        list(replicas(4).distribute_dataset(*ten(kind)))


def test_what_is_known_to_be_uneven_is_refused_before_the_first_step():
    with pytest.raises(UnevenBatchError, match="10 rows in batches of 4 on 4 replicas give a batch of 2 rows"):
        replicas(4).distribute_dataset(np.arange(10), 4)
    with pytest.raises(UnevenBatchError, match="10 rows in batches of 3 on 2 replicas give a batch of 3 rows"):
        replicas(2).distribute_dataset(np.arange(10), 3)


def test_dropping_is_no_way_out_when_every_batch_is_uneven():
    with pytest.raises(UnevenBatchError, match=r"for exact means\), or another batch_size"):
        replicas(2).distribute_dataset(np.arange(10), 3, remainder="drop")
    with pytest.raises(UnevenBatchError, match=r"for exact means\), or another batch_size"):
        list(replicas(2).distribute_dataset([np.arange(3)] * 2, remainder="drop"))


def test_pad_repeats_the_last_row_up_to_a_full_batch(kind):
    dataset = replicas(4).distribute_dataset(*ten(kind), remainder="pad")
    assert parts_of(dataset)[-1] == [[8], [9], [9], [9]]


def test_pad_rounds_a_batch_up_to_the_replicas():
    dataset = replicas(4).distribute_dataset(np.arange(10), 5, remainder="pad", mask=True)
    elements = [tuple(part.tolist() for part in whole(e)) for e in dataset]
    assert elements == [
        ([0, 1, 2, 3, 4, 4, 4, 4], [1, 1, 1, 1, 1, 0, 0, 0]),
        ([5, 6, 7, 8, 9, 9, 9, 9], [1, 1, 1, 1, 1, 0, 0, 0]),
    ]


def test_drop_leaves_the_smaller_batch_out(kind, strategy):
    assert rows_of(strategy.distribute_dataset(*ten(kind), remainder="drop")) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_drop_that_leaves_nothing_says_so(caplog):
    array = replicas(2).distribute_dataset(np.arange(3), 4, remainder="drop")
    assert len(array) == 0
    for dataset in (array, replicas(2).distribute_dataset(lambda: iter(range(3)), 4, remainder="drop")):
        caplog.clear()
        assert list(dataset) == []
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert warning.startswith("dataset: remainder='drop' left no batch in this pass: the source has too few rows")
        with pytest.raises(ArgumentError, match="element_spec: the source gives no batch"):
            _ = dataset.element_spec


def test_dropped_rows_are_logged_and_strict_makes_them_an_error(caplog, kind):
    dataset = replicas(2).distribute_dataset(*ten(kind), remainder="drop")
    with caplog.at_level(logging.INFO, "phalanx"):
        list(dataset)
    assert "element 2 has 2 rows of 4 and is dropped" in caplog.text
    px.strict()
    with pytest.raises(UnevenBatchError, match=r"leaves out 2 rows \(element 2, 4 expected\), and px.strict is on"):
        list(dataset)


def test_error_refuses_a_smaller_batch_even_if_it_divides(kind):
    with pytest.raises(UnevenBatchError, match=r"2 rows, which is smaller than the others \(4\)"):
        list(replicas(2).distribute_dataset(*ten(kind), remainder="error"))


def test_batches_before_an_uneven_one_are_handed_out():
    iterator = iter(replicas(4).distribute_dataset(*ten("batches")))
    assert len(rows_of([next(iterator), next(iterator)])) == 2
    with pytest.raises(UnevenBatchError, match="element 2"):
        next(iterator)


def test_the_uneven_batch_may_be_the_first():
    batches = [np.arange(3), np.arange(8), np.arange(5)]
    dataset = replicas(2).distribute_dataset(batches, remainder="pad", mask=True)
    sizes = [(x.stacked.size, int(whole(mask).sum())) for x, mask in dataset]
    assert sizes == [(4, 3), (8, 8), (8, 5)]


def test_an_element_without_rows_is_an_error():
    with pytest.raises(ArgumentError, match="element 1 has no rows"):
        list(replicas(2).distribute_dataset([np.ones((4, 2)), np.ones((0, 2))]))


# ---- the mask ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (np.arange(2), ("x", "m")),
        ((np.arange(2), np.arange(2)), ("x", "x", "m")),
        ({"a": np.arange(2)}, ({"a": "x"}, "m")),
    ],
    ids=["array", "tuple", "dict"],
)
def test_the_mask_comes_last(source, expected):
    def names(*dataset):
        (element,) = replicas(2).distribute_dataset(*dataset, remainder="pad", mask=True)
        return jax.tree.map(lambda rows: "m" if rows.dtype == np.float32 else "x", whole(element))

    assert names(source, 4) == names([source]) == expected
    assert names([[np.arange(2), np.arange(2)]]) == ["x", "x", "m"]


@pytest.mark.parametrize("remainder", ["auto", "drop", "error"])
def test_without_padding_the_mask_is_all_ones(remainder):
    dataset = replicas(2).distribute_dataset(np.arange(8), 4, remainder=remainder, mask=True)
    assert [whole(mask).tolist() for _, mask in dataset] == [[1] * 4, [1] * 4]


@pytest.mark.parametrize("n", range(1, 9))
def test_every_row_counts_once_for_every_size_and_number_of_replicas(n):
    """The masked mean over an epoch is the mean over the rows, exactly, for 1 row up to 3 batches of them."""
    strategy = replicas(n)

    @px.function
    def sums(x, mask):
        def fn(x, mask):
            return px.get_replica_context().all_reduce("sum", ((x * mask).sum(), mask.sum()))

        return strategy.run(fn, args=(x, mask))

    for size in range(1, 3 * BATCH + 1):
        rows = np.arange(1.0, size + 1, dtype=np.float32)  # whose sums are exact in float32
        dataset = strategy.distribute_dataset(rows, BATCH, remainder="pad", mask=True, prefetch=0)
        totals, counts = zip(*[sums(*element) for element in dataset])
        assert len(dataset) == len(counts) == -(-size // BATCH)
        assert sum(map(float, counts)) == size
        assert sum(map(float, totals)) / size == rows.mean()
    assert sums.trace_count == 1


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_replicas_that_hold_padding_alone_do_not_change_training(size):
    """Loss, gradients and metrics are those of one device, and never NaN: the mean is over the rows of all replicas."""
    x = np.random.default_rng(0).normal(size=(size, 3)).astype(np.float32)

    def train(n):
        strategy = replicas(n)
        with strategy.scope():
            w = px.Variable(jnp.ones(3))
            rows = px.Variable(0.0, synchronization="on_read", aggregation="sum")
            optimizer = px.Optimizer(optax.sgd(0.1))

        def fn(x, mask):
            count = px.get_replica_context().all_reduce("sum", mask.sum())
            with px.GradientTape() as tape:
                losses = jnp.log((x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ w + 3)  # NaN for a row of zeros
                loss = (losses * mask).sum() / count
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            rows.assign_add(mask.sum())
            return loss

        step = px.function(lambda x, mask: strategy.reduce("sum", strategy.run(fn, (x, mask))))
        losses = [float(step(*e)) for e in strategy.distribute_dataset(x, 8, remainder="pad", mask=True)]
        return [*losses, *w.numpy(), float(rows)]

    one, eight = train(1), train(8)
    assert np.isfinite(eight).all()
    assert eight[-1] == size
    np.testing.assert_allclose(eight, one, rtol=1e-5)


# ---- every row comes back once, in order ---------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 4, 8])
@pytest.mark.parametrize("source", ["array", "generator", "dicts"])
def test_predictions_are_every_row_once_in_order(n, source):
    strategy, ids = replicas(n), np.arange(22)
    sources = {
        "array": (ids, 8),
        "generator": ((ids[i : i + 8] for i in range(0, 22, 8)), None),
        "dicts": ({"id": ids}, 8),
    }
    given, batch_size = sources[source]

    @px.function
    def predict(rows):
        return strategy.gather(strategy.run(lambda rows: jax.tree.map(lambda x: 10 * x, rows), (rows,)))

    found = []
    for rows, mask in strategy.distribute_dataset(given, batch_size, remainder="pad", mask=True):
        real = whole(mask) > 0
        found.append(jax.tree.map(lambda out: np.asarray(out)[real], predict(rows)))
    (column,) = jax.tree.leaves(jax.tree.map(lambda *parts: np.concatenate(parts), *found))
    assert column.tolist() == (10 * ids).tolist()
