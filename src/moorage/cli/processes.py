"""The subcommands that are one process: their config class and the `main` that runs it.

A process's modules are imported only when it is chosen. `env-server --check --endpoint URL [--model NAME]`
plays one episode against that engine and shows it; without an endpoint it only loads the environment.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from moorage.cli.arguments import Arguments, parse_arguments, read_config
from moorage.core.errors import ConfigError

# command: (config class, main, what it is told to read)
PROCESSES: dict[str, tuple[str, str]] = {
    "inference": ("moorage.config.run:InferenceProcessConfig", ""),
    "env-server": ("moorage.config.env:EnvServerConfig", "moorage.env.process:main"),
    "orchestrator": ("moorage.config.run:OrchestratorProcessConfig", "moorage.orchestrator.loop:main"),
    "trainer": ("moorage.config.run:TrainerProcessConfig", "moorage.trainer.loop:main"),
    "sft": ("moorage.config.sft:SftConfig", "moorage.trainer.sft:main"),
    "eval": ("moorage.config.evaluation:EvaluationConfig", "moorage.orchestrator.evaluation:main"),
}
CHECK_OPTIONS = {
    "endpoint": "the engine's address, such as http://127.0.0.1:8000",
    "model": "the name under which the engine serves the model (default: policy)",
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
        for name, text in CHECK_OPTIONS.items() if switches else ():
            print(f"  --check --{name}: {text}")
        return 0
    arguments = parse_arguments(args, switches)
    arguments, options = _take_check_options(arguments)
    if not arguments.files and not arguments.overrides:
        raise ConfigError(f"moorage {command} needs a config file: `moorage {command} @ FILE`")
    config, _ = read_config(cls, arguments, switches)
    if "check" in arguments.switches:
        return _check_env(config, arguments, options)
    return _load(main_path or ENGINES[config.inference.backend])(config)


def _take_check_options(arguments: Arguments) -> tuple[Arguments, dict[str, str]]:
    """With `--check`: `--endpoint` and `--model` taken out of the overrides. Raises ConfigError."""
    if "check" not in arguments.switches:
        return arguments, {}
    options, rest = {}, []
    for key, raw in arguments.overrides:
        if key not in CHECK_OPTIONS:
            rest.append((key, raw))
        elif raw is None:
            raise ConfigError(f"--{key} needs a value: {CHECK_OPTIONS[key]}")
        else:
            options[key] = raw
    if "model" in options and "endpoint" not in options:
        raise ConfigError("--model names what the engine serves; say which engine with --endpoint")
    if not options.get("endpoint", "http://").startswith(("http://", "https://")):
        raise ConfigError(
            f"--endpoint {options['endpoint']!r} is no http address; {CHECK_OPTIONS['endpoint']}"
        )
    return replace(arguments, overrides=tuple(rest)), options


def _check_env(config: Any, arguments: Arguments, options: dict[str, str]) -> int:
    if "endpoint" in options:
        return _load("moorage.env.check:run")(config, options["endpoint"], options.get("model", "policy"))
    from moorage.env.resolve import load_env, resolve_env

    data, shuffle_seed = resolve_env(config.source.env, config.split)
    env = load_env(data)
    order = "in its own order" if shuffle_seed is None else f"shuffled with seed {shuffle_seed}"
    print(f"{', '.join(arguments.files)}: {type(env).__name__} on {data['taskset']['id']} loads, {order}")
    return 0


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
