"""Workers are killed at every kind of moment; the run that is started again ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster import Outcome, launch

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("worker.py")
STEPS = 18  # six epochs of three batches, saved after every second step and after each epoch

LAUNCH = ["start", "imported", "before roll call", "after roll call", "before JAX connects", "after JAX connects",
          "connected", "built"]  # fmt: skip
RESTORE = ["before read", "before verify", "after verify", "after read", "before restore begins",
           "after restore begins", "before restore ends", "after restore ends"]  # fmt: skip
SAVE = ["before copy to the host", "after copy to the host", "before remove_incomplete", "before _checkpointer",
        "after _checkpointer", "before _write_json", "after _write_json", "after _fingerprint", "before _flush",
        "after _flush", "before rename", "after rename", "before remove", "after remove"]  # fmt: skip
STEP = ["before a step", "during a step", "after a step"]
ON_THE_WRITER = {"before remove_incomplete", "before _checkpointer", "after _checkpointer", "before _write_json",
                 "after _write_json", "after _fingerprint", "before _flush", "after _flush", "before rename",
                 "after rename", "before remove", "after remove"}  # fmt: skip


def kill(random_: random.Random, moment: str) -> dict[str, object]:
    """A kill at this moment, of a process and at a time that the seed chooses."""
    process = 0 if moment in ON_THE_WRITER else random_.randrange(2)
    times = 1 if moment in {*LAUNCH, *RESTORE, "before remove_incomplete"} else random_.randint(1, 2)
    fault: dict[str, object] = {"moment": moment, "process": process, "times": times}
    if moment in STEP:
        fault["after"] = random_.random() * 0.01
    return fault


def plans() -> dict[str, list[dict[str, object]]]:
    """Each kind of moment in a run of its own; restores and launches are killed where there is something to restore."""
    draw = random.Random(20)
    begin = {"moment": "after a step", "process": 1, "times": 5}
    return {
        "launch": [begin, *(kill(draw, moment) for moment in LAUNCH)],
        "restore": [begin, *(kill(draw, moment) for moment in RESTORE)],
        "save": [kill(draw, moment) for moment in SAVE],
        "step": [kill(draw, moment) for moment in STEP * 3],
    }


PLANS = plans()


def run(folder: Path, plan: list[dict[str, object]], **more: str) -> Outcome:
    options = ("--max-restarts", str(len(plan)), "--pause", "0")
    return launch(2, WORKER, str(folder), json.dumps(plan), options=options, timeout=280, **more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    outcome = run(tmp_path_factory.mktemp("undisturbed"), [])
    assert outcome.code == 0, outcome.err[-3000:]
    first, last = outcome.told()[0]
    assert (first["first step"], last["last step"]) == (0, STEPS - 1)
    return last["result"]


def test_there_are_at_least_30_moments():
    assert sum(map(len, PLANS.values())) >= 30


@pytest.mark.parametrize("kind", PLANS)
def test_nothing_is_lost_when_a_worker_is_killed(kind, undisturbed, tmp_path):
    plan = PLANS[kind]
    outcome = run(tmp_path, plan)
    assert outcome.code == 0, outcome.err[-5000:]
    ends = [said[-1] for said in outcome.told().values()]
    assert [end["result"] for end in ends] == [undisturbed, undisturbed]
    # Every kill happened, and was seen as what it was.
    assert outcome.err.count("was ended by SIGKILL, the first to fail") == len(plan)
    assert outcome.err.count("starting all again") == len(plan)
    # What was saved is never computed again: each start begins where the last one began, or later.
    starts = [said["first step"] for said in outcome.told()[0] if "first step" in said]
    assert starts == sorted(starts)


def test_asked_to_stop_it_saves_the_last_step_and_goes_on(undisturbed, tmp_path):
    plan = [{"moment": "during a step", "process": process, "times": 3, "signal": "SIGTERM"} for process in (1, 0)]
    outcome = run(tmp_path, plan)
    assert outcome.code == 0, outcome.err[-5000:]
    assert outcome.told()[1][-1]["result"] == undisturbed
    assert outcome.err.count("the workers have saved and stopped, as they were asked") == 2
    starts = [said["first step"] for said in outcome.told()[0] if "first step" in said]
    # A step takes a millisecond here, and agreeing on the one to stop after a few of them.
    assert starts[0] == 0 and 3 <= starts[1] <= 8 and starts[1] + 3 <= starts[2] <= starts[1] + 8


def test_a_worker_that_is_stopped_is_named_and_the_run_goes_on(undisturbed, tmp_path):
    plan = [{"moment": "during a step", "process": process, "times": 5, "signal": "SIGSTOP"} for process in (1, 0)]
    outcome = run(tmp_path, plan, HEARTBEAT="2")
    assert outcome.code == 0, outcome.err[-5000:]
    assert outcome.told()[0][-1]["result"] == undisturbed
    assert "phalanx: process 1 (host" in outcome.err and "phalanx: process 0 (host" in outcome.err
    assert outcome.err.count("it is stopped, or its machine or the network is down") >= 2
