"""Group "datasets": how rows reach the replicas, uneven ends, structures, and loops over them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from goldens.kit import attempt, check, differs, replay
from phalanx.errors import ArgumentError, StrategyError, UnevenBatchError


def _rows(golden) -> np.ndarray:
    return np.asarray(golden.inputs["rows"], np.float32)


def _parts(dataset) -> list[list[list[float]]]:
    """The rows of each replica in each step."""
    return [[np.asarray(part).tolist() for part in element.values] for element in dataset]


def _real_rows(dataset) -> list[list[float]]:
    """The rows of each step that are no padding, replica after replica."""
    steps = []
    for rows, mask in dataset:
        steps.append([a for x, m in zip(rows.values, mask.values) for a, b in zip(x.tolist(), m.tolist()) if b])
    return steps


def _joined(steps: list[list[list[float]]]) -> list[list[float]]:
    """The peer's steps, replica after replica."""
    return [list(itertools.chain.from_iterable(parts)) for parts in steps]


def _splits_evenly(steps: list[list[list[float]]]) -> bool:
    return all(len({len(part) for part in parts}) == 1 for parts in steps)


# ---- batches of a distributed dataset ------------------------------------------------------------


def _distribute(golden, strategy, **options) -> px.Strategy:
    return strategy.distribute_dataset(_rows(golden), golden.inputs["global_batch"], **options)


@replay("ds_distribute_8_rows_batch_4")
def test_whole_batches_are_split_in_order(golden, strategy):
    return {"steps": _parts(_distribute(golden, strategy))}


@replay("ds_distribute_10_rows_batch_4_drop")
def test_a_short_batch_can_be_dropped(golden, strategy):
    return {"steps": _parts(_distribute(golden, strategy, remainder="drop"))}


@replay("ds_distribute_3_rows_batch_4_drop")
def test_dropping_can_leave_nothing(golden, strategy):
    return {"steps": _parts(_distribute(golden, strategy, remainder="drop"))}


def _every_row_once(golden, strategy):
    """Steps that split evenly are the peer's; any other is an error, or padded: each row once, in order."""
    expected = golden.expect["steps"]
    if _splits_evenly(expected):
        assert _parts(_distribute(golden, strategy)) == expected
    else:
        with pytest.raises(UnevenBatchError, match="does not divide by"):
            _distribute(golden, strategy)
    padded = _distribute(golden, strategy, remainder="pad", mask=True)
    assert _real_rows(padded) == _joined(expected)
    assert len({rows.shape for rows, _ in padded}) == 1


_UNEVEN = "replicas hold equally many rows: a batch that does not divide is an error, or padded and masked"


@differs("ds_distribute_10_rows_batch_4", _UNEVEN)
def test_10_rows_in_batches_of_4(golden, strategy):
    _every_row_once(golden, strategy)


@differs("ds_distribute_7_rows_batch_4", _UNEVEN)
def test_7_rows_in_batches_of_4(golden, strategy):
    _every_row_once(golden, strategy)


@differs("ds_distribute_1_rows_batch_4", _UNEVEN)
def test_1_row_in_batches_of_4(golden, strategy):
    _every_row_once(golden, strategy)


@differs("ds_distribute_5_rows_batch_4", _UNEVEN)
def test_5_rows_in_batches_of_4(golden, strategy):
    _every_row_once(golden, strategy)


@differs("ds_distribute_9_rows_batch_3", _UNEVEN)
def test_9_rows_in_batches_of_3(golden, strategy):
    _every_row_once(golden, strategy)


@differs("ds_distribute_7_rows_batch_5", _UNEVEN)
def test_7_rows_in_batches_of_5(golden, strategy):
    _every_row_once(golden, strategy)


@differs("ds_distribute_10_rows_batch_8", _UNEVEN)
def test_10_rows_in_batches_of_8(golden, strategy):
    _every_row_once(golden, strategy)


# ---- elements ------------------------------------------------------------------------------------


@differs("ds_structured_elements", _UNEVEN)
def test_elements_have_the_structure_of_the_source(golden, strategy):
    source = {"x": np.asarray(golden.inputs["x"], np.float32), "y": np.asarray(golden.inputs["y"], np.int32)}
    steps = list(strategy.distribute_dataset(source, 4, remainder="pad", mask=True))
    for (element, mask), expected in zip(steps, golden.expect["steps"], strict=True):
        real = np.concatenate([np.asarray(m) for m in mask.values]) > 0
        for name, found in element.items():
            rows = np.concatenate([np.asarray(part) for part in found.values])[real]
            check(rows, list(itertools.chain.from_iterable(expected[name]["values"])))
    check([part.shape for part in steps[0][0]["x"].values], golden.expect["steps"][0]["x"]["shapes"])


@differs("ds_iteration_protocol", _UNEVEN + "; Python's iterators are all there is")
def test_datasets_are_iterated_as_python_does(golden, strategy):
    dataset = _distribute(golden, strategy, remainder="pad", mask=True)
    first = _real_rows(dataset)
    assert first == _joined(golden.expect["first_pass"])
    assert (_real_rows(dataset) == first) is golden.expect["second_pass_is_the_same"]
    iterator = iter(dataset)
    succeeded = sum(1 for _ in iterator)
    assert succeeded == golden.expect["successful_next"]
    assert type(attempt(next, iterator)).__name__ == golden.expect["error_at_the_end"]


@differs("ds_transformations", _UNEVEN)
def test_sources_are_transformed_before_they_are_distributed(golden, strategy):
    rows, size = _rows(golden), golden.inputs["global_batch"]

    def batched(rows):
        rows = list(rows)
        return (np.asarray(rows[i : i + size]) for i in range(0, len(rows), size))

    sources = {
        "a_batch_repeat": lambda: itertools.chain(batched(rows), batched(rows)),
        "b_repeat_batch": lambda: batched(itertools.chain(rows, rows)),
        "c_skip_take": lambda: itertools.islice(batched(rows), 1, 3),
        "d_map": lambda: (10 * batch for batch in batched(rows)),
        "e_prefetch_cache": lambda: batched(rows),
    }
    for name, source in sources.items():
        expected = golden.expect[name]
        assert _real_rows(strategy.distribute_dataset(source, remainder="pad", mask=True)) == _joined(expected)
        if _splits_evenly(expected):
            assert _parts(strategy.distribute_dataset(source)) == expected


@differs("ds_unbatched", "scalar rows are refused for every N, with the way out: batch_size")
def test_what_was_not_batched_is_taken_for_batches(golden, strategy):
    vectors = np.asarray(golden.inputs["vectors"], np.float32)
    golden.check(_parts(strategy.distribute_dataset(lambda: iter(vectors))), "vectors")
    scalars = np.asarray(golden.inputs["scalars"], np.float32)
    with pytest.raises(ArgumentError, match="has no rows to split"):
        list(strategy.distribute_dataset(lambda: iter(scalars)))
    assert _joined(_parts(strategy.distribute_dataset(lambda: iter(scalars), 4, remainder="pad")))[0] == [0, 1, 2, 3]


@differs("ds_element_spec", "the number of rows is known, since all batches have one shape; len() works")
def test_a_dataset_tells_shapes_and_length(golden, strategy):
    source = {"x": np.ones((10, 2), np.float32), "y": np.ones(10, np.int64)}
    for remainder, name in (("pad", "drop_False"), ("drop", "drop_True")):
        dataset = strategy.distribute_dataset(source, golden.inputs["global_batch"], remainder=remainder)
        assert len(dataset) == golden.expect[name]["cardinality"]
        part = golden.expect["drop_True"]["x"][0]["shape"][0]
        assert dataset.element_spec == {
            "x": jax.ShapeDtypeStruct((part, 2), np.float32),
            "y": jax.ShapeDtypeStruct((part,), np.int32),
        }


# ---- datasets from a function --------------------------------------------------------------------


@differs("ds_from_function", _UNEVEN)
def test_a_function_makes_the_batches_of_single_replicas(golden, strategy):
    rows, size, told = _rows(golden), golden.inputs["batch_per_replica"], []

    def batches(context):
        told.append(context)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    dataset = strategy.distribute_datasets_from_function(batches, remainder="pad", mask=True)
    (context,) = told
    expected = golden.expect["context"]
    assert context.num_input_pipelines == expected["num_input_pipelines"]
    assert context.input_pipeline_id == expected["input_pipeline_id"]
    assert context.num_replicas == expected["num_replicas_in_sync"]
    for batch, per_replica in expected["per_replica_batch_size"].items():
        check(attempt(context.per_replica_batch_size, int(batch)), per_replica)
    assert _real_rows(dataset) == _joined(golden.expect["steps"])
    full = [parts for parts in golden.expect["steps"] if all(len(part) == size for part in parts)]
    assert _parts(strategy.distribute_datasets_from_function(batches, remainder="drop")) == full


@differs("ds_from_function_uneven", _UNEVEN)
def test_replicas_may_run_out_of_batches(golden, strategy):
    size = golden.inputs["batch_per_replica"]
    for name, count in (("10_rows", 10), ("7_rows", 7)):
        rows = np.arange(count, dtype=np.float32)
        batches = [rows[i : i + size] for i in range(0, count, size)]
        dataset = strategy.distribute_datasets_from_function(lambda _: batches, remainder="pad", mask=True)
        assert _real_rows(dataset) == _joined(golden.expect[name])


# ---- loops over datasets -------------------------------------------------------------------------


@differs("ds_loop_inside_function", "the program would keep the data of its trace: the loop stands outside")
def test_a_loop_over_a_dataset_stands_outside_of_the_traced_function(golden, strategy):
    dataset = _distribute(golden, strategy, remainder="pad", mask=True)
    with strategy.scope():
        total, steps = px.Variable(0.0), px.Variable(0)

    @px.function
    def step(batch):
        total.assign_add(strategy.reduce("sum", strategy.run(lambda x, mask: (x * mask).sum(), batch)))
        steps.assign_add(1)

    results = []
    for _ in range(2):
        for batch in dataset:
            step(batch)
        results.append({"total": float(total), "steps": int(steps)})
    golden.check(results, "after_call")
    assert step.trace_count == 1
    with pytest.raises(StrategyError, match="pass each element to the function as an argument"):
        px.function(lambda: [step(batch) for batch in dataset])()


@differs("ds_losses_on_uneven_batches", "an empty replica adds nothing: no mean is NaN")
def test_means_over_uneven_batches_count_rows(golden, strategy):
    x, y = (np.asarray(golden.inputs[name], np.float32) for name in "xy")

    def losses(x, y, mask):
        context = px.get_replica_context()
        rows = context.all_reduce("sum", mask.sum())
        total = ((x - y) ** 2 * mask).sum()
        return total / rows, total / golden.inputs["global_batch"], total / jnp.maximum(mask.sum(), 1)

    dataset = strategy.distribute_dataset((x, y), golden.inputs["global_batch"], remainder="pad", mask=True)
    for batch, expected in zip(dataset, golden.expect["steps"], strict=True):
        mean, scaled, own = strategy.run(losses, batch)
        check(strategy.reduce("sum", mean), expected["a"])
        check(strategy.reduce("sum", scaled), expected["b"])
        check(strategy.reduce("sum", scaled), expected["d"])
        assert np.isfinite([np.asarray(part) for part in strategy.local_results(own)]).all()


@replay("ds_gather_predictions")
def test_predictions_are_gathered_in_row_order(golden, strategy):
    x = np.asarray(golden.inputs["x"], np.float32)
    with strategy.scope():
        w = px.Variable(np.asarray(golden.inputs["w"], np.float32))

    @px.function
    def predict(batch):
        return strategy.gather(strategy.run(lambda x, mask: (x @ w, mask), batch))

    steps = []
    for batch in strategy.distribute_dataset((x,), 4, remainder="pad", mask=True):
        predictions, mask = predict(batch)
        steps.append(np.asarray(predictions)[np.asarray(mask) > 0])
    return {"steps": steps}
