"""A small training run that dies where it is told: ``worker.py FOLDER PLAN``, started by ``phalanx launch``.

The plan is a list, one entry for each time that all are started: where (``moment``), in which process and, for
moments that come again and again, at which of them. Dying is SIGKILL sent to itself: nothing is cleaned up.
"""

# ruff: noqa: E402 - workers die between imports, too

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

folder, plan = sys.argv[1], json.loads(sys.argv[2])
attempt, me = int(os.environ["PHALANX_RESTARTS"]), int(os.environ["PHALANX_PROCESS_ID"])
fault = plan[attempt] if attempt < len(plan) else {}
counts: dict[str, int] = {}


def here(moment: str) -> None:
    """This moment has come; if it is the one in the plan, it is the last."""
    if fault.get("moment") != moment or fault["process"] != me:
        return
    counts[moment] = counts.get(moment, 0) + 1
    if counts[moment] != fault.get("times", 1):
        return
    if "after" in fault:
        threading.Thread(target=lambda: (time.sleep(fault["after"]), os.kill(os.getpid(), SIGNAL)), daemon=True).start()
        return
    os.kill(os.getpid(), SIGNAL)


SIGNAL = getattr(signal, fault.get("signal", "SIGKILL"))


def before(owner: object, name: str, moment: str) -> None:
    """The moment before a function is called, and the one after."""
    original = getattr(owner, name)

    def replacement(*args, **kwargs):
        here(f"before {moment}")
        result = original(*args, **kwargs)
        here(f"after {moment}")
        return result

    setattr(owner, name, replacement)


here("start")

import phalanx as px

here("imported")
import phalanx._jax
from phalanx.cluster import connection

before(connection, "call_the_roll", "roll call")
before(connection._jax, "connect", "JAX connects")
px.connect(timeout=30, heartbeat=float(os.environ.get("HEARTBEAT", "10")))
here("connected")

import jax.numpy as jnp
import numpy as np
import optax

from phalanx.checkpoint import files, manager

for name in ("_checkpointer", "_write_json", "_fingerprint", "_flush", "remove", "read", "verify", "remove_incomplete"):
    before(files, name, name)
before(files.os, "rename", "rename")
before(manager, "take", "copy to the host")
before(manager.Restoring, "begin", "restore begins")
before(manager.Restoring, "finish", "restore ends")

strategy = px.Mirrored()
rows = np.random.default_rng(0).normal(size=(22, 4)).astype(np.float32)  # batches of 8, 8 and 6
with strategy.scope():
    w = px.Variable(jnp.ones((4, 2)), name="w")
    optimizer = px.Optimizer(optax.adam(0.1))
    optimizer.build([w])


def replica(x, mask):
    with px.GradientTape() as tape:
        loss = (jnp.tanh(x @ w).sum(1) * mask).sum()
    optimizer.apply_gradients([(tape.gradient(loss, w), w)])
    return loss


@px.function
def train(batch):
    return strategy.reduce("sum", strategy.run(replica, batch))


here("built")
data = strategy.distribute_dataset(rows, 8, remainder="pad", mask=True, shuffle=True, seed=3)
kept = px.Checkpoint(w=w, optimizer=optimizer)
steps = []
for step in px.resumable(folder, data, kept, epochs=6, every=2):
    if not steps:
        print(json.dumps({"attempt": attempt, "first step": step.number}), flush=True)
    here("before a step")
    loss = train(step.batch)
    here("during a step")
    steps.append(step.number)
    float(loss)
    here("after a step")
px.cluster.agree("done")
result = {"w": w.numpy().tobytes().hex(), "moments": [m.tobytes().hex() for m in map(np.asarray, optimizer.variables)]}
print(json.dumps({"attempt": attempt, "last step": step.number if steps else None, "result": result}), flush=True)
