"""What comes over the connection to the agent of a host besides its answers."""

from __future__ import annotations

import os

from whet.launch.agent.channel import Channel


def test_a_start_file_that_ends_without_a_line_break_swallows_no_answer() -> None:
    """As of a shell whose start file says `printf 'loading modules... '`."""
    ours, theirs = os.pipe()
    channel = Channel(ours, os.open(os.devnull, os.O_WRONLY))
    os.write(theirs, b'welcome\nloading modules... whet-launch: {"facts": 1}\n')
    os.write(theirs, b'whet-launch: {"output": "whet-launch: "}\n')
    first, second = channel.receive(5), channel.receive(5)
    os.close(theirs)
    channel.close()
    assert first is not None
    assert first["facts"] == 1
    assert second is not None
    assert second["output"] == "whet-launch: "
    assert channel.noise == ["welcome", "loading modules... "]
