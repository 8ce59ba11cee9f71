"""The warm-up process: supervised steps on conversations, with the trainer's own model, packing and
optimizer.

| loop | consumes | produces | waits for | unblocked by |
|---|---|---|---|---|
| main | conversations of a taskset | gradients, the saved model | nothing | SIGTERM ends it after the step |

Owns the order of a warm-up: make or load the model, train, save in Hugging Face layout under a temporary
name, rename. With several ranks each draws the same conversations and trains its own share.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moorage.config.model import ModelConfig
from moorage.config.sft import SftConfig
from moorage.config.trainer import TrainerConfig
from moorage.core.errors import ConfigError, MoorageError
from moorage.core.log import get_logger, setup_logging
from moorage.core.parent import watch_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moorage.trainer.conversations import Conversation
    from moorage.trainer.rows import Row
    from moorage.trainer.step import TrainStep
    from moorage.trainer.world import World

log = get_logger(__name__)

STOPPED = 143


def main(config: SftConfig) -> int:
    """Run the whole warm-up. Returns the exit code; raises ConfigError for what a person must change."""
    setup_logging("sft")
    watch_parent()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return 0 if warm_up(config, stop) else STOPPED
    except ConfigError:
        raise
    except MoorageError as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1


def warm_up(config: SftConfig, stop: threading.Event) -> bool:
    """Train and save; False when stopped before the end (nothing is saved then)."""
    from moorage.trainer.conversations import load_conversations
    from moorage.trainer.world import make_world

    output = Path(config.output)
    if (output / "config.json").exists():
        raise ConfigError(
            f"output {config.output!r} already holds a model; choose another folder or remove it"
        )
    trainer = _trainer_config(config)
    conversations = load_conversations(config.taskset, config.seed)
    world = make_world(trainer)
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        source = _starting_folder(config, temporary / "init", world)
        step = _make_step(config, trainer, source, world)
        if not Warmup(config, step, source, world).train(conversations, stop):
            return False
        _save(step, source, temporary, output, world)
        return True
    finally:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        world.close()


def _trainer_config(config: SftConfig) -> TrainerConfig:
    shared = ("num_ranks", "device", "num_threads", "activation_checkpointing", "optimizer", "schedule")
    values = {name: getattr(config, name) for name in shared}
    return TrainerConfig.model_validate({**values, "router_replay": False})


def _starting_folder(config: SftConfig, folder: Path, world: World) -> Path:
    """The folder to start from; with [init] the main rank makes it."""
    if config.init is None:
        assert config.model is not None
        return Path(config.model)
    if world.is_main:
        from moorage.trainer.model import hide_progress_bars
        from moorage.trainer.starter import ARCHITECTURES, make_model_folder

        hide_progress_bars()
        if config.init.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"init.architecture {config.init.architecture!r} is unknown; choose one of "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        make_model_folder(folder, config.init.architecture, config.seed, config.init.overrides)
    world.barrier()
    return folder


def _make_step(config: SftConfig, trainer: TrainerConfig, source: Path, world: World) -> TrainStep:
    import torch

    from moorage.trainer.losses import make_loss
    from moorage.trainer.model import load_model
    from moorage.trainer.step import TrainStep

    torch.manual_seed(config.seed)
    model = load_model(ModelConfig(path=str(source), dtype=config.dtype), trainer, world, config.seq_len)
    return TrainStep(model, make_loss({"type": "ipo"}), trainer, config.max_steps)


class Warmup:
    """The steps of a warm-up."""

    def __init__(self, config: SftConfig, step: TrainStep, source: Path, world: World) -> None:
        from transformers import AutoTokenizer

        from moorage.trainer.conversations import SampleMaker

        self.config = config
        self.step = step
        self.world = world
        self.maker = SampleMaker(AutoTokenizer.from_pretrained(source), config.seq_len)

    def train(self, conversations: Iterator[Conversation], stop: threading.Event) -> bool:
        """All steps; False when stopped before the last one."""
        from moorage.trainer.metrics import StepMetrics

        config, began = self.config, time.perf_counter()
        parameters = self.step.model.num_parameters
        log.info(
            "%d parameters, %d steps of %d conversations", parameters, config.max_steps, config.batch_size
        )
        for number in range(1, config.max_steps + 1):
            metrics = StepMetrics(self.step.loss.metric_names)
            self.step.run(number, self._next_rows(conversations), metrics)
            if number % config.log_interval == 0 or number == config.max_steps:
                self._report(number, metrics.agree(self.world), time.perf_counter() - began)
            if stop.is_set() and number < config.max_steps:
                return False
        return True

    def _next_rows(self, conversations: Iterator[Conversation]) -> list[Row]:
        """This rank's packed rows of the next batch."""
        from moorage.payload.assemble import assemble
        from moorage.records.packing import pack
        from moorage.trainer.rows import float_dtype, make_row

        samples, arrays = self.maker.take(conversations, self.config.batch_size)
        micros = pack(samples, self.config.row_tokens, self.world.size)[self.world.rank]
        dtype = float_dtype(self.config.dtype)
        return [make_row(assemble(micro, arrays), dtype, self.world.device, replay=False) for micro in micros]

    def _report(self, number: int, agreed: dict[str, float], spent_s: float) -> None:
        if self.world.is_main:
            left_s = spent_s / number * (self.config.max_steps - number)
            shown = (
                number,
                self.config.max_steps,
                agreed["ce/nll/mean"],
                agreed["optim/lr"],
                spent_s,
                left_s,
            )
            log.info("step %d/%d  loss %.4f  lr %.2e  %.0f s spent, %.0f s left", *shown)


def _save(step: TrainStep, source: Path, temporary: Path, output: Path, world: World) -> None:
    """Write to a temporary folder beside `output`, then rename it."""
    from moorage.trainer.export import Exporter

    folder = temporary / "final"
    if world.is_main:
        folder.mkdir(parents=True)
    world.barrier()
    Exporter(step.model, source).write(folder)
    world.barrier()
    if world.is_main:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        os.replace(folder, output)
        log.info("saved %s", output)
