"""distribute_dataset: what can be a source, and what its elements look like."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feeding import aligned, numbers, replicas, rows_of, whole

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError

Batch = namedtuple("Batch", ["x", "y"])


# ---- arrays --------------------------------------------------------------------------------------


def test_rows_of_an_array_arrive_in_order(strategy):
    dataset = strategy.distribute_dataset(np.arange(12.0, dtype=np.float32), 4)
    assert rows_of(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(dataset) == 3


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64"])
def test_arrays_keep_their_dtype(convert, dtype):
    x = convert(np.arange(4).astype(jnp.dtype(dtype)))
    (element,) = replicas(2).distribute_dataset(x, 4)
    assert element.dtype == jnp.dtype(dtype)
    assert whole(element).tolist() == np.asarray(x).tolist()


def test_64_bit_arrays_become_32_bit_unless_x64_is_on():
    strategy = replicas(2)
    for on, expected in ((False, np.float32), (True, np.float64)):
        with jax.enable_x64(on):  # of the thread that iterates; the rows are moved by another one
            (element,) = strategy.distribute_dataset(np.arange(4.0), 4)
        assert element.dtype == expected


@pytest.mark.parametrize(
    "source",
    [
        (np.arange(4), np.ones((4, 2))),
        {"x": [np.arange(4), np.ones((4, 2))]},
        {"x": np.arange(4), "more": {"y": np.ones((4, 2))}},
        Batch(np.arange(4), jnp.ones((4, 2))),
        {"x": np.arange(4), "none": None},
    ],
    ids=lambda source: type(source).__name__,
)
def test_elements_have_the_structure_of_the_arrays(source):
    strategy = replicas(2)
    (element,) = strategy.distribute_dataset(source, 4)
    assert jax.tree.structure(whole(element)) == jax.tree.structure(source)
    for found, given in zip(jax.tree.leaves(whole(element)), jax.tree.leaves(source)):
        assert found.tolist() == np.asarray(given).tolist()


def test_an_element_is_a_snapshot_of_the_array():
    x = aligned(8, 1024)
    for strategy in (replicas(1), replicas(2)):
        x[:] = np.arange(8)[:, None]
        elements = list(strategy.distribute_dataset(x, 4))
        x[:] = -1
        assert [whole(element)[:, 0].tolist() for element in elements] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_memory_map_is_read_batch_by_batch(tmp_path):
    huge = np.memmap(tmp_path / "rows", dtype=np.float32, mode="w+", shape=(2**34, 4))  # 256 GiB, none of it written
    huge[:2] = [[1], [2]]
    dataset = replicas(2).distribute_dataset(huge, 2)
    assert len(dataset) == 2**33
    assert rows_of([next(iter(dataset))]) == [[[1] * 4, [2] * 4]]


def test_arrays_need_a_batch_size():
    for source in (np.arange(4), (np.arange(4), np.arange(4)), {"x": np.arange(4)}):
        with pytest.raises(
            ArgumentError, match=r"arrays need batch_size, .* replicas: \S+\(arrays, batch_size=\.\.\.\)\.$"
        ):
            replicas(1).distribute_dataset(source)


def test_arrays_of_different_length_are_refused_by_path():
    with pytest.raises(
        ArgumentError, match=r"the source differ in their number of rows \(source\['x'\]: 4, source\['y'\]: 5\)"
    ):
        replicas(1).distribute_dataset({"x": np.arange(4), "y": np.arange(5)}, 2)


# ---- iterables -----------------------------------------------------------------------------------


def test_each_item_of_an_iterable_is_a_batch(strategy):
    batches = [np.arange(4.0), np.arange(4.0, 8.0)]
    sources = batches, batches.__iter__, lambda: iter(batches), (b for b in batches), map(np.asarray, batches)
    for source in sources:
        assert rows_of(strategy.distribute_dataset(source)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_batch_size_stacks_the_items_of_an_iterable(strategy):
    rows = [(float(i), np.full(2, i)) for i in range(8)]
    for source in (iter(rows), lambda: rows, (row for row in rows)):
        elements = [whole(element) for element in strategy.distribute_dataset(source, 4)]
        assert [x.tolist() for x, _ in elements] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert elements[1][1].tolist() == [[4, 4], [5, 5], [6, 6], [7, 7]]


def test_a_list_of_arrays_is_batches_and_with_batch_size_it_must_say_whether_rows_or_columns():
    batches = [np.arange(4.0), np.arange(4.0) + 10]
    strategy = replicas(2)
    assert rows_of(strategy.distribute_dataset(batches)) == [[0, 1, 2, 3], [10, 11, 12, 13]]
    for ambiguous in (batches, [{"x": np.ones(3)}] * 4, [(np.ones(2), np.ones(2))] * 4):
        with pytest.raises(ArgumentError, match=r"a list of arrays .* may be columns or rows"):
            strategy.distribute_dataset(ambiguous, 4)
    (columns,) = strategy.distribute_dataset(tuple(batches), 4)
    assert [part.tolist() for part in whole(columns)] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    for rows in (np.stack(batches), lambda: iter(batches)):
        assert rows_of(strategy.distribute_dataset(rows, 2)) == [[[0, 1, 2, 3], [10, 11, 12, 13]]]


@pytest.mark.parametrize("source", [([1.0, 2.0], [3.0, 4.0]), {"x": [1.0, 2.0]}, (np.ones(2), [1.0, 2.0])], ids=str)
def test_columns_that_are_lists_are_refused(source):
    with pytest.raises(ArgumentTypeError, match=r"\]\[0\] is a float.* Make lists arrays with np\.asarray"):
        replicas(2).distribute_dataset(source, 2)


def test_columns_in_a_list_of_lists_are_refused_in_few_words():
    with pytest.raises(ArgumentError, match=r"columns would be a tuple of arrays, \(np.array\(x\)") as error:
        list(replicas(2).distribute_dataset([np.ones((100, 4)).tolist(), list(range(100))], 32))
    assert "and so on (400 arrays), found" in str(error.value)
    assert len(str(error.value)) < 500


def test_a_list_of_numbers_is_an_iterable_of_rows():
    assert rows_of(replicas(2).distribute_dataset([1.0, 2.0, 3.0, 4.0], 2)) == [[1, 2], [3, 4]]


def test_iterables_can_be_iterated_again_when_the_source_can(strategy):
    for source in ([np.arange(4.0)] * 2, numbers(2)):
        dataset = strategy.distribute_dataset(source)
        assert rows_of(dataset) == rows_of(dataset) != []


def test_a_function_is_called_once_for_each_pass_and_may_return_any_source():
    calls = []

    def source():
        calls.append(1)
        return np.arange(4.0) + 10 * len(calls)

    dataset = replicas(2).distribute_dataset(source, 4)
    assert [rows_of(dataset), rows_of(dataset)] == [[[10, 11, 12, 13]], [[20, 21, 22, 23]]]


def test_a_class_is_called_for_each_pass_like_a_function():
    class Batches:
        def __iter__(self):
            return iter([np.arange(4.0)])

    assert rows_of(replicas(2).distribute_dataset(Batches)) == [[0, 1, 2, 3]]


def test_a_function_with_one_parameter_is_told_the_epoch():
    def with_default(epoch, rows=4):
        return [np.full(rows, epoch)]

    class Rows:
        def of(self, epoch, *more, **named):
            return [np.full(4, epoch)]

    strategy = replicas(2)
    for source in (with_default, lambda epoch: with_default(epoch), Rows().of, partial(with_default, rows=4)):
        dataset = strategy.distribute_dataset(source)
        assert dataset.element_spec.shape == (2,)
        assert [rows_of(dataset) for _ in range(3)] == [[[0] * 4], [[1] * 4], [[2] * 4]]
    for source in (lambda epoch=7: with_default(epoch), lambda *epoch: with_default(7), partial(with_default, 7)):
        assert rows_of(strategy.distribute_dataset(source)) == [[7] * 4]
    with pytest.raises(ArgumentTypeError, match=r"needs epoch, rows\. A source function is called with the number"):
        strategy.distribute_dataset(lambda epoch, rows: [])


def test_a_function_that_gives_a_function_is_refused():
    def itself():
        return itself

    for source in (itself, lambda: len):
        with pytest.raises(ArgumentTypeError, match=r"the function <function .* gave a function, .* and no data"):
            list(replicas(2).distribute_dataset(source))


def test_length_is_known_where_the_source_tells():
    strategy = replicas(2)
    batches = [np.arange(4.0)] * 3
    assert len(strategy.distribute_dataset(batches)) == 3
    assert len(strategy.distribute_dataset([1.0] * 10, 4, remainder="pad")) == 3
    assert len(strategy.distribute_dataset([1.0] * 10, 4, remainder="drop")) == 2
    assert len(strategy.distribute_dataset(np.ones(10), 4, remainder="drop")) == 2
    unknown = {"generator": iter(batches), "function": numbers(3)}
    for source in unknown.values():
        with pytest.raises(TypeError, match="does not tell how many batches"):
            len(strategy.distribute_dataset(source))
    with pytest.raises(TypeError):  # the last of them may be dropped
        len(strategy.distribute_dataset(batches, remainder="drop"))


def test_an_iterator_can_be_read_once_and_says_so_the_second_time():
    dataset = replicas(2).distribute_dataset(numbers(3)())
    assert len(rows_of(dataset)) == 3
    with pytest.raises(ArgumentError, match=r"read only once, and it has been read.*a function that returns a new"):
        iter(dataset)


def test_no_pass_over_an_iterator_is_partial_or_repeats():
    """A loop of several epochs ends with an error at the second; a function as source gives all of them."""
    strategy = replicas(2)
    seen = []
    with pytest.raises(ArgumentError, match="read only once"):
        dataset = strategy.distribute_dataset(numbers(3)())
        for _ in range(3):
            for element in dataset:
                seen.append(float(element.values[0][0]))
    assert seen == [0, 1, 2]
    dataset = strategy.distribute_dataset(numbers(3))
    assert [rows[0] for _ in range(3) for rows in rows_of(dataset)] == [0, 1, 2] * 3


def test_an_endless_source_is_read_on_and_on_by_one_iterator():
    def endless():
        i = 0
        while True:
            yield np.full(4, i)
            i += 1

    iterator = iter(replicas(2).distribute_dataset(endless()))
    epochs = [[int(next(iterator).values[0][0]) for _ in range(2)] for _ in range(3)]
    assert epochs == [[0, 1], [2, 3], [4, 5]]


def test_a_source_that_fills_one_buffer_again_and_again_is_fed_right():
    buffer = aligned(2, 4096)

    def source():
        for i in range(6):
            buffer[:] = i
            yield buffer

    strategy = replicas(2)
    for prefetch in (0, 3):
        elements = list(strategy.distribute_dataset(source, prefetch=prefetch))
        assert [float(element.values[1].max()) for element in elements] == list(range(6))
    stacked = list(strategy.distribute_dataset(source, 2))
    assert [whole(element)[:, 0, 0].tolist() for element in stacked] == [[0, 1], [2, 3], [4, 5]]
    side_by_side = list(strategy.distribute_datasets_from_function(lambda _: source()))
    assert [whole(element)[:, 0].tolist() for element in side_by_side] == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]


# ---- element_spec --------------------------------------------------------------------------------


def test_element_spec_is_that_of_each_replicas_part():
    source = {"x": np.ones((10, 3)), "y": np.arange(10)}
    dataset = replicas(2).distribute_dataset(source, 4, remainder="pad", mask=True)
    x, y = jax.ShapeDtypeStruct((2, 3), np.float32), jax.ShapeDtypeStruct((2,), np.int32)
    assert dataset.element_spec == ({"x": x, "y": y}, jax.ShapeDtypeStruct((2,), np.float32))
    element = next(iter(dataset))
    assert jax.tree.map(lambda part: (part.shape, part.dtype), element[0]["x"].values[0]) == (x.shape, x.dtype)


def test_element_spec_is_known_from_what_was_fed_and_else_asked_for_once():
    for fed_before in (False, True):
        passes = count()
        asked = []

        def source(passes=passes, asked=asked):
            asked.append(next(passes))
            return iter([np.ones((4, 2)), np.ones((2, 2))])

        dataset = replicas(2).distribute_dataset(source)
        if fed_before:
            next(iter(dataset))
        assert dataset.element_spec == dataset.element_spec == jax.ShapeDtypeStruct((2, 2), np.float32)
        assert asked == [0]
        assert len(list(dataset)) == 2
        assert dataset.element_spec.shape == (2, 2)


def test_element_spec_is_not_that_of_a_smaller_last_element():
    dataset = replicas(2).distribute_dataset(np.ones((6, 3)), 4)
    first, last = iter(dataset), replicas(2).distribute_dataset(np.ones((6, 3)), 4)
    next(first)
    last.load_state_dict(dataset.state_dict())
    assert [element.values[0].shape for element in last] == [(1, 3)]
    assert last.element_spec.shape == (2, 3)


def test_element_spec_of_an_iterator_is_known_after_its_first_element():
    dataset = replicas(2).distribute_dataset(iter([np.ones((4, 2))]))
    with pytest.raises(ArgumentError, match="read only once. Ask after the first element"):
        _ = dataset.element_spec
    next(iter(dataset))
    assert dataset.element_spec.shape == (2, 2)


def test_element_spec_of_an_iterable_reads_its_first_element_only():
    asked = []

    def source():
        for i in range(3):
            asked.append(i)
            yield np.ones((4, 2))

    dataset = replicas(2).distribute_dataset(source)
    assert dataset.element_spec == jax.ShapeDtypeStruct((2, 2), np.float32)
    assert asked == [0]
    with pytest.raises(ArgumentError, match="can be read only once"):
        _ = replicas(2).distribute_dataset(source()).element_spec


# ---- what is no source ---------------------------------------------------------------------------


@pytest.mark.parametrize("source", [3, "rows.csv", object()], ids=["number", "text", "object"])
def test_what_is_no_source_is_refused(source):
    with pytest.raises(ArgumentTypeError, match="distribute_dataset takes arrays, pytrees of arrays, an iterable"):
        replicas(1).distribute_dataset(source, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive int, got 0"),
        ({"batch_size": 2.0}, "batch_size must be a positive int, got 2.0"),
        ({"batch_size": True}, "batch_size must be a positive int, got True"),
        ({"prefetch": -1}, "prefetch must be an int from 0 on, got -1"),
        ({"seed": "a"}, "seed must be an int"),
        ({"remainder": "keep"}, "remainder must be one of 'auto', 'pad', 'drop', 'error', got 'keep'"),
        ({"auto_shard": "file"}, "auto_shard must be one of 'data', 'off', got 'file'"),
    ],
)
def test_options_are_checked_at_once(options, message):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        replicas(1).distribute_dataset(np.arange(4), **{"batch_size": 2, **options})


@pytest.mark.parametrize("in_replica", [True, False], ids=["replica", "foreign scope"])
def test_a_dataset_is_made_outside_replicas_and_foreign_scopes(in_replica):
    strategy = replicas(2)

    def make():
        strategy.distribute_dataset(np.arange(4), 2)

    with pytest.raises(px.errors.StrategyError, match=r"distribute_dataset"):
        if in_replica:
            strategy.run(make)
        else:
            with replicas(1).scope():
                make()


def test_no_library_is_imported_for_a_source():
    script = """
import sys, numpy as np, phalanx as px
list(px.OneDevice().distribute_dataset((np.arange(4),), 2))
print([name for name in ("torch", "tensorflow", "grain", "datasets", "keras", "h5py", "rich") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
