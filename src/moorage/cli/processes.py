"""The subcommands that are one process: their config class and the `main` that runs it.

A process's modules are imported only when it is chosen. `env-server --check` only resolves and loads the
environment, and says so.
"""

from __future__ import annotations

import importlib
from typing import Any

from moorage.cli.arguments import Arguments, parse_arguments, read_config
from moorage.core.errors import ConfigError

# command: (config class, main, what it is told to read)
PROCESSES: dict[str, tuple[str, str]] = {
    "inference": ("moorage.config.run:InferenceProcessConfig", ""),
    "env-server": ("moorage.config.env:EnvServerConfig", "moorage.env.broker:main"),
    "orchestrator": ("moorage.config.run:OrchestratorProcessConfig", "moorage.orchestrator.loop:main"),
    "trainer": ("moorage.config.run:TrainerProcessConfig", "moorage.trainer.loop:main"),
    "sft": ("moorage.config.sft:SftConfig", "moorage.trainer.sft:main"),
    "eval": ("moorage.config.evaluation:EvaluationConfig", "moorage.orchestrator.evaluation:main"),
}
ENGINES = {"builtin": "moorage.engine.builtin.server:main", "vllm": "moorage.engine.vllm:main"}


def run(command: str, args: list[str]) -> int:
    """Run a process command to its end."""
    config_path, main_path = PROCESSES[command]
    switches = ("check",) if command == "env-server" else ()
    cls = _load(config_path)
    if "--help" in args or "-h" in args:
        from moorage.cli.fields import render_fields

        print(f"usage: moorage {command} @ FILE [--dotted.key VALUE ...]\n\n{render_fields(cls)}")
        return 0
    arguments = parse_arguments(args, switches)
    if not arguments.files and not arguments.overrides:
        raise ConfigError(f"moorage {command} needs a config file: `moorage {command} @ FILE`")
    config, _ = read_config(cls, arguments, switches)
    if "check" in arguments.switches:
        return _check_env(config, arguments)
    return _load(main_path or ENGINES[config.inference.backend])(config)


def _check_env(config: Any, arguments: Arguments) -> int:
    from moorage.env.resolve import load_env, resolve_env

    data, shuffle_seed = resolve_env(config.source.env, config.split)
    env = load_env(data)
    order = "in its own order" if shuffle_seed is None else f"shuffled with seed {shuffle_seed}"
    print(f"{', '.join(arguments.files)}: {type(env).__name__} on {data['taskset']['id']} loads, {order}")
    return 0


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
