"""`moorage COMMAND ...`: finds the command and turns every expected failure into one line.

Promises:
- nothing heavy is imported before a command is chosen (`moorage --help` takes a fraction of a second);
- a `ConfigError` is one line and exit code 2, any other `MoorageError` one line and exit code 1; a bug of
  ours is a traceback. Ctrl-C is 130.
"""

from __future__ import annotations

import importlib
import sys

from moorage.core.terminal import mute, say

COMMANDS: dict[str, tuple[str, str]] = {
    "rl": ("moorage.cli.rl", "a whole reinforcement learning run on this machine"),
    "sft": ("moorage.cli.processes", "warm a model up on a taskset's conversations"),
    "eval": ("moorage.cli.processes", "measure a model on environments"),
    "inference": ("moorage.cli.processes", "one inference engine"),
    "env-server": ("moorage.cli.processes", "one environment server (--check: only try its environment)"),
    "orchestrator": ("moorage.cli.processes", "the orchestrator of a run"),
    "trainer": ("moorage.cli.processes", "one trainer rank"),
    "ledger": ("moorage.cli.ledger", "who holds which payloads of a run"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else 2
    name = args[0]
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
        return _fail(f"unknown command {name!r}; {hint}", 2)
    from moorage.core.collector import relax_collector
    from moorage.core.errors import ConfigError, MoorageError

    relax_collector()
    module = importlib.import_module(COMMANDS[name][0])
    try:
        return module.run(name, args[1:])
    except ConfigError as error:
        return _fail(str(error), 2)
    except MoorageError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        mute(sys.stdout)
        return 1


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: moorage COMMAND [@ FILE] [--dotted.key VALUE ...]",
            "",
            *lines,
            "",
            "`moorage COMMAND --help` lists every key of a command's config file.",
        ]
    )


def _fail(message: str, code: int) -> int:
    say(f"moorage: error: {' '.join(message.split())}", sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
