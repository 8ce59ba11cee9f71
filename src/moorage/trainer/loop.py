"""The trainer process.

| loop | consumes | produces | waits for | unblocked by |
|---|---|---|---|---|
| main | micro batches of step N | step N of the optimizer | `batches/step_N` | READY, END.json, SIGTERM |
| main | the model after step N | `weights/step_N`, then READY | nothing | - |
| main | payloads all ranks have | deletes | payload stores | the client's deadline (rest carried over) |
| main | model, optimizer | `checkpoints/step_N/trainer` | the save before | its thread, `SAVE_TIMEOUT_S` |
| prefetch thread | `batches/step_N+1` | its payloads | batch file, stores | as above, `fetch_timeout_s` |
| heartbeat thread | - | `alive/trainer.json` | - | - |

Version 0 is the model that training starts from. The trainer publishes the version before its first step at
start, and version N after step N; the orchestrator waits for these and no others.
A dead orchestrator ends every wait (RunEnded). Ranks agree on every stop, so none is left in a collective.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from moorage.config.run import TrainerProcessConfig
from moorage.core.collector import settle_collector
from moorage.core.errors import MoorageError, RunEnded
from moorage.core.log import get_logger, setup_logging
from moorage.core.parent import watch_parent
from moorage.core.rundir import Heartbeat, RunDir

if TYPE_CHECKING:
    from moorage.trainer.session import Session

log = get_logger(__name__)

STOPPED = 143


def main(config: TrainerProcessConfig) -> int:
    """Run one rank of the trainer to `max_steps`. The exit code: 0 at the end, 143 when told to stop."""
    setup_logging("trainer")
    watch_parent()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    run = RunDir(config.facts.run_dir)
    session: Session | None = None
    heartbeat = Heartbeat(run, "trainer") if os.environ.get("RANK", "0") == "0" else None
    try:
        if heartbeat is not None:
            heartbeat.start()
        from moorage.trainer.session import Session  # torch takes seconds: the heart beats before

        session = Session(config, run, stop)
        settle_collector()
        session.train()
        return 0
    except RunEnded as ended:
        log.warning("%s", ended)
        return STOPPED if stop.is_set() else 1
    except MoorageError as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    finally:
        if session is not None:
            session.close()
        if heartbeat is not None:
            heartbeat.stop()
