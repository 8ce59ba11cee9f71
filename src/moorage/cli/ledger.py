"""`moorage ledger RUN`: who holds which payloads of a run, and since when."""

from __future__ import annotations

from moorage.core.errors import ConfigError

USAGE = """usage: moorage ledger RUN_FOLDER [--limit N]

  Asks a live run's payload services (the secret comes from MOORAGE_TOKEN), or reads what an ended one left.
  --limit: how many outstanding payloads to name per store (default 20).
"""


def run(_command: str, args: list[str]) -> int:
    """Print the accounts of one run. Exit code 0 when every account is known and nothing was freed twice."""
    if "--help" in args or "-h" in args:
        print(USAGE)
        return 0
    words = list(args)
    limit = 20
    if "--limit" in words:
        at = words.index("--limit")
        given = words[at + 1] if at + 1 < len(words) else ""
        if not given.isdigit():
            raise ConfigError(f"--limit needs a number, not {given!r}")
        limit = int(given)
        del words[at : at + 2]
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError("moorage ledger needs one run folder: `moorage ledger runs/NAME`")
    from moorage.report.ledger import show_ledger

    return show_ledger(words[0], limit=limit)
