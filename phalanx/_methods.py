"""A traced method, as its object gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx._concrete import ConcreteFunction
    from phalanx.function import Function


class BoundFunction:
    """A traced method together with its object, which it keeps alive while it is being called."""

    def __init__(self, function: Function[..., Any], instance: Any) -> None:
        self._function = function
        self.__self__ = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """See `Function.get_concrete_function`."""
        return self._function.get_concrete_function(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """See `Function.lower`."""
        return self._function.lower(*args, **kwargs)

    def cost(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `Function.cost`."""
        return self._function.cost(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self._function.name)  # as Python's own methods

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._function.__doc__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundFunction) and other._function is self._function

    def __hash__(self) -> int:
        return hash(self._function)

    def __repr__(self) -> str:
        return f"<bound {self._function!r} of {self.__self__!r}>"
