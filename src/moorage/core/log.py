"""Logging: one format for every process; the launcher gives each process its own file."""

from __future__ import annotations

import logging
import os
import sys

FORMAT = "%(asctime)s %(levelname).1s %(process_name)s %(name)s: %(message)s"


def setup_logging(process_name: str, level: str | None = None) -> None:
    """Send this process's log to standard error. `level` defaults to MOORAGE_LOG_LEVEL, else info."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S", defaults={"process_name": process_name}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("WARNING")
    logging.getLogger("moorage").setLevel((level or os.environ.get("MOORAGE_LOG_LEVEL", "info")).upper())
    logging.captureWarnings(True)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)
