"""One of two processes, with a replica each: ``checkpoint_worker.py PROCESS PORT DIRECTORY`` prints what it found."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path

import jax
import numpy as np

ME, PORT, DIRECTORY = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
SCENARIOS = {}


def scenario(fn):
    SCENARIOS[fn.__name__] = fn
    return fn


def outcome(fn, *args, **kwargs):
    start = time.monotonic()
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return {"result": result, "quick": time.monotonic() - start < 20}


class Counter:
    """A state of this process's own."""

    def __init__(self, value, refuses=False):
        self.value = value
        self.refuses = refuses

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("not here")
        self.value = state["value"]


def variables(px, strategy, fill):
    with strategy.scope():
        return {
            "w": px.Variable(np.full(3, fill, np.float32), name="w"),
            "own": px.Variable(fill, synchronization="on_read", aggregation="sum", name="own"),
        }


def values(strategy, made):
    return [made["w"].numpy().tolist(), float(strategy.local_results(made["own"])[0])]


@scenario
def saved_and_restored(px, strategy):
    here, counter = variables(px, strategy, 1.0), Counter(10 + ME)
    strategy.run(lambda: here["own"].assign(px.get_replica_context().replica_id + 5.0))
    manager = px.CheckpointManager(DIRECTORY / "both")
    manager.save(px.Checkpoint(variables=here, counter=counter), step=3)
    manager.wait()
    there, other = variables(px, strategy, 0.0), Counter(0)
    step = manager.restore_latest(px.Checkpoint(variables=there, counter=other))
    return {"step": step, "values": values(strategy, there), "counter": other.value, "steps": manager.steps}


@scenario
def of_four_replicas(px, strategy):
    there = variables(px, strategy, 0.0)
    manager = px.CheckpointManager(DIRECTORY / "four")
    step = manager.restore_latest(px.Checkpoint(variables=there))
    return {"step": step, "values": values(strategy, there), "sum": float(there["own"].numpy())}


@scenario
def refused_by_one(px, strategy):
    here = variables(px, strategy, 1.0)
    manager = px.CheckpointManager(DIRECTORY / "refused")
    manager.save(px.Checkpoint(variables=here, counter=Counter(1)), step=1)
    here["w"].assign(np.full(3, 7, np.float32))
    counter = Counter(7, refuses=ME == 1)
    told = outcome(manager.restore_latest, px.Checkpoint(variables=here, counter=counter))
    return {**told, "values": values(strategy, here), "counter": counter.value}


@scenario
def different_objects(px, strategy):
    here = variables(px, strategy, 1.0)
    manager = px.CheckpointManager(DIRECTORY / "different")
    return outcome(manager.save, px.Checkpoint(**({"a": here} if ME else {"b": here})), step=1)


@scenario
def different_calls(px, strategy):
    manager = px.CheckpointManager(DIRECTORY / "calls")
    return outcome(manager.wait if ME else lambda: manager.save(px.Checkpoint(a=1), step=1))


@scenario
def audited(px, strategy):
    w = variables(px, strategy, 1.0)["w"]
    mine = np.ones(3, np.float32)
    mine[1] += ME * 1e-7
    part = jax.device_put(mine, jax.local_devices()[0])
    w._replace(jax.make_array_from_single_device_arrays((3,), strategy.sharding(per_replica=False), [part]))
    found = [(d.variable, d.replica, d.process, d.index) for d in px.audit(w).divergences]
    auditor = px.Auditor(w, every=1, on_divergence="repair")
    auditor.after_step()
    auditor.finish()
    return {"found": found, "equal": px.audit(w).equal, "value": w.numpy().tolist()}


@scenario
def guarded(px, strategy):
    import optax

    w = variables(px, strategy, 1.0)["w"]
    guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)))

    def replica():
        bad = np.float32(px.get_replica_context().num_replicas - 1)
        gradient = jax.numpy.where(px.get_replica_context().replica_id == bad, np.nan, np.ones(3, np.float32))
        guard.apply_gradients([(gradient, w)])

    strategy.run(replica)
    return {**outcome(guard.check), "value": w.numpy().tolist()}


@scenario
def cannot_be_written(px, strategy):
    manager = px.CheckpointManager("/proc/no/such/place")
    manager.save(px.Checkpoint(a=1), step=1)
    return outcome(manager.wait)


@scenario
def the_first_alone(px, strategy):
    manager = px.CheckpointManager(DIRECTORY / "alone", timeout=2)
    return outcome(manager.save, px.Checkpoint(a=1), step=1) if ME == 0 else None


@scenario
def the_second_alone(px, strategy):
    manager = px.CheckpointManager(DIRECTORY / "alone", timeout=2)
    return outcome(manager.save, px.Checkpoint(a=1), step=1) if ME == 1 else None


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, ME, initialization_timeout=30)
    import phalanx as px

    strategy = px.Mirrored()
    results = {name: fn(px, strategy) for name, fn in SCENARIOS.items()}
    print(json.dumps(results), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    logging.getLogger("jax").setLevel(logging.ERROR)
    logging.getLogger("phalanx").setLevel(logging.CRITICAL)
    try:
        main()
    except BaseException:
        traceback.print_exc()
    else:
        os._exit(0)
    os._exit(1)  # JAX's own way out would wait for the other process
