"""`audit` and `Auditor`: do all replicas hold the same bits?

Phalanx refuses updates that would make replicas differ. What it cannot see are faults below it: a bit that flips in a
device's memory, a collective that gives its participants different sums, an array that other code assembled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from phalanx import _jax, state
from phalanx._bits import fingerprint, from_bits, to_bits
from phalanx._checks import check_choice, check_int
from phalanx._launch import in_order
from phalanx._packs import stored_arrays
from phalanx.checkpoint.leaves import Held
from phalanx.checkpoint.objects import Contents
from phalanx.distribute.collectives import broadcast
from phalanx.distribute.strategy import Strategy
from phalanx.errors import ArgumentError, ArgumentTypeError, ReplicaDivergenceError, StrategyError
from phalanx.variables import Variable

logger = logging.getLogger("phalanx")

OnDivergence = Literal["raise", "repair"]


@dataclass(frozen=True)
class Divergence:
    """A component that is not that of replica 0."""

    variable: str
    """Name of the variable."""
    replica: int
    process: int
    """Which owns the replica."""
    index: tuple[int, ...]
    """Of the first element that differs."""

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"Variable {self.variable!r}: replica {self.replica} (process {self.process}) differs from replica 0, first at {self.variable}{at}"


@dataclass(frozen=True)
class AuditReport:
    """What `audit` found."""

    variables: int
    """How many mirrored variables were compared."""
    divergences: tuple[Divergence, ...]

    @property
    def equal(self) -> bool:
        """Whether all replicas hold the same bits."""
        return not self.divergences

    def __str__(self) -> str:
        if self.equal:
            return f"{self.variables} mirrored variable{'s' * (self.variables != 1)}: equal on all replicas"
        return "\n".join(map(str, self.divergences))


def audit(target: Any, strategy: Strategy | None = None) -> AuditReport:
    """Compare the components of mirrored variables bit by bit, on the devices.

    Each replica computes a fingerprint of each variable, and these few numbers are exchanged in one collective. Only
    variables whose fingerprints differ are looked at element by element. With several processes all must call it.

    Args:
        target: a variable, an optimizer, a Keras model, a `Checkpoint`, a strategy (all its variables), an object with a
            list ``variables``, or dicts and lists of these. Per-replica variables may differ, and are left out.
        strategy: which the variables must belong to. Default: whichever they do.

    Returns:
        A report with ``equal`` and ``divergences``, each with the name of the variable, the replica, its process, and the
        index of the first element that differs from replica 0's.

    Raises:
        StrategyError: in a traced function or a replica, or when a variable belongs to another strategy.
        ArgumentTypeError: for something that has no variables.

    Example:
        >>> with px.Mirrored().scope():
        ...     w = px.Variable([1.0, 2.0], name="w")
        >>> report = px.audit(w)
        >>> report.equal
        True
        >>> print(report)
        1 mirrored variable: equal on all replicas
    """
    _refuse_traces()
    groups = _groups(target, strategy)
    return _report(groups, [_fingerprints(*group) for group in groups.items()])


class Auditor:
    """Audits every so many steps, in a loop of yours or as a callback of `fit`.

    The fingerprints are computed after the step and looked at after the next one, so that no step is waited for.

    Args:
        target: see `audit`. As a callback: default, the model with its optimizer.
        every: steps from one audit to the next.
        on_divergence: ``"raise"``, or ``"repair"``: give all replicas what replica 0 holds, and log it.

    Raises:
        ArgumentError: for `every` that is no positive int, or an unknown `on_divergence`.

    Example:
        >>> with px.Mirrored().scope():
        ...     w = px.Variable([1.0, 2.0], name="w")
        >>> auditor = px.Auditor(w, every=10)
        >>> for step in range(30):
        ...     _ = w.assign_add([1.0, 1.0])
        ...     auditor.after_step()
        >>> auditor.finish()
        >>> auditor.audits
        3
    """

    def __init__(self, target: Any = None, *, every: int = 100, on_divergence: OnDivergence = "raise") -> None:
        check_int(every, "Auditor: every")
        check_choice(on_divergence, "Auditor: on_divergence", ("raise", "repair"))
        self.target = target
        self.audits = 0
        """How often variables were compared."""
        self._every = every
        self._repairs = on_divergence == "repair"
        self._steps = 0
        self._pending: tuple[_Groups, list[Any], int] | None = None

    def after_step(self) -> None:
        """Call after each step.

        Raises:
            ReplicaDivergenceError: when replicas differ; at a step that is later by one.
            ArgumentError: when the auditor was not told what to audit.
            StrategyError: in a traced function or a replica.
        """
        self._steps += 1
        if self._pending is not None:
            self.finish()
        if self._steps % self._every:
            return
        if self.target is None:
            raise ArgumentError("Auditor: say what to audit: px.Auditor(variables, optimizer or model, every=100).")
        _refuse_traces()
        groups = _groups(self.target, None)
        self._pending = groups, [_fingerprints(*group) for group in groups.items()], self._steps
        self.audits += 1

    def finish(self) -> None:
        """Look at the last audit now; call it when training ends.

        Raises:
            ReplicaDivergenceError: when replicas differ.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        groups, fingerprints, step = pending
        report = _report(groups, fingerprints)
        if report.equal:
            return
        if not self._repairs:
            raise ReplicaDivergenceError(
                f"Replicas that must hold the same values differ after step {step}:\n{report}\nA device or an interconnect"
                " may be faulty. Restore a checkpoint from before, or use px.Auditor(..., on_divergence='repair')."
            )
        names = {divergence.variable for divergence in report.divergences}
        for strategy, variables in groups.items():
            _repair(strategy, [v for v in variables if v.name in names])
        logger.warning("audit after step %s: repaired from replica 0:\n%s", step, report)


_Groups = dict[Strategy, list[Variable]]


def _refuse_traces() -> None:
    if state.in_step():
        raise StrategyError("Replicas are audited outside of traced functions and replicas: after the step.")


def _groups(target: Any, strategy: Strategy | None) -> _Groups:
    """The mirrored variables that several replicas hold, by strategy."""
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ArgumentTypeError(f"audit: strategy must be a strategy such as px.Mirrored(), got {strategy!r:.60}.")
    if isinstance(target, Strategy):
        variables = target.variables
    else:
        contents = Contents()
        with state.lifted_out():
            contents.add("target", target, lambda _: None)
        variables = [leaf.variable for leaf in contents.leaves.values() if isinstance(leaf, Held)]
        if not variables:
            raise ArgumentTypeError(f"audit: there are no variables in {type(target).__name__} {target!r:.60}.")
    groups: _Groups = {}
    for variable in variables:
        if strategy is not None:
            state.refuse_foreign(variable, strategy, "audited")
        if variable.num_components > 1 and not variable.per_replica and variable.has_storage:
            groups.setdefault(variable.strategy, []).append(variable)
    return groups


def _fingerprints(strategy: Strategy, variables: Sequence[Variable]) -> Any:
    """Of each replica and variable, on the devices; the same on all."""
    return _run(strategy, _all_fingerprints(strategy.mesh), variables)


def _run(strategy: Strategy, program: Any, variables: Sequence[Variable]) -> Any:
    with state.turn(), state.lock:
        stored = stored_arrays(variables)
        return in_order(strategy.in_order, lambda: [program(stored)])[0]


@functools.lru_cache(maxsize=64)
def _all_fingerprints(mesh: Any) -> Any:
    def one_replica(arrays: list[Any]) -> Any:
        mine = jnp.stack([fingerprint(array) for array in arrays])
        return _jax.all_gather(_jax.lift(mine), 0, stacked=True)

    return jax.jit(_jax.on_replicas(mesh, one_replica, PartitionSpec(), PartitionSpec()))


@functools.lru_cache(maxsize=64)
def _first_differences(mesh: Any) -> Any:
    """The program that gives, for each replica and variable, the first element that is not replica 0's, or -1."""

    def one_replica(arrays: list[Any]) -> Any:
        firsts = []
        for array in arrays:
            bits = _jax.lift(to_bits(array))
            differs = (bits != broadcast(bits, 0)).reshape(array.size, -1).any(1)
            firsts.append(jnp.where(differs.any(), jnp.argmax(differs), -1))
        return _jax.all_gather(jnp.stack(firsts), 0, stacked=True)

    return jax.jit(_jax.on_replicas(mesh, one_replica, PartitionSpec(), PartitionSpec()))


@functools.lru_cache(maxsize=64)
def _from_first_replica(mesh: Any) -> Any:
    def one_replica(arrays: list[Any]) -> Any:
        return [from_bits(broadcast(_jax.lift(to_bits(array)), 0), array) for array in arrays]

    return jax.jit(_jax.on_replicas(mesh, one_replica, PartitionSpec(), PartitionSpec()))


def _report(groups: _Groups, fingerprints: list[Any]) -> AuditReport:
    found: list[Divergence] = []
    for (strategy, variables), prints in zip(groups.items(), fingerprints):
        prints = np.asarray(prints)
        differing = [v for v, column in zip(variables, np.moveaxis(prints, 1, 0)) if (column != column[0]).any()]
        if differing:
            found += _differences(strategy, differing)
    return AuditReport(sum(map(len, groups.values())), tuple(found))


def _differences(strategy: Strategy, variables: list[Variable]) -> list[Divergence]:
    firsts = np.asarray(_run(strategy, _first_differences(strategy.mesh), variables))
    return [
        Divergence(
            v.name, replica, device.process_index, tuple(map(int, np.unravel_index(firsts[replica, i], v.shape)))
        )
        for i, v in enumerate(variables)
        for replica, device in enumerate(strategy.devices)
        if firsts[replica, i] >= 0
    ]


def _repair(strategy: Strategy, variables: list[Variable]) -> None:
    if variables:
        with state.turn(), state.lock:
            for variable, stored in zip(variables, _run(strategy, _from_first_replica(strategy.mesh), variables)):
                variable._replace(stored)
