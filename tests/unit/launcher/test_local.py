"""The launcher against small real processes: what each kind of ending does to the run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from moorage.core.parent import process_birth
from moorage.core.rundir import RunDir, read_json
from moorage.launcher.local import LocalRun, Outcome
from moorage.launcher.plan import Plan, ProcessRecord
from moorage.launcher.progress import PlainDisplay, Progress
from moorage.report.summary import sum_ledgers

FOREVER = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def make_record(run: RunDir, name: str, kind: str, code: str, **more: object) -> ProcessRecord:
    argv = (sys.executable, "-c", code)
    return ProcessRecord(name, kind, argv, run.log(name), **more)  # type: ignore[arg-type]


def run_records(run: RunDir, records: list[ProcessRecord], out: TextIO | None = None) -> tuple[Outcome, str]:
    """The outcome, and what was said (to a buffer unless `out` says where)."""
    out = out or io.StringIO()
    plan = Plan(run, "a" * 32, 1, 3, tuple(records), {})
    outcome = LocalRun(plan, "secret-of-this-test", Progress(run, 3, PlainDisplay(out))).run()
    return outcome, out.getvalue() if isinstance(out, io.StringIO) else ""


def workers(run: RunDir, code: str, seconds: float = 0.3) -> list[ProcessRecord]:
    """An orchestrator and a trainer that both do `code` after a moment."""
    body = f"import sys, time, os, signal; time.sleep({seconds}); {code}"
    return [
        make_record(run, "orchestrator", "orchestrator", body, ends_well=True),
        make_record(run, "trainer", "trainer", body, ends_well=True),
    ]


def test_a_run_whose_workers_end_with_zero_is_finished_and_leaves_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    engine = make_record(run, "inference", "inference", FOREVER)
    outcome, _ = run_records(run, [engine, *workers(run, "pass")])
    assert (outcome.status, outcome.exit_code, outcome.error) == ("finished", 0, None)
    assert read_json(run.end)["status"] == "finished"
    assert outcome.left == []
    assert outcome.peak_rss_mib["inference"] > 1


def test_a_failing_worker_ends_the_run_with_its_last_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    failing = make_record(
        run, "trainer", "trainer", "raise SystemExit('moorage: error: no memory')", ends_well=True
    )
    orchestrator = make_record(run, "orchestrator", "orchestrator", FOREVER, ends_well=True)
    outcome, said = run_records(run, [orchestrator, failing])
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.error == "trainer ended with code 1: moorage: error: no memory"
    assert "no memory" in said


def test_a_service_that_ends_with_zero_before_the_run_is_over_is_a_death(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    engine = make_record(run, "inference", "inference", "pass")
    outcome, _ = run_records(run, [engine, *workers(run, "time.sleep(60)")])
    assert outcome.status == "failed"
    assert "inference ended with code 0" in (outcome.error or "")


def test_a_killed_process_is_named_before_those_that_fail_because_of_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    killed = make_record(
        run, "inference", "inference", "import os, time; time.sleep(.3); os.kill(os.getpid(), 9)"
    )
    outcome, _ = run_records(run, [*workers(run, "time.sleep(60)"), killed])
    assert (outcome.error or "").startswith("inference was killed by SIGKILL")


def test_a_record_marked_restart_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    marker = tmp_path / "starts"
    code = f"import time, sys; open({str(marker)!r}, 'a').write('x'); time.sleep(0.2); sys.exit(3)"
    flaky = make_record(run, "helper", "env_server", code, on_death="restart")
    outcome, said = run_records(run, [flaky, *workers(run, "pass", 0.35)])
    assert outcome.status == "finished"
    assert len(marker.read_text()) >= 2
    assert "starting it again" in said


def test_a_record_that_dies_three_times_in_a_minute_ends_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    flaky = make_record(run, "helper", "env_server", "import sys; sys.exit(3)", on_death="restart")
    outcome, said = run_records(run, [flaky, *workers(run, "time.sleep(60)")])
    assert outcome.status == "failed"
    assert said.count("starting it again") == 2


def test_a_replica_may_die_while_another_of_its_group_lives(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    first = make_record(run, "one", "env_server", "import sys; sys.exit(3)", on_death="go_on", group="g")
    other = make_record(run, "two", "env_server", FOREVER, on_death="go_on", group="g")
    outcome, said = run_records(run, [first, other, *workers(run, "pass", 0.6)])
    assert outcome.status == "finished"
    assert "the run goes on" in said


def test_the_last_replica_of_a_group_takes_the_run_with_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    records = [
        make_record(run, name, "env_server", "import sys; sys.exit(3)", on_death="go_on", group="g")
        for name in ("one", "two")
    ]
    outcome, _ = run_records(run, [*records, *workers(run, "time.sleep(60)")])
    assert outcome.status == "failed"


def test_ctrl_c_cancels_the_run_and_ends_every_process_even_a_stubborn_grandchild(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    pids = tmp_path / "grandchild"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    engine = make_record(run, "inference", "inference", code)
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    outcome, _ = run_records(run, [engine, *workers(run, "time.sleep(60)")])
    timer.join()
    assert (outcome.status, outcome.exit_code) == ("cancelled", 130)
    assert time.monotonic() - began < 30
    assert process_birth(int(pids.read_text())) is None  # gone, or a zombie that init has not reaped
    assert read_json(run.end) == {**read_json(run.end), "status": "cancelled", "error": "stopped by Ctrl-C"}


@pytest.mark.usefixtures("hang_ups_are_heard")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_cancels_the_run_also_when_nobody_reads_the_output(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = RunDir(tmp_path / "run")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
        timer.start()
        outcome, _ = run_records(run, workers(run, "time.sleep(60)"), out)
        timer.join()
    assert (outcome.status, outcome.exit_code) == ("cancelled", code)
    assert read_json(run.end)["status"] == "cancelled"


SURVIVOR = """
import json, msgspec, os, sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
port = socket.bind_to_random_port("tcp://127.0.0.1")
address = sys.argv[1]
os.makedirs(os.path.dirname(address), exist_ok=True)
open(address + ".tmp", "w").write(json.dumps({"rpc": f"tcp://127.0.0.1:{port}"}))
os.rename(address + ".tmp", address)
client, request, method, body = socket.recv_multipart()
reply = msgspec.msgpack.encode({"ledger": {"kept": 3, "freed": {"trainer": 3}}})
socket.send_multipart([client, request, b"reply", reply])
socket.close(linger=1000)
"""


def test_the_account_of_a_server_that_ended_with_an_error_is_unknown(tmp_path: Path) -> None:
    """Its address file is gone with it; the account of the others is not that of the run."""
    run = RunDir(tmp_path / "run")
    servers = [
        make_record(run, f"envs/train/{name}.node", "env_server", code, group=name)
        for name, code in (("words", SURVIVOR), ("lost", "import time; time.sleep(0.7); raise SystemExit(1)"))
    ]
    servers[0] = replace(servers[0], argv=(*servers[0].argv, str(run.address("train", "words.node"))))
    outcome, _ = run_records(run, [*servers, *workers(run, "time.sleep(60)")])
    assert (outcome.error or "").startswith("envs/train/lost.node ended with code 1")
    survivor = outcome.ledgers["train/words.node"]
    assert survivor is not None
    assert survivor.kept == 3
    assert outcome.ledgers["train/lost.node"] is None
    assert sum_ledgers(outcome.ledgers) is None


def test_nothing_is_left_running_when_the_run_folder_cannot_be_written(tmp_path: Path) -> None:
    run, pid = RunDir(tmp_path / "run"), tmp_path / "pid"
    waiting = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); {FOREVER}"
    spoil = (
        f"import os, pathlib, shutil, time\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.02)\n"
        f"shutil.rmtree({str(run)!r}); pathlib.Path({str(run)!r}).write_text('a file')\nraise SystemExit(1)"
    )
    engine = make_record(run, "inference", "inference", waiting)
    with pytest.raises(OSError, match="run"):
        run_records(run, [engine, make_record(run, "trainer", "trainer", spoil, ends_well=True)])
    assert process_birth(int(pid.read_text())) is None


@contextmanager
def started_by_somebody_else() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the same secret, as whoever runs an external env server exports it."""
    environ = {**os.environ, "MOORAGE_TOKEN": "secret-of-this-test"}
    process = subprocess.Popen([sys.executable, "-c", FOREVER], env=environ, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_process_that_shares_only_the_secret_is_left_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with started_by_somebody_else() as server:
        outcome, _ = run_records(run, workers(run, "pass"))
        assert outcome.status == "finished"
        assert outcome.left == []
        assert server.poll() is None


def test_a_second_ctrl_c_does_not_wait_for_a_process_that_ignores_sigterm(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    stubborn = make_record(run, "trainer", "trainer", STUBBORN, ends_well=True)
    timers = [threading.Timer(at, os.kill, (os.getpid(), signal.SIGINT)) for at in (1.0, 1.5)]
    for timer in timers:
        timer.start()
    began = time.monotonic()
    outcome, _ = run_records(run, [stubborn])
    assert outcome.status == "cancelled"
    assert time.monotonic() - began < 4


def test_a_child_gets_the_secret_and_the_launchers_pid_by_environment_only(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    out = tmp_path / "environment"
    code = f"import json, os; open({str(out)!r}, 'w').write(json.dumps(dict(os.environ)))"
    record = make_record(run, "trainer", "trainer", code, ends_well=True, env={"OMP_NUM_THREADS": "2"})
    run_records(run, [record])
    environ = json.loads(out.read_text())
    assert environ["MOORAGE_TOKEN"] == "secret-of-this-test"
    assert environ["MOORAGE_PARENT_PID"] == str(os.getpid())
    assert environ["OMP_NUM_THREADS"] == "2"
    written = subprocess.run(["grep", "-rl", "secret-of-this-test", str(run.root)], capture_output=True)
    assert written.stdout == b""
