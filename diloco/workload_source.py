"""Finding a workload's source without running it, so that an agent can look before it starts a worker.

The module is looked for on Python's path and then in the working directory, in that order: a file there hides nothing.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from service.errors import InputError

FIELD = "workload"
ANYTHING = frozenset({"*", "__getattr__"})
"""A module that binds one of these may have names that its source does not show."""


def split_name(name: str) -> tuple[str, str]:
    """``MODULE:FACTORY`` → both."""
    module, _, factory = name.partition(":")
    return module, factory


def check_workload(name: str) -> None:
    """See that the module exists, is Python, and binds the factory's name.

    Raises:
        InputError: it does not. What only running the module can tell is left to the worker.
    """
    module, factory = split_name(name)
    spec = find_module(module)
    try:
        source = spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None
        bound = set(_bound_names(ast.parse(source))) if source is not None else ANYTHING
    except (ImportError, SyntaxError, ValueError) as exc:
        raise InputError(f"{spec.origin} is not valid Python: {exc}", field=FIELD, remedy="repair the module") from exc
    except OSError as exc:
        raise InputError(f"cannot read {spec.origin}: {exc.strerror or exc}", field=FIELD) from exc
    if factory not in bound and not bound & ANYTHING:
        raise missing_factory(module, factory, spec.origin)


def find_module(module: str) -> ModuleSpec:
    """Where a module is; neither it nor a package around it is imported.

    Raises:
        InputError: nowhere.
    """
    top, *inner = module.split(".")
    spec = _find_installed(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    for part in inner:
        # By its last name alone: the finder would look up the parents of a dotted one among the imported modules.
        inside = list(spec.submodule_search_locations or ()) if spec is not None else []
        spec = PathFinder.find_spec(part, inside)
    if spec is None:
        raise InputError(
            f"no module {module} on Python's path or in {Path.cwd()}",
            field=FIELD,
            remedy="start in the folder that holds it, set PYTHONPATH, or install its package",
        )
    return spec


def missing_factory(module: str, factory: str, origin: str | None) -> InputError:
    where = f" ({origin})" if origin else ""
    return InputError(
        f"{module}{where} has no {factory}", field=FIELD, remedy="give MODULE:FACTORY with a function of the module"
    )


def _find_installed(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # imported, but from nowhere: __main__
        return None


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """All names that are bound anywhere in a module: more than it has, never less but for `ANYTHING`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.alias():
                yield node.asname or node.name.partition(".")[0]
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case _:
                pass
