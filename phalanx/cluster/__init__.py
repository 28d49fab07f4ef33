"""Many processes as one program: how they find each other, agree, and notice that one is gone."""

from phalanx.cluster.agreement import agree as agree
from phalanx.cluster.connection import Cluster as Cluster
from phalanx.cluster.connection import describe as describe
from phalanx.cluster.exits import EXIT_LOST as EXIT_LOST
from phalanx.cluster.exits import EXIT_PREEMPTED as EXIT_PREEMPTED
from phalanx.cluster.exits import EXIT_STUCK as EXIT_STUCK
from phalanx.cluster.preemption import listen as listen
from phalanx.cluster.preemption import stop_requested as stop_requested
from phalanx.cluster.resolvers import CloudTPU as CloudTPU
from phalanx.cluster.resolvers import Explicit as Explicit
from phalanx.cluster.resolvers import Kubernetes as Kubernetes
from phalanx.cluster.resolvers import OpenMPI as OpenMPI
from phalanx.cluster.resolvers import Phalanx as Phalanx
from phalanx.cluster.resolvers import Slurm as Slurm
from phalanx.cluster.resolvers import TFConfig as TFConfig
from phalanx.cluster.resolvers import Torchrun as Torchrun
from phalanx.cluster.spec import ClusterSpec as ClusterSpec
from phalanx.cluster.watchdog import Watchdog as Watchdog
