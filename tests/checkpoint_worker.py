"""One of two processes, with a replica each: ``checkpoint_worker.py PROCESS PORT DIRECTORY`` prints what it found."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from scenarios import ME, main, outcome, scenario

import phalanx as px

DIRECTORY = Path(sys.argv[3])


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


def variables(strategy, fill):
    with strategy.scope():
        return {
            "w": px.Variable(np.full(3, fill, np.float32), name="w"),
            "own": px.Variable(fill, synchronization="on_read", aggregation="sum", name="own"),
        }


def values(strategy, made):
    return [made["w"].numpy().tolist(), float(strategy.local_results(made["own"])[0])]


@scenario
def saved_and_restored(strategy):
    here, counter = variables(strategy, 1.0), Counter(10 + ME)
    strategy.run(lambda: here["own"].assign(px.get_replica_context().replica_id + 5.0))
    manager = px.CheckpointManager(DIRECTORY / "both")
    manager.save(px.Checkpoint(variables=here, counter=counter), step=3)
    manager.wait()
    there, other = variables(strategy, 0.0), Counter(0)
    step = manager.restore_latest(px.Checkpoint(variables=there, counter=other))
    return {"step": step, "values": values(strategy, there), "counter": other.value, "steps": manager.steps}


@scenario
def of_four_replicas(strategy):
    there = variables(strategy, 0.0)
    manager = px.CheckpointManager(DIRECTORY / "four")
    step = manager.restore_latest(px.Checkpoint(variables=there))
    return {"step": step, "values": values(strategy, there), "sum": float(there["own"].numpy())}


def numbers(key):
    return np.asarray(jax.random.key_data(key.value.addressable_shards[0].data)).tolist()


@scenario
def random_keys(strategy):
    with strategy.scope():
        key = px.Variable(jax.random.key(3 + ME), name="key")
        keys = px.Variable(jax.random.split(jax.random.key(1, impl="rbg"), 2), name="keys")
        own = px.Variable(jax.random.key(0), synchronization="on_read", aggregation="only_first_replica", name="own")

    @px.function
    def step():
        new, used = jax.random.split(key.value)
        key.assign(new)

        def replica():
            own.assign(jax.random.fold_in(own.value, px.get_replica_context().replica_id))
            return jax.random.key_data(own.value)

        return strategy.gather(strategy.run(replica), axis=0), jax.random.key_data(used)

    first = numbers(key)
    manager = px.CheckpointManager(DIRECTORY / "keys")
    manager.save(px.Checkpoint(key=key, keys=keys, own=own), step=1)
    once = [np.asarray(part).tolist() for part in step()]
    key.assign(jax.random.key(7))
    assigned = numbers(key)
    manager.restore_latest(px.Checkpoint(key=key, keys=keys, own=own))
    again = [np.asarray(part).tolist() for part in step()]
    return {"first": first, "assigned": assigned, "once": once, "again": again, "equal": px.audit([key, keys]).equal}


@scenario
def refused_by_one(strategy):
    here = variables(strategy, 1.0)
    manager = px.CheckpointManager(DIRECTORY / "refused")
    manager.save(px.Checkpoint(variables=here, counter=Counter(1)), step=1)
    here["w"].assign(np.full(3, 7, np.float32))
    counter = Counter(7, refuses=ME == 1)
    told = outcome(manager.restore_latest, px.Checkpoint(variables=here, counter=counter))
    return {**told, "values": values(strategy, here), "counter": counter.value}


@scenario
def different_objects(strategy):
    here = variables(strategy, 1.0)
    manager = px.CheckpointManager(DIRECTORY / "different")
    return outcome(manager.save, px.Checkpoint(**({"a": here} if ME else {"b": here})), step=1)


@scenario
def different_calls(strategy):
    manager = px.CheckpointManager(DIRECTORY / "calls")
    return outcome(manager.wait if ME else lambda: manager.save(px.Checkpoint(a=1), step=1))


@scenario
def audited(strategy):
    w = variables(strategy, 1.0)["w"]
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
def guarded(strategy):
    import optax

    w = variables(strategy, 1.0)["w"]
    guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)))

    def replica():
        bad = np.float32(px.get_replica_context().num_replicas - 1)
        gradient = jax.numpy.where(px.get_replica_context().replica_id == bad, np.nan, np.ones(3, np.float32))
        guard.apply_gradients([(gradient, w)])

    strategy.run(replica)
    return {**outcome(guard.check), "value": w.numpy().tolist()}


@scenario
def cannot_be_written(strategy):
    manager = px.CheckpointManager("/proc/no/such/place")
    manager.save(px.Checkpoint(a=1), step=1)
    return outcome(manager.wait)


@scenario
def the_first_alone(strategy):
    manager = px.CheckpointManager(DIRECTORY / "alone", timeout=2)
    return outcome(manager.save, px.Checkpoint(a=1), step=1) if ME == 0 else None


@scenario
def the_second_alone(strategy):
    manager = px.CheckpointManager(DIRECTORY / "alone", timeout=2)
    return outcome(manager.save, px.Checkpoint(a=1), step=1) if ME == 1 else None


if __name__ == "__main__":
    main()
