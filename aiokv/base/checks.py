"""Checks of callers' arguments: a bad argument raises a typed error, and nothing has changed.

Each function returns the value in the form that the engine uses. The native core checks limits that
depend on the state of the cache.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
from typing import TYPE_CHECKING, Final, NoReturn, ParamSpec, TypeVar, cast

from aiokv.errors import AiokvError, ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

MAX_INT64: Final = 2**63 - 1
MAX_INT32: Final = 2**31 - 1
MAX_LABEL_CHARACTERS: Final = 64


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message: at most 200 characters, and never an error."""
    try:
        text = repr(value)
    except (
        Exception
    ):  # an int of more digits than Python converts, an object whose constructor has failed
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def integer(
    name: str,
    value: object,
    *,
    minimum: int = -MAX_INT64,
    maximum: int = MAX_INT64,
    error: type[AiokvError] = UsageError,
) -> int:
    """Return ``value`` as an int; ``np.int64`` and the like are integers, bools and floats are not.

    Raises:
        AiokvError: of the class ``error``; not an integer from ``minimum`` to ``maximum``.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise error(f"{name} is {shown(value)}; it must be an integer")
        try:
            value = operator.index(value)
        except TypeError:  # an array of several numbers
            raise error(f"{name} is {shown(value)}; it must be an integer") from None
    if not minimum <= value <= maximum:
        limits = f"between {minimum} and {maximum}"
        if minimum == -MAX_INT64:
            limits = f"at most {maximum}"
        elif maximum == MAX_INT64:
            limits = f"at least {minimum}"
        raise error(f"{name} is {shown(value)}; it must be {limits}")
    return value


def seconds(
    name: str,
    value: object,
    *,
    error: type[AiokvError] = UsageError,
    minimum: float | None = None,
    maximum: float = math.inf,
) -> float:
    """Return ``value`` as a float, which may be infinite.

    Raises:
        AiokvError: of the class ``error``; not a number, NaN, or out of range.
    """
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise error(f"{name} is {shown(value)}; it must be a number of seconds")
        try:
            value = float(value)
        except OverflowError:  # an int that no float can hold
            value = -math.inf if value < 0 else math.inf
    if math.isnan(value):
        raise error(f"{name} is nan; it must be a number of seconds")
    if minimum is not None and value < minimum:
        raise error(f"{name} is {value}; it must be at least {minimum} seconds")
    if value > maximum:
        raise error(f"{name} is {value}; it must be at most {maximum:g} seconds")
    return value


def timeout(value: object, name: str = "timeout") -> float | None:
    """Return the seconds until a deadline; None and infinity mean no deadline.

    A negative number is 0.0: the deadline has passed.

    Raises:
        UsageError: neither None nor a number, or NaN.
    """
    if value is None:
        return None
    limit = seconds(name, value)
    return None if limit == math.inf else max(limit, 0.0)


def reserve_blocks(value: object) -> int:
    """Return ``value`` as a number of blocks.

    Raises:
        UsageError: not an integer from 0 to 2147483647.
    """
    return integer("reserve_blocks", value, minimum=0, maximum=MAX_INT32)


def positive(name: str, value: object, error: type[AiokvError] = UsageError) -> float:
    """Return ``value`` as a float above 0.

    Raises:
        AiokvError: of the class ``error``; not a finite number above 0.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # an int that no float can hold
            number = math.inf
        if 0 < number < math.inf:
            return number
    raise error(f"{name} is {shown(value)}; it must be a finite number above 0")


def text(name: str, value: object, error: type[AiokvError] = UsageError) -> str:
    """Return ``value``, which must be a str that UTF-8 can encode.

    Raises:
        AiokvError: of the class ``error``; it is not.
    """
    if not isinstance(value, str):
        raise error(f"{name} is {shown(value)}; it must be a str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            raise error(
                f"{name} is {shown(value)}, which is not valid Unicode: {problem}"
            ) from None
    return value


def label(name: str, value: object) -> str:
    """Return ``value``, which must be a str of at most ``MAX_LABEL_CHARACTERS`` characters.

    Raises:
        UsageError: it is not.
    """
    checked = text(name, value)
    if len(checked) > MAX_LABEL_CHARACTERS:
        raise UsageError(
            f"{name} has {len(checked)} characters; at most {MAX_LABEL_CHARACTERS} are possible",
            hint="give requests that return alike the same short label",
        )
    return checked


def flag(name: str, value: object, error: type[AiokvError] = UsageError) -> bool:
    """Return ``value``, which must be a bool.

    Raises:
        AiokvError: of the class ``error``; it is not.
    """
    if not isinstance(value, bool):
        raise error(f"{name} is {shown(value)}; it must be True or False")
    return value


def choice(
    name: str, value: object, accepted: Iterable[str], error: type[AiokvError] = UsageError
) -> None:
    """Check that ``value`` is one of the ``accepted`` names.

    Raises:
        AiokvError: of the class ``error``; ``value`` is none of the ``accepted`` names.
    """
    names = tuple(accepted)
    if not isinstance(value, str) or value not in names:
        raise error(f"{name} is {shown(value)}; it must be one of {', '.join(map(repr, names))}")


def sequence(name: str, value: Iterable[_T]) -> list[_T]:
    """Return the elements of ``value``.

    Raises:
        UsageError: it is a str, or cannot be iterated over.
    """
    if not isinstance(value, str | bytes):
        try:
            return list(value)
        except TypeError:
            pass
    raise UsageError(f"{name} is {shown(value)}; it must be a sequence")


def known_names(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, or all of them."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known names: {', '.join(names)}"


def arguments(error: type[AiokvError] = ConfigError) -> Callable[[type[_T]], type[_T]]:
    """Return a class decorator: wrong constructor arguments raise ``error``, not ``TypeError``.

    The signature for ``inspect`` and type checkers does not change.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        init = cls.__init__
        setattr(cls, "__init__", _with_bound_arguments(init, cls.__name__, error))  # noqa: B010
        return cls

    return decorate


def _with_bound_arguments(
    init: Callable[_P, _R], name: str, error: type[AiokvError]
) -> Callable[_P, _R]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as problem:
            accepted = list(signature.parameters)[1:]
            unknown = next((given for given in kwargs if given not in accepted), None)
            if unknown is None:
                raise error(f"{name}: {problem}") from None
            hint = known_names(unknown, accepted)
            raise error(f"{name}: {unknown!r} is unknown", hint=hint) from None
        return init(*args, **kwargs)

    return cast("Callable[_P, _R]", checked)


class Unique:
    """Refuse ``copy`` and ``pickle``: each resource has one owner."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            f"{self!r} cannot be copied or pickled: it owns memory, threads or connections"
        )
