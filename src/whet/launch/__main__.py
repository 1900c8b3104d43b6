"""What ssh starts on a host: `python -m whet.launch`, which runs `whet launch` there.

It reads one line of JSON from standard input (`over_ssh.Orders`): variables and words with secrets do not stand in a
command line, which every user of the host can read. Each further byte is a signal to pass on to the ranks, or a sign of
life. When the input ends or no sign comes, because the launcher or the connection is gone, the ranks are stopped. At
the end it says in a line of standard error, after MARK, how they ended, or in a dry run what was planned.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from whet.errors import EXIT_OTHER, ConfigError, WhetError
from whet.launch import elastic, run
from whet.launch.arguments import HostsArguments, LaunchArguments
from whet.launch.over_ssh import BEAT, MARK, Orders
from whet.launch.rank import STOP_S, no_restart

_LONGEST_LINE = 1 << 24


def main() -> int:
    """Run `whet launch` as ordered; return its exit code."""
    given = os.dup(0)
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
        if not (byte := os.read(given, 1)):
            return EXIT_OTHER
        line += byte
    orders = Orders(**json.loads(line))
    threading.Thread(target=_obey, args=(given, orders.silence_s), daemon=True).start()
    try:
        return _run(orders)
    except WhetError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return error.exit_code


def _run(orders: Orders) -> int:
    try:
        os.chdir(orders.working_dir)
    except OSError as error:
        raise ConfigError(
            what="the working folder is missing",
            got=f"{orders.working_dir}: {error.strerror}",
            why="ranks start in the same folder on every host",
            fix="create it or mount it there, or name a folder that all hosts have: --working_dir FOLDER (without it, "
            "the launcher's own)",
        ) from error
    os.environ.update(orders.variables)
    run.require_linux()
    asked = LaunchArguments(**{**orders.launch, "command": tuple(orders.launch["command"])})
    several = HostsArguments(**{**orders.hosts, "env": ()})
    plan = run.planned(asked, several, orders.commands, orders.ranked, first_rank=orders.first_rank)
    if asked.dry_run:
        run.show(plan)
        with elastic.listens(replace(plan.meeting, port=several.master_port)) as listener:
            _say(n_ranks=len(plan.ranks), port=0 if listener is None else int(listener.getsockname()[1]))
        return 0
    outcome = run.started(plan, restarts=(orders.n_restarts, orders.max_restarts))
    if outcome.failed is not None:
        age_s = time.time() - outcome.failed.at
        _say(**{**asdict(outcome.failed), "age_s": age_s, "stopped": outcome.stopped_by is not None})
    return outcome.code


def _obey(given: int, silence_s: float) -> None:
    """Pass signals on; once the input ends or nothing comes, have the ranks stopped, and end in any case."""
    while select.select([given], [], [], silence_s)[0] and (data := os.read(given, 1)):
        if data != BEAT:
            os.kill(os.getpid(), data[0])
    os.kill(os.getpid(), no_restart())
    time.sleep(STOP_S + 2)
    os.kill(os.getpid(), signal.SIGKILL)  # the processes around the ranks notice, and stop them


def _say(**facts: Any) -> None:
    sys.stderr.flush()
    os.write(2, MARK + json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the launcher waits: no time for what torch takes down at the end of Python
