"""Write a training step for one device; run it unchanged on one, eight or a thousand."""

import importlib

from phalanx import _jax
from phalanx import cluster as cluster
from phalanx import errors as errors
from phalanx.abstract import abstract as abstract
from phalanx.audit import Auditor as Auditor
from phalanx.audit import audit as audit
from phalanx.checkpoint.checkpoint import Checkpoint as Checkpoint
from phalanx.checkpoint.manager import CheckpointManager as CheckpointManager
from phalanx.checkpoint.resumable import resumable as resumable
from phalanx.cluster.connection import connect as connect
from phalanx.control_flow import cond as cond
from phalanx.control_flow import scan as scan
from phalanx.control_flow import while_loop as while_loop
from phalanx.data.progress import progress as progress
from phalanx.devices import cpu_devices as cpu_devices
from phalanx.distribute.in_effect import get_replica_context as get_replica_context
from phalanx.distribute.in_effect import get_strategy as get_strategy
from phalanx.distribute.in_effect import in_cross_replica_context as in_cross_replica_context
from phalanx.distribute.mirrored import TPU as TPU
from phalanx.distribute.mirrored import Mirrored as Mirrored
from phalanx.distribute.mirrored import OneDevice as OneDevice
from phalanx.distribute.replica import ReplicaContext as ReplicaContext
from phalanx.distribute.strategy import Strategy as Strategy
from phalanx.distribute.values import PerReplica as PerReplica
from phalanx.finite import NonFiniteGuard as NonFiniteGuard
from phalanx.finite import finite_or_raise as finite_or_raise
from phalanx.forward import ForwardAccumulator as ForwardAccumulator
from phalanx.function import function as function
from phalanx.function import run_functions_eagerly as run_functions_eagerly
from phalanx.function import strict as strict
from phalanx.optim import Optimizer as Optimizer
from phalanx.preflight.api import preflight as preflight
from phalanx.profiling.api import profile as profile
from phalanx.self_check import self_check as self_check
from phalanx.tape import GradientTape as GradientTape
from phalanx.trees import variables_like as variables_like
from phalanx.variables import Component as Component
from phalanx.variables import Variable as Variable

_jax.hide_absent_tpu()

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "keras":
        return importlib.import_module("phalanx.keras")
    from phalanx._tensorflow import MODULE, no_such

    raise no_such("module 'phalanx'", name, MODULE)
