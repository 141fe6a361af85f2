"""Print ``aiokv/sync/verbs.pyi``, for ``make stubs``: the types of the verbs for threads.

The methods of these classes are made when ``aiokv.sync`` is imported; editors and type checkers
read the stub. It has the first paragraph of each docstring, and the place of the rest.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from inspect import Parameter
from pathlib import Path
from typing import Any

import aiokv
from aiokv.sync import verbs
from aiokv.sync.table import VERBS

PACKAGE = Path(aiokv.__file__).parent
SOURCES = ("engine/engine.py", "engine/lease.py", "sync/__init__.py")  # import all types
WIDTH = 100
ORIGINS = {
    verb.name or method.__name__: method.__qualname__
    for verb in VERBS
    if (method := getattr(verb.method, "fget", verb.method))
}


def stub() -> str:
    """Return the text of the stub."""
    classes = (verbs.RecordedVerbs, verbs.LeaseVerbs, verbs.EngineVerbs)
    body = "\n".join(class_text(cls) for cls in classes)
    first, *_ = (verbs.__doc__ or "").splitlines()
    return f'"""{first}\n\nWritten by ``make stubs``.\n"""\n\n{imports(body)}\n\n{body}'


def imports(body: str) -> str:
    """Return the imports of the names in annotations."""
    names = set(re.findall(r"\w+", re.sub(r'""".*?"""', "", body, flags=re.DOTALL)))
    lines = {"import numpy as np", "from typing import Any"}
    for source in SOURCES:
        for node in ast.walk(ast.parse((PACKAGE / source).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                used = (alias.name for alias in node.names if alias.name in names)
                lines |= {f"from {node.module} import {name}" for name in used}
    return "\n".join(sorted(lines))


def class_text(cls: type) -> str:
    members = [(name, value) for name, value in vars(cls).items() if not name.startswith("_")]
    methods = "\n".join(method_text(name, value) for name, value in members)
    return f'class {cls.__name__}:\n    """{cls.__doc__}"""\n\n{methods}'


def method_text(name: str, member: Any) -> str:
    function = member.fget if isinstance(member, property) else member
    signature = inspect.signature(function)
    parameters = ", ".join(declared(signature))
    line = f"    def {name}({parameters}) -> {signature.return_annotation}:"
    if len(line) > WIDTH:
        indent = " " * 8
        wrapped = textwrap.fill(parameters, WIDTH, initial_indent=indent, subsequent_indent=indent)
        line = f"    def {name}(\n{wrapped}\n    ) -> {signature.return_annotation}:"
    summary, *more = function.__doc__.split("\n\n")
    more = more and [f"See ``{ORIGINS[name]}``.\n"]
    text = textwrap.indent('"""' + "\n\n".join([summary, *more]) + '"""', " " * 8)
    decorator = "    @property\n" if isinstance(member, property) else ""
    return f"{decorator}{line}\n{text}\n"


def declared(signature: inspect.Signature) -> list[str]:
    """Return the parameters of a method as text."""
    found: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is Parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        text = parameter.name
        if parameter.annotation is not Parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not Parameter.empty:
            text += f" = {parameter.default!r}"
        found.append(text)
    return found


if __name__ == "__main__":
    sys.stdout.write(stub())
