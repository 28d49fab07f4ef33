"""PyTorch: `DistributedDataParallel` over gloo, a process for each replica, and its eager autograd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

from benchmarks.peers.serving import serve
from benchmarks.problems import mlp_parameters, regression_batch, training_problems

Made = tuple[Callable[[], Any], Callable[[], Any]]


def mlp_loss(parameters: Sequence[Any], x: Any, y: Any) -> Any:
    """As in `benchmarks.models`."""
    *layers, (w, b) = zip(parameters[::2], parameters[1::2])
    for weight, bias in layers:
        x = torch.relu(x @ weight + bias)
    return ((x @ w + b - y) ** 2).mean(-1).sum()


class Model(torch.nn.Module):
    """The loss as a module, as `DistributedDataParallel` wants it."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.from_numpy(p.copy()) for p in parameters)

    def forward(self, x: Any, y: Any) -> Any:
        """The sum over the rows."""
        return mlp_loss(list(self.all), x, y)


def step(problem: str, optimizer: str, replicas: int, quick: bool) -> Made | None:
    """Dense layers; each replica's process follows the first one, which is asked for steps."""
    what = training_problems(quick)[problem]
    if what.kind != "mlp":
        return None
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // replicas))
    rank = int(os.environ.get("RANK", "0"))
    model: Any = Model(what.parameters)
    if replicas > 1:
        _join(rank, replicas)
        model = torch.nn.parallel.DistributedDataParallel(model)
    kinds = {"SGD": lambda p: torch.optim.SGD(p, 1e-3), "Adam": lambda p: torch.optim.Adam(p, 1e-3)}
    updates = kinds[optimizer](model.parameters())
    x, y = (torch.from_numpy(np.array_split(a, replicas)[rank].copy()) for a in what.batch)

    def train_step() -> float:
        updates.zero_grad()
        loss = model(x, y) / what.rows
        (loss * replicas).backward()  # whose mean over the replicas is the gradient of the sum
        updates.step()
        total = loss.detach()
        if replicas > 1:
            distributed.all_reduce(total)
        return float(total)

    while rank:  # as fast as the first replica, which the sums wait for; its end ends the process
        train_step()
    return train_step, lambda: [train_step() for _ in range(4)]


def _join(rank: int, replicas: int) -> None:
    """Meet the processes of the other replicas, which the first one starts."""
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        for other in range(1, replicas):
            command = [sys.executable, "-m", "benchmarks.peers.torch_peer", *sys.argv[1:]]
            subprocess.Popen(command, env={**os.environ, "RANK": str(other)}, stdin=subprocess.DEVNULL, stdout=2)
    distributed.init_process_group("gloo", rank=rank, world_size=replicas)


def eager(sizes: list[int], rows: int) -> Made:
    """Autograd."""
    parameters = [torch.from_numpy(p).requires_grad_() for p in mlp_parameters(sizes)]
    x, y = map(torch.from_numpy, regression_batch(rows, sizes[0]))

    def run() -> Any:
        loss = mlp_loss(parameters, x, y)
        return loss, torch.autograd.grad(loss, parameters)

    def numbers() -> list[float]:
        loss, grads = run()
        return [float(loss), *(float(g.abs().sum()) for g in grads)]

    return run, numbers


if __name__ == "__main__":
    serve({"step": step, "eager": eager})
