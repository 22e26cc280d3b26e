"""The command as a user meets it: processes, exit codes, and one line on standard error."""

import os
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

MODULE = '''
import sys
from pathlib import Path
import typer
from warmcast.manifests.errors import IntegrityError, UsageError

def greet(name: str, times: int = 1) -> None:
    """Greet somebody."""
    print(f"hello {name} " * times)

def fail() -> None:
    """Fail as a job does."""
    raise IntegrityError("blob x", expected="a", found="b\\nc", do="fetch it again")

def misuse() -> None:
    """Fail as a wrong argument does."""
    raise UsageError("--x", expected="1", found="2")

def crash() -> None:
    """Fail as a bug does."""
    raise ZeroDivisionError("one\\nbad \\x1b[31m thing")

def missing_file() -> None:
    """Fail as a missing file does."""
    Path("/nonexistent/file").read_bytes()

def answer(code: int) -> int:
    """Return an exit code."""
    return code

def leave() -> None:
    """Leave by typer's own way."""
    raise typer.Exit(5)

several = typer.Typer(help="Several commands in one.")
several.command("greet")(greet)
several.command("misuse")(misuse)

def wait() -> None:
    """Wait to be interrupted."""
    print("waiting", flush=True)
    sys.stdin.read()

def talk() -> None:
    """Print more than a pipe holds."""
    for number in range(100_000):
        print(number)
'''

BROKEN = "import a_package_that_nobody_has\n"
COMMANDS = (
    *("greet", "fail", "misuse", "crash", "missing_file", "answer", "leave", "wait", "talk"),
    "several",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment in which another distribution brings commands, as an extra would."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "test_commands.py").write_text(MODULE)
    (folder / "test_commands_broken.py").write_text(BROKEN)
    info = folder / "test_commands-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-commands\nVersion: 1\n")
    lines = [f"test-{name} = test_commands:{name}" for name in COMMANDS]
    lines.append("test-broken = test_commands_broken:main")
    (info / "entry_points.txt").write_text("\n".join(["[warmcast.commands]", *lines]) + "\n")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "NO_COLOR": "1"}


def command(*words):
    return [sys.executable, "-c", "from warmcast.manifests.command import main; main()", *words]


@pytest.fixture
def warmcast(environment):
    def call(*words):
        return subprocess.run(
            command(*words),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def complained(done, code, line):
    assert done.stderr == f"warmcast: {line}\n"
    assert done.returncode == code


def test_a_command_runs(warmcast):
    done = warmcast("test-greet", "you", "--times", "2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello you hello you \n", "")


def test_a_command_that_fails(warmcast):
    complained(warmcast("test-fail"), 1, "blob x: expected a, found b c; fetch it again")


def test_a_command_that_is_misused(warmcast):
    complained(warmcast("test-misuse"), 2, "--x: expected 1, found 2")


def test_a_command_of_several(warmcast):
    done = warmcast("test-several", "greet", "you")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello you \n", "")
    complained(warmcast("test-several", "misuse"), 2, "--x: expected 1, found 2")


@pytest.mark.parametrize(
    ("words", "line"),
    [([], "Missing command (see --help)"), (["x"], "No such command 'x' (see --help)")],
)
def test_a_command_of_several_that_is_not_named(warmcast, words, line):
    complained(warmcast("test-several", *words), 2, line)


def test_an_unknown_command(warmcast):
    done = warmcast("deplyo")
    assert done.returncode == 2
    assert done.stderr.startswith("warmcast: command line: expected a command of ")
    assert done.stderr.endswith("found 'deplyo'\n")
    assert "test-greet" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["test-greet"], "missing argument 'name'"),
        (["test-greet", "you", "--times", "x"], "invalid value for '--times'"),
        (["test-greet", "you", "--nope"], "no such option: --nope"),
        (["test-greet", "you", "too"], "unexpected extra argument"),
        (["--nope"], "no such option: --nope"),
    ],
)
def test_wrong_arguments(warmcast, words, part):
    done = warmcast(*words)
    assert done.returncode == 2
    assert part in done.stderr.lower()
    assert "see --help" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_bug_is_one_line(warmcast):
    complained(
        warmcast("test-crash"),
        1,
        r"ZeroDivisionError: one bad \u001b[31m thing (a bug, or a case we missed: "
        "--debug shows where)",
    )


@pytest.mark.parametrize("words", [("--debug", "test-crash"), ("test-crash", "--debug")])
def test_debug_shows_where(warmcast, words):
    done = warmcast(*words)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in crash" in done.stderr


def test_a_missing_file_is_no_bug(warmcast):
    complained(warmcast("test-missing_file"), 1, "/nonexistent/file: No such file or directory")


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_command_chooses_its_exit_code(warmcast, code):
    done = warmcast("test-answer", str(code))
    assert (done.returncode, done.stderr) == (code, "")


def test_typers_own_way_out(warmcast):
    assert warmcast("test-leave").returncode == 5


def test_a_command_whose_libraries_are_missing(warmcast):
    complained(
        warmcast("test-broken", "--some", "argument"),
        2,
        "warmcast test-broken: expected the package 'a_package_that_nobody_has', found it is not "
        "installed; install the extra of warmcast that brings it",
    )


@pytest.mark.parametrize("debug", [False, True])
def test_ctrl_c(environment, debug):
    words = ["test-wait"] + ["--debug"] * debug
    with subprocess.Popen(
        command(*words),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate()
    if debug:
        assert "KeyboardInterrupt" in complaint
        assert process.returncode == -signal.SIGINT
    else:
        assert complaint == "warmcast: interrupted; what was begun can be run again\n"
        assert process.returncode == 130


def test_a_reader_that_goes_away(environment):
    with subprocess.Popen(
        command("test-talk"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_a_reader_that_goes_away_before_the_last_flush(environment):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command("test-greet", "you"),
            env=environment,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_version(warmcast):
    done = warmcast("--version")
    assert (done.returncode, done.stdout) == (0, f"warmcast {version('warmcast')}\n")


def test_help_of_one_command(warmcast):
    done = warmcast("test-greet", "--help")
    assert done.returncode == 0
    assert "warmcast test-greet [OPTIONS]" in done.stdout
    assert "Greet somebody." in done.stdout


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2)])
def test_help_shows_all_commands(warmcast, words, code):
    done = warmcast(*words)
    assert (done.returncode, done.stderr) == (code, "")
    for name in (
        "deploy",
        "inspect",
        "verify",
        "demo",
        "bench",
        "test-greet",
        "Greet somebody.",
        "Several",
    ):
        assert name in done.stdout
    assert "Needs the package 'a_package_that_nobody_has'" in done.stdout


def test_a_command_pays_for_no_others_libraries(environment):
    script = (
        "import contextlib, sys; from warmcast.manifests.command import main\n"
        "with contextlib.suppress(SystemExit): main(['test-answer', '0'])\n"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'prefect', 'boto3', 'redis', 'huggingface_hub')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
