"""Frames: where a read or a write of a variable goes.

Reading ``w`` means the stored array in eager code, an input of the program in a traced function, one
replica's component in a replica. A variable never asks which: it asks the top of one thread-local
stack. An entry of the stack answers two separate questions,

* *where values live*: `EagerFrame` (in the variables), `TraceFrame` (in the program being traced);
* *what reading and writing mean*: its `Context` (cross-replica, replica, merge).

`ContextFrame` changes the meaning and keeps the place; `TapeFrame` changes neither and is told of
each read. A new kind of place is a new frame, nothing else.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from phalanx import _jax
from phalanx._contexts import Context as Context
from phalanx._contexts import CrossReplica as CrossReplica
from phalanx._contexts import Op as Op
from phalanx._contexts import apply_op as apply_op
from phalanx._contexts import diverging as diverging
from phalanx._contexts import merge_components as merge_components
from phalanx._contexts import refuse_foreign as refuse_foreign
from phalanx._explain import leaked, without_storage
from phalanx._packs import Piece, stored_array
from phalanx._turns import Lending as Lending
from phalanx._turns import calling_back as calling_back
from phalanx._turns import lock as lock
from phalanx._turns import set_all as set_all
from phalanx._turns import tracing as tracing
from phalanx._turns import turn as turn
from phalanx.errors import FrozenVariableError, StrategyError, VariableCreationError, VariableWriteError

if TYPE_CHECKING:
    from phalanx.variables import Variable

Capture = tuple["Variable", bool]
"""A variable read from outside a program, and whether as a tape around the program sees it."""


# ---- where values live ---------------------------------------------------------------------------


class Frame(ABC):
    """One entry of the stack."""

    parent: Frame | None
    context: Context

    lock: AbstractContextManager[Any] = nullcontext()
    """Held while a variable is read or updated here; nobody waits for a `turn` in it."""

    def turn(self) -> AbstractContextManager[Any]:
        """Held around an update, from reading the old value to storing the new one."""
        return self.lock

    is_eager = False
    inherits_tapes = False

    @property
    def base(self) -> Frame:
        """The entry below the tapes that were opened on top of it."""
        return self

    @abstractmethod
    def load(self, variable: Variable) -> Any:
        """The stored array: the value, or one component per replica along axis 0."""

    def load_for_read(self, variable: Variable) -> Any:
        """The stored array for user code that reads it."""
        return self.load(variable)

    def load_as_input(self, variable: Variable) -> Any:
        """The stored array for a program that is called here."""
        return self.load(variable)

    @abstractmethod
    def type_of(self, variable: Variable) -> Any:
        """Type of the stored array, without reading it."""

    @abstractmethod
    def store(self, variable: Variable, stored: Any) -> None:
        """Replace the stored array."""

    def store_all(self, values: dict[Variable, Any]) -> None:
        """Replace the stored arrays of several variables: all or, after an error or interrupt, none."""
        for variable, stored in values.items():
            self.store(variable, stored)

    def handed_out(self, variable: Variable) -> None:
        """User code got hold of the stored array itself."""

    @abstractmethod
    def created(self, variable: Variable, stored: Any) -> None:
        """A variable was born here."""

    def note_use(self, strategy: Any) -> None:
        """A strategy's variables or replicas are part of what runs here."""

    def holds(self, variable: Variable) -> bool:
        """Whether the variable was read or written here, so that its shape is settled."""
        return False


class EagerFrame(Frame):
    """The floor: values live in the variables."""

    parent = None
    is_eager = True
    lock = lock

    def __init__(self) -> None:
        self.context = CrossReplica()

    def turn(self) -> AbstractContextManager[Any]:
        return turn()

    def load(self, variable: Variable) -> Any:
        for trace in _jax.trace_chain():
            if _jax.is_staging(trace):
                raise frozen(variable, _jax.staged_for(trace))
        if type(self._present(variable)) is jax.ShapeDtypeStruct:
            raise without_storage(variable)
        return stored_array(variable)

    def type_of(self, variable: Variable) -> Any:
        return stored_type(self._present(variable))

    @staticmethod
    def _present(variable: Variable) -> Any:
        if variable._stored is None:
            raise VariableCreationError(
                f"{variable.label}, created at {variable._created_at}, has no value: the traced function that created it"
                " failed before. Create it again, or give its initial value as a function without arguments, which is"
                " called at once."
            )
        return variable._stored

    def store(self, variable: Variable, stored: Any) -> None:
        self.store_all({variable: stored})

    def store_all(self, values: dict[Variable, Any]) -> None:
        for variable, stored in values.items():
            refuse_transformations(variable, None)
            if _jax.is_tracer(stored):
                raise leaked(f"{variable.label}, assigned at {_jax.user_line()}")
        placed = [variable._placed(stored) for variable, stored in values.items()]
        Lending.lend(values)
        set_all(values, "_stored", placed)

    def load_for_read(self, variable: Variable) -> Any:
        with lock:
            stored = self.load(variable)
            self.handed_out(variable)
        return stored

    def handed_out(self, variable: Variable) -> None:
        Lending.lend((variable,))

    def created(self, variable: Variable, stored: Any) -> None:
        variable._replace(variable._placed(stored))


def stored_type(stored: Any) -> Any:
    """The type of what a variable holds, as an input of a program."""
    if type(stored) in (jax.ShapeDtypeStruct, Piece):
        return _jax.local_aval(stored.shape, stored.dtype, varying=False)
    return _jax.type_of(stored)


class TraceFrame(Frame):
    """The body of a program: reads become its inputs, writes its outputs."""

    inherits_tapes = True
    """Whether tapes around the program see into it: not into a replica from outside."""

    def __init__(self, parent: Frame, tracing: _jax.Tracing, context: Context | None = None) -> None:
        self.parent = parent
        self.tracing = tracing
        self.context = context or parent.base.context
        self.values: dict[Variable, Any] = {}
        self.captures: dict[Capture, int] = {}
        """The input of the program that each variable read from outside became."""
        self._read_again: dict[Capture, tuple[Any, Any]] = {}
        """Variables read after they were assigned: the assigned value, and what readers got."""
        self.written: dict[Variable, str] = {}
        """The variables that the body assigned, each with the user's line that did so last."""
        self.in_order = False
        """Whether steps of this program must not overlap (see _traced.in_order)."""
        self.strategy: Any = None
        """The strategy whose replicas this program contains."""
        self.births: list[Variable] = []
        """Variables that the body created."""
        self.initial: dict[Variable, Any] = {}
        """Those of them whose initial value was traced."""

    def holds(self, variable: Variable) -> bool:
        return variable in self.values

    def note_use(self, strategy: Any) -> None:
        if strategy is not None:
            self.in_order |= strategy.in_order
            self.strategy = strategy

    def type_of(self, variable: Variable) -> Any:
        return jax.typeof(self.values[variable]) if variable in self.values else self.type_outside(variable)

    def type_outside(self, variable: Variable) -> Any:
        """Type of the stored array as the program gets it."""
        assert self.parent is not None
        return self.parent.base.type_of(variable)

    def load(self, variable: Variable) -> Any:
        for trace in _jax.trace_chain():
            if trace is self.tracing.trace:
                break
            if _jax.is_staging(trace):
                if _jax.staged_for(trace) == "jit":
                    raise frozen(variable, "jit")
                _stack.bodies_read = True
        if variable not in self.values:
            self.values[variable] = self._entry(variable)
        return self.values[variable]

    def load_for_read(self, variable: Variable) -> Any:
        assert self.parent is not None
        # A tape around this program sees a mirrored variable as varying, updates must see it as invariant.
        seen_by_tapes = self.inherits_tapes and _jax.in_replica_trace() and tapes_lift(self.parent, variable)
        return self._read(variable, self.load(variable), lifted=seen_by_tapes and not variable.per_replica)

    def load_as_input(self, variable: Variable) -> Any:
        return self._read(variable, self.load(variable), lifted=False)

    def _read(self, variable: Variable, stored: Any, lifted: bool) -> Any:
        """What `stored` is for a reader: its gradient is the variable's, not that of what was assigned to it."""
        if (variable, False) in self.captures and stored is self._entry(variable):
            return self._entry(variable, lifted)
        if variable in self.initial or not jnp.issubdtype(variable.dtype, jnp.inexact):
            return stored
        known = self._read_again.get((variable, lifted))
        if known is None or known[0] is not stored:
            entry = self._entry(variable, lifted)
            with _jax.using_trace(self.tracing.trace):
                again = _jax.read_again(_jax.lift(stored) if lifted else stored, entry)
            known = self._read_again[variable, lifted] = (stored, again)
        return known[1]

    def _entry(self, variable: Variable, lifted: bool = False) -> Any:
        """The input of the program that the variable is."""
        if (variable, lifted) not in self.captures:
            aval = self.type_outside(variable)
            if lifted:
                aval = _jax.local_aval(variable.shape, variable.dtype, varying=True)
            self._capture(variable, lifted, aval)
        return self.tracing.inputs[self.captures[variable, lifted]]

    def _capture(self, variable: Variable, lifted: bool, aval: Any) -> None:
        self.note_use(variable.strategy)
        self.captures[variable, lifted] = len(self.tracing.inputs)
        self.tracing.input(aval)

    def store(self, variable: Variable, stored: Any) -> None:
        refuse_transformations(variable, self.tracing.trace)
        self.values[variable] = stored
        self.written[variable] = _jax.user_line()
        renew_bodies()

    def created(self, variable: Variable, stored: Any) -> None:
        self.births.append(variable)
        if _jax.is_tracer(stored):
            self.values[variable] = stored
            self.initial[variable] = stored
        else:
            with lifted_out():
                variable._replace(variable._placed(stored))
            if self.parent is not None and not self.parent.base.is_eager:
                self.parent.base.created(variable, stored)


class ContextFrame(Frame):
    """The same place with other rules: a strategy's scope, a merge step."""

    def __init__(self, parent: Frame, context: Context) -> None:
        self.parent = parent
        self.context = context
        self.place = parent.base
        self.lock = self.place.lock

    def turn(self) -> AbstractContextManager[Any]:
        return self.place.turn()

    def load(self, variable: Variable) -> Any:
        return self.place.load(variable)

    def load_for_read(self, variable: Variable) -> Any:
        return self.place.load_for_read(variable)

    def load_as_input(self, variable: Variable) -> Any:
        return self.place.load_as_input(variable)

    def type_of(self, variable: Variable) -> Any:
        return self.place.type_of(variable)

    def store(self, variable: Variable, stored: Any) -> None:
        self.place.store(variable, stored)

    def store_all(self, values: dict[Variable, Any]) -> None:
        self.place.store_all(values)

    def handed_out(self, variable: Variable) -> None:
        self.place.handed_out(variable)

    def created(self, variable: Variable, stored: Any) -> None:
        self.place.created(variable, stored)

    def note_use(self, strategy: Any) -> None:
        self.place.note_use(strategy)

    def holds(self, variable: Variable) -> bool:
        return self.place.holds(variable)

    @property
    def is_eager(self) -> bool:  # type: ignore[override]
        return self.place.is_eager


class TapeFrame(ContextFrame):
    """The same place under the same rules, with a tape that is told of each read."""

    def __init__(self, parent: Frame, tape: Any) -> None:
        super().__init__(parent, parent.base.context)
        self.tape = tape

    @property
    def base(self) -> Frame:
        return self.place


def tapes_of(frame: Frame) -> Iterator[Any]:
    """The tapes opened in this place, innermost first; those below a function's body are not among them."""
    link: Frame | None = frame
    while isinstance(link, ContextFrame):
        if isinstance(link, TapeFrame):
            yield link.tape
        link = link.parent


def tapes_lift(frame: Frame, variable: Variable) -> bool:
    """Whether reading the variable in this place gives a value typed as varying."""
    if any(tape.lifts(variable) for tape in tapes_of(frame)):
        return True
    place = frame.base
    return place.inherits_tapes and place.parent is not None and tapes_lift(place.parent, variable)


def frozen(variable: Variable, purpose: str) -> FrozenVariableError:
    """The error for a read that would become a constant of a compiled program."""
    return FrozenVariableError(
        f"{variable.label} is read inside a program that jax.{purpose} is tracing, at {_jax.user_line()}: its"
        " present value would be baked in and later assignments would go unseen. Use px.function instead of"
        " jax.jit (px.scan, px.cond, px.while_loop instead of jax.lax's), or pass `v.value` as an argument."
    )


def refuse_transformations(variable: Variable, floor: Any) -> None:
    """Raise when a write would be lost or traced more than once: only tapes may stand in between."""
    for trace in _jax.trace_chain():
        if trace is floor:
            return
        if not isinstance(trace, _jax.OperationTrace):
            kind = _jax.staged_for(trace) if _jax.is_staging(trace) else type(trace).__name__.removesuffix("Trace")
            raise VariableWriteError(
                f"{variable.label} is assigned inside a JAX transformation ({kind}) at {_jax.user_line()}, which"
                " cannot carry the update out. Return the new value and assign it outside; in loops and branches"
                " use px.scan, px.while_loop and px.cond; for gradients use px.GradientTape."
            )


# ---- the stack -----------------------------------------------------------------------------------


class _Stack(threading.local):
    def __init__(self) -> None:
        self.top: Frame = EagerFrame()
        self.bodies_read = False
        """Whether a variable was read in a body that JAX traces and keeps (lax.scan, cond, checkpoint ...)."""
        self.without_storage: Any = None
        """The `abstract` scope that is open, if any."""


_stack = _Stack()


def top() -> Frame:
    """The frame that reads and writes of this thread go to."""
    return _stack.top


def context() -> Context:
    """The rules in effect in this thread."""
    return _stack.top.context


_not_met = {"keras": "phalanx.keras"}
"""Libraries whose variables take part once both are imported, in whatever order, and the module that sees to it."""


def _meet_libraries() -> None:
    for library in [name for name in _not_met if name in sys.modules]:
        with suppress(StrategyError):  # it runs on another backend, and has nothing that could take part
            importlib.import_module(_not_met.pop(library))


@contextmanager
def pushed(frame: Frame) -> Iterator[None]:
    """Put a frame on top of the stack for the length of the block."""
    if _not_met:
        _meet_libraries()
    before = _stack.top
    _stack.top = frame
    try:
        yield
    finally:
        _stack.top = before


def set_top(frame: Frame) -> None:
    """For tapes, which may be closed in another order than they were opened."""
    if _not_met:
        _meet_libraries()
    _stack.top = frame
    renew_bodies()


_generations = itertools.count(2)
_latest_generation = [1]


def renew_bodies() -> None:
    """Call where reading a variable gives something else from here on: after a write, in another trace or tape.

    A body that read a variable, and that JAX kept with the value it saw, is traced anew the next time.
    """
    if _stack.bodies_read:
        _stack.bodies_read = False
        _latest_generation[0] = next(_generations)
    # Eager code keeps to 0: its compiled programs must stay, and in its bodies reading a variable is an error.
    _jax.set_body_generation(0 if _stack.top.is_eager else _latest_generation[0])


@contextmanager
def lifted_out() -> Iterator[None]:
    """Run the block eagerly, out of every function and replica that is being traced around it."""
    if _stack.without_storage is not None:
        with _stack.without_storage.lifted_out():
            yield
        return
    strategy = context().strategy
    frame = EagerFrame()
    frame.context = CrossReplica(strategy)
    # New arrays belong on the strategy's devices from the start, not on JAX's default one.
    local = [] if strategy is None else strategy.local_devices[:1]
    device = jax.default_device(local[0]) if local else nullcontext()
    try:
        with _jax.outside_traces(), pushed(frame), device:
            renew_bodies()
            yield
    finally:
        renew_bodies()


def read(variable: Variable) -> jax.Array:
    """The variable's value here and now; active tapes are told."""
    frame = _stack.top
    base = frame.base
    value = base.context.read(variable, base)
    return _tell_tapes(frame, variable, value)


def read_out_of_traces(variable: Variable) -> jax.Array:
    """As `read`, in a function that JAX traces and does not keep, where the present value may be a constant."""
    frame = _stack.top
    if not frame.base.is_eager:
        return read(variable)
    with _jax.outside_traces():
        value = frame.base.context.read(variable, frame.base)
    return _tell_tapes(frame, variable, value)


def is_plain() -> bool:
    """Whether this thread is in eager code outside every scope."""
    return _stack.top.is_eager and _stack.top.context.strategy is None and _stack.top.base is _stack.top


def in_step() -> bool:
    """Whether this is code of a step: of a traced function, ours or JAX's, or of a replica."""
    return not _stack.top.is_eager or context().in_replica or any(map(_jax.is_staging, _jax.trace_chain()))


def borrow(variable: Variable) -> Any:
    """The stored array here and now, which no step will take away from whoever asked."""
    place = _stack.top.base
    with place.lock:
        stored = place.load(variable)
        place.handed_out(variable)
    return stored


def load_for_call(capture: Capture) -> Any:
    """The stored array as an input of a program that is called here; active tapes are told."""
    variable, lifted = capture
    frame = _stack.top
    stored = frame.base.load_for_read(variable) if lifted else frame.base.load_as_input(variable)
    if not _jax.is_eager():
        frame.base.handed_out(variable)
    if _jax.in_replica_trace() and not lifted and not variable.per_replica:
        # The program takes the invariant value; tapes that want it varying are told of their own capture.
        return _tell_tapes(frame, variable, stored, lifting=False)
    value = _tell_tapes(frame, variable, stored)
    return _jax.lift(value) if lifted else value


def tape_key(frame: Frame) -> Hashable:
    """Part of a trace's key: how tapes around the program change the types of what it reads."""
    return tuple(tape.key for tape in tapes_of(frame)) if _jax.in_replica_trace() else ()


def _tell_tapes(frame: Frame, variable: Variable, value: Any, lifting: bool = True) -> Any:
    for tape in reversed(list(tapes_of(frame))):
        if lifting or not tape.lifts(variable):
            value = tape.on_read(variable, value)
    return value


def assign(variable: Variable, value: Any, op: Op) -> None:
    """Update the variable by the rules of the place we are in."""
    base = _stack.top.base
    with base.turn(), base.lock:
        base.context.assign(variable, value, op, base)


def create(variable: Variable, value: Any) -> None:
    """Give a new variable its initial value."""
    base = _stack.top.base
    if _jax.is_tracer(value):
        base.created(variable, base.context.initial(variable, value))
    else:
        with lifted_out():
            stored = context().initial(variable, value)
        base.created(variable, stored)
