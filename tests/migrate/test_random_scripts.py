"""Scripts by chance: a command that counts as certain runs once, and its words are those that bash gives it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from random import Random

import pytest

from whet.migrate.shell import read

pytestmark = pytest.mark.true_start

_START = r"""
prog() { local line; printf -v line '<%s>' "$@"; printf '%s\n' "$line" >&3; }
exec 3>&1 1>/dev/null 2>/dev/null
unset A B C
"""
_LITERALS = ["x", "'a b'", '"c  d"', "7", "''", "e\\ f", "'*'", "g=h", "-3", "$'t\\tq'"]
_VALUES = ["$N", '"$N"', "${N}z", '"${N:-d} y"', "${N##*a}", "${N%b*}", "${N:+p}", "${N-u}", '"${N[@]}"', '"${N[*]}"',
           "${N[1]}", "$((3+2))", "$(basename /a/b)", "`echo x`"]  # fmt: skip
_CHANGES = ["N=V", "N=V", "N=V M=V", "N+=V", "N=(V V)", "N+=(V)", "N[0]=el", "export N=V", "export N", "declare N=V",
            "declare -a N=(V q)", "unset N", ": ${N:=w}", "read -r N <<< 'r1 r2'", "((N=5))", "let N=6", 'eval "N=ev"',
            "printf -v N %s pf", "mapfile -t N <<< $'m1\\nm2'", "f2() { local N=3; M=4; shift; }; f2 a"]  # fmt: skip
_QUESTIONS = ["true", "false", '[ -n "$N" ]', "[[ $N == x ]]", "((1))", "! true", "N=V", "cd .", "echo q | grep -q z"]
_SENTENCES = [
    "if Q; then\nS\nS\nfi", "if Q; then S\nelse\nS\nS\nfi", "for N in V V; do\nS\nS\ndone", "Q && S", "Q || S",
    "for ((i=0;i<2;i++)); do S\ndone", "while read -r N; do P; done <<< 'l m'", "Q && { S\nS\n}", "{ S\nS\n}",
    "case $N in\n x|y) S\n;;\n (if) S\n ;;\n *) S\n;;\nesac", "f() { S\nS\n}\nf\nP", "P | cat", "{ S\n} | cat",
    "( S\nS\n)", "Q && P || S", "{ P; } && P", "cat > /dev/null <<E\n$A fi ' (\nE", "N=V && P", "N=V M=V P", "{ S\n} &",
]  # fmt: skip


def _script(chance: Random) -> str:
    """Return a script with numbered commands `prog`."""
    n = 0

    def filled(text: str, depth: int) -> str:
        nonlocal n
        found = ""
        for char in text:
            if char == "P":
                n += 1
                found += f"prog {n} " + " ".join(filled("V", depth) for _ in range(chance.randint(1, 3)))
            elif char == "V":
                found += chance.choice(_LITERALS) if chance.random() < 0.4 else filled(chance.choice(_VALUES), depth)
            elif char == "S":
                lines = [*_CHANGES, *["P"] * 20, *(_SENTENCES if depth else [])]
                found += filled(chance.choice(lines), depth - 1)
            elif char == "Q":
                found += filled(chance.choice(_QUESTIONS), depth)
            else:
                found += chance.choice("ABC") if char in "NM" else char
        return found

    return "\n".join(filled("S", 2) for _ in range(6)) + "\n" + filled("P", 0)


@pytest.mark.parametrize("seed", range(4))
def test_certain_words_are_those_of_bash(seed: int, tmp_path: Path) -> None:
    chance, n_compared = Random(seed), 0
    for _ in range(25):
        text = _script(chance)
        done = subprocess.run(
            ["bash", "-c", f"{_START}{text}\nwait"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for found in read(f"unset A B C\n{text}").commands:
            if found.name != "prog" or not found.sure:
                continue
            number = found.words[1].text
            shown = [line for line in done.stdout.splitlines() if line.startswith(f"<{number}>")]
            parts = [part for word in found.words for part in word.parts if not isinstance(part, str)]
            if parts:
                assert all(part.needs or part.raw in ("*", "`echo x`") for part in parts), text
                assert len(shown) == 1, text
            else:
                assert shown == ["".join(f"<{word.text}>" for word in found.words[1:])], text
                n_compared += 1
    assert n_compared > 40
