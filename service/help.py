"""How an option is shown by ``--help``: words for Python's types, and only defaults that say something."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

TYPE_WORDS = {
    "str": "TEXT",
    "int": "N",
    "float": "NUMBER",
    "Path": "PATH",
    "SecretStr": "SECRET",
    "{Path,DatabaseUrl}": "PATH|URL",
}
PAIRS = "NAME=VALUE"
SEVERAL = re.compile(r"tuple\[(.+),\.\.\.\]")
META_OPTIONS = {
    "--config": {"metavar": "PATH", "help": "TOML file with settings; its keys are the options, with _ for -."},
    "--print-config": {"action": "store_true", "help": "Print the settings, secrets masked, and exit."},
}


class OptionWriter:
    """Adds the options of one model to a parser (an ``add_argument_method`` of pydantic-settings)."""

    def __init__(self, fields: Mapping[str, FieldInfo]) -> None:
        self._fields = {name.replace("_", "-"): field for name, field in fields.items()}

    def __call__(self, parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        if options.get("action") == "help":
            shown = parser.add_argument(*names, **options)
            for name, meta in META_OPTIONS.items():
                parser.add_argument(name, default=argparse.SUPPRESS, **meta)  # type: ignore[arg-type]
            return shown
        name = names[0].lstrip("-")
        field = self._fields.get(name.removeprefix("no-") if options.get("action") == "store_false" else name)
        if field is not None and not field.is_required():
            # What the library says of the default comes last; a docstring may have words of its own on it.
            text = str(options["help"]).rpartition("(default")[0].rstrip()
            default = default_words(field).replace("%", "%%")
            options["help"] = f"{text} (default: {default})" if default else text
        choices = _choices(field.annotation) if field is not None else ""
        if isinstance(options.get("metavar"), str):
            options["metavar"] = choices or type_words(options["metavar"])
        return parser.add_argument(*names, **options)


def _choices(annotation: Any) -> str:
    """The values of an enumeration as one types them; empty for anything else."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Enum)]
    return "{" + ",".join(str(member.value) for member in kinds[0]) + "}" if kinds else ""


def type_words(shown: str) -> str:
    """``tuple[Path,...]`` → ``PATH,...``; choices such as ``{a,b}`` stay."""
    several = SEVERAL.fullmatch(shown)
    if several:
        return f"{type_words(several[1])},..."
    return PAIRS if shown.startswith("dict[") else TYPE_WORDS.get(shown, shown)


def default_words(field: FieldInfo) -> str:
    """The default as a user would write it; empty if leaving the option out is not the same as giving a value."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or value is None or isinstance(value, bool | dict):
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
