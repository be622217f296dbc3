"""tools/advisor/launch_lines/shell.py: words are those that bash makes."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.tools.advisor.launch_lines.shell import number, read

LAUNCH = "launch() { for word in \"$@\"; do printf '%s\\0' \"$word\"; done; printf '\\1'; }\n"


def words_of_bash(script: str) -> list[tuple[str, ...]]:
    """The words that bash gives each `launch`."""
    ran = subprocess.run(["bash", "-c", LAUNCH + script], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    return [tuple(part.split("\0")[:-1]) for part in ran.stdout.split("\1")[:-1]]


def words_read(script: str) -> list[tuple[str, ...]]:
    return [command.words[1:] for command in read(script).commands if command.words[0] == "launch"]


ENDS = ["\n", " # said\n", " ;\n", " &\nwait\n", " > /dev/null 2>&1\n", " || true\n"]
plain = st.text("abc-=/.:,0129_+@%", min_size=1, max_size=6)
parts = st.one_of(
    plain,
    st.text('ab {}:"#;&|<>()0', max_size=8).map(lambda text: f"'{text}'"),
    st.text("ab {}:'#;&|<>()0", max_size=8).map(lambda text: f'"{text}"'),
    st.sampled_from(['"a\\"b"', "a\\ b", "$ONE", '"$TWO"', "${ONE}", '"${TWO}x"', "${UNSET:-d}", "${LIST[1]}", "$FLAGS", "\\$x"]),
)
# A `#` begins a comment and an `=` an assignment only where a word begins, and "launch" stands before it.
# A letter behind `$ONE` would be one of another name, which is not set: bash takes nothing for it, and `read` leaves it as it is.
words = st.lists(parts, min_size=1, max_size=3).map("".join).filter(lambda word: not re.search(r"\$(ONE|FLAGS)\w", word))
gaps = st.sampled_from([" ", "  ", " \\\n  ", "\t"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(gaps, words), max_size=7), st.sampled_from(ENDS))
def test_words_are_those_of_bash(pieces, end):
    setting = "export ONE=1 TWO='two words'\nFLAGS='--a 1 --b'\nLIST=('x' \"y z\")\n"
    script = f"{setting}launch{''.join(gap + word for gap, word in pieces)}{end}launch end\n"
    wanted = words_of_bash(script)
    if "/dev/null" in end:
        assert words_read(script)[-1:] == wanted[-1:]
        end_of_line = words_of_bash(script.replace(end, "\n"))
        assert words_read(script) == end_of_line
    else:
        assert words_read(script) == wanted


def test_variables_are_those_of_the_environment_at_the_launch():
    text = "A=1\nexport B=2\nA=3 launch x\nunset B\nif [ -n y ]; then\n export C=4\n launch y\nelse\n export D=5\n launch z\nfi\nlaunch w\n"
    commands = [command for command in read(text, {"P": "q"}).commands if command.words[0] == "launch"]
    seen = [{name: value for name, value in command.variables.items() if name in "ABCD"} for command in commands]
    assert seen == [{"A": "3", "B": "2"}, {"A": "1", "C": "4"}, {"A": "1", "D": "5"}, {"A": "1"}]
    assert [command.line for command in commands] == [3, 7, 10, 12]
    assert all(command.variables["P"] == "q" for command in commands)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("launch --a 1 \\  \n --b 2", ("--a", "1", "--b", "2")),
        ("launch --a 1 \\ # why\n --b 2", ("--a", "1", "--b", "2")),
        ("launch --a 1\n--b 2", ("--a", "1", "--b", "2")),
        ("launch --ip <your ip> --port <port>", ("--ip", "<your ip>", "--port", "<port>")),
        ("IP=('your first ip')\nlaunch --ip ${IP[0]}:80", ("--ip", "your first ip:80")),
        ("launch --port $((8000+$i)) --rank $1 --at `hostname`", ("--port", "$((8000+$i))", "--rank", "$1", "--at", "`hostname`")),
        ("for i in $(cat hosts); do\nlaunch --rank $i --port $((80+i))\ndone", ("--rank", "$i", "--port", "$((80+i))")),
        ("i=0\nwhile read host; do\nlaunch --rank $i\ni=$((i+1))\ndone", ("--rank", "$i")),
        ("for i in {1..9999}; do launch $i; done", ("$i",)),
        ("for ((i=0; i<3; i++)); do launch $i $j; done", ("$i", "$j")),
        ("i=0\nuntil ((i > 2)); do\nlaunch $i\n((i++))\ndone", ("$i",)),
        ("N=`expr 1 + 2`\nlet M=N+1\nlaunch $N $M", ("`expr 1 + 2`", "$M")),
        ("cat <<EOF\nlaunch no\nEOF\nlaunch yes", ("yes",)),
        ("launch 'never closed", ("never closed",)),
    ],
)  # fmt: skip
def test_slips_of_pages_are_read(text, wanted):
    (command,) = [command for command in read(text).commands if command.words[0] == "launch"]
    assert command.words[1:] == wanted


steps = st.sampled_from(
    [
        "launch $i $j", 'launch "${A[$i]}" ${#A[@]}', "j=$((j * 2 + i))", "A+=($j)", "launch $((j+1)) ${B:-$j}",
        'launch "${A[@]}" "${!A[@]}"', "for k in a b; do launch $k$i; done", "if [ -n y ]; then j=$((j+3)); fi",
    ]
)  # fmt: skip
loops = st.sampled_from(["for i in 0 1 2; do", "for i in {0..4}; do", "for i in $(seq 1 3)\ndo", 'for i in "${!A[@]}";\ndo'])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(loops, st.lists(steps, min_size=1, max_size=4)), min_size=1, max_size=3))
def test_loops_and_numbers_are_those_of_bash(written):
    blocks = (f"{loop}\n" + "\n".join(body) + "\ndone" for loop, body in written)
    script = "A=(3 1)\nj=1\n" + "\n".join(blocks) + "\nlaunch $i $j\n"
    assert words_read(script) == words_of_bash(script)


leaves = st.one_of(st.integers(0, 99).map(str), st.sampled_from(["a", "b", "0x1f", "017", "-3", "~b", "(a)", "--a", "c"]))
signs = st.sampled_from(["+", "-", "*", "/", "%", "**", "<<", "//", "<", "==", "&&", ","])
sums = st.recursive(leaves, lambda inner: st.tuples(st.just("("), inner, signs, inner, st.just(")")).map(" ".join), max_leaves=5)


@settings(max_examples=15, deadline=None)
@given(st.lists(sums, min_size=8, max_size=8))
def test_a_sum_is_that_of_bash_or_is_not_known(texts):
    script = "".join(f"a=7; b=2; c=08; (printf '%s ' \"$(({text}))\" || printf 'none ') 2>/dev/null; printf '\\n'\n" for text in texts)
    printed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    for text, wanted in zip(texts, printed, strict=True):
        value = number(text, {"a": "7", "b": "2", "c": "08"})
        assert value is None or str(value) == wanted.strip(), text
    assert number("(a + 3) * b / 4 % 3 - -1", {"a": "7", "b": "2"}) == 3
    assert [number(text, {"a": "7"}) for text in ("a / 0", "2 * 9223372036854775807", "x", "", "1 2", "-a / 2")] == [None] * 6


@pytest.mark.parametrize(
    "text",
    [
        "N=1\nlaunch $N", "N=`nproc`\nlaunch $N", "export N=4\nlaunch $N", "N=3 launch $N",
        "((N = 3))\nlaunch $N",
        "let N=2\nlaunch $N", "for N in 1 2 3; do launch $N; done", "unset N\nlaunch $N", "N+=x\nlaunch $N",
        "for N in $(hosts); do launch $N; done",
        "A=(5 6)\nN=${A[1]}\nlaunch ${N}", "bash -c 'N=1; launch $N'",
    ],
)  # fmt: skip
def test_what_the_user_sets_wins_over_the_script(text):
    script = read(text, settings={"N": "8"})
    commands = [command for command in script.commands if command.words[0] in ("launch", "bash")]
    if "bash" in text:
        (command,) = commands
        commands = [each for each in read(command.words[2], command.variables, script.settings).commands if each.words[0] == "launch"]
    assert [(command.words[1:], command.variables["N"]) for command in commands] == [(("8",), "8")]


def test_a_loop_that_does_not_end_ends_here():
    script = read("while ((1)); do launch x; done\nfor i in {1..200}; do for j in {1..200}; do launch $i $j; done; done\nlaunch end")
    assert len(script.commands) < 4
    assert script.commands[-1].words == ("launch", "end")


def test_the_script_says_which_variables_it_uses():
    assert read("A=1\nB=$A\nlaunch ${C} '$D'").used == {"A", "C"}
