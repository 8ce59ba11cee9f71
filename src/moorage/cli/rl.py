"""`moorage rl`: from one run file to a finished run folder.

    run file -> checks -> derived configs -> plan -> room in the run folder -> launcher -> summary.json

Promises:
- a folder that holds a run is refused unless `--resume` or `--clean`, and these remove nothing before all
  else is known to be right;
- `--dry-run` writes the derived configs and stops; it changes nothing of a run that is there.

Ends with the launcher's exit code.
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
from moorage.core.terminal import say
from moorage.launcher import checks, resume
from moorage.launcher.local import LocalRun, Outcome
from moorage.launcher.plan import Plan, make_plan
from moorage.launcher.progress import Progress, make_display
from moorage.report.summary import Facts, make_summary, render_summary

SWITCHES = ("dry-run", "resume", "clean")
USAGE = """usage: moorage rl @ FILE [--dotted.key VALUE ...] [--dry-run] [--resume | --clean]

  --dry-run
      Check everything, write the config of every process to <run>/configs (to <run>/dry-run/configs when the
      folder holds a run), and stop.
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
    is_dry = "dry-run" in arguments.switches
    with resume.hold(run_dir):
        facts = _choose_attempt(run_dir, config, arguments)
        if not is_dry:
            resume.wait_for_leavers(run_dir)  # they hold the ports that are looked at next
        plan = _make_plan(config, facts, is_moe=is_mixture_of_experts(model))
        if is_dry:
            return _show_plan(plan, arguments, data)
        secret = _make_secret(plan)
        _make_room(run_dir, config, facts, arguments)  # nothing is removed before all is known to be right
        _write_run_file(run_dir, arguments, data)
        _write_configs(plan, run_dir.configs)
        return launch(plan, config.name, secret)


def _check(config: RunConfig) -> dict[str, Any]:
    """All that can be wrong before anything starts. Returns the model's config.json."""
    model = checks.read_model_config(config.model.path)
    checks.check_length(config.seq_len, model)
    for split, source in sources_by_split(config.orchestrator):
        checks.check_source(split, source)
    return model


def _choose_attempt(run_dir: RunDir, config: RunConfig, arguments: Arguments) -> ProcessFacts:
    """Say which attempt this is; changes nothing. Raises ConfigError when the folder does not allow it."""
    run_id, attempt, step = uuid.uuid4().hex, 1, 0
    if "resume" in arguments.switches:
        run_id, attempt, step = resume.resume_facts(run_dir)
    elif resume.holds_run(run_dir):
        if "clean" not in arguments.switches:
            raise ConfigError(
                f"{run_dir} holds a run already; --resume goes on with it, --clean removes it, or choose "
                "another `name`"
            )
        resume.check_removable(run_dir, Path(config.output_dir))
    return ProcessFacts(
        run_dir=str(run_dir),
        run_id=run_id,
        attempt=attempt,
        start_step=step + 1,
        max_steps=config.max_steps,
        seq_len=config.seq_len,
        seed=config.seed,
    )


def _make_room(run_dir: RunDir, config: RunConfig, facts: ProcessFacts, arguments: Arguments) -> None:
    """Remove what earlier attempts left and this one must not find."""
    if "resume" in arguments.switches:
        step = facts.start_step - 1
        shipped = resume.clean_after(run_dir, step, keep_batches=config.payload.retain == "checkpoint")
        resume.write_parts(run_dir, step, shipped, config.checkpoint, last_step=config.max_steps)
    elif resume.holds_run(run_dir):
        resume.remove_run(run_dir, Path(config.output_dir))


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


def _show_plan(plan: Plan, arguments: Arguments, data: dict[str, Any]) -> int:
    """`--dry-run`: write the configs and print their paths; a run that is there already keeps its own."""
    target = RunDir(plan.run.root / resume.DRY_RUN) if resume.holds_run(plan.run) else plan.run
    _write_run_file(target, arguments, data)
    for path in _write_configs(plan, target.configs):
        print(path)
    return 0


def _write_configs(plan: Plan, folder: Path) -> list[Path]:
    paths = []
    for path, config in plan.configs.items():
        paths.append(folder / path.relative_to(plan.run.configs))
        write_json_atomic(paths[-1], config)
    return paths


def launch(plan: Plan, title: str, secret: str) -> int:
    """Run the plan to its end, and write and show its summary, also when the launcher itself fails or nobody
    reads the output any more. Returns the exit code."""
    display = make_display(title)
    display.say(f"run folder {plan.run}; {len(plan.records)} processes; logs in {plan.run.logs}")
    local = LocalRun(plan, secret, Progress(plan.run, plan.max_steps, display))
    try:
        local.run()
    finally:
        display.close()
        _conclude(plan, local.outcome)
    return local.outcome.exit_code


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


def _conclude(plan: Plan, outcome: Outcome) -> None:
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
    say(render_summary(summary), sys.stdout)
    for pid in outcome.left:
        say(f"moorage: process {pid} could not be ended", sys.stderr)
    if outcome.error and outcome.exit_code not in (0, 130):
        say(f"moorage: error: {outcome.error}", sys.stderr)
