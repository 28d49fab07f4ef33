"""Elements on the devices: each replica's rows on its own device and nowhere else; gathered, looked at."""

from __future__ import annotations

import gc
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from feeding import parts_of, replicas, rows_of, whole

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError, UnevenBatchError


def shards(part: px.PerReplica) -> dict[jax.Device, list[int]]:
    """The rows that lie on each device."""
    return {shard.device: np.asarray(shard.data).ravel().tolist() for shard in part.stacked.addressable_shards}


# ---- placement -----------------------------------------------------------------------------------


def test_each_device_holds_the_rows_of_its_replica_alone():
    strategy = px.Mirrored(jax.devices()[2:6])
    (x,) = strategy.distribute_dataset(np.arange(8), 8)
    assert shards(x) == {d: [2 * i, 2 * i + 1] for i, d in enumerate(strategy.devices)}


def test_replica_order_is_the_order_of_the_devices():
    strategy = px.Mirrored(jax.devices()[3::-1])
    (x,) = strategy.distribute_dataset(np.arange(4), 4)
    assert [part.device for part in x.values] == list(strategy.devices)
    assert [int(part[0]) for part in x.values] == [0, 1, 2, 3]


def test_nothing_lies_on_devices_that_are_not_the_strategys():
    """Neither inputs nor masks, neither while feeding nor after a training loop."""
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}

    def devices_in_use():
        return {d for array in jax.live_arrays() if id(array) not in before for d in array.devices()}

    strategy = px.Mirrored(jax.devices()[2:4])
    with strategy.scope():
        w = px.Variable(jnp.ones(3))
        optimizer = px.Optimizer(optax.adam(0.1))
        seen = px.Variable(0.0, synchronization="on_read", aggregation="sum")

    @px.function
    def step(batch):
        def fn(x, y, mask):
            with px.GradientTape() as tape:
                loss = ((x @ w - y) ** 2 * mask).sum()
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            seen.assign_add(mask.sum())
            return loss

        return strategy.reduce("sum", strategy.run(fn, batch))

    source = np.ones((10, 3), np.float32), np.ones(10, np.float32)
    for prefetch in (0, 2):
        dataset = strategy.distribute_dataset(source, 4, remainder="pad", mask=True, shuffle=True, prefetch=prefetch)
        for batch in dataset:
            loss = step(batch)
            assert devices_in_use() <= set(strategy.devices)
        strategy.gather(batch)
    assert float(seen) == 20 and np.isfinite(float(loss))
    assert devices_in_use() <= set(strategy.devices)


def test_every_device_holds_as_many_bytes_as_the_others_at_every_moment(monkeypatch):
    """The batch is never whole on one device: it is split in the host's memory."""
    strategy, held = replicas(8), []
    gc.collect()
    kept = jax.live_arrays()  # so that no new array gets the identity of an old one
    before = set(map(id, kept))
    split = strategy.split_rows

    def counting(rows, **options):
        element = split(rows, **options)
        new = [array for array in jax.live_arrays() if id(array) not in before]
        shards = [shard for array in new for shard in array.addressable_shards]
        # A shard that was looked at is an array of its own, on the same memory.
        bytes_at = {(s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}
        held.append([sum(n for (device, _), n in bytes_at.items() if device == d) for d in strategy.devices])
        return element

    monkeypatch.setattr(strategy, "split_rows", counting)
    source = np.ones((64, 100), np.float32), np.ones(64, np.float32)
    for x, *_ in strategy.distribute_dataset(
        source, 16, mask=True, prefetch=0
    ):  # in one thread: nothing dies meanwhile
        assert {shard.data.nbytes for shard in x.stacked.addressable_shards} == {2 * 100 * 4}
    assert len(held) == 12
    assert all(len(set(devices)) == 1 and devices[0] > 0 for devices in held)


# ---- gather, local_results -----------------------------------------------------------------------


def test_gather_gives_the_rows_in_order(strategy):
    source = {"x": np.arange(24.0).reshape(8, 3), "y": np.arange(8)}
    (element,) = strategy.distribute_dataset(source, 8)
    gathered = strategy.gather(element)
    assert np.asarray(gathered["x"]).tolist() == source["x"].tolist()
    assert gathered["y"].tolist() == source["y"].tolist()


def test_local_results_are_the_parts_with_the_elements_structure(strategy):
    n = strategy.num_replicas
    (element,) = strategy.distribute_dataset((np.arange(8), {"y": np.arange(8)}), 8)
    results = strategy.local_results(element)
    assert len(results) == n
    assert [x.tolist() for x, _ in results] == np.arange(8).reshape(n, -1).tolist()
    assert all(y["y"].tolist() == x.tolist() for x, y in results)


# ---- distribute_datasets_from_function -----------------------------------------------------------


def test_the_function_is_told_its_place_and_gives_batches_for_single_replicas(strategy):
    n, contexts = strategy.num_replicas, []

    def batches(context):
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas))
        size = context.per_replica_batch_size(4 * n)
        return (np.full(size, i) for i in range(2 * n))

    elements = parts_of(strategy.distribute_datasets_from_function(batches))
    assert contexts == [(1, 0, n)]
    assert elements == [[[i] * 4 for i in range(n)], [[i] * 4 for i in range(n, 2 * n)]]


def test_per_replica_batch_size_refuses_what_does_not_divide():
    def batches(context):
        with pytest.raises(UnevenBatchError, match="A global batch of 6 rows does not divide by 4 replicas"):
            context.per_replica_batch_size(6)
        for size in (16.0, 0, -8, "a", True):
            with pytest.raises(ArgumentError, match=f"global_batch_size must be a positive int, got {size!r}"):
                context.per_replica_batch_size(size)
        assert repr(context) == "InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas=4)"
        return [np.ones(1)] * 4

    assert len(replicas(4).distribute_datasets_from_function(batches)) == 1


def test_replicas_without_a_batch_get_padding():
    def batches(_):
        return [np.arange(2), np.arange(2) + 2, np.arange(2) + 4]

    dataset = replicas(2).distribute_datasets_from_function(batches, remainder="pad", mask=True)
    assert [tuple(part.tolist() for part in whole(e)) for e in dataset] == [
        ([0, 1, 2, 3], [1, 1, 1, 1]),
        ([4, 5, 5, 5], [1, 1, 0, 0]),
    ]
    assert rows_of(replicas(2).distribute_datasets_from_function(batches, remainder="drop")) == [[0, 1, 2, 3]]


def test_each_replica_gets_its_own_batch_whatever_the_sizes():
    """Within a step (4 and 2 rows), from step to step (then 2 and 2), and when some are missing (then 1 of 2)."""

    def batches(_):
        return [np.arange(4), np.arange(2) + 10, np.arange(2) + 20, np.arange(2) + 30, np.arange(2) + 40]

    strategy = replicas(2)
    padded = strategy.distribute_datasets_from_function(batches, remainder="pad", mask=True)
    kept = [[x[w > 0].tolist() for x, w in strategy.local_results(element)] for element in padded]
    assert kept == [[[0, 1, 2, 3], [10, 11]], [[20, 21], [30, 31]], [[40, 41], []]]
    assert {x.shape for x, _ in padded} == {(4,)}
    with pytest.raises(UnevenBatchError, match=r"the batches of the replicas in element 0 have \[4, 2\] rows"):
        list(strategy.distribute_datasets_from_function(batches))
    even = strategy.distribute_datasets_from_function(lambda _: batches(_)[2:])
    iterator = iter(even)
    assert parts_of([next(iterator)]) == [[[20, 21], [30, 31]]]
    with pytest.raises(UnevenBatchError, match=r"element 1 have \[2, 0\] rows"):
        next(iterator)
    smaller = strategy.distribute_datasets_from_function(lambda _: [*batches(_)[:1] * 2, *batches(_)[1:3]])
    assert parts_of(smaller) == [[[0, 1, 2, 3], [0, 1, 2, 3]], [[10, 11], [20, 21]]]
    dropping = strategy.distribute_datasets_from_function(lambda _: batches(_)[2:], remainder="drop")
    assert parts_of(dropping) == [[[20, 21], [30, 31]]]


def test_whole_arrays_are_no_batches_of_single_replicas():
    with pytest.raises(ArgumentError, match="distribute_datasets_from_function: .* returns an iterable of batches"):
        replicas(2).distribute_datasets_from_function(lambda _: np.ones((4, 2)))


def test_batches_that_do_not_fit_together_are_named():
    def batches(_):
        return [{"x": np.ones((2, 3))}, {"x": np.ones((2, 4))}]

    message = r"batch 1 differs from the first in \['x'\]: expected float64\[3\], found float64\[4\]"
    with pytest.raises(ArgumentError, match=message):
        list(replicas(2).distribute_datasets_from_function(batches))


def test_from_function_takes_a_function_outside_replicas():
    strategy = replicas(2)
    with pytest.raises(ArgumentTypeError, match="distribute_datasets_from_function takes a function, got list"):
        strategy.distribute_datasets_from_function([np.ones(4)])
    with pytest.raises(StrategyError, match="distribute_datasets_from_function was called in a replica"):
        strategy.run(lambda: strategy.distribute_datasets_from_function(lambda _: []))


# ---- distribute_values_from_function -------------------------------------------------------------


def test_values_from_a_function_lie_on_their_replicas_devices(strategy):
    values = strategy.distribute_values_from_function(lambda context: np.full(2, context.replica_id))
    assert shards(values) == {device: [i, i] for i, device in enumerate(strategy.devices)}
    total = strategy.reduce("sum", strategy.run(lambda x: x.sum(), (values,)))
    assert float(total) == sum(range(strategy.num_replicas)) * 2


# ---- what is said --------------------------------------------------------------------------------


def test_a_dataset_says_what_it_is(caplog):
    strategy = replicas(4)
    with caplog.at_level(logging.INFO, "phalanx"):
        dataset = strategy.distribute_dataset(np.arange(20), 8, remainder="pad", shuffle=True, seed=5)
    assert "dataset: 20 rows, batches of 8 (2 per replica), shuffled with seed 5" in caplog.text
    assert repr(dataset) == "<dataset of 20 rows, 3 batches of 8 on Mirrored(cpu:0-3)>"
    assert repr(strategy.distribute_dataset(iter([1]))) == "<dataset on Mirrored(cpu:0-3)>"
