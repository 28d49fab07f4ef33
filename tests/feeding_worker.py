"""One of two processes, with a replica each: ``feeding_worker.py PROCESS PORT`` prints what the scenarios gave."""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scenarios import ME, main, outcome, scenario


def rows(count, first=0):
    return np.arange(first, first + count, dtype=np.float32)


def seen(strategy, dataset):
    """Of each element: this process's own part, and all rows, with the mask if there is one."""
    elements = []
    for element in dataset:
        parts = element if isinstance(element, tuple) else (element,)
        elements.append([[strategy.local_results(p)[0].tolist(), strategy.gather(p).tolist()] for p in parts])
    return elements


# ---- the same source everywhere ------------------------------------------------------------------


@scenario
def same_arrays(strategy):
    dataset = strategy.distribute_dataset(rows(10), 4, remainder="pad", mask=True)
    return {"length": len(dataset), "elements": seen(strategy, dataset)}


@scenario
def same_generator(strategy):
    return seen(strategy, strategy.distribute_dataset(lambda: (rows(4, 4 * i) for i in range(2))))


@scenario
def drawn_seed(strategy):
    dataset = strategy.distribute_dataset(rows(8), 4, shuffle=True)
    return {"elements": seen(strategy, dataset), "seed": dataset.state_dict()["seed"]}


@scenario
def other_number_of_rows(strategy):
    return outcome(lambda: strategy.distribute_dataset(rows(8 + ME), 4, remainder="pad"))


@scenario
def other_options(strategy):
    return outcome(lambda: strategy.distribute_dataset(rows(8), 4 + 4 * ME, remainder="pad"))


@scenario
def generators_of_other_length(strategy):
    dataset = strategy.distribute_dataset(lambda: (rows(4) for _ in range(1 + ME)))
    return outcome(lambda: seen(strategy, dataset))


# ---- a source of its own for each ----------------------------------------------------------------


def own(strategy, count, **options):
    """This process's `count` rows (0, 1 ... or 100, 101 ...), in batches of two for each process."""
    return strategy.distribute_dataset(rows(count, 100 * ME), 4, auto_shard="off", **options)


@scenario
def padded_until_all_are_done(strategy):
    dataset = own(strategy, [3, 7][ME], remainder="pad", mask=True)
    return {"length": len(dataset), "elements": seen(strategy, dataset)}


@scenario
def one_has_nothing(strategy):
    return seen(strategy, own(strategy, [0, 3][ME], remainder="pad", mask=True))


class Pair(NamedTuple):
    x: Any
    y: Any


@scenario
def one_has_nothing_of_a_class(strategy):
    def source():
        yield from [Pair(rows(2), rows(2))] * ME

    return outcome(lambda: seen(strategy, strategy.distribute_dataset(source, auto_shard="off", remainder="pad")))


@scenario
def none_has_anything(strategy):
    return outcome(lambda: seen(strategy, own(strategy, 0, remainder="pad", mask=True)))


@scenario
def dropped_together(strategy):
    return seen(strategy, own(strategy, [7, 5][ME], remainder="drop"))


@scenario
def uneven(strategy):
    return outcome(lambda: seen(strategy, own(strategy, [4, 6][ME])))


@scenario
def other_kind_of_rows(strategy):
    source = [np.ones((2, 3 + ME), np.float32)]
    dataset = strategy.distribute_dataset(source, auto_shard="off", remainder="pad")
    return outcome(lambda: seen(strategy, dataset))


@scenario
def batch_that_does_not_divide(strategy):
    return outcome(lambda: strategy.distribute_dataset(rows(8), 3, auto_shard="off", remainder="pad"))


@scenario
def from_function(strategy):
    def batches(context):
        size = context.per_replica_batch_size(4)
        return [rows(size, 100 * context.input_pipeline_id + size * i) for i in range(2)]

    return seen(strategy, strategy.distribute_datasets_from_function(batches))


@scenario
def resumed(strategy):
    first = own(strategy, [3, 7][ME], remainder="pad", mask=True)
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    second = own(strategy, [3, 7][ME], remainder="pad", mask=True)
    second.load_state_dict(first.state_dict())
    return {"rest": seen(strategy, iterator), "resumed": seen(strategy, second)}


# ---- trouble on one process ----------------------------------------------------------------------


@scenario
def one_fails(strategy):
    def source():
        yield rows(2)
        if ME == 1:
            raise OSError("disk on fire")
        yield rows(2)

    return outcome(lambda: seen(strategy, strategy.distribute_dataset(source, auto_shard="off")))


@scenario
def one_leaves(strategy):
    dataset = strategy.distribute_dataset(lambda: (rows(2) for _ in range(50)), auto_shard="off")

    def loop():
        for i, _ in enumerate(dataset):
            if ME == 1 and i == 1:
                break
        return i

    return outcome(loop)


@scenario
def one_does_not_come(strategy):
    from phalanx.data import agreement

    dataset = own(strategy, 4)
    agreement._TIMEOUT_SECONDS = 1.0
    try:
        return outcome(lambda: next(iter(dataset)) if ME == 0 else None)
    finally:
        agreement._TIMEOUT_SECONDS = 60.0


@scenario
def all_leave(strategy):
    dataset = strategy.distribute_dataset(lambda: (rows(2) for _ in range(50)), auto_shard="off")

    def loop():
        return [next(iter(dataset)).shape[0] for _ in range(3)]  # three passes, each left at once

    return outcome(loop)


# ---- what each process can read, alone and together ----------------------------------------------


@scenario
def readable_everywhere(strategy):
    import phalanx as px

    with strategy.scope():
        w = px.Variable(jnp.ones(2), name="w")
        count = px.Variable(0.0, synchronization="on_read", aggregation="sum")
        optimizer = px.Optimizer(optax.sgd(0.1))

    @px.function
    def step(x, mask):
        def fn(x, mask):
            with px.GradientTape() as tape:
                loss = (x @ w * mask).sum()
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            count.assign_add(mask.sum())
            return loss, {"prediction": 10 * x[:, 0]}

        losses, outputs = strategy.run(fn, (x, mask))
        return strategy.reduce("sum", losses), strategy.gather(outputs), losses

    predictions = []
    for x, mask in strategy.distribute_dataset(np.stack([rows(5)] * 2, 1), 4, remainder="pad", mask=True):
        loss, outputs, per_replica = step(x, mask)
        predictions += np.asarray(outputs["prediction"])[np.asarray(strategy.gather(mask)) > 0].tolist()
    return {
        "predictions": predictions,
        "loss": float(loss),
        "variable": w.numpy().tolist(),
        "count": float(count),
        "own part": [float(part) for part in strategy.local_results(per_replica)],
        "own components": len(strategy.local_results(w)),
        "other part": outcome(lambda: per_replica.values),
    }


@scenario
def strategy_of_one_process(_):
    import phalanx as px

    if ME == 0:  # process 1 knows nothing of it
        local = px.Mirrored(jax.local_devices())
        return seen(local, local.distribute_dataset(lambda: (rows(2) for _ in range(2)), shuffle=False))
    return None


@scenario
def progress_is_printed_once(strategy):
    import phalanx as px

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in px.progress(strategy.distribute_dataset(rows(4), 4), "epoch 1"):
            pass
    return printed.getvalue()


if __name__ == "__main__":
    main()
