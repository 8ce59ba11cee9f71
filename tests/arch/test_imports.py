"""What gets loaded when modules are imported: measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from tests.arch import layers

CODE = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(names: list[str]) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, *names], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_in(*packages: str) -> list[str]:
    """Every module of these packages, but for those that may load torch."""
    torch = layers.MAY_IMPORT["torch"]
    return [
        module
        for module in layers.modules()
        if layers.package_of(module) in packages
        and not any(module == p or module.startswith((p + ".", p + "_")) for p in torch)
        and not module.endswith("__main__")
    ]


def test_everything_but_trainer_engine_and_weights_loads_no_torch() -> None:
    names = modules_in(
        "core", "records", "config", "payload", "exchange", "monitor", "engine", "launcher",
        "env", "tasksets", "orchestrator", "report", "cli",
    )  # fmt: skip
    assert len(names) > 40
    assert "torch" not in loaded_by(names)


def test_what_runs_beside_the_environment_library_does_not_load_it() -> None:
    names = modules_in(
        "core", "records", "config", "payload", "exchange", "monitor", "engine", "launcher", "report", "cli"
    )
    assert not [name for name in loaded_by(names) if name.startswith("verifiers")]


def test_the_trainer_does_not_load_the_environment_library() -> None:
    names = [module for module in layers.modules() if layers.package_of(module) == "trainer"]
    assert not [name for name in loaded_by(names) if name.startswith("verifiers")]


def test_the_help_of_the_command_loads_nothing_heavy() -> None:
    loaded = loaded_by(["moorage.cli.main"])
    assert not loaded & {"pydantic", "rich", "numpy", "aiohttp", "zmq", "msgspec"}


def test_the_help_answers_within_a_third_of_a_second() -> None:
    best = min(_time_help() for _ in range(5))  # the best of five: other work on the machine is not its fault
    assert best < 0.3


def _time_help() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "moorage.cli.main", "--help"], check=True, capture_output=True)
    return time.perf_counter() - began
