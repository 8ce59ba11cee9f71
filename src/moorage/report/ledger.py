"""`moorage ledger <run>`: who holds what of a run's payloads, and since when.

A live run's payload services are asked (address files say where; the secret comes from MOORAGE_TOKEN). Of an
ended run the journals that are left are replayed; where the spools are gone, `summary.json` has the sum.
Reads only: nothing here frees or changes anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moorage.core.errors import ConfigError, PayloadError
from moorage.core.rundir import RunDir, read_json
from moorage.core.secret import TOKEN_VARIABLE
from moorage.payload.client import PayloadClient
from moorage.payload.journal import JOURNAL_NAME
from moorage.payload.spool import Spool, attempt_keys
from moorage.payload.store import Held
from moorage.records.payload import HOLDERS, Ledger

_ANSWER_S = 5.0


class StoreAccount(msgspec.Struct):
    """What is known of one store. `source`: `service`, `journal` or `summary`. `problem`: why there is no
    account, None when there is one."""

    store: str
    source: str
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    held: list[Held] = msgspec.field(default_factory=list)
    problem: str | None = None


class _Stats(Ledger):
    held: list[Held] = msgspec.field(default_factory=list)


def read_accounts(
    run_dir: str | os.PathLike[str], *, token: str | None = None, limit: int = 20
) -> list[StoreAccount]:
    """One account per store of the run, oldest `limit` outstanding payloads named in each.

    `token` None: from MOORAGE_TOKEN. Raises ConfigError when `run_dir` is no run, or is live and there is no
    token.
    """
    run = RunDir(run_dir)
    if not run.root.is_dir():
        raise ConfigError(f"{run} is not a run folder")
    addresses = _read_addresses(run)
    if addresses and read_json(run.end) is None:
        token = token or os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise ConfigError(
                f"{run} has not ended: its payload services want its secret; set {TOKEN_VARIABLE} to it"
            )
        with PayloadClient(token) as client:
            return [_ask(client, store, address, limit) for store, address in addresses.items()]
    accounts = [_replay(store, root, limit) for store, root in _find_spools(run, addresses).items()]
    return accounts or _read_summary(run)


def format_accounts(accounts: list[StoreAccount]) -> str:
    """The accounts as lines for a person: a row per store, their sum, and what is outstanding."""
    if not accounts:
        return "no payload store has left an account of this run"
    good = [account for account in accounts if account.problem is None]
    head = f"{'store':32} {'from':8} {'kept':>8} {'MiB':>9} {'outstanding':>11} {'oldest':>8}  freed by"
    lines = [head, *(_format_row(account) for account in accounts)]
    if len(good) > 1:
        total = StoreAccount("total", "", _sum([account.ledger for account in good]))
        lines.append(_format_row(total))
    for account in good:
        for item in account.held:
            lines.append(
                f"  held {_format_age(item.age_s):>8}  {item.id}  {item.nbytes / 2**20:9.2f} MiB  "
                f"{account.store} {item.attempt} request {item.request}"
            )
        if (unnamed := account.ledger.outstanding - len(account.held)) > 0:
            lines.append(f"  and {unnamed} more in {account.store}")
    return "\n".join(lines)


def show_ledger(run_dir: str | os.PathLike[str], *, token: str | None = None, limit: int = 20) -> int:
    """Print the accounts of a run. 0 when every store has one and nothing was freed twice, else 1."""
    accounts = read_accounts(run_dir, token=token, limit=limit)
    print(format_accounts(accounts))
    total = _sum([account.ledger for account in accounts])
    return int(any(account.problem for account in accounts) or total.double_frees > 0)


def _sum(ledgers: list[Ledger]) -> Ledger:
    total = Ledger()
    for ledger in ledgers:
        total = total.add(ledger)
    return total


def _read_addresses(run: RunDir) -> dict[str, dict[str, Any]]:
    """`<split>/<name>.<node>` to the content of its address file."""
    found = {}
    for path in sorted(run.envs.glob("*/*.address")):
        if (address := read_json(path)) is not None:
            found[f"{path.parent.name}/{path.name[: -len('.address')]}"] = address
    return found


def _ask(client: PayloadClient, store: str, address: Mapping[str, Any], limit: int) -> StoreAccount:
    if address["payload"] is None:
        return StoreAccount(store, "service", problem="the store waits for the orchestrator of this attempt")
    try:
        answer = client.stats(address["payload"], _ANSWER_S, outstanding=limit)
    except PayloadError as error:
        return StoreAccount(store, "service", problem=str(error))
    stats = msgspec.json.decode(answer, type=_Stats)
    return StoreAccount(store, "service", stats, stats.held)


def _find_spools(run: RunDir, addresses: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Spool roots that still hold journals: those in the run folder, and those that address files name."""
    found = {}
    for journal in sorted(run.spool.glob(f"*/*/*/{JOURNAL_NAME}")):
        root = journal.parent.parent
        found[f"{root.parent.name}/{root.name}"] = root
    for store, address in addresses.items():
        spool = Path(address.get("spool") or "/nowhere")
        root = spool.parent if (spool / JOURNAL_NAME).exists() else spool
        if attempt_keys(root):
            found.setdefault(store, root)
    return found


def _replay(store: str, root: Path, limit: int) -> StoreAccount:
    account, held = StoreAccount(store, "journal"), []
    now = time.time()
    for key in attempt_keys(root):
        try:
            spool = Spool(root, key, create=False, writable=False)
        except PayloadError as error:
            account.problem = str(error)
            continue
        account.ledger = account.ledger.add(spool.ledger())
        held += [Held(e.id, key, e.request, e.nbytes, max(0.0, now - e.since)) for e in spool.outstanding()]
        spool.close()
    account.held = sorted(held, key=lambda item: -item.age_s)[:limit]
    return account


def _read_summary(run: RunDir) -> list[StoreAccount]:
    payload = (read_json(run.summary) or {}).get("payload")
    if not isinstance(payload, dict):
        return []
    known = {name: payload[name] for name in Ledger.__struct_fields__ if payload.get(name) is not None}
    if "bytes" in payload:
        known.setdefault("kept_bytes", payload["bytes"])
    return [StoreAccount("all stores", "summary", msgspec.convert(known, Ledger))]


def _format_row(account: StoreAccount) -> str:
    if account.problem is not None:
        return f"{account.store:32} {account.source:8} no account: {account.problem}"
    ledger = account.ledger
    freed = [f"{holder} {ledger.freed[holder]}" for holder in HOLDERS if ledger.freed.get(holder)]
    faults = [
        f"{count} {what}"
        for what, count in (
            ("double frees", ledger.double_frees),
            ("unknown", ledger.unknown),
            ("damaged", ledger.damaged),
        )
        if count
    ]
    return (
        f"{account.store:32} {account.source:8} {ledger.kept:8} {ledger.kept_bytes / 2**20:9.1f} "
        f"{ledger.outstanding:11} {_format_age(ledger.oldest_s):>8}  {', '.join(freed + faults) or 'nobody'}"
    )


def _format_age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
