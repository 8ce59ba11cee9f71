"""Imports go downward only, and heavy libraries stay where they belong."""

from __future__ import annotations

import pytest

from tests.arch import layers


def all_imports() -> list[layers.Import]:
    found: list[layers.Import] = []
    for module, path in layers.modules().items():
        found.extend(layers.imports_of(module, path.read_text()))
    return found


def test_every_package_is_in_exactly_one_layer() -> None:
    packages = {package for module in layers.modules() if (package := layers.package_of(module))}
    assert packages == {package for row in layers.ROWS for package in row}
    assert sum(len(row) for row in layers.ROWS) == len(packages)


def test_imports_go_downward_only() -> None:
    assert layers.layer_faults(all_imports()) == []


def test_heavy_and_foreign_libraries_are_imported_only_where_allowed() -> None:
    assert layers.library_faults(all_imports()) == []


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("moorage.core.net", "from moorage.records import sample"),
        ("moorage.orchestrator.loop", "import moorage.trainer.loop"),
        ("moorage.payload.client", "def f():\n    from moorage.env.client import EnvClient"),
    ],
)
def test_an_upward_or_sideways_import_is_found(module: str, statement: str) -> None:
    assert len(layers.layer_faults(list(layers.imports_of(module, statement)))) == 1


def test_a_library_in_the_wrong_place_is_found() -> None:
    imports = list(
        layers.imports_of("moorage.env.worker", "import torch.nn\nimport pickle\nimport verifiers")
    )
    assert len(layers.library_faults(imports)) == 2
    assert layers.library_faults([layers.Import("moorage.trainer.step", 1, "torch")]) == []
