"""The launcher's hand on a host: `python -m whet.launch.agent`, at the other end of ssh.

It answers the questions of the pre-flight, starts the ranks of its host and reports how they end. When the launcher is
gone, or says nothing for too long, it stops the ranks: no rank outlives the launcher or the connection to it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whet.hardware import network as interfaces
from whet.launch import environment, local, picture
from whet.launch.agent import facts, network
from whet.launch.agent.channel import Channel, Message, Silence
from whet.launch.agent.facts import Prepared
from whet.launch.environment import Placement

_EVERY_S = 0.05
_LISTENS_S = 0.5
_WAITS_S = 30.0
"""How long the launcher may be silent before the ranks are started; it sends a beat every two seconds."""
_DRAIN_S = 1.0


class Agent:
    """One run on this host, from the first question to the end of its ranks."""

    def __init__(self, channel: Channel, frames: Frames | None = None, own: Mapping[str, Any] | None = None) -> None:
        """`own` is what this host decides by itself: all of its command, if somebody started the launcher on it."""
        self._channel = channel
        self._frames = frames
        self._own = own or {}
        self._spec: Mapping[str, Any] = {}
        self._prepared: Prepared | None = None
        self._listener: network.Listener | None = None

    def serve(self) -> Message | None:
        """Answer until the run is over; return how it ended, None if the launcher is gone."""
        answers = {
            "find": self._find,
            "clock": lambda _: {"time": facts.clock()},
            "greet": self._greet,
            "mesh": self._mesh,
            "link": self._link,
            "show": self._show,
        }
        silence = Silence(self._channel)
        while not self._channel.is_over() and silence.seconds() < _WAITS_S:
            message = self._channel.receive(_LISTENS_S)
            if message is None:
                continue
            if message["ask"] == "over":
                return message
            if message["ask"] == "start":
                self._run(message)
                silence = Silence(self._channel)
            elif message["ask"] in answers:
                self._channel.send(question=message.get("question"), **answers[message["ask"]](message))
        return None

    def _find(self, message: Message) -> dict[str, Any]:
        self._spec = {**message, **self._own}
        found, self._prepared, self._listener = facts.find(self._spec)
        return {"facts": found.message()}

    def _greet(self, message: Message) -> dict[str, Any]:
        """Try to connect to the first host through each of its addresses."""
        targets = {address: (address, message["port"]) for address in message["candidates"]}
        found = network.greet_all(targets, self._spec["word"])
        own = interfaces.addresses()
        return {
            "greetings": {address: asdict(one) for address, one in found.items()},
            "towards": {address: interfaces.interface_towards(address, own) for address in message["candidates"]},
        }

    def _mesh(self, message: Message) -> dict[str, Any]:
        """Try to connect to every other host, as gloo will."""
        found = network.greet_all(message["peers"], self._spec["word"], message["source"])
        return {"greetings": {name: asdict(one) for name, one in found.items()}}

    def _link(self, message: Message) -> dict[str, Any]:
        """Measure the link to another host."""
        address, port = message["to"]
        met = network.greet(address, port, self._spec["word"], source=message["source"], measure=True)
        return {"bytes_per_s": met.bytes_per_s}

    def _show(self, message: Message) -> dict[str, Any]:
        """Return the picture of this host's plan, and the variables that each rank gets."""
        assert self._prepared is not None
        ranks, notes = self._starts(message)
        lines = picture.drawn(self._spec["name"], self._prepared.topology, self._prepared.ranks, message["first_rank"])
        before = os.environ
        changed = [
            {name: value for name, value in one.environment.items() if before.get(name) != value} for one in ranks
        ]
        preloaded = [path.name for path in self._prepared.preload.paths]
        return {
            "picture": lines,
            "notes": notes,
            "preloaded": preloaded,
            "command": self._prepared.line,
            "variables": {
                one.rank: {name: value for name, value in own.items() if name not in self._spec["env"]}
                for one, own in zip(ranks, changed, strict=True)
            },
        }

    def _run(self, message: Message) -> None:
        """Start the ranks of this host, and report until they have ended."""
        if self._listener is not None:
            self._listener.close()
        ending = local.Ending(noted=[])
        watching = threading.Thread(target=obey, args=(self._channel, ending, message["heartbeat_timeout_s"]))
        watching.daemon = True
        watching.start()
        outcome = local.run(self._starts(message)[0], ending, self._report)
        ending.stop = True
        watching.join()  # the next message is for `serve`
        if self._frames is not None:
            self._frames.drain()
        self._channel.send(ended=outcome.code)

    def _report(self, start: local.RankStart, code: int) -> None:
        """Say at once which rank failed, so that the others can be stopped."""
        lines = local.tail(start.log) if start.log is not None else []
        log = str(start.log.absolute()) if start.log is not None else ""
        self._channel.send(failed=start.rank, code=code, at=facts.clock(), log=log, tail=lines)

    def _starts(self, message: Message) -> tuple[list[local.RankStart], list[str]]:
        """Return what each rank is started with, and a note for each variable that gives way."""
        assert self._prepared is not None
        preload, n_local = self._prepared.preload, len(self._prepared.ranks)
        found: list[local.RankStart] = []
        notes: list[str] = []
        for plan in self._prepared.ranks:
            place = _place(plan.local_rank, n_local, {**self._spec, **message})
            variables, notes = environment.variables(os.environ | self._spec["env"], plan, place, preload)
            log = Path(self._spec["log_dir"]) / f"rank-{place.rank}.log"
            found.append(
                local.RankStart(
                    rank=place.rank,
                    command=self._prepared.line,
                    environment=variables,
                    cpus=plan.cpus,
                    nodes=plan.nodes,
                    preload=[str(path) for path in preload.paths],
                    log=log if place.rank else None,
                    restart=place.restart,
                )
            )
        return found, notes


def _place(local_rank: int, n_local: int, message: Message) -> Placement:
    return Placement(
        rank=message["first_rank"] + local_rank,
        n_ranks=message["n_ranks"],
        local_rank=local_rank,
        n_local=n_local,
        node_rank=message["node_rank"],
        master_addr=message["master_addr"],
        master_port=message["master_port"],
        interface=message["interface"],
        restart=message["restart"],
        max_restarts=message["max_restarts"],
    )


def obey(channel: Channel, ending: local.Ending, timeout_s: float) -> None:
    """Do to the ranks what the launcher says; stop them once it is gone or silent.

    A signal may reach this process and the launcher alike, as when a scheduler ends all of them: it counts once.
    """
    silence, n_own = Silence(channel), 0
    while not ending.stop:
        message = channel.receive(_EVERY_S)
        own = ending.noted or []
        if len(own) > n_own:
            n_own = len(own)
            channel.send(signal=int(own[-1]), n=n_own)
            ending.asked += own[len(ending.asked) :]
        if message is not None and "signal" in message:
            ending.asked += [signal.Signals(message["signal"])] * (message["n"] - len(ending.asked))
        elif message is not None or channel.ended.is_set():
            ending.stop = True
        elif silence.seconds() > timeout_s:
            channel.send(alone_s=timeout_s, at=facts.clock())
            ending.stop = True


class Frames:
    """Sends all that this process and its ranks print to the launcher, instead of into the connection."""

    def __init__(self, channel: Channel) -> None:
        self._threads = [self._redirected(channel, number) for number in (1, 2)]

    def drain(self) -> None:
        """Wait until all output of the ranks, which have ended, is on the way."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
        for thread in self._threads:
            thread.join(_DRAIN_S)

    @staticmethod
    def _redirected(channel: Channel, number: int) -> threading.Thread:
        reader, writer = os.pipe()
        os.dup2(writer, number)
        os.close(writer)

        def forward() -> None:
            while data := os.read(reader, 1 << 16):
                channel.send_output(output=data.decode("utf-8", "surrogateescape"), to=number)

        thread = threading.Thread(target=forward, daemon=True)
        thread.start()
        return thread


def main() -> int:
    """Serve the launcher at the other end of standard input and output."""
    channel = Channel(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    agent = Agent(channel, Frames(channel))
    agent.serve()
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
