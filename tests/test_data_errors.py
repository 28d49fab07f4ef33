"""Sources that cannot be fed: what is wrong is named, with the leaf, what was expected and what was found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feeding import replicas, rows_of, whole

from phalanx.errors import ArgumentError, ArgumentTypeError


def feed(*elements, **options):
    """What becomes of a source with these elements on two replicas."""
    return list(replicas(2).distribute_dataset(lambda: iter(elements), **options))


# ---- sources that change -------------------------------------------------------------------------

GOOD = {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.int32)}

CHANGES = {
    r"element 1 differs from the first in \['x'\]: expected float32\[3\], found float32\[2\]": {
        **GOOD,
        "x": np.ones((4, 2), np.float32),
    },
    r"element 1 differs from the first in \['y'\]: expected int32\[\], found float32\[\]": {
        **GOOD,
        "y": np.ones(4, np.float32),
    },
    r"element 1 differs from the first in \['y'\]: expected \[.*\['y'\].*\], found \[\"\['x'\]\"\]": {"x": GOOD["x"]},
    r"element 1 differs from the first in \['z'\]: expected .*, found .*\['z'\]": {**GOOD, "z": GOOD["y"]},
    r"element 1 differs from the first in \['x'\]: expected .*, found .*\['x'\]\[0\]": {**GOOD, "x": (GOOD["x"],)},
    r"of element 1 differ in their number of rows \(\['x'\]: 4, \['y'\]: 5\)": {**GOOD, "y": np.ones(5, np.int32)},
}


@pytest.mark.parametrize("message", CHANGES, ids=range(len(CHANGES)))
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_change_is_named_by_element_and_leaf_with_expected_and_found(message, prefetch):
    with pytest.raises(ArgumentError, match=message):
        feed(GOOD, CHANGES[message], prefetch=prefetch)


def test_a_change_from_list_to_tuple_is_named():
    with pytest.raises(ArgumentError, match=r"from the first in the structure: expected PyTreeDef\(\(\*,\)\), found"):
        feed((np.ones(4),), [np.ones(4)])


def test_elements_before_the_change_are_handed_out():
    iterator = iter(replicas(2).distribute_dataset(lambda: iter([GOOD, GOOD, {"x": GOOD["x"]}])))
    assert [sorted(next(iterator)), sorted(next(iterator))] == [["x", "y"]] * 2
    with pytest.raises(ArgumentError, match="element 2"):
        next(iterator)


def test_rows_that_do_not_stack_are_named_by_row_and_leaf():
    rows = [{"x": np.ones(3)}] * 5 + [{"x": np.ones(2)}]
    message = r"row 5 differs from the first in \['x'\]: expected float64\[3\], found float64\[2\]"
    with pytest.raises(ArgumentError, match=message):
        feed(*rows, batch_size=2)


# ---- what no device can hold ---------------------------------------------------------------------


@pytest.mark.parametrize("column", [["a", "b"], [b"a", b"b"], [{}, None], np.array(["2020"] * 2, "M8[D]")], ids=str)
def test_columns_that_are_not_numeric_are_named_with_the_ways_out(column):
    batch = {"x": np.ones(2), "text": np.array(column)}
    message = r"\['text'\].* is not numeric \(dtype .*a map before distribute_dataset; or feed the number of the row"
    with pytest.raises(ArgumentTypeError, match=message):
        feed(batch)
    with pytest.raises(ArgumentTypeError, match=message):
        replicas(2).distribute_dataset(batch, 2)  # before the first step


def test_text_is_looked_up_on_the_host_with_a_map_in_the_background():
    vocabulary = {"a": 0, "b": 1}
    batches = [{"text": ["a", "b"]}, {"text": ["b", "b"]}]

    def lookup(batch):
        return {"text": np.array([vocabulary[word] for word in batch["text"]])}

    elements = replicas(2).distribute_dataset(lambda: map(lookup, batches))
    assert [whole(e)["text"].tolist() for e in elements] == [[0, 1], [1, 1]]


def test_texts_that_are_wanted_back_are_found_by_the_number_of_their_row():
    names = np.array(["ann", "bob", "cid", "dan", "eve"])
    source = {"x": np.arange(5.0), "row": np.arange(5)}
    logged = []
    for batch, mask in replicas(2).distribute_dataset(source, 2, shuffle=True, seed=0, remainder="pad", mask=True):
        real = whole(mask) > 0
        logged += zip(names[whole(batch)["row"]][real].tolist(), whole(batch)["x"][real].tolist())
    assert sorted(logged) == [("ann", 0), ("bob", 1), ("cid", 2), ("dan", 3), ("eve", 4)]


def test_numbers_instead_of_rows_are_refused_with_the_way_out():
    with pytest.raises(ArgumentError, match=r"\[1\] of element 0 is a single number.*Give batch_size to stack"):
        feed((np.ones(4), 3.0))
    with pytest.raises(ArgumentError, match=r"\[1\] of element 0 is a single number"):
        feed((np.ones(4), np.float32(3)))
    with pytest.raises(ArgumentError, match="source is 0-d and has no rows"):
        replicas(2).distribute_dataset(np.array(3.0), 2)


@pytest.mark.parametrize("leaf", [object(), iter([1]), len], ids=["object", "iterator", "function"])
def test_what_is_no_array_is_named(leaf):
    with pytest.raises(ArgumentTypeError, match=r"\['x'\] of element 0 is not numeric"):
        feed({"x": leaf})


def test_random_keys_are_refused_with_the_way_out():
    keys = jax.random.split(jax.random.key(0), 4)
    for source, batch_size in ((keys, 4), ([keys], None)):
        with pytest.raises(ArgumentTypeError, match=r"random keys.*key_data"):
            list(replicas(2).distribute_dataset(source, batch_size))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40 + 7])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_integers_that_do_not_fit_on_the_device_are_named(value, prefetch):
    strategy, message = replicas(2), rf"\['id'\] of element 1 holds {value}, which does not fit int32: int64 becomes"
    ids = np.array([0, 1, 2, value])
    sources = ({"id": ids}, 2), ([{"id": ids[:2]}, {"id": ids[2:]}], None), ([{"id": int(i)} for i in ids], 2)
    for source, size in sources:
        with pytest.raises(ArgumentError, match=message):
            list(strategy.distribute_dataset(source, size, prefetch=prefetch))
        with jax.enable_x64(True):
            elements = [
                whole(element)["id"] for element in strategy.distribute_dataset(source, size, prefetch=prefetch)
            ]
        assert np.concatenate(elements).tolist() == ids.tolist()


def test_integers_at_the_limits_of_the_devices_fit():
    info = np.iinfo(np.int32)
    assert rows_of(replicas(2).distribute_dataset(np.array([info.min, info.max]), 2)) == [[info.min, info.max]]
    assert rows_of(replicas(2).distribute_dataset(np.array([2**32 - 1, 0], np.uint64), 2)) == [[2**32 - 1, 0]]
    with pytest.raises(ArgumentError, match="the array of element 0 holds 4294967296, which does not fit uint32"):
        feed(np.array([2**32, 0], np.uint64))


def test_masked_entries_are_refused():
    rows = np.ma.masked_array(np.arange(4.0), mask=[False, True, False, False])
    with pytest.raises(ArgumentTypeError, match=r"source\['x'\] has masked entries.*\.filled\(value\)"):
        replicas(2).distribute_dataset({"x": rows}, 2)
    with pytest.raises(ArgumentTypeError, match=r"\['x'\] of element 0 has masked entries"):
        feed({"x": rows})
    assert rows_of(replicas(2).distribute_dataset(np.ma.masked_array(np.arange(4.0)), 4)) == [[0, 1, 2, 3]]


def test_what_is_distributed_already_is_refused():
    strategy = replicas(2)
    dataset = strategy.distribute_dataset(np.arange(8.0), 4)
    with pytest.raises(ArgumentTypeError, match="the source is a distributed dataset already"):
        strategy.distribute_dataset(dataset, 8)
    (element, _) = dataset
    for source in (element, {"x": element}, (element, np.ones(4))):
        with pytest.raises(ArgumentTypeError, match=r"source.* is a PerReplica, which lies on the replicas already"):
            strategy.distribute_dataset(source, 2)
    for batches in ([element], lambda: dataset, ({"x": x} for x in dataset)):
        with pytest.raises(ArgumentTypeError, match=r"of element 0 is a PerReplica"):
            list(strategy.distribute_dataset(batches))


def test_rows_of_different_length_are_called_ragged():
    ragged = np.array([np.ones(1), np.ones(2)], object)
    with pytest.raises(ArgumentTypeError, match=r"\['x'\] of element 0 is ragged: its rows differ in length. Pad them"):
        feed({"x": ragged})
    with pytest.raises(ArgumentTypeError, match=r"source\['x'\] is ragged"):
        replicas(2).distribute_dataset({"x": ragged}, 2)


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_doubles_are_refused(dtype):
    with pytest.raises(ArgumentTypeError, match=r"has dtype .*, which JAX does not know. Use .astype\(np.float64\)"):
        replicas(2).distribute_dataset({"x": np.ones(4, dtype)}, 2)


# ---- nothing, and too much -----------------------------------------------------------------------


@pytest.mark.parametrize("source", [np.ones((0, 3)), {"x": jnp.ones(0), "y": jnp.ones((0, 2))}], ids=["array", "dict"])
def test_arrays_without_rows_are_refused_at_once(source):
    with pytest.raises(ArgumentError, match="the source is empty"):
        replicas(2).distribute_dataset(source, 2)


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"remainder": "pad"}, {"prefetch": 0}], ids=str)
def test_a_source_that_gives_nothing_says_so(options):
    for source in (lambda: iter(()), [], iter([])):
        with pytest.raises(ArgumentError, match=r"the source is empty \(it gave no element\)"):
            list(replicas(2).distribute_dataset(source, **options))


def test_an_element_without_arrays_is_refused():
    with pytest.raises(ArgumentError, match=r"element 0 holds no arrays: {'x': None}"):
        feed({"x": None})


def test_an_element_that_does_not_fit_says_how_large_it_is():
    huge = np.broadcast_to(np.float32(0), (4, 2**48))  # a petabyte for each of two replicas, and no memory of its own
    size = r"shape \(4, 281474976710656\) and dtype float32 \(4,294,967,296 MiB, 2,147,483,648 MiB per replica\)"
    with pytest.raises(ArgumentError, match=size):
        feed(huge)


def test_an_error_of_the_device_about_memory_says_so_too(monkeypatch):
    strategy = replicas(2)

    def full(rows, **_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64 bytes.")

    monkeypatch.setattr(strategy, "split_rows", full)
    with pytest.raises(ArgumentError, match=r"does not fit on the devices\. Use a smaller batch_size, or"):
        list(strategy.distribute_dataset(np.ones(4), 4))


def test_a_dataset_is_usable_after_an_error():
    bad = [np.ones(4), np.ones(3)]
    dataset = replicas(2).distribute_dataset(lambda: iter(bad))
    with pytest.raises(ValueError, match="element 1"):
        list(dataset)
    bad[1] = np.zeros(4)
    assert rows_of(dataset) == [[1] * 4, [0] * 4]
