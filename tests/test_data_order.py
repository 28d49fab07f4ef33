"""The order of rows: the source's, or one that seed and epoch settle alone; and going on exactly where one stopped."""

from __future__ import annotations

import json
import logging
import re
from itertools import islice

import numpy as np
import pytest
from feeding import numbers, replicas, rows_of, whole

from phalanx.errors import ArgumentError

ROWS = np.arange(16.0, dtype=np.float32)


def shuffled(n=2, batch_size=8, seed=3, rows=ROWS, **options):
    return replicas(n).distribute_dataset(rows, batch_size, shuffle=True, seed=seed, **options)


def order(dataset) -> list[float]:
    return [row for rows in rows_of(dataset) for row in rows]


# ---- shuffling -----------------------------------------------------------------------------------


def test_shuffled_order_depends_on_seed_and_epoch_alone():
    datasets = [shuffled(n, batch_size) for n, batch_size in ((1, 8), (2, 8), (4, 4), (8, 16), (1, 3))]
    epochs = [[order(dataset) for dataset in datasets] for _ in range(3)]
    for orders in epochs:
        assert all(found == orders[0] for found in orders)
        assert sorted(orders[0]) == ROWS.tolist()
    assert len({tuple(orders[0]) for orders in epochs}) == 3
    assert order(shuffled(seed=4)) != epochs[0][0]


def test_an_epoch_that_was_left_early_does_not_change_the_next():
    whole_epochs, left = shuffled(), shuffled()
    order(whole_epochs)
    next(iter(left))
    assert order(left) == order(whole_epochs)


def test_rows_of_all_arrays_stay_together():
    source = {"x": ROWS, "y": np.stack([ROWS, -ROWS], axis=1)}
    for element in map(whole, shuffled(rows=source)):
        assert (element["y"] == np.stack([element["x"], -element["x"]], axis=1)).all()


def test_a_seed_that_was_not_given_is_drawn_and_logged_so_that_the_run_can_be_repeated(caplog):
    with caplog.at_level(logging.INFO, "phalanx"):
        drawn = shuffled(seed=None)
    (seed,) = re.findall(r"batches of 8 \(4 per replica\), shuffled with seed (\d+)", caplog.text)
    assert order(shuffled(seed=int(seed))) == order(drawn)
    assert order(shuffled(seed=None)) != order(shuffled(seed=None))


def test_a_seed_without_shuffle_is_refused():
    with pytest.raises(ArgumentError, match="seed=3 is for shuffle=True, and shuffle is False"):
        replicas(2).distribute_dataset(ROWS, 8, seed=3)


def test_shuffling_needs_rows_that_can_be_read_by_index():
    for source in (numbers(3)(), [np.ones(4)], range(8)):
        with pytest.raises(ArgumentError, match=r"shuffle=True needs rows that can be read by index.*in the source"):
            replicas(2).distribute_dataset(source, shuffle=True)


def test_a_function_that_gives_arrays_can_be_shuffled():
    assert order(shuffled(rows=lambda: ROWS)) == order(shuffled())


# ---- resuming ------------------------------------------------------------------------------------


def epoch_of_batches(epoch):
    """A source that shuffles itself, by its epoch."""
    return iter(np.random.default_rng(epoch).permutation(ROWS).reshape(4, 4))


SOURCES = {
    "array": lambda **o: replicas(2).distribute_dataset(ROWS, 4, **o),
    "shuffled": lambda **o: shuffled(2, 4, **o),
    "batches": lambda **o: replicas(2).distribute_dataset(list(ROWS.reshape(4, 4)), **o),
    "generator": lambda **o: replicas(2).distribute_dataset(numbers(4), **o),
    "stacked": lambda **o: replicas(2).distribute_dataset(lambda: iter(ROWS), 4, **o),
    "uneven": lambda **o: replicas(2).distribute_dataset(ROWS[:15], 4, remainder="pad", **o),
    "uneven batches": lambda **o: replicas(2).distribute_dataset(
        [*ROWS[:12].reshape(3, 4), ROWS[12:13]], remainder="pad", **o
    ),
    "dropping": lambda **o: replicas(2).distribute_dataset(ROWS[:15], 4, remainder="drop", **o),
    "function of the epoch": lambda **o: replicas(2).distribute_dataset(epoch_of_batches, **o),
    "function": lambda **o: replicas(2).distribute_datasets_from_function(lambda _: list(ROWS.reshape(8, 2)), **o),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_state_restores_the_exact_next_element_in_a_new_run(make, prefetch):
    run = make(prefetch=prefetch)
    epochs = [rows_of(run) for _ in range(3)]
    for taken in range(len(epochs[1]) + 1):
        stopped = make(prefetch=prefetch)
        rows_of(stopped)
        rows_of(islice(stopped, taken))
        state = json.loads(json.dumps(stopped.state_dict()))
        resumed = make(prefetch=prefetch)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [rows_of(resumed), rows_of(resumed)] == [epochs[1][taken:], epochs[2]]


def test_the_state_counts_what_was_handed_out_and_not_what_was_made_ahead():
    dataset = replicas(2).distribute_dataset(ROWS, 2, prefetch=4)
    iterator = iter(dataset)
    for i in range(3):
        assert dataset.state_dict()["element"] == i
        next(iterator)


def test_a_state_goes_back_in_the_same_dataset():
    dataset = shuffled(2, 4)
    iterator = iter(dataset)
    next(iterator)
    state, (rest,) = dataset.state_dict(), [rows_of(iterator)]
    rows_of(dataset)
    dataset.load_state_dict(state)
    assert rows_of(dataset) == rest


def test_the_state_of_a_finished_epoch_is_the_start_of_the_next():
    dataset, again = shuffled(), shuffled()
    rows_of(dataset)
    again.load_state_dict(dataset.state_dict())
    assert rows_of(again) == rows_of(dataset)


def test_a_run_goes_on_with_another_number_of_replicas():
    stopped = shuffled(2, 4)
    rest = iter(stopped)
    next(rest)
    resumed = shuffled(4, 4)
    resumed.load_state_dict(stopped.state_dict())
    assert rows_of(resumed) == rows_of(rest)


@pytest.mark.parametrize(("before", "after"), [(8, 4), (2, 8), (4, 4), (4, 1)])
def test_batches_of_single_replicas_go_on_with_another_number_of_replicas(before, after):
    def make(n):
        dataset = replicas(n).distribute_datasets_from_function(lambda _: [np.full(2, i) for i in range(30)], **pad)
        return [dataset, iter(dataset)]

    pad = {"remainder": "pad", "mask": True}
    stopped, iterator = make(before)
    next(iterator)
    resumed, _ = make(after)
    resumed.load_state_dict(stopped.state_dict())
    elements = [whole(element) for element in resumed]
    assert [rows[mask > 0].tolist() for rows, mask in elements] == [
        np.repeat(range(i, min(i + after, 30)), 2).tolist() for i in range(before, 30, after)
    ]
    assert {rows.size for rows, _ in elements} == {2 * after}


KINDS = {
    "rows": lambda: replicas(2).distribute_dataset(ROWS, 4),
    "items": lambda: replicas(2).distribute_dataset(iter(ROWS), 4),
    "function": lambda: replicas(2).distribute_dataset(lambda: iter(ROWS), 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_with_its_kind_of_source_only(kind):
    for other, make in KINDS.items():
        stopped, resumed = KINDS[kind](), make()
        next(iter(stopped))
        if other == kind:
            resumed.load_state_dict(stopped.state_dict())
            assert rows_of(resumed) == ROWS.reshape(4, 4)[1:].tolist()
        else:
            with pytest.raises(ArgumentError, match=f"of another kind of source, '{kind}'; this one is of '{other}'"):
                resumed.load_state_dict(stopped.state_dict())


def test_after_a_loop_that_was_left_the_next_one_is_the_next_epoch_unless_the_state_is_loaded():
    def left(dataset):
        return whole(next(iter(dataset))).tolist()

    dataset, run = shuffled(2, 4), shuffled(2, 4)
    epochs = [rows_of(run), rows_of(run)]
    assert left(dataset) == epochs[0][0]
    state = dataset.state_dict()
    assert (state["epoch"], state["element"]) == (0, 1)
    assert left(dataset) == epochs[1][0]
    dataset.load_state_dict(state)
    assert rows_of(dataset) == epochs[0][1:]
    assert dataset.state_dict()["epoch"] == 1


def test_a_state_is_plain_python():
    state = shuffled(seed=np.int64(3), batch_size=np.int32(8)).state_dict()
    assert json.loads(json.dumps(state)) == state
    assert order(shuffled(seed=np.int64(3))) == order(shuffled(seed=3))


def test_a_state_carries_the_seed_that_was_drawn():
    stopped, resumed = shuffled(2, 4, seed=None), shuffled(2, 4, seed=None)
    rest = iter(stopped)
    next(rest)
    resumed.load_state_dict(stopped.state_dict())
    assert rows_of(resumed) == rows_of(rest)


def test_an_iterator_that_was_read_cannot_go_back_but_a_new_one_is_read_up_to_the_state():
    dataset = replicas(2).distribute_dataset(numbers(4)())
    next(iter(dataset))
    state = dataset.state_dict()
    dataset.load_state_dict(state)
    with pytest.raises(ArgumentError, match="read only once"):
        iter(dataset)
    fresh = replicas(2).distribute_dataset(numbers(4)())
    fresh.load_state_dict(state)
    assert [rows[0] for rows in rows_of(fresh)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: {"epoch": 1}, "load_state_dict takes what state_dict gave"),
        (lambda: None, "load_state_dict takes what state_dict gave, got None"),
        (lambda: replicas(2).distribute_dataset(ROWS, 4).state_dict(), "another setting of shuffle"),
        (
            lambda: shuffled(rows=ROWS[:12], batch_size=4).state_dict(),
            "whose source has 12 rows or .*; this one's has 16",
        ),
        (lambda: {**shuffled(2, 4).state_dict(), "element": "2"}, "load_state_dict takes what state_dict gave"),
        (lambda: {**shuffled(2, 4).state_dict(), "epoch": -1}, "load_state_dict takes what state_dict gave"),
        (lambda: {**shuffled(2, 4).state_dict(), "seed": 1.5}, "load_state_dict takes what state_dict gave"),
        (lambda: {**shuffled(2, 4).state_dict(), "rows": [4]}, "load_state_dict takes what state_dict gave"),
        (lambda: {**shuffled(2, 4).state_dict(), "kind": 1}, "load_state_dict takes what state_dict gave"),
        (lambda: shuffled(2, 4, seed=5).state_dict(), "with seed=5; this one has seed=3, .* Leave seed out"),
        (lambda: shuffled(2, 8).state_dict(), "with batch_size=8; this one has 4, and would go on at another row"),
    ],
    ids=[
        "incomplete",
        "none",
        "not shuffled",
        "other data",
        "text",
        "negative",
        "float",
        "list",
        "number",
        "other seed",
        "other batches",
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(other, message):
    dataset = shuffled(2, 4)
    with pytest.raises(ArgumentError, match=message):
        dataset.load_state_dict(other())
    assert rows_of(dataset) == rows_of(shuffled(2, 4))
