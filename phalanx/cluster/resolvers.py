"""Cluster resolvers: environment variables in, `ClusterSpec` out; they look at nothing else.

A resolver has a `source` and ``resolve(environment)``, which gives None where its scheduler has not started
this process, and raises `ClusterError` where it has but the variables make no sense.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from phalanx.cluster.environment import Variables, share, visible_devices
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import ArgumentTypeError, ClusterError

DEFAULT_PORT = 55527
"""Where process 0 is met unless something else is said; it is the same on all processes."""

_BY_HAND = "Set PHALANX_COORDINATOR=host:port of process 0, or pass px.cluster.Explicit."


class Resolver(Protocol):
    """Finds the cluster in environment variables."""

    source: str

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec | None:
        """What this process has to know, or None."""


class Explicit:
    """The cluster given by hand.

    Args:
        num_processes: how many there are.
        process_id: which one this is, from 0.
        coordinator: "host:port" of process 0, the same for all.
        local_device_ids: which of the devices that the process sees are its own. Default: all.

    Raises:
        ClusterError: for numbers or addresses that cannot be.

    Example:
        >>> px.cluster.Explicit(2, 0, "10.0.0.1:1234").resolve({}).num_processes
        2
    """

    source = "by hand"

    def __init__(
        self,
        num_processes: int,
        process_id: int,
        coordinator: str = "",
        local_device_ids: tuple[int, ...] | list[int] | None = None,
    ) -> None:
        for name, value in (("num_processes", num_processes), ("process_id", process_id)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ArgumentTypeError(f"px.cluster.Explicit: {name} must be an int, got {value!r:.60}.")
        if not isinstance(coordinator, str):
            raise ArgumentTypeError(f"px.cluster.Explicit: coordinator must be host:port, got {coordinator!r:.60}.")
        ids = () if local_device_ids is None else tuple(local_device_ids)
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ArgumentTypeError(
                f"px.cluster.Explicit: local_device_ids must be a list of ints, got {local_device_ids!r:.60}."
            )
        if num_processes > 1 and not coordinator:
            raise ClusterError("px.cluster.Explicit: coordinator is missing; it must be host:port of process 0.")
        self._spec = ClusterSpec(
            source=self.source,
            num_processes=num_processes,
            process_id=process_id,
            coordinator=coordinator,
            coordinator_from="px.cluster.Explicit's coordinator",
            local_device_ids=None if local_device_ids is None else ids,
        )

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec:
        """What was given."""
        return self._spec


class Phalanx:
    """Variables of ``phalanx launch``; they may be set by hand.

    ``PHALANX_PROCESS_ID``, ``PHALANX_NUM_PROCESSES`` and ``PHALANX_COORDINATOR``.
    """

    source = "PHALANX_PROCESS_ID"

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec | None:
        """What this process has to know, or None."""
        variables = Variables(environment, self.source)
        if "PHALANX_PROCESS_ID" not in variables:
            return None
        number, count = variables.index("PHALANX_PROCESS_ID", "PHALANX_NUM_PROCESSES")
        return ClusterSpec(
            source="phalanx launch" if "PHALANX_LAUNCHER" in variables else "PHALANX_PROCESS_ID",
            num_processes=count,
            process_id=number,
            coordinator=variables.text("PHALANX_COORDINATOR", "" if count == 1 else None, why=_BY_HAND),
            coordinator_from="PHALANX_COORDINATOR",
        )


class TFConfig:
    """TensorFlow's ``TF_CONFIG``: the chief is process 0, the workers follow."""

    source = "TF_CONFIG"

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec | None:
        """What this process has to know, or None."""
        variables = Variables(environment, self.source)
        if "TF_CONFIG" not in variables:
            return None
        cluster, kind, index = _tf_config(variables)
        if kind == "evaluator":
            return ClusterSpec(source="TF_CONFIG (the evaluator, which runs by itself)", num_processes=1, process_id=0)
        if kind not in ("chief", "master", "worker"):
            raise variables.wrong(
                "TF_CONFIG", f"task.type is {kind!r}; Phalanx knows chief, worker and evaluator, no parameter servers"
            )
        members = [(task, address) for task in ("chief", "master", "worker") for address in cluster.get(task, [])]
        twice = [address for address, n in Counter(address for _, address in members).items() if n > 1]
        if twice:
            raise variables.wrong("TF_CONFIG", f"{', '.join(twice)} is there more than once")
        if index >= len(cluster.get(kind, [])):
            raise variables.wrong(
                "TF_CONFIG", f"task.index is {index}, but cluster.{kind} has {len(cluster.get(kind, []))}"
            )
        first = members[0][0]
        return ClusterSpec(
            source=self.source,
            num_processes=len(members),
            process_id=[task for task, _ in members].index(kind) + index,
            coordinator=members[0][1],
            coordinator_from=f"TF_CONFIG's cluster.{first}[0]",
        )


def _tf_config(variables: Variables) -> tuple[dict[str, list[str]], str, int]:
    try:
        config = json.loads(variables.text("TF_CONFIG"))
    except (ValueError, RecursionError) as error:
        raise variables.wrong("TF_CONFIG", f"it is no JSON ({error})") from None

    def part(of: Any, key: str, kind: type, where: str) -> Any:
        if not isinstance(of, dict) or not isinstance(of.get(key), kind) or isinstance(of.get(key), bool):
            raise variables.wrong("TF_CONFIG", f"{where}{key} is missing, or no {kind.__name__}")
        return of[key]

    cluster = part(config, "cluster", dict, "")
    for kind in cluster:
        for address in part(cluster, kind, list, "cluster."):
            if not isinstance(address, str):
                raise variables.wrong("TF_CONFIG", f"cluster.{kind} must be a list of host:port")
    task = part(config, "task", dict, "")
    index = task.get("index", 0) if isinstance(task, dict) else 0
    if isinstance(index, str) and index.isdecimal():  # some schedulers write it so
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise variables.wrong("TF_CONFIG", f"task.index is {index!r}; it must be a number from 0")
    return cluster, part(task, "type", str, "task."), index


class Slurm:
    """A step of a SLURM job, started by ``srun``: one process per node, per GPU, or anything between."""

    source = "SLURM"

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec | None:
        """What this process has to know, or None."""
        variables = Variables(environment, self.source)
        if "SLURM_JOB_ID" not in variables:
            return None
        if "SLURM_STEP_NODELIST" not in variables:
            tasks = variables.number("SLURM_NTASKS", 1)
            if tasks > 1:
                raise variables.wrong("SLURM_NTASKS", "but SLURM_STEP_NODELIST is not set: start the script with srun")
            return None
        count_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
        number, count = variables.index("SLURM_PROCID", count_name)
        return ClusterSpec(
            source=self.source,
            num_processes=count,
            process_id=number,
            coordinator=f"{_first_host(variables)}:{_port_of(variables.text('SLURM_JOB_ID'), variables)}",
            coordinator_from="SLURM_STEP_NODELIST's first host",
            local_device_ids=_slurm_devices(variables, environment, count),
        )


def _port_of(job: str, variables: Variables) -> int:
    """One for each job, so that two jobs may share a machine."""
    return variables.number("PHALANX_COORDINATOR_PORT", 61440 + zlib.crc32(job.encode()) % 4096)


def _first_host(variables: Variables) -> str:
    """The first of "n1,n2", "n[1-3,7]", "n[001-015]-ib,m2", "rack[2-3]n[1-4]"."""
    nodes = variables.text("SLURM_STEP_NODELIST")
    found = re.match(r"(?:[^\[\],]|\[[^\[\]]*\])+", nodes)
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", found.group()) if found else ""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise variables.wrong("SLURM_STEP_NODELIST", "it is no list of nodes")
    return host


def _tasks_here(variables: Variables, count: int) -> int:
    """Tasks on this node: its entry of "4(x2),1"."""
    if "SLURM_STEP_TASKS_PER_NODE" not in variables:
        nodes = variables.number("SLURM_STEP_NUM_NODES", 1)
        return max(1, count // max(1, nodes))
    counts: list[int] = []
    for part in variables.text("SLURM_STEP_TASKS_PER_NODE").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise variables.wrong("SLURM_STEP_TASKS_PER_NODE", "it must be like 4(x2),1")
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    node = variables.number("SLURM_NODEID", 0)
    if node >= len(counts):
        raise variables.wrong("SLURM_NODEID", f"SLURM_STEP_TASKS_PER_NODE has {len(counts)} nodes")
    return counts[node]


def _slurm_devices(variables: Variables, environment: Mapping[str, str], count: int) -> tuple[int, ...] | None:
    """Which of the GPUs that the process sees are its own, as indices into those it sees."""
    visible = visible_devices(environment)
    if visible is None:
        return None
    here, local = _tasks_here(variables, count), variables.number("SLURM_LOCALID")
    if local >= here:
        raise variables.wrong("SLURM_LOCALID", f"there are {here} tasks on this node")
    seen = len(visible)
    per_task = variables.number("SLURM_GPUS_PER_TASK", 0)
    allocated = variables.number("SLURM_GPUS_ON_NODE", per_task * here or 0)
    if per_task and seen == per_task:
        return tuple(range(seen))  # each task sees its own alone
    if allocated and seen * here == allocated and here > 1:
        return tuple(range(seen))
    if allocated and seen not in (allocated, per_task * here):
        raise ClusterError(
            f"SLURM: this task sees {seen} GPUs (CUDA_VISIBLE_DEVICES={','.join(visible)}) and {here} tasks share the"
            f" {allocated} GPUs of the node (SLURM_GPUS_ON_NODE={allocated}), so some would be used twice or not at all."
            " Ask for --gpus-per-task, or let all tasks see all with --gpu-bind=none."
        )
    if seen % here:
        raise ClusterError(
            f"SLURM: {here} tasks on this node share {seen} GPUs (CUDA_VISIBLE_DEVICES={','.join(visible)}), which does"
            " not divide. Change --ntasks-per-node or --gpus-per-node."
        )
    return share(seen, local, here)


class OpenMPI:
    """Processes of Open MPI's ``mpirun``, or of MPICH's and Intel MPI's (``PMI_RANK``)."""

    source = "MPI"

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec | None:
        """What this process has to know, or None."""
        variables = Variables(environment, self.source)
        ours = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")
        names = next(((rank, size) for rank, size in ours if rank in variables or size in variables), None)
        if names is None or "SLURM_STEP_NODELIST" in variables:  # srun speaks PMI too
            return None
        number, count = variables.index(*names)
        local_names = (
            ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
            if names[0].startswith("OMPI")
            else ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        )
        devices = None
        visible = visible_devices(environment)
        local_count = variables.number(local_names[1], 1)
        if visible is not None and local_count > 1 and len(visible) % local_count == 0:
            devices = share(len(visible), variables.number(local_names[0]), local_count)
        coordinator, origin = _mpi_coordinator(variables, count, local_names[1])
        return ClusterSpec(
            source=self.source,
            num_processes=count,
            process_id=number,
            coordinator=coordinator,
            coordinator_from=origin,
            local_device_ids=devices,
        )


def _mpi_coordinator(variables: Variables, count: int, local_count: str) -> tuple[str, str]:
    if count == 1 or "PHALANX_COORDINATOR" in variables:
        return variables.text("PHALANX_COORDINATOR", ""), "PHALANX_COORDINATOR"
    job = variables.text("OMPI_MCA_ess_base_jobid", variables.text("PMIX_NAMESPACE", variables.text("PMI_ID", "0")))
    port = _port_of(job, variables)
    if variables.number(local_count, 0) == count:
        return f"127.0.0.1:{port}", f"{local_count}, all on this machine"
    uri = re.search(r"tcp6?://([^,:;]+|\[[^\],]+)", variables.text("OMPI_MCA_orte_hnp_uri", ""))
    if uri is None:
        raise ClusterError(
            f"{variables.source}: {count} processes on several machines, and nothing says where process 0 is. {_BY_HAND}"
        )
    return f"{uri.group(1)}:{port}" if "[" not in uri.group(1) else f"{uri.group(1)}]:{port}", "OMPI_MCA_orte_hnp_uri"


class Kubernetes:
    """Pods of an indexed job; the job must say how many they are, and name a headless service.

    ``JOB_COMPLETION_INDEX`` is set by Kubernetes. ``PHALANX_NUM_PROCESSES`` is to be set in the job. Process 0
    is found as ``<job>-0.<subdomain>`` (``PHALANX_SUBDOMAIN``, by default the job's name), or at
    ``PHALANX_COORDINATOR``.
    """

    source = "Kubernetes"

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec | None:
        """What this process has to know, or None."""
        variables = Variables(environment, self.source)
        if "JOB_COMPLETION_INDEX" not in variables:
            return None
        variables.text("PHALANX_NUM_PROCESSES", why="Set it in the job, to what spec.completions says.")
        number, count = variables.index("JOB_COMPLETION_INDEX", "PHALANX_NUM_PROCESSES")
        coordinator, origin = variables.text("PHALANX_COORDINATOR", ""), "PHALANX_COORDINATOR"
        if count > 1 and not coordinator:
            host = variables.text("HOSTNAME", why=_BY_HAND)
            job, dash, index = host.partition(".")[0].rpartition("-")
            if not dash or index != str(number):
                raise variables.wrong("HOSTNAME", f"it must be the job's name and -{number}, as in an indexed job")
            subdomain = variables.text("PHALANX_SUBDOMAIN", job)
            coordinator = f"{job}-0.{subdomain}:{variables.number('PHALANX_COORDINATOR_PORT', DEFAULT_PORT)}"
            origin = "HOSTNAME and PHALANX_SUBDOMAIN"
        return ClusterSpec(
            source=self.source,
            num_processes=count,
            process_id=number,
            coordinator=coordinator,
            coordinator_from=origin,
        )


class CloudTPU:
    """Hosts of a TPU slice, or of several slices, as Google Kubernetes Engine describes them."""

    source = "Cloud TPU"

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec | None:
        """What this process has to know, or None."""
        variables = Variables(environment, self.source)
        if "TPU_WORKER_HOSTNAMES" not in variables:
            return None
        hosts = [host.strip() for host in variables.text("TPU_WORKER_HOSTNAMES").split(",")]
        if "" in hosts or len(set(hosts)) < len(hosts):
            raise variables.wrong("TPU_WORKER_HOSTNAMES", "a host is empty, or there more than once")
        worker = variables.number("TPU_WORKER_ID", 0 if len(hosts) == 1 else None)
        if worker >= len(hosts):
            raise variables.wrong("TPU_WORKER_ID", f"TPU_WORKER_HOSTNAMES has {len(hosts)} hosts")
        slices = variables.number("MEGASCALE_NUM_SLICES", 1)
        slice_id = variables.number("MEGASCALE_SLICE_ID", 0 if slices == 1 else None)
        if slice_id >= slices:
            raise variables.wrong("MEGASCALE_SLICE_ID", f"MEGASCALE_NUM_SLICES={slices}")
        host, origin = hosts[0], "TPU_WORKER_HOSTNAMES's first host"
        if slices > 1:
            host = variables.text("MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
            origin = "MEGASCALE_COORDINATOR_ADDRESS"
        return ClusterSpec(
            source=self.source,
            num_processes=len(hosts) * slices,
            process_id=slice_id * len(hosts) + worker,
            coordinator=f"{host}:{variables.number('PHALANX_COORDINATOR_PORT', DEFAULT_PORT)}",
            coordinator_from=origin,
        )


class Torchrun:
    """Variables of PyTorch's launchers: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``."""

    source = "torchrun"

    def resolve(self, environment: Mapping[str, str]) -> ClusterSpec | None:
        """What this process has to know, or None."""
        variables = Variables(environment, self.source)
        if "RANK" not in variables or "MASTER_ADDR" not in variables:
            return None
        number, count = variables.index("RANK", "WORLD_SIZE")
        port = variables.number("MASTER_PORT", 29500)
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1  # torchrun itself listens there
        local_count, devices = variables.number("LOCAL_WORLD_SIZE", 1), None
        visible = visible_devices(environment)
        if visible is not None and local_count > 1 and len(visible) % local_count == 0:
            devices = share(len(visible), variables.number("LOCAL_RANK"), local_count)
        elif visible is None and local_count > 1:
            devices = (variables.number("LOCAL_RANK"),)
        return ClusterSpec(
            source=self.source,
            num_processes=count,
            process_id=number,
            coordinator=f"{_bracketed(variables.text('MASTER_ADDR'))}:{port}",
            coordinator_from="MASTER_ADDR and MASTER_PORT",
            local_device_ids=devices,
        )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


RESOLVERS: tuple[Resolver, ...] = (Phalanx(), TFConfig(), Kubernetes(), CloudTPU(), Slurm(), OpenMPI(), Torchrun())
"""Those that look at the environment."""


def find(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that the environment tells of, or None.

    Raises:
        ClusterError: when two schedulers' variables contradict each other, or one's are broken.
    """
    by_launcher = RESOLVERS[0].resolve(environment)
    if by_launcher is not None:  # said on purpose, perhaps inside a job of a scheduler
        return by_launcher
    found = [spec for resolver in RESOLVERS[1:] if (spec := resolver.resolve(environment)) is not None]
    if len({(spec.num_processes, spec.process_id) for spec in found}) > 1:
        raise ClusterError(
            "The environment tells of different clusters: "
            + "; ".join(
                f"{spec.source} says {spec.num_processes} processes and I am {spec.process_id}" for spec in found
            )
            + ". Pass the one that is meant, px.connect(px.cluster.TFConfig()), or unset the variables of the other."
        )
    return found[0] if found else None
