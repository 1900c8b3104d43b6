"""The words of a shell text are those that a shell makes of it, but for what only it can know."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from whet.errors import ConfigError
from whet.migrate.shell import read

pytestmark = pytest.mark.true_start

_TEXTS = [
    "prog --a 'b c' \"d e\" f\\ g --h=i\\\n  j # a comment",
    'A=1; B="x y"; prog $A ${A}2 "$B" $B \'$B\' "\\$B" a"b"\'c\'d',
    "ARGS=(--one 'two three'); ARGS+=(four); prog \"${ARGS[@]}\" ${ARGS[@]}",
    'Z=(1 2); prog "q${Z[@]}r" $Z "$Z" "${Z[*]}" ${Z[1]}; Z=(); prog "${Z[@]}" "a${Z[@]}"; Z+=(3); Z+=4; prog $Z',
    'M=\'a b\'; N="$M c"; prog "$N" "" \'\'',
    'A=\' y \'; prog a$A"" "a"$A"b" x$A\'z\'',
    "A=0; A=1 B=$A; prog $B; A=2 C=$A prog $A; prog $A",
    "prog $'tab\\there' \"quote\\\"d\" 'it'\\''s' $'it\\'s\\x41\\101\\u00e9\\e' $\"q\"",
    "prog a\\\n  b 'c\\\nd' \"e\\\nf\"",
    "true && prog a | cat > out 2>&1; prog b 2>/dev/null &",
    "prog a > >(cat) 2>&1; prog b &>/dev/null; cat <<< 'x y'; time prog c; ! prog d",
    "cat <<END\nprog hidden $A\nEND\nprog shown",
    "cat <<-A <<'B'\n\tit's\n\tA\nprog no\nB\nprog yes",
    "(A=1; prog $A); A=3; (A=4; prog $A); prog $A; { A=5; prog $A; }; prog $A",
    "export A=x B='y z'; prog $A \"$B\"",
    'declare -a Q=(a \'b c\'); declare R=$Q; readonly S=\'x y\'; export T=$S U=1; prog "${Q[@]}" $R "$S" "$T" $U',
    'T=1; unset T; prog "$T" ${T:-d} ${T-e} $T',
    'A=\'*.zz [a]\'; prog $A "$A"; B=*.zz; prog "$B"',
    "W=; : ${W:=8}; prog $W ${W}; W=9; : ${W:=7}; prog $W",
    "A=a/b.c; E=; prog ${A##*/} ${A#*/} ${A%.c} ${A%%/*} ${A%x} ${E:-d} ${E-d} ${A:-d} ${A:+y} x${E:+y}",
    "N=7; M=-3; prog $((N*2+1)) $((${N}/M)) $((N%M)) $(($N-(2-M))) $((-N)); N=$((N*2)); prog $N",
    'A=x/y.sh; prog $(basename $A) $(basename "$A" .sh) `basename $A` $(basename /)',
    "A='--x 1'; eval \"prog $A\"; B='prog $C'; C=4; eval $B; D=' --p  q '; prog $D",
    "if false; then A=1; fi; A=2; prog $A; f() { B=3; }; C=4; prog $C; exit\nprog never",
]


@pytest.mark.parametrize("text", _TEXTS)
def test_words_are_those_of_bash(text: str, tmp_path: Path) -> None:
    show = "import sys; sys.stderr.write(repr(sys.argv[1:]) + chr(10))"
    program = f"prog() {{ {sys.executable} -c '{show}' \"$@\" 2>&3; }}; "
    script = f"{program}exec 3>&1 1>/dev/null; {text}\nwait"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    commands = [one for one in read(text).commands if one.name == "prog"]
    assert all(one.sure for one in commands)
    found = [[word.text for word in one.words[1:]] for one in commands]
    assert sorted(map(repr, found)) == sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize(
    "block",
    [
        "if [ $X ]; then A=2; fi",
        "if x; then B=3; else unset A; fi",
        "[ $X ] && A=2",
        "[ $X ] && { B=1; A=2; }",
        "[ $X ] || { B=1; A=2; }",
        "[[ $X && $Y ]] && A=2",
        "! grep -q x y && A=2",
        "cat x | grep -q y && A=2",
        "case $X in\n a|b) B=3 ;;\n (fi) A=2 ;;\n*) B=4\nesac",
        "for A in 1 2; do x; done",
        "for ((A=0; A<3; A++)); do x; done",
        "while read -r A; do x; done < file",
        "while [[ $# -gt 0 ]]; do case $1 in --a) A=$2; shift 2 ;; *) shift ;; esac; done",
        "until x; do if y; then A=2; fi; done",
        "select A in 1 2; do break; done",
        "f() { A=2; }; A=1; f",
        "function f\n{\n A=2\n}\nf",
        "((A*=2))",
        "let A=A*2",
        "(( A++ ))",
        "prog $((A+=1))",
        "read A",
        "read -r B A <<< 'x y'",
        "mapfile -t A < x",
        "printf -v A %s x",
        "source config.sh",
        "source vars.sh",
        ". ./env_vars.sh",
        "source my_mpi/vars.sh",
        "source vars_train.env",
        "source variables",
        "source bash_args.sh",
        "source conda_args.sh && activate",
        "source profile_big.sh --like setvars.sh",
        "export $(cat .env)",
        'eval "$(x)"',
        "declare -i A=2+3",
        "A[0]=5",
        "A=([1]=x)",
        "{ A=2; } | tee log",
        "A=2 &",
    ],
)
def test_what_only_the_shell_decides_leaves_no_value(block: str) -> None:
    *_, last = read(f"A=1\n{block}\nprog $A\n").commands
    (word,) = last.words[1:]
    assert (last.sure, word.text, word.live) == (True, "$A", True)
    assert any("A" in part.needs for part in word.parts if not isinstance(part, str))
    *_, last = read(f"A=1\n{block}\nUNRELATED=5\nprog $UNRELATED\n").commands
    assert [word.text for word in last.words] == ["prog", "5"], "later lines count again"


@pytest.mark.parametrize(
    "file",
    [
        "setvars.sh",
        "/opt/intel/oneapi/setvars.sh --force",
        "/opt/intel/oneapi/mpi/latest/env/vars.sh",
        '"$CCL_ROOT"/env/vars.sh',
        '$(python -c "import x as y; print(y.cwd)")/env/setvars.sh',
        "activate env",
        "~/venv/bin/activate",
        "~/.bashrc",
        "/etc/profile",
        "$(conda info --base)/etc/profile.d/conda.sh",
        "/usr/share/modules/init/bash",
    ],
)
def test_file_that_sets_paths_leaves_every_value(file: str) -> None:
    *_, last = read(f"A=1\nsource {file}\nprog $A\n").commands
    assert [word.text for word in last.words] == ["prog", "1"]


@pytest.mark.parametrize(
    "text",
    [
        "if x; then prog; fi",
        "x || prog",
        "[ x ] && prog",
        "[ x ] && { y; prog; }",
        "f() { prog; }",
        "for i in 1 2; do prog; done",
        "A=$(prog python x.py)",
        "cat <(prog python x.py)",
        "case x in a) prog ;; esac",
    ],
)
def test_command_that_may_not_run_is_not_certain(text: str) -> None:
    assert [one.sure for one in read(text).commands if one.name == "prog"] == [False]
    assert [one.sure for one in read(f"{text}\nlater").commands if one.name == "later"] == [True]


@pytest.mark.parametrize("word", ["$(f 1)", "`f`", "$(echo $((A+1)))", "${B:A:1}", "${#A}", "$(cat $A)", "${A//x/y}"])
def test_part_that_the_shell_computes_of_the_text_says_so(word: str) -> None:
    *_, last = read(f"A=1; f() {{ x; }}; prog {word}").commands
    assert all(part.needs for part in last.words[1].parts if not isinstance(part, str))
    *_, last = read(f"prog {word}").commands
    assert not any(part.needs for part in last.words[1].parts if not isinstance(part, str))


def test_arguments_that_the_text_moves_are_unknown() -> None:
    *_, last = read('prog "$1"; shift; prog "$1" "$@"').commands
    assert all(part.needs for word in last.words[1:] for part in word.parts if not isinstance(part, str))
    first, *_ = read('f() { shift; }; prog "$1"').commands[1:]
    assert not any(part.needs for word in first.words[1:] for part in word.parts if not isinstance(part, str))


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
    for one in (text, f"prog {text}"):
        with suppress(ConfigError):
            read(one)


@pytest.mark.parametrize("text", ["fi", "if x; then y", "prog 'x", "prog $(x", "cat <<END\nx", "{ x", "x )", "a=(b"])
def test_text_that_bash_refuses_is_refused(text: str) -> None:
    assert subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False).returncode or "<<" in text
    with pytest.raises(ConfigError, match="not a complete script"):
        read(text)


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
