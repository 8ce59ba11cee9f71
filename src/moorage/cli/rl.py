"""`moorage rl`: from one run file to a finished run folder.

    run file -> checks -> derived configs -> plan -> launcher -> summary.json

`--dry-run` stops after writing the derived configs. A folder that holds a run is refused unless `--resume` or
`--clean`. Ends with the launcher's exit code.
"""

from __future__ import annotations

import os
import secrets
import sys
import uuid
from pathlib import Path
from typing import Any

from moorage.cli.arguments import Arguments, parse_arguments, read_config
from moorage.config.derive import derive, sources_by_split
from moorage.config.model import is_mixture_of_experts
from moorage.config.run import ProcessFacts, RunConfig
from moorage.core.errors import ConfigError
from moorage.core.rundir import RunDir, write_bytes_atomic, write_json_atomic
from moorage.core.secret import TOKEN_VARIABLE
from moorage.launcher import checks, resume
from moorage.launcher.local import Outcome, run_plan
from moorage.launcher.plan import Plan, make_plan
from moorage.launcher.progress import Progress, make_display
from moorage.report.summary import Facts, make_summary, render_summary

SWITCHES = ("dry-run", "resume", "clean")
USAGE = """usage: moorage rl @ FILE [--dotted.key VALUE ...] [--dry-run] [--resume | --clean]

  --dry-run
      Check everything, write the config of every process to <run>/configs, and stop.
  --resume
      Go on from the newest whole checkpoint in the run folder.
  --clean
      Remove what the run folder holds, then start.
"""


def run(_command: str, args: list[str]) -> int:
    """Run one reinforcement learning run on this machine."""
    if "--help" in args or "-h" in args:
        from moorage.cli.fields import render_fields

        print(f"{USAGE}\n{render_fields(RunConfig)}")
        return 0
    arguments = parse_arguments(args, SWITCHES)
    if {"resume", "clean"} <= arguments.switches:
        raise ConfigError("--resume and --clean exclude each other")
    if not arguments.files and not arguments.overrides:
        raise ConfigError("moorage rl needs a run file: `moorage rl @ run.toml`")
    config, data = read_config(RunConfig, arguments, SWITCHES)
    run_dir = RunDir(Path(config.output_dir) / config.name)
    model = _check(config)
    with resume.hold(run_dir):
        facts = _prepare(run_dir, config, arguments)
        plan = _make_plan(config, facts, is_moe=is_mixture_of_experts(model))
        _write_run_file(run_dir, arguments, data)
        if "dry-run" in arguments.switches:
            return _write_configs(plan)
        return _launch(plan, config)


def _check(config: RunConfig) -> dict[str, Any]:
    """All that can be wrong before anything starts. Returns the model's config.json."""
    model = checks.read_model_config(config.model.path)
    for split, source in sources_by_split(config.orchestrator):
        checks.check_source(split, source)
    return model


def _prepare(run_dir: RunDir, config: RunConfig, arguments: Arguments) -> ProcessFacts:
    """Make the run folder ready for this attempt, and say which attempt it is."""
    run_id, attempt, step = uuid.uuid4().hex, 1, 0
    if "resume" in arguments.switches:
        run_id, attempt, step = resume.resume_facts(run_dir)
        if "dry-run" not in arguments.switches:
            resume.clean_after(run_dir, step, keep_batches=config.payload.retain == "checkpoint")
    elif resume.holds_run(run_dir):
        if "clean" not in arguments.switches:
            raise ConfigError(
                f"{run_dir} holds a run already; --resume goes on with it, --clean removes it, or choose "
                "another `name`"
            )
        if "dry-run" not in arguments.switches:
            resume.remove_run(run_dir, Path(config.output_dir))
    return ProcessFacts(
        run_dir=str(run_dir),
        run_id=run_id,
        attempt=attempt,
        start_step=step + 1,
        max_steps=config.max_steps,
        seq_len=config.seq_len,
        seed=config.seed,
    )


def _make_plan(config: RunConfig, facts: ProcessFacts, *, is_moe: bool) -> Plan:
    engine = config.inference
    ports = [] if engine.urls else checks.choose_ports(engine.host, engine.port, engine.replicas)
    if engine.port:
        checks.check_ports(engine.host, ports, "inference.port")
    try:
        derived = derive(config, facts, engine_ports=ports, is_moe=is_moe)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rendezvous = checks.choose_ports("127.0.0.1", 0, 1)[0] if config.trainer.num_ranks > 1 else 0
    return make_plan(derived, devices=checks.share_devices(derived), rendezvous_port=rendezvous)


def _write_run_file(run_dir: RunDir, arguments: Arguments, data: dict[str, Any]) -> None:
    """Keep what was written: the first file as it is, and everything merged as data."""
    for name in arguments.files[:1]:
        if name.endswith(".toml"):
            write_bytes_atomic(run_dir.run_toml, Path(name).read_bytes())
    write_json_atomic(run_dir.configs / "run.json", data)


def _write_configs(plan: Plan) -> int:
    for path, config in plan.configs.items():
        write_json_atomic(path, config)
        print(path)
    return 0


def _launch(plan: Plan, config: RunConfig) -> int:
    display = make_display(config.name)
    display.say(f"run folder {plan.run}; {len(plan.records)} processes; logs in {plan.run.logs}")
    progress = Progress(plan.run, config.max_steps, display)
    try:
        outcome = run_plan(plan, _make_secret(plan), progress)
    finally:
        display.close()
    return _conclude(plan, outcome)


def _make_secret(plan: Plan) -> str:
    """New for every attempt, unless an env server that somebody else started has one already."""
    if not plan.external:
        return secrets.token_hex(32)
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        names = ", ".join(source for source, _ in plan.external)
        raise ConfigError(
            f"{names}: this env server runs already, so its secret is needed: set {TOKEN_VARIABLE} to what "
            "it was started with (or what it printed)"
        )
    return token


def _conclude(plan: Plan, outcome: Outcome) -> int:
    summary = make_summary(
        plan.run,
        Facts(
            status=outcome.status,
            error=outcome.error,
            wall_s=outcome.wall_s,
            ledgers=outcome.ledgers,
            peak_rss_mib=outcome.peak_rss_mib,
        ),
    )
    write_json_atomic(plan.run.summary, summary)
    print(render_summary(summary), flush=True)
    for pid in outcome.left:
        print(f"moorage: process {pid} could not be ended", file=sys.stderr)
    if outcome.error and outcome.exit_code not in (0, 130):
        print(f"moorage: error: {outcome.error}", file=sys.stderr)
    return outcome.exit_code
