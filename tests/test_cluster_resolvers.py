"""Resolvers: environment variables as schedulers set them, and as they should not be."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.cluster.resolvers import DEFAULT_PORT, find
from phalanx.errors import ClusterError


def tf_config(task: tuple[str, int | str], **cluster: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})}


SLURM = {
    "SLURM_JOB_ID": "81244",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_MCA_ess_base_jobid": "1531576321",
}
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "2",
    "HOSTNAME": "train-2",
    "PHALANX_NUM_PROCESSES": "4",
}
GKE_TPU = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc,t-2.svc,t-3.svc", "TPU_WORKER_ID": "2"}
LAUNCH = {
    "PHALANX_PROCESS_ID": "1",
    "PHALANX_NUM_PROCESSES": "2",
    "PHALANX_COORDINATOR": "127.0.0.1:4000",
    "PHALANX_LAUNCHER": "77",
}

FOUND = {
    "workers of TF_CONFIG": (
        tf_config(("worker", 1), worker=["a:1", "b:2"]),
        ("TF_CONFIG", 2, 1, "a:1", None),
    ),
    "a chief comes first": (
        tf_config(("worker", 0), chief=["c:9"], worker=["a:1", "b:2"]),
        ("TF_CONFIG", 3, 1, "c:9", None),
    ),
    "the chief itself": (tf_config(("chief", 0), chief=["c:9"], worker=["a:1"]), ("TF_CONFIG", 2, 0, "c:9", None)),
    "an index that is a string": (
        tf_config(("worker", "1"), worker=["a:1", "b:2"]),
        ("TF_CONFIG", 2, 1, "a:1", None),
    ),
    "an evaluator runs by itself": (
        tf_config(("evaluator", 0), worker=["a:1", "b:2"], evaluator=["e:1"]),
        ("TF_CONFIG (the evaluator, which runs by itself)", 1, 0, "", None),
    ),
    "srun": (SLURM, ("SLURM", 2, 1, None, None)),
    "mpirun of Open MPI 4": (OMPI, ("MPI", 4, 3, None, None)),
    "mpirun of MPICH on one machine": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ("MPI", 2, 1, None, None),
    ),
    "Open MPI 5 with an address": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PHALANX_COORDINATOR": "h:5"},
        ("MPI", 2, 0, "h:5", None),
    ),
    "torchrun, whose own port is taken": (TORCHRUN, ("torchrun", 8, 5, "node-a:29501", (1,))),
    "PyTorch's variables by hand": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "7"},
        ("torchrun", 2, 0, "[::1]:7", None),
    ),
    "an indexed job": (KUBERNETES, ("Kubernetes", 4, 2, f"train-0.train:{DEFAULT_PORT}", None)),
    "an indexed job with a service": (
        {**KUBERNETES, "PHALANX_SUBDOMAIN": "trainers", "PHALANX_COORDINATOR_PORT": "6000"},
        ("Kubernetes", 4, 2, "train-0.trainers:6000", None),
    ),
    "a TPU slice": (GKE_TPU, ("Cloud TPU", 4, 2, f"t-0.svc:{DEFAULT_PORT}", None)),
    "two TPU slices": (
        {**GKE_TPU, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1",
         "MEGASCALE_COORDINATOR_ADDRESS": "s0-0.svc:8080"},
        ("Cloud TPU", 8, 6, f"s0-0.svc:{DEFAULT_PORT}", None),
    ),
    "one TPU host": ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, ("Cloud TPU", 1, 0, None, None)),
    "phalanx launch": (LAUNCH, ("phalanx launch", 2, 1, "127.0.0.1:4000", None)),
    "the launcher inside a job": ({**SLURM, **LAUNCH}, ("phalanx launch", 2, 1, "127.0.0.1:4000", None)),
    "two that agree": (
        {**GKE_TPU, **KUBERNETES},
        ("Kubernetes", 4, 2, f"train-0.train:{DEFAULT_PORT}", None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_the_cluster_is_found(case):
    environment, (source, count, number, coordinator, devices) = FOUND[case]
    spec = find(environment)
    assert spec is not None
    assert (spec.source, spec.num_processes, spec.process_id) == (source, count, number)
    assert coordinator in (None, spec.coordinator)
    assert spec.local_device_ids == devices


@pytest.mark.parametrize(
    "environment", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"SLURM_JOB_ID": "1"}, {"RANK": "1"}]
)
def test_other_variables_tell_of_no_cluster(environment):
    assert find(environment) is None


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


BROKEN = {
    "no JSON": ({"TF_CONFIG": "{worker"}, ["TF_CONFIG={worker", "no JSON"]),
    "brackets without end": ({"TF_CONFIG": "[" * 100_000}, ["TF_CONFIG=[", "no JSON"]),
    "digits of another script": ({**TORCHRUN, "RANK": "\uff11"}, ["RANK=\uff11", "a number from 0"]),
    "a host of dots": ({**LAUNCH, "PHALANX_COORDINATOR": "..:1"}, ["PHALANX_COORDINATOR", "no address"]),
    "a host that never ends": (
        {**LAUNCH, "PHALANX_COORDINATOR": "x" * 300 + ":1"},
        ["PHALANX_COORDINATOR", "no address"],
    ),
    "no cluster": ({"TF_CONFIG": "{}"}, ["TF_CONFIG={}", "cluster is missing"]),
    "no task": ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, ["task is missing"]),
    "workers as a string": (tf_config(("worker", 0), worker="a:1"), ["cluster.worker"]),
    "a worker twice": (tf_config(("worker", 0), worker=["a:1", "a:1"]), ["TF_CONFIG", "a:1 is there more than once"]),
    "two coordinators": (
        tf_config(("chief", 1), chief=["a:1"], worker=["b:1"]),
        ["task.index is 1", "cluster.chief has 1"],
    ),
    "an index too high": (tf_config(("worker", 2), worker=["a:1", "b:1"]), ["task.index is 2", "has 2"]),
    "an index below zero": (tf_config(("worker", -1), worker=["a:1", "b:1"]), ["task.index is -1"]),
    "a parameter server": (tf_config(("ps", 0), ps=["a:1"], worker=["b:1"]), ["'ps'", "no parameter servers"]),
    "no port": (tf_config(("worker", 0), worker=["a", "b:1"]), ["TF_CONFIG's cluster.worker[0]", "host:port"]),
    "a port too high": (tf_config(("worker", 0), worker=["a:70000", "b:1"]), ["'a:70000'", "65535"]),
    "outside of srun": (without({**SLURM, "SLURM_NTASKS": "4"}, "SLURM_STEP_NODELIST"), ["SLURM_NTASKS=4", "srun"]),
    "no SLURM_PROCID": (without(SLURM, "SLURM_PROCID"), ["SLURM_PROCID is not set"]),
    "a SLURM_PROCID of another step": ({**SLURM, "SLURM_PROCID": "2"}, ["SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS=2"]),
    "a list of no nodes": ({**SLURM, "SLURM_STEP_NODELIST": "[,"}, ["SLURM_STEP_NODELIST=[,"]),
    "an empty WORLD_SIZE": ({**TORCHRUN, "WORLD_SIZE": ""}, ["WORLD_SIZE is empty"]),
    "a RANK that is no number": ({**TORCHRUN, "RANK": "two"}, ["RANK=two", "a number from 0"]),
    "a RANK too high": ({**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
    "a WORLD_SIZE of 0": ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    "a job of unknown size": (without(KUBERNETES, "PHALANX_NUM_PROCESSES"), ["PHALANX_NUM_PROCESSES", "completions"]),
    "a pod of no indexed job": ({**KUBERNETES, "HOSTNAME": "train-abc"}, ["HOSTNAME=train-abc", "-2"]),
    "an index beyond the job": ({**KUBERNETES, "JOB_COMPLETION_INDEX": "4"}, ["JOB_COMPLETION_INDEX=4"]),
    "a TPU host twice": ({**GKE_TPU, "TPU_WORKER_HOSTNAMES": "a,a"}, ["TPU_WORKER_HOSTNAMES=a,a"]),
    "no TPU_WORKER_ID": (without(GKE_TPU, "TPU_WORKER_ID"), ["TPU_WORKER_ID is not set"]),
    "a TPU_WORKER_ID too high": ({**GKE_TPU, "TPU_WORKER_ID": "4"}, ["TPU_WORKER_ID=4", "4 hosts"]),
    "a slice too many": (
        {**GKE_TPU, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "2"},
        ["MEGASCALE_SLICE_ID=2"],
    ),
    "MPI on several machines": (without(OMPI, "OMPI_MCA_orte_hnp_uri"), ["PHALANX_COORDINATOR=host:port"]),
    "no OMPI_COMM_WORLD_SIZE": (without(OMPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_SIZE is not set"]),
    "no coordinator": (without(LAUNCH, "PHALANX_COORDINATOR"), ["PHALANX_COORDINATOR is not set"]),
    "two schedulers": (
        {**SLURM, **tf_config(("worker", 0), worker=["a:1", "b:1", "c:1"])},
        ["TF_CONFIG says 3 processes and I am 0", "SLURM says 2 processes and I am 1"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_variables_are_named_with_their_values(case):
    environment, texts = BROKEN[case]
    with pytest.raises(ClusterError) as caught:
        find(environment)
    for text in texts:
        assert text in str(caught.value)


def test_a_value_that_never_ends_is_cut_in_the_message():
    with pytest.raises(ClusterError) as caught:
        find({"TF_CONFIG": "x" * 100_000})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "nodes, host",
    [("n1", "n1"), ("n[1-3,7]", "n1"), ("n[001-015],m2", "n001"), ("m2,n[1-2]", "m2"), ("r[2-3]n[1-4]-ib", "r2n1-ib"),
     ("gpu-a.example.com,b", "gpu-a.example.com"), ("n[7,9-12]", "n7")],
)  # fmt: skip
def test_the_first_host_of_a_list_of_nodes(nodes, host):
    assert find({**SLURM, "SLURM_STEP_NODELIST": nodes}).host == host


def test_jobs_that_share_a_machine_have_ports_of_their_own():
    ports = {find({**SLURM, "SLURM_JOB_ID": str(job)}).port for job in range(81000, 81020)}
    assert len(ports) > 15
    assert all(61440 <= port < 65536 for port in ports)


def on_gpus(nodes: int, tasks: int, visible: str, local: int, **more: str) -> dict[str, str]:
    return {
        **SLURM,
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks // nodes}(x{nodes})",
        "SLURM_PROCID": str(local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": "0",
        "CUDA_VISIBLE_DEVICES": visible,
        **more,
    }


@pytest.mark.parametrize(
    "nodes, tasks, visible, more, expected",
    [
        (2, 2, "0,1,2,3", {}, [(0, 1, 2, 3)]),
        (2, 2, "0,1,2,3", {"SLURM_GPUS_ON_NODE": "4"}, [(0, 1, 2, 3)]),
        (2, 8, "0,1,2,3", {"SLURM_GPUS_ON_NODE": "4"}, [(0,), (1,), (2,), (3,)]),
        (1, 2, "0", {"SLURM_GPUS_PER_TASK": "1"}, [(0,), (0,)]),
        (1, 2, "1", {"SLURM_GPUS_ON_NODE": "2"}, [(0,), (0,)]),
        (1, 2, "2,3", {}, [(0,), (1,)]),
        (1, 2, "0,1,2,3", {"SLURM_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "4"}, [(0, 1), (2, 3)]),
        (1, 2, "0,1", {"SLURM_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "4"}, [(0, 1), (0, 1)]),
    ],
)
def test_tasks_of_a_node_share_its_gpus(nodes, tasks, visible, more, expected):
    found = [find(on_gpus(nodes, tasks, visible, local, **more)).local_device_ids for local in range(len(expected))]
    assert found == expected


@pytest.mark.parametrize(
    "environment, flag",
    [
        (on_gpus(1, 2, "0,1,2", 0), "--ntasks-per-node"),
        (on_gpus(1, 2, "0,1", 0, SLURM_GPUS_ON_NODE="8"), "--gpus-per-task"),
        (on_gpus(1, 2, "0", 0, SLURM_GPUS_ON_NODE="4"), "--gpu-bind"),
    ],
)
def test_gpus_that_would_be_used_twice_or_not_at_all_are_refused(environment, flag):
    with pytest.raises(ClusterError, match=flag):
        find(environment)


def test_a_resolver_that_is_passed_beats_the_environment(monkeypatch):
    environment = tf_config(("worker", 0), worker=["a:1", "b:1", "c:1"])
    assert px.cluster.Explicit(2, 1, "h:5").resolve(environment).num_processes == 2
    assert find(environment).num_processes == 3
    assert str(px.cluster.Explicit(2, 1, "h:5").resolve({})) == "cluster by hand: 2 processes, I am 1, coordinator h:5"


@pytest.mark.parametrize(
    "args, text",
    [
        ((2, 2, "h:5"), "from 0 to 1"),
        ((0, 0), "at least 1"),
        ((2, 0), "coordinator is missing"),
        ((2, 0, "h"), "host:port"),
    ],
)
def test_a_cluster_by_hand_is_checked(args, text):
    with pytest.raises(ClusterError, match=text):
        px.cluster.Explicit(*args)
    for wrong, text in (
        (("2", 0), "num_processes must be an int"),
        ((2, 0, 5), "coordinator must be host:port, got 5"),
        ((2, 0, "h:5", "01"), "local_device_ids must be a list of ints, got '01'"),
    ):
        with pytest.raises(px.errors.ArgumentTypeError, match=text):
            px.cluster.Explicit(*wrong)


def test_a_scheduler_that_is_asked_for_must_be_there(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ClusterError, match="TF_CONFIG was asked for, and its variables are not set"):
        px.connect(px.cluster.TFConfig())


def test_without_a_cluster_nothing_is_connected():
    assert px.connect().num_processes == 1
    assert px.cluster.agree(1) == [1]
    assert px.cluster.describe().local_devices


def test_a_cluster_after_the_devices_were_opened_is_refused():
    px.OneDevice()
    with pytest.raises(ClusterError, match="px.connect came too late"):
        px.connect(px.cluster.Explicit(2, 0, "127.0.0.1:1"))
    with pytest.raises(px.errors.ArgumentError, match="timeout must be a positive number"):
        px.connect(timeout=0)
    with pytest.raises(px.errors.ArgumentError, match="heartbeat must be a positive number"):
        px.connect(heartbeat=float("inf"))
    with pytest.raises(px.errors.ArgumentTypeError, match="bind must be an address, got 5"):
        px.connect(bind=5)


class Site:
    def __init__(self, spec):
        self._spec = spec

    def resolve(self, environment):
        return self._spec


def test_what_is_no_resolver_is_refused():
    for wrong in ("slurm", px.cluster.Slurm):
        with pytest.raises(px.errors.ArgumentTypeError, match="px.connect takes a resolver"):
            px.connect(wrong)
    with pytest.raises(
        px.errors.ArgumentTypeError, match="Site gave a dict; resolve must give a px.cluster.ClusterSpec"
    ):
        px.connect(Site({"num_processes": 2}))
    with pytest.raises(ClusterError, match="Site was asked for, and its variables are not set"):
        px.connect(Site(None))


def test_processes_agree_on_what_json_holds():
    for wrong in (np.float32(1), jnp.ones(2), {1, 2}, {"loss": jnp.float32(1)}):
        with pytest.raises(
            px.errors.ArgumentTypeError, match=r"agree takes numbers.*give float\(array\) or array.tolist"
        ):
            px.cluster.agree(wrong)


@pytest.mark.parametrize(
    "name", [name for name in vars(px.cluster) if name[0].isupper() or name in ("agree", "describe")]
)
def test_every_public_object_of_the_cluster_is_documented(name):
    thing = getattr(px.cluster, name)
    assert isinstance(thing, int) or len(thing.__doc__) > 30
