"""For mkdocstrings: the sections of docstrings under the names that its parser knows."""

import re

import griffe


class Sections(griffe.Extension):
    """``Example:`` is ``Examples:``; ``Raises (from calls):`` is ``Raises:``."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^( *)Raises \(.*\):$", r"\1Raises:", text, flags=re.MULTILINE)
