"""The layers as data: which package may import which, and who may load what is heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "moorage"

# Row by row from the top. A package may import from rows below its own and from itself.
ROWS: tuple[frozenset[str], ...] = (
    frozenset({"cli"}),
    frozenset({"orchestrator", "trainer", "report"}),
    frozenset({"env", "tasksets"}),
    frozenset({"engine", "launcher"}),
    frozenset({"payload", "exchange", "monitor"}),
    frozenset({"records", "config"}),
    frozenset({"core"}),
)

# Heavy or foreign libraries, and the modules (prefixes) that may import them anywhere in their text.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "torch": ("moorage.trainer", "moorage.engine.builtin", "moorage.exchange.weights"),
    "transformers": (
        "moorage.trainer",
        "moorage.engine.builtin",
        "moorage.engine.render",
        "moorage.exchange.weights",
    ),
    "verifiers": ("moorage.env", "moorage.tasksets", "moorage.orchestrator"),
    "wandb": ("moorage.monitor",),
    "vllm": (),
    "pickle": (),
    "ray": (),
}


@dataclass(frozen=True)
class Import:
    """One import statement: the module it stands in, its line, and the module it names."""

    module: str
    line: int
    target: str


def package_of(module: str) -> str | None:
    """`env` of `moorage.env.broker`; None for what is not ours."""
    parts = module.split(".")
    return parts[1] if parts[0] == "moorage" and len(parts) > 1 else None


def row_of(package: str) -> int:
    """Index into ROWS, 0 at the top. Raises KeyError for a package that is in no row."""
    for index, row in enumerate(ROWS):
        if package in row:
            return index
    raise KeyError(f"package {package!r} is in no layer; add it to tests/arch/layers.py")


def modules() -> dict[str, Path]:
    """Every module of the project by dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, text: str) -> Iterator[Import]:
    """Every import in `text`, those inside functions and `if TYPE_CHECKING` included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(module, node.lineno, name.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield Import(module, node.lineno, node.module)


def layer_faults(imports: list[Import]) -> list[str]:
    """A line for each import that goes up or sideways."""
    faults = []
    for one in imports:
        source, target = package_of(one.module), package_of(one.target)
        if source is None or target is None or source == target:
            continue
        if row_of(target) <= row_of(source):
            faults.append(f"{one.module}:{one.line} imports {one.target}, which is not below it")
    return faults


def library_faults(imports: list[Import]) -> list[str]:
    """A line for each import of a library by a module that may not have it."""
    faults = []
    for one in imports:
        library = one.target.split(".")[0]
        allowed = MAY_IMPORT.get(library)
        if allowed is not None and not any(
            one.module == prefix or one.module.startswith((prefix + ".", prefix + "_")) for prefix in allowed
        ):
            faults.append(f"{one.module}:{one.line} imports {library}")
    return faults
