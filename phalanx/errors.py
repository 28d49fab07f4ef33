"""The errors that Phalanx raises; each also derives from the builtin that fits."""

from __future__ import annotations

__all__ = [
    "AggregationRequiredError",
    "ArgumentError",
    "ArgumentTypeError",
    "AssignmentError",
    "AssignmentTypeError",
    "CheckpointError",
    "ClusterError",
    "CompilationError",
    "DeviceError",
    "FrozenVariableError",
    "NonFiniteError",
    "PhalanxError",
    "ReplicaDivergenceError",
    "RetraceError",
    "StrategyError",
    "TapeError",
    "TracingError",
    "UnevenBatchError",
    "VariableCreationError",
    "VariableWriteError",
]


class PhalanxError(Exception):
    """Base class of every error that Phalanx raises on purpose."""


class ArgumentError(PhalanxError, ValueError):
    """An argument has a value, shape or structure that the call cannot take."""


class ArgumentTypeError(PhalanxError, TypeError):
    """An argument has a type that the call cannot take."""


class AssignmentError(PhalanxError, ValueError):
    """A value does not fit the variable it is assigned to (shape or dtype)."""


class AssignmentTypeError(AssignmentError, TypeError):
    """A value has a dtype that the variable's cannot hold without losing its kind."""


class AggregationRequiredError(PhalanxError, ValueError):
    """Replicas would assign different values to a mirrored variable that does not say how to merge them."""


class ReplicaDivergenceError(PhalanxError, ValueError):
    """An update would make the components of a mirrored variable differ."""


class FrozenVariableError(PhalanxError, RuntimeError):
    """A variable was read where JAX would bake its value into a compiled program for ever."""


class VariableWriteError(PhalanxError, RuntimeError):
    """A variable was assigned inside a JAX transformation that cannot carry the update out."""


class VariableCreationError(PhalanxError, ValueError):
    """A variable cannot be created here."""


class TracingError(PhalanxError, TypeError):
    """A traced value was used where a concrete one is needed, or outside the function it belongs to."""


class RetraceError(PhalanxError, RuntimeError):
    """A function was traced again after warm-up while `px.strict` was on."""


class TapeError(PhalanxError, RuntimeError):
    """A tape was asked for something it did not record or can no longer give."""


class StrategyError(PhalanxError, RuntimeError):
    """A strategy was used in the wrong context or mixed with another one."""


class CompilationError(PhalanxError, RuntimeError):
    """The compiler refuses a program, or cannot be had; nothing of it has run."""

    def __init__(self, message: str, compiler_message: str = "") -> None:
        super().__init__(message)
        self.compiler_message = compiler_message
        """All that the compiler said."""

    def __reduce__(self) -> tuple[type[CompilationError], tuple[str, str]]:
        return type(self), (str(self), self.compiler_message)


class DeviceError(PhalanxError, RuntimeError):
    """The devices that were asked for cannot be had."""


class ClusterError(PhalanxError, RuntimeError):
    """The processes of a cluster cannot be found, cannot be reached, or do not agree."""


class CheckpointError(PhalanxError, RuntimeError):
    """A checkpoint could not be written, is damaged, or does not fit the objects that are to be restored."""


class NonFiniteError(PhalanxError, RuntimeError):
    """A loss, gradient or other value that was to be finite is NaN or infinite."""


class UnevenBatchError(PhalanxError, ValueError):
    """A batch does not divide by the number of replicas."""
