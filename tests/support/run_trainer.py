"""`python -m tests.support.run_trainer <config.json>`: one trainer rank, as the command line starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from moorage.config.base import load_config
from moorage.config.run import TrainerProcessConfig
from moorage.trainer.loop import main

if __name__ == "__main__":
    sys.exit(main(load_config(TrainerProcessConfig, Path(sys.argv[1]))))
