"""An extension of mkdocstrings: parameters that share a description become one row of the reference.

NumPy docstrings write ``q, k, v : array`` once; without this, the text is repeated for each of them. The parameter that
collects unknown options is left out of signatures.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import griffe

PUBLIC = ("aule.api", "aule.codegen", "aule.distributed", "aule.integrations", "aule.kernels", "aule.nn")


class MergeParameters(griffe.Extension):
    """Only for functions: when a class is read, the parameters that it inherits are not known yet."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if not func.path.startswith(PUBLIC):
            return
        if "unknown" in func.parameters and str(func.parameters["unknown"].annotation) == "NoReturn":
            del func.parameters["unknown"]
        if func.docstring is None:
            return
        defaults = {parameter.name: str(parameter.default) for parameter in func.parameters}
        for section in func.docstring.parsed:
            if section.kind is griffe.DocstringSectionKind.parameters:
                groups = (list(group) for _, group in groupby(section.value, key=lambda p: p.description))
                section.value[:] = [together(group, defaults) for group in groups]


def together(parameters: list[Any], defaults: dict[str, str]) -> Any:
    """One entry for all; types and defaults that differ are left to the signature."""
    first, names = parameters[0], [parameter.name for parameter in parameters]
    given = {defaults.get(name) for name in names}
    if len(given) > 1:
        first.annotation, first.value = None, "..."
    elif first.value is not None:  # of {"a", "b"} griffe takes the first for the default
        first.value = given.pop() or first.value
    first.name = ", ".join(names)
    return first
