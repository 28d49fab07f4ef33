"""`abstract`: variables with shapes and dtypes and no storage, for models that are only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from phalanx import _jax, state
from phalanx._explain import why_not_traced
from phalanx._packs import stored_array
from phalanx.errors import StrategyError, VariableWriteError
from phalanx.variables import Variable


class AbstractFrame(state.Frame):
    """The place inside `abstract`: whatever is computed here has a type and no value."""

    parent = None

    def __init__(self, scope: _Scope, context: state.Context) -> None:
        self._scope = scope
        self.context = context

    def load(self, variable: Variable) -> Any:
        if variable.has_storage:
            return stored_array(variable)
        values = self._scope.values
        if variable not in values:
            values[variable] = self._scope.tracing.input(self.type_of(variable))
        return values[variable]

    def type_of(self, variable: Variable) -> Any:
        return state.stored_type(variable._stored)

    def store(self, variable: Variable, stored: Any) -> None:
        if variable.has_storage:
            raise VariableWriteError(
                f"{variable.label} has a value and is assigned in px.abstract(), where nothing is computed, at"
                f" {_jax.user_line()}. Assign it outside."
            )
        self._scope.values[variable] = stored

    def created(self, variable: Variable, stored: Any) -> None:
        variable._replace(jax.ShapeDtypeStruct(stored.shape, stored.dtype))


class _Scope:
    """One `abstract` block."""

    def __init__(self, tracing: _jax.Tracing) -> None:
        self.tracing = tracing
        self.values: dict[Variable, Any] = {}
        """What reading a variable gave."""

    @contextmanager
    def lifted_out(self) -> Iterator[None]:
        """As `state.lifted_out`, without leaving the block."""
        frame = AbstractFrame(self, state.CrossReplica(state.context().strategy))
        with _jax.outside_traces(), _jax.back_to(self.tracing), state.pushed(frame):
            yield


@contextmanager
def abstract() -> Iterator[None]:
    """In the block variables have a shape and a dtype, and no storage: models of any size fit.

    Whatever JAX computes in the block has a type and no value. Models of Keras and optimizers made in it are
    abstract too. `px.preflight` compiles steps that use such variables; nothing can run with them.

    Raises (also from the block):
        StrategyError: in a traced function or a replica.
        TracingError: when the value of an array is needed.
        VariableWriteError: when a variable that has a value is assigned.

    Example:
        >>> with px.abstract():
        ...     w = px.Variable(jnp.zeros((1_000_000, 1_000_000)), name="w")
        >>> w
        Variable(name='w', shape=(1000000, 1000000), dtype=float32, value=<no storage>)
    """
    stack = state._stack
    if stack.without_storage is not None:
        yield
        return
    if not state.top().is_eager:
        raise StrategyError("px.abstract() is entered in a traced function or a replica. Enter it outside.")
    with _jax.outside_traces(), _jax.types_alone() as tracing:
        scope = _Scope(tracing)
        stack.without_storage = scope
        try:
            with state.pushed(AbstractFrame(scope, state.context())):
                yield
        except Exception as error:
            better = why_not_traced("px.abstract", error)
            if better is None:
                raise
            raise better from error
        finally:
            stack.without_storage = None
