"""Methods of a verb for threads, made from its row in the table of verbs."""

from __future__ import annotations

import inspect
import linecache
import re
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from aiokv.sync import on_loop
from aiokv.sync.answers import Answer, FutureAnswer, ReturnAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_FILE: Final = "<verbs of aiokv.sync>"  # file name in tracebacks, which show the lines of the text
# Text after the docstring of the async verb.
_DIFFERENCES: Final = {
    "future": """

For threads, the call returns an :class:`EngineFuture` at once, whose ``cancel()`` has the effects
of a cancellation.""",
    "block": """

For threads, the object is entered with ``with``, and what is awaited returns an
:class:`EngineFuture`. Nothing crosses before it is entered.""",
}
_FIND_ENGINE: Final = "    inner = port.cache\n"
_FIND_LEASE: Final = """\
    try:
        inner = lease.inner
    except AttributeError:
        inner = inner_of(lease)  # raises
"""
_INNER: Final = {
    "batch": "step_of(batch)",
    "lease": "inner_of(lease)",
    "leases": "inners_of(leases)",
}


class Verb(NamedTuple):
    """Row of the table: a verb of ``Lease`` or ``CacheEngine`` that threads may call.

    A verb of a lease becomes ``Calls.verb(lease, ...)`` and ``SyncLease.verb(...)``, a verb of the
    engine ``Calls.verb(...)`` and ``SyncEngine.verb(...)``.

    Attributes:
        method: method or property whose parameters and docstring the methods have.
        answer: ``"value"``: the value of ``method``, which does not wait. ``"return"``: the same,
            for a verb that gives something back: it is done, too, when the engine has ended.
            ``"future"``: an ``EngineFuture`` of the value. ``"lease"``: a ``SyncLease`` that later
            calls of the crossing may use. ``"block"``: a context manager, which ``wraps`` makes
            from the port and a function that calls ``method``. ``"direct"``: the value, without a
            crossing. ``Calls`` have no methods of the last two.
        refreshes: fields of the ``SyncLease`` that change, unless the value is None or False.
        name: name of the methods; empty for that of ``method``.
        fixed: arguments of ``method`` that the methods do not have.
        text: docstring of the methods; empty for that of ``method``.
        run: makes the call on the loop; None to call ``method``. Its arguments are the future or
            the lease of the answer, the lease or the port, and a dict of the arguments.
        wraps: makes the object for threads from the port and the value.
    """

    method: Callable[..., Any] | property
    answer: Literal["value", "return", "future", "lease", "block", "direct"] = "value"
    refreshes: tuple[str, ...] = ()
    name: str = ""
    fixed: Mapping[str, object] = {}
    text: str = ""
    run: Callable[..., Any] | None = None
    wraps: Callable[..., Any] | None = None


def add_methods(verbs: Iterable[Verb], calls: type, lease: type, engine: type) -> None:
    """Add the methods of all verbs to the bases of ``Calls``, ``SyncLease`` and ``SyncEngine``.

    The methods are compiled from text, like those of data classes: each has the parameters of its
    verb, so a wrong call raises ``TypeError`` at once, and a call is as fast as one of a method
    written by hand.
    """
    made = [_Methods(verb) for verb in verbs]
    names: dict[str, Any] = {
        "__name__": __name__,
        "Answer": Answer,
        "FutureAnswer": FutureAnswer,
        "ReturnAnswer": ReturnAnswer,
        "at_once": on_loop.at_once,
        "begin": on_loop.begin,
        "inner_of": on_loop.inner_of,
        "inners_of": on_loop.inners_of,
        "step_of": on_loop.step_of,
        "kept": on_loop.kept,
    }
    for methods in made:
        names[f"run_{methods.name}"] = methods.verb.run
        names[f"wrap_{methods.name}"] = methods.verb.wraps
    text = "".join(methods.source() for methods in made)
    linecache.cache[_FILE] = (len(text), None, text.splitlines(keepends=True), _FILE)
    exec(compile(text, _FILE, "exec"), names)
    for methods in made:
        if methods.is_recorded:
            names[f"run_{methods.name}"].__name__ = methods.name  # used in messages
        methods.finish(lease if methods.of_lease else engine, names[f"called_{methods.name}"])
        if methods.is_recorded:
            methods.finish(calls, names[f"recorded_{methods.name}"], is_recorded=True)


class _Methods:
    """Text of the functions of one verb."""

    def __init__(self, verb: Verb) -> None:
        method: Any = verb.method.fget if isinstance(verb.method, property) else verb.method
        signature = inspect.signature(method)
        self.verb = verb
        self.name = verb.name or method.__name__
        self.of_lease = method.__qualname__.startswith("Lease.")
        self.is_recorded = verb.answer not in ("block", "direct")
        self._method = method
        returned = _for_threads(signature.return_annotation)
        self._value_type = (
            verb.wraps.__name__
            if isinstance(verb.wraps, type) and not returned.startswith(verb.wraps.__name__)
            else returned
        )
        self._parameters = [
            parameter.replace(annotation=_for_threads(parameter.annotation))
            for name, parameter in signature.parameters.items()
            if name != "self" and name not in verb.fixed
        ]
        # Objects that the function on the loop gets before the arguments.
        self._given = ["lease"] if self.of_lease else []
        if verb.wraps or not self.of_lease:
            self._given.insert(0, "port")

    def source(self) -> str:
        """Return the text of the functions."""
        parts = [self._called()]
        if self.is_recorded:
            parts.append(self._recorded())
            if self.verb.run is None:
                parts.append(self._run())
        return "".join(parts)

    def _called(self) -> str:
        """Return the text of the method of ``SyncLease`` or ``SyncEngine``."""
        copied = ""
        if not self.is_recorded:
            owner = "self.inner" if self.of_lease else "self._port.cache"
            call = f"{owner}.{self._use(self._passed(on_loop=True))}"
            if self.verb.answer == "block":
                call = f"wrap_{self.name}(self._port, lambda: {call})"
                copied = self._copied()
        else:
            send = "start" if self.verb.answer in ("future", "lease") else "call"
            passed = self._passed("self") if self.of_lease else self._passed()
            call = f"self._port.{send}(lambda calls: calls.{self.name}({passed}))"
        return f"""
def called_{self.name}({self._declared("self")}):
{copied}    return {call}
"""

    def _recorded(self) -> str:
        """Return the text of the method of ``Calls``."""
        verb = self.verb
        names = [p.name for p in self._parameters]
        if verb.run is not None:
            names = [f"dict({', '.join(f'{name}={name}' for name in names)})"]
        given = [name.replace("port", "self._port") for name in self._given]
        made = {"future": "self._new_future()", "lease": "self._port.new_lease()"}.get(verb.answer)
        cls = {"return": "ReturnAnswer", "future": "FutureAnswer"}.get(verb.answer, "Answer")
        if made is None:
            made = f"{cls}(run_{self.name}, ({', '.join([*given, *names])},))"
            recorded = "made"
        else:
            recorded = f"{cls}(run_{self.name}, ({', '.join(['made', *given, *names])},))"
        return f"""
def recorded_{self.name}({self._declared("self", *(["lease"] if self.of_lease else []))}):
{self._copied()}    made = {made}
    self._add({recorded})
    return made
"""

    def _run(self) -> str:
        """Return the text of the function that makes the call on the loop."""
        inner = "inner_of(lease)" if self.of_lease else "port.cache"
        fixed = (f"{name}={value!r}" for name, value in self.verb.fixed.items())
        use = self._use(", ".join(filter(None, [self._passed(on_loop=True), *fixed])))
        given = ", ".join([*self._given, *(p.name for p in self._parameters)])
        if self.verb.answer == "future":
            return f"""
def run_{self.name}(future, {given}):
    begin(future, lambda: {inner}.{use}, ())
"""
        value = f"inner.{use}"
        if inspect.iscoroutinefunction(self._method):
            value = f"at_once({value})"
        if self.verb.wraps:
            value = f"wrap_{self.name}(port, {value})"
        refresh = ""
        if self.verb.refreshes:
            refresh = f"    value = {value}\n    if value is not None and value is not False:\n"
            refresh += "".join(f"        lease.{x} = inner.{x}\n" for x in self.verb.refreshes)
            value = "value"
        return f"""
def run_{self.name}({given}):
{_FIND_LEASE if self.of_lease else _FIND_ENGINE}{refresh}    return {value}
"""

    def _use(self, passed: str) -> str:
        is_property = isinstance(self.verb.method, property)
        return self._method.__name__ if is_property else f"{self._method.__name__}({passed})"

    def _copied(self) -> str:
        """Return the text that takes the elements of iterables when the call is recorded."""
        return "".join(
            f"    {p.name} = kept({p.name!r}, {p.name})\n"
            for p in self._parameters
            if "Iterable[" in p.annotation and p.default is Parameter.empty
        )

    def _declared(self, *first: str) -> str:
        """Return the parameters of a method, with their defaults."""
        declared = list(first)
        for parameter in self._parameters:
            if parameter.kind is Parameter.KEYWORD_ONLY and "*" not in declared:
                declared.append("*")
            has_default = parameter.default is not Parameter.empty
            declared.append(parameter.name + (f"={parameter.default!r}" if has_default else ""))
        return ", ".join(declared)

    def _passed(self, *first: str, on_loop: bool = False) -> str:
        """Return the arguments of a call, by name where they must be."""
        passed = list(first)
        for parameter in self._parameters:
            name = parameter.name
            value = _INNER.get(name, name) if on_loop else name
            passed.append(f"{name}={value}" if parameter.kind is Parameter.KEYWORD_ONLY else value)
        return ", ".join(passed)

    def finish(self, cls: type, function: Any, *, is_recorded: bool = False) -> None:
        """Give a function its name, docstring and types, and add it to a class."""
        is_future = self.verb.answer == "future"
        text = self.verb.text or inspect.cleandoc(self._method.__doc__ or "")
        if is_recorded:
            function.__doc__ = f"{text.splitlines()[0]}\n\nSee ``{self._method.__qualname__}``."
        else:
            function.__doc__ = text + _DIFFERENCES.get(self.verb.answer, "")
        function.__module__ = cls.__module__
        function.__name__ = self.name
        function.__qualname__ = f"{cls.__qualname__}.{self.name}"
        value = f"EngineFuture[{self._value_type}]" if is_future else self._value_type
        if is_recorded and self.verb.answer in ("value", "return"):
            value = f"Answer[{value}]"
        lease = {"lease": "SyncLease"} if is_recorded and self.of_lease else {}
        types = {parameter.name: parameter.annotation for parameter in self._parameters}
        function.__annotations__ = {**lease, **types, "return": value}
        is_property = isinstance(self.verb.method, property) and not is_recorded
        setattr(cls, self.name, property(function) if is_property else function)


def _for_threads(annotation: str) -> str:
    """Return the type for threads, such as ``SyncLease`` for ``Lease``; any iterable for a list."""
    annotation = re.sub(r"^Sequence\[(Lease|int)\]", r"Iterable[\1]", annotation)
    annotation = re.sub(r"\bComputeBatch\b", "SyncComputing", annotation)
    return re.sub(r"\b(Lease|Self)\b", "SyncLease", annotation)
