"""The words of a shell text are those that a shell makes of it, but for what only it can know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from whet.migrate.shell import read

pytestmark = pytest.mark.true_start

_TEXTS = [
    "prog --a 'b c' \"d e\" f\\ g --h=i\\\n  j # a comment",
    'A=1; B="x y"; prog $A ${A}2 "$B" $B \'$B\' "\\$B" a"b"\'c\'d',
    "ARGS=(--one 'two three'); ARGS+=(four); prog \"${ARGS[@]}\" ${ARGS[@]}",
    'M=\'a b\'; N="$M c"; prog "$N" "" \'\'',
    "prog $'tab\\there' \"quote\\\"d\" 'it'\\''s'",
    "true && prog a | cat > out 2>&1; prog b 2>/dev/null &",
    "cat <<END\nprog hidden $A\nEND\nprog shown",
    "if true; then prog in_if; fi; { prog in_braces; }",
    "export A=x B='y z'; prog $A \"$B\"",
    "N=2; for ((i = 0; i < 1; i++)); do prog $N; done",
    "A=a/b.c; E=; prog ${A##*/} ${A#*/} ${A%.c} ${A%%/*} ${A%x} ${E:-d} ${E-d} ${A:-d} ${A:+y} x${E:+y}",
    "N=7; M=-3; prog $((N*2+1)) $((${N}/M)) $((N%M)) $(($N-(2-M))) $((-N))",
    'A=x/y.sh; prog $(basename $A) $(basename "$A" .sh) `basename $A` $(basename /)',
    "if true; then A=1; else A=2; fi; B=3; if false; then B=3; fi; prog $B; C=3; prog $C",
    "A='--x 1'; eval \"prog $A\"; B='prog $C'; C=4; eval $B; D=' --p  q '; prog $D",
]


@pytest.mark.parametrize("text", _TEXTS)
def test_words_are_those_of_bash(text: str, tmp_path: Path) -> None:
    show = "import sys; sys.stderr.write(repr(sys.argv[1:]) + chr(10))"
    program = f"prog() {{ {sys.executable} -c '{show}' \"$@\" 2>&3; }}; "
    script = f"{program}exec 3>&1 1>/dev/null; {text}\nwait"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [[word.text for word in one.words[1:]] for one in read(text).commands if one.name == "prog"]
    assert sorted(map(repr, found)) == sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize(
    "text", ["plain", "a b", "it's", "~/x y", "$HOME/a b", "tab\there", "a*b", "", "\x1b[31m", "é"]
)
def test_words_are_written_as_bash_reads_them(text: str) -> None:
    (word,) = read(f'prog "{text}"').commands[0].words[1:]
    show = "import os; os.write(1, os.fsencode(__import__('sys').argv[1]))"
    script = f'{sys.executable} -c "{show}" {word.shell()}'
    shown = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env=os.environ | {"HOME": "h"})
    assert shown.stdout.decode() == text.replace("$HOME", "h")
    assert word.shell().isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "$(basename #",
        "$(basename ;)",
        "$((",
        "$((1/0))",
        "$((((((1",
        "if",
        "fi",
        "case x in",
        ";;",
        "&&",
        "for",
        "done",
        "eval '$('",
        "${A:",
        "${:-x}",
        "'",
        '"',
        "$(",
        "${",
        "`",
        "((",
        "a=(",
        "<<END",
        "\\",
        "$",
        "prog 'x",
        "x=",
        ")",
        "|&",
    ],
)
def test_broken_text_ends(text: str) -> None:
    read(text)
    read(f"prog {text}")


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, whet.cli.main as main\n"
        "line = 'LD_PRELOAD=libtcmalloc.so mpirun -f h -n 4 -ppn 2 python run_qa.py --model_name_or_path m "
        "--dataset_name squad --do_train --output_dir o --no_cuda --use_ipex --bf16 --trust_remote_code'\n"
        "code = main.run(['migrate', line])\n"
        "print(code, {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "78 set()"
    assert done.stdout.startswith("whet launch --nproc_per_node 2 --hostfile h --memory_allocator tcmalloc -- qa ")
