# SPDX-License-Identifier: Apache-2.0
"""`wrap` must not be seen: status, signals, streams, descriptors, environment of the job.

Where it is of no matter whether there is a service, a refused runtime directory keeps the tests
quick: wrap then says so in one line and runs the job without. The fake service of these tests
speaks the launcher's part of the protocol only.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANG_SECONDS, process_gone, process_state, uffdprefetch, wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def alone(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment in which no service can be had, at once."""
    os.symlink("/", tmp_path / "hub")
    return env


def wrap(
    env: dict[str, str], *command: str, **options: object
) -> subprocess.CompletedProcess[bytes]:
    defaults: dict[str, object] = {"capture_output": True, "timeout": HANG_SECONDS}
    words = uffdprefetch("wrap", "--", *command)
    return subprocess.run(words, env=env, **{**defaults, **options})  # type: ignore[call-overload, no-any-return]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


# ---- status -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 7, 125, 255])
def test_exit_status_is_the_jobs(alone: dict[str, str], code: int) -> None:
    assert wrap(alone, "sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("name", ["SEGV", "TERM", "KILL", "ABRT", "INT", "QUIT", "PIPE", "HUP"])
def test_wrap_dies_of_the_jobs_signal(alone: dict[str, str], name: str) -> None:
    number = getattr(signal, f"SIG{name}")
    assert wrap(alone, "sh", "-c", f"kill -{name} $$").returncode == -number


def test_wrap_leaves_no_core_of_its_own(alone: dict[str, str], tmp_path: Path) -> None:
    """The job may dump core; wrap, dying of the same signal, has set its own limit to at most 1."""

    def allow_core() -> None:
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))

    done = wrap(
        alone, "sh", "-c", "ulimit -c 0; kill -SEGV $$", cwd=tmp_path, preexec_fn=allow_core
    )
    assert done.returncode == -signal.SIGSEGV
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("core")] == []


def test_a_program_that_is_not_there_is_127(alone: dict[str, str]) -> None:
    done = wrap(alone, "/no/such/program")
    assert done.returncode == 127
    assert b"uffdprefetch: cannot execute '/no/such/program': No such file" in done.stderr
    assert b"Traceback" not in done.stderr
    assert wrap(alone, "no-such-program-in-path").returncode == 127


@pytest.mark.parametrize("options", [[], ["--learn"], ["--learn=name"]])
def test_a_working_directory_that_was_removed_is_the_jobs_affair(
    env: dict[str, str], tmp_path: Path, options: list[str]
) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        gone = tmp_path / "gone"
        gone.mkdir()
        into = 'cd "$0" && rmdir "$0" && exec "$@"'
        return subprocess.run(
            ["sh", "-c", into, str(gone), *words], env=env | {"HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=HANG_SECONDS,
        )  # fmt: skip

    done = run(*uffdprefetch("wrap", "--quiet", *options, "--", "/bin/sh", "-c", "exit 4"))
    assert (done.returncode, "Traceback" in done.stderr) == (4, False)
    done = run(*uffdprefetch("wrap", *options, "--", "no-such-program"))
    assert done.returncode == 127
    done = run(*uffdprefetch("wrap", "--learn-dir", "relative", "--", "true"))
    assert done.returncode == 2
    assert "--learn-dir: relative: the working directory has been removed" in done.stderr


def test_a_program_that_cannot_be_executed_is_126(alone: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    assert wrap(alone, str(tmp_path / "data")).returncode == 126
    assert wrap(alone, str(tmp_path)).returncode == 126


def test_a_script_without_interpreter_line_runs_as_execvp_would(
    alone: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text('echo "$1"; exit 5\n')
    script.chmod(0o755)
    for environment in (alone, {**alone, "UFFDPREFETCH_DISABLE": "1"}):
        done = wrap(environment, str(script), "word")
        assert (done.returncode, done.stdout) == (5, b"word\n")


def test_without_a_command_it_is_a_usage_error(alone: dict[str, str]) -> None:
    for words in (
        *(("wrap",), ("wrap", "--"), ("wrap", "-q"), ("wrap", "--no-such", "--", "echo")),
        *(("wrap", "-o", "%z", "--", "echo"), ("wrap", "--no-such", "echo")),
    ):
        done = subprocess.run(uffdprefetch(*words), env=alone, capture_output=True)
        assert done.returncode == 2, words
        assert done.stdout == b"" and done.stderr


def test_the_command_needs_no_dashes_before_it(alone: dict[str, str]) -> None:
    words = ("wrap", "--policy", "none", "-q", "printf", "%s|", "--policy", "nonsense", "--", "-h")
    done = subprocess.run(uffdprefetch(*words), env=alone, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"--policy|nonsense|--|-h|"), done.stderr


def test_words_after_the_dashes_are_never_ours(alone: dict[str, str]) -> None:
    done = wrap(alone, "printf", "%s|", "--policy", "nonsense", "--", "-h")
    assert done.stdout == b"--policy|nonsense|--|-h|"


def test_a_place_that_cannot_be_written_is_said_before_the_command_runs(
    env: dict[str, str], tmp_path: Path
) -> None:
    words = ("wrap", "-o", str(tmp_path / "no" / "x"), "--", "sh", "-c", "echo ran >&2; exit 4")
    done = subprocess.run(uffdprefetch(*words), env=env, capture_output=True, text=True)
    first, ran, *_ = done.stderr.splitlines()
    assert done.returncode == 4 and ran == "ran"
    assert f"the summary will not be written: there is no directory {tmp_path}/no" in first
    assert "not written" not in "".join(done.stderr.splitlines()[1:])


# ---- streams, descriptors, environment ----------------------------------------------------------


def test_stdin_and_stdout_are_the_jobs_own(alone: dict[str, str]) -> None:
    data = os.urandom(1 << 20)
    done = wrap(alone, "cat", input=data)
    assert done.stdout == data


def test_only_prefixed_lines_are_added_to_stderr(alone: dict[str, str]) -> None:
    done = wrap(alone, "sh", "-c", "echo mine >&2")
    lines = done.stderr.splitlines()
    assert lines.count(b"mine") == 1
    assert all(line == b"mine" or line.startswith(b"uffdprefetch: ") for line in lines)
    assert len(lines) == 2  # one warning: no service


_LIST_DESCRIPTORS = """
import os
for fd in sorted(map(int, os.listdir('/proc/self/fd'))):
    try: print(fd, os.readlink(f'/proc/self/fd/{fd}'))
    except OSError: pass
"""


@pytest.mark.parametrize("with_service", [False, True])
def test_the_job_has_exactly_the_descriptors_that_wrap_had(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path], with_service: bool
) -> None:
    if with_service:
        fake("good")
    else:
        os.symlink("/", tmp_path / "hub")
    with open(tmp_path / "out", "w") as out, open(os.devnull) as null, open(__file__) as extra:
        options = {"stdin": null, "stdout": out, "stderr": null, "pass_fds": (extra.fileno(),)}
        command = python(_LIST_DESCRIPTORS)
        subprocess.run(command, env=env, **options, check=True)  # type: ignore[call-overload]
        out.seek(0)
        plain = Path(out.name).read_text()
        out.truncate()
        wrap(env, *command, **options, capture_output=False, check=True, cwd=tmp_path)
    assert Path(out.name).read_text() == plain
    assert f" {__file__}\n" in plain


def test_a_closed_stderr_is_no_trouble(alone: dict[str, str]) -> None:
    words = " ".join(uffdprefetch("wrap", "--", "sh", "-c", "'echo ok; exit 3'"))
    done = subprocess.run(["sh", "-c", f"exec {words} 2>&-"], env=alone, capture_output=True)
    assert (done.returncode, done.stdout) == (3, b"ok\n")


_STATE = re.compile(rb"^((?:Sig(?:Blk|Ign|Cgt)|Umask|Cpus_allowed):.*|Max .*)$", re.MULTILINE)


@pytest.mark.parametrize(
    "prepare",
    ["plain", "nohup", "sigchld ignored", "usr1 blocked", "int ignored", "low limits"],
)
def test_signal_state_mask_and_limits_are_inherited(alone: dict[str, str], prepare: str) -> None:
    def in_child() -> None:
        os.umask(0o027)
        if prepare == "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        elif prepare == "sigchld ignored":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        elif prepare == "usr1 blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
        elif prepare == "int ignored":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif prepare == "low limits":
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))

    # cat and no shell: dash sets SIGCHLD back to the default for itself and its children.
    job = ("cat", "/proc/self/status", "/proc/self/limits")
    plain = subprocess.run(job, env=alone, capture_output=True, preexec_fn=in_child)
    wrapped = wrap(alone, *job, preexec_fn=in_child)
    assert len(_STATE.findall(plain.stdout)) > 15
    assert _STATE.findall(wrapped.stdout) == _STATE.findall(plain.stdout)
    # ... and the status comes through whatever happens to SIGCHLD.
    assert wrap(alone, "sh", "-c", "exit 9", preexec_fn=in_child).returncode == 9


def test_session_and_process_group_are_inherited(alone: dict[str, str]) -> None:
    code = "import os; print(os.getpgid(0), os.getsid(0))"
    done = wrap(alone, *python(code))
    assert done.stdout.split() == [str(os.getpgid(0)).encode(), str(os.getsid(0)).encode()]


def _environment_of(done: subprocess.CompletedProcess[bytes]) -> dict[bytes, bytes]:
    pairs = (entry.partition(b"=") for entry in done.stdout.split(b"\0") if entry)
    return {name: value for name, _, value in pairs if name != b"_"}


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C"}, {"LANG": "C.UTF-8"}])
def test_without_a_service_the_environment_is_untouched(
    alone: dict[str, str], locale: dict[str, str]
) -> None:
    """In the C locale the interpreter adds LC_CTYPE for itself; the job must not see it."""
    base = {k: v for k, v in alone.items() if k not in ("LANG", "LC_ALL", "LC_CTYPE")}
    given = {**base, **locale, "ODD": "a\nb", "PREFIXED": "=x="}
    done = wrap(given, "env", "-0")
    assert _environment_of(done) == {
        os.fsencode(name): os.fsencode(value) for name, value in given.items() if name != "_"
    }


def test_with_a_service_only_our_variables_are_added(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("good")
    done = wrap(env, "env", "-0", cwd=tmp_path)
    before = {os.fsencode(name): os.fsencode(value) for name, value in env.items() if name != "_"}
    after = _environment_of(done)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {
        b"LD_PRELOAD",
        b"ASAN_OPTIONS",  # else a program of AddressSanitizer's does not start
        b"PYTHONPATH",  # a sitecustomize.py that waits for PyTorch
        b"UFFDPREFETCH_SOCKET",
        b"UFFDPREFETCH_MIN_SIZE",
        b"UFFDPREFETCH_LISTEN",
    }
    assert after[b"UFFDPREFETCH_MIN_SIZE"] == str(16 << 20).encode()


def test_an_existing_preload_is_kept_behind_ours(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("good")
    libc_like = next(Path("/lib").glob("*/libm.so.6"))
    env["LD_PRELOAD"] = str(libc_like)
    done = wrap(env, "env", "-0", cwd=tmp_path)
    ours, *old = _environment_of(done)[b"LD_PRELOAD"].split(b":")
    assert b"_preload" in ours
    assert old == [os.fsencode(libc_like)]


def test_an_existing_python_path_is_kept_behind_ours_unless_torch_is_left_alone(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("good")
    env["PYTHONPATH"] = "/some/where:/else"
    ours, *old = _environment_of(wrap(env, "env", "-0", cwd=tmp_path))[b"PYTHONPATH"].split(b":")
    assert (Path(os.fsdecode(ours)) / "sitecustomize.py").exists()
    assert old == [b"/some/where", b"/else"]
    for off in (("--torch", "off"), ("--policy", "none")):
        words = uffdprefetch("wrap", "-q", *off, "--", "env", "-0")
        done = subprocess.run(words, env=env, capture_output=True, cwd=tmp_path)
        assert _environment_of(done)[b"PYTHONPATH"] == b"/some/where:/else"


def test_policy_none_keeps_the_jobs_own_advice(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("good")
    words = uffdprefetch("wrap", "-q", "--policy", "none", "--min-size", "1MiB", "--", "env", "-0")
    done = subprocess.run(words, env=env, capture_output=True, cwd=tmp_path)
    environment = _environment_of(done)
    assert environment[b"UFFDPREFETCH_KEEP_ADVICE"] == b"1"
    assert environment[b"UFFDPREFETCH_MIN_SIZE"] == b"1048576"


def test_engine_off_preloads_nothing(
    env: dict[str, str], tmp_path: Path, fake: Callable[..., Path]
) -> None:
    fake("good")
    words = uffdprefetch("wrap", "-q", "--engine", "off", "--", "env", "-0")
    done = subprocess.run(words, env=env, capture_output=True, cwd=tmp_path)
    assert b"LD_PRELOAD" not in _environment_of(done)


def test_disable_becomes_the_job_itself(env: dict[str, str], tmp_path: Path) -> None:
    env["UFFDPREFETCH_DISABLE"] = "1"
    env["UFFDPREFETCH_POLICY"] = "nonsense"  # not even looked at
    job = subprocess.Popen(
        uffdprefetch("wrap", "--", "sh", "-c", "echo $$; grep SigIgn /proc/self/status"),
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = job.communicate(timeout=HANG_SECONDS)
    assert out.split()[0] == str(job.pid).encode()
    ignored = int(out.split()[-1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)
    assert err == b""
    assert not (tmp_path / "hub").exists()


# ---- signals ------------------------------------------------------------------------------------

_TRAPS = """
import os, signal, sys, time
def got(number, frame):
    seen.append(number)
    os.write(1, signal.Signals(number).name.encode() + b'\\n')  # print() is not reentrant
seen = []
for name in sys.argv[1].split(','):
    signal.signal(getattr(signal, name), got)
print('ready', os.getpid(), flush=True)
while len(seen) < int(sys.argv[2]):
    time.sleep(0.01)
sys.exit(40 + len(seen))
"""


def trap(names: str, count: int) -> tuple[str, ...]:
    return (*python(_TRAPS), names, str(count))


def start_ready(
    children: Start, env: dict[str, str], command: tuple[str, ...], **options: object
) -> tuple[subprocess.Popen[bytes], int]:
    """A running wrap and the pid of its job, which has said that it is ready."""
    process = children(
        uffdprefetch("wrap", "--", *command),
        **{"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, **options},
    )
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == b"ready"
    return process, int(pid)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGINT"])
def test_a_signal_sent_to_wrap_reaches_the_job_once(
    alone: dict[str, str], children: Start, name: str
) -> None:
    process, job = start_ready(children, alone, trap(f"{name},SIGALRM", 2))
    process.send_signal(getattr(signal, name))
    assert process.stdout is not None
    assert process.stdout.readline().strip() == name.encode()
    # A second copy would come before this one, which the job alone gets.
    os.kill(job, signal.SIGALRM)
    assert process.stdout.readline().strip() == b"SIGALRM"
    assert process.wait(HANG_SECONDS) == 42


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_a_signal_sent_to_the_process_group_reaches_the_job_once(
    alone: dict[str, str], children: Start, name: str
) -> None:
    """As mpirun, timeout(1) and Slurm's pgid tracking send them."""
    process, job = start_ready(children, alone, trap(f"{name},SIGALRM", 2), start_new_session=True)
    assert process.stdout is not None
    # wrap takes it when the job has taken its own: a second copy would not melt into the first
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process_state(process.pid) == "T", "wrap to stop")
    os.killpg(process.pid, getattr(signal, name))
    assert process.stdout.readline().strip() == name.encode()
    process.send_signal(signal.SIGCONT)
    number = getattr(signal, name)
    wait_until(lambda: _taken(process.pid, number), "wrap to take the signal")
    wait_until(lambda: _taken(process.pid, signal.SIGCONT), "wrap to look at its signals")
    os.kill(job, signal.SIGALRM)
    assert process.stdout.readline().strip() == b"SIGALRM"
    assert process.wait(HANG_SECONDS) == 42


#: Takes signals one by one: a handler of Python's runs once for several of a kind.
_ALL = """
import os, signal, sys
signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", os.getpid(), flush=True)
for _ in range(int(sys.argv[1])):
    print(signal.sigwaitinfo(signals).si_signo, flush=True)
"""


def test_every_signal_that_can_be_caught_reaches_the_job(
    alone: dict[str, str], children: Start
) -> None:
    """Even those of faults, those that are ignored by default, and each of a queue of real-time
    ones; SIGCHLD is about wrap's own children, and SIGWINCH is the terminal's."""
    unsent = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGWINCH}
    unsent |= {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}  # SIGCONT discards them
    sent = sorted(map(int, signal.valid_signals() - unsent))
    sent += [signal.SIGRTMIN + 1, signal.SIGRTMAX, signal.SIGRTMAX]
    process, _ = start_ready(children, alone, (*python(_ALL), str(len(sent))))
    for number in sent:
        process.send_signal(number)
    assert process.wait(HANG_SECONDS) == 0
    assert process.stdout is not None
    assert sorted(map(int, process.stdout)) == sorted(sent)


def test_a_signal_that_was_ignored_at_the_start_is_passed_on_to_a_job_that_handles_it(
    alone: dict[str, str], children: Start
) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process, _ = start_ready(children, alone, trap("SIGUSR1,SIGHUP", 2), preexec_fn=ignore)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGHUP)
    assert process.wait(HANG_SECONDS) == 42


def test_what_was_pending_or_set_before_wrap_is_the_jobs(alone: dict[str, str]) -> None:
    """A signal that waits, and a timer: `perl -e 'alarm 9; exec @ARGV'`."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.setitimer(signal.ITIMER_REAL, 10 * HANG_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, 10 * HANG_SECONDS)

    code = (
        "import signal; signal.sigwait({signal.SIGUSR1});"
        "print(all(signal.getitimer(w)[0] for w in (signal.ITIMER_REAL, signal.ITIMER_PROF)))"
    )
    assert wrap(alone, *python(code), preexec_fn=prepare).stdout == b"True\n"


def test_what_fails_beside_the_job_does_not_leave_it(alone: dict[str, str]) -> None:
    code = (
        "import sys; from uffdprefetch.base import spawn\n"
        "def fails(*_): raise OSError('no room')\n"
        "status = spawn.run(['sh', '-c', 'read x; exit 5'], {}, fails, fails, fails, fails)\n"
        "sys.exit(status >> 8)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=alone, input=b"on", capture_output=True,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 5 and done.stderr.count(b"OSError: no room\n") == 2, done.stderr


def test_another_ones_signal_to_wrap_alone_is_passed_on_after_one_to_the_group(
    alone: dict[str, str], children: Start
) -> None:
    process, _ = start_ready(children, alone, trap("SIGUSR1,SIGUSR2", 3), start_new_session=True)
    assert process.stdout is not None
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.stdout.readline().strip() == b"SIGUSR1"
    process.send_signal(signal.SIGUSR2)
    assert process.stdout.readline().strip() == b"SIGUSR2"
    subprocess.run(["sh", "-c", f"kill -USR1 {process.pid}"], check=True)
    assert process.stdout.readline().strip() == b"SIGUSR1"
    assert process.wait(HANG_SECONDS) == 43


def test_a_signal_that_came_while_both_were_stopped_reaches_the_job_once(
    alone: dict[str, str], children: Start
) -> None:
    """As a shell ends a stopped job: SIGTERM and SIGCONT to its group."""
    process, job = start_ready(children, alone, trap("SIGTERM,SIGALRM", 2), start_new_session=True)
    # A session leader's group would be orphaned, where SIGTSTP does nothing: the stop is ours.
    os.killpg(process.pid, signal.SIGSTOP)
    wait_until(lambda: process_state(process.pid) == process_state(job) == "T", "both to stop")
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGCONT)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"SIGTERM"
    wait_until(lambda: _taken(process.pid, signal.SIGTERM), "wrap to look at its signals")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: _taken(process.pid, signal.SIGCONT), "wrap to look at its signals")
    os.kill(job, signal.SIGALRM)
    assert process.stdout.readline().strip() == b"SIGALRM"
    assert process.wait(HANG_SECONDS) == 42


def test_the_bystander_ends_with_wrap_however_that_ends(
    alone: dict[str, str], children: Start
) -> None:
    process, job = start_ready(children, alone, trap("SIGUSR1", 1))
    others = set(map(int, _children(process.pid))) - {job}
    assert others
    process.kill()
    for pid in others:
        wait_until(functools.partial(process_gone, pid), "the end of wrap's other children")
    os.kill(job, signal.SIGUSR1)


def test_the_bystander_holds_no_descriptor_of_the_jobs(
    alone: dict[str, str], children: Start
) -> None:
    """Who reads the job's output must see its end when the job and wrap have closed theirs."""
    process, job = start_ready(children, alone, trap("SIGUSR1", 1))
    for pid in set(map(int, _children(process.pid))) - {job}:
        wait_until(
            lambda pid=pid: len(os.listdir(f"/proc/{pid}/fd")) == 1,  # type: ignore[misc]
            "the bystander to have nothing but its pipe",
        )
    os.kill(job, signal.SIGUSR1)
    assert process.wait(HANG_SECONDS) == 41


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _taken(pid: int, number: int) -> bool:
    """Whether no such signal waits to be taken and the process waits for the next one."""

    def mask(name: str) -> int:
        return int(status.partition(name + ":")[2].split()[0], 16)

    status = Path(f"/proc/{pid}/status").read_text()
    # sigwaitinfo(2) unblocks what it waits for as long as it sleeps
    waits = not mask("SigBlk") >> (signal.SIGCHLD - 1) & 1
    return waits and not mask("ShdPnd") >> (number - 1) & 1


# ---- a job that stops ---------------------------------------------------------------------------

_STOPS = """
import os, signal, sys
print("ready", os.getpid(), flush=True)
os.kill(os.getpid(), int(sys.argv[1]))
sys.stdin.readline()
sys.exit(7)
"""


def _next_change(process: subprocess.Popen[bytes]) -> int:
    """What a shell sees: the next stop, continuation or end, as of waitpid(2)."""
    found = [0, 0]

    def changed() -> bool:
        options = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        found[:] = os.waitpid(process.pid, options)
        return bool(found[0])

    wait_until(changed, "a change of wrap's state")
    if os.WIFEXITED(found[1]) or os.WIFSIGNALED(found[1]):
        process.returncode = os.waitstatus_to_exitcode(found[1])
    return found[1]


_COMMANDS = {
    "wrap": uffdprefetch("wrap", "--"),
    "wrap in wrap": [*uffdprefetch("wrap", "--"), *uffdprefetch("wrap", "--")],
    "cluster": uffdprefetch("cluster", "--launcher", "/no/such", "--"),
}


@pytest.mark.parametrize(
    ("command", "number"),
    [
        *(("wrap", number) for number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN)),
        *((command, signal.SIGTSTP) for command in _COMMANDS if command != "wrap"),
    ],
)
def test_a_job_that_stops_is_seen_stopped_and_when_it_goes_on_so_does_wrap(
    alone: dict[str, str], children: Start, command: str, number: int
) -> None:
    process = children(
        [*_COMMANDS[command], *python(_STOPS), str(int(number))], env=alone,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=os.setpgrp,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    job = int(process.stdout.readline().split()[1])
    status = _next_change(process)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == number
    os.kill(job, signal.SIGCONT)  # not to wrap
    assert os.WIFCONTINUED(_next_change(process))
    process.stdin.close()
    assert os.waitstatus_to_exitcode(_next_change(process)) == 7


@pytest.mark.root
def test_a_signal_that_may_not_be_passed_on_to_another_users_job_does_not_end_wrap(
    alone: dict[str, str], children: Start
) -> None:
    """As of a job that is `sudo`. SIGCONT may be sent within a session, and comes after it."""
    code = (
        "import os, signal, sys; os.setuid(65534)\n"
        "signal.signal(signal.SIGCONT, lambda *_: sys.exit(7))\n"
        "print('ready', os.getpid(), flush=True)\n"
        "while True: signal.pause()"
    )
    command = ["setpriv", "--bounding-set", "-kill", *uffdprefetch("wrap", "--", *python(code))]
    process = children(command, env=alone, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline().startswith(b"ready")
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: _taken(process.pid, signal.SIGUSR1), "wrap to take the signal")
    process.send_signal(signal.SIGCONT)
    assert process.wait(HANG_SECONDS) == 7


def test_a_job_that_is_killed_while_it_is_stopped_ends_wrap(
    alone: dict[str, str], children: Start
) -> None:
    process, job = start_ready(
        children, alone, (*python(_STOPS), str(int(signal.SIGSTOP))), preexec_fn=os.setpgrp
    )
    assert os.WIFSTOPPED(_next_change(process))
    os.kill(job, signal.SIGKILL)
    assert process.wait(HANG_SECONDS) == -signal.SIGKILL


def test_a_job_that_has_left_an_orphaned_group_is_seen_stopped(
    alone: dict[str, str], children: Start
) -> None:
    """There SIGTSTP stops nobody: wrap stops by SIGSTOP."""
    code = "import os; os.setpgid(0, 0)\n" + _STOPS
    process, _ = start_ready(
        children, alone, (*python(code), str(int(signal.SIGTSTP))),
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert os.WIFSTOPPED(_next_change(process))
    process.send_signal(signal.SIGCONT)  # wrap passes it on
    assert process.wait(HANG_SECONDS) == 7


@pytest.mark.parametrize("how", ["SIG_IGN", "lambda *_: None"])
@pytest.mark.parametrize("to_group", [True, False])
def test_wrap_does_not_stop_where_the_job_does_not(
    alone: dict[str, str], children: Start, how: str, to_group: bool
) -> None:
    code = (
        f"import os, signal; signal.signal(signal.SIGTSTP, signal.{how})\n"
        if how == "SIG_IGN"
        else f"import os, signal; signal.signal(signal.SIGTSTP, {how})\n"
    )
    code += "print('ready', os.getpid(), flush=True); input(); raise SystemExit(7)"
    process, _ = start_ready(
        children, alone, python(code), stdin=subprocess.PIPE, preexec_fn=os.setpgrp
    )
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGTSTP)
    wait_until(lambda: _taken(process.pid, signal.SIGTSTP), "wrap to take the signal")
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(HANG_SECONDS) == 7


# ---- the end ------------------------------------------------------------------------------------


def test_wrap_ends_with_the_signal_it_passed_on(alone: dict[str, str], children: Start) -> None:
    code = "import os, signal; print('ready', os.getpid(), flush=True); signal.pause()"
    process, _ = start_ready(children, alone, python(code))
    process.terminate()
    assert process.wait(HANG_SECONDS) == -signal.SIGTERM


def test_the_job_lives_on_when_wrap_is_killed(alone: dict[str, str], children: Start) -> None:
    process, job = start_ready(children, alone, trap("SIGUSR1", 1))
    process.kill()
    assert process.wait(HANG_SECONDS) == -signal.SIGKILL
    os.kill(job, signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"SIGUSR1"
    wait_until(lambda: process_gone(job), "the end of the orphaned job")


def _on_a_terminal(
    children: Start, env: dict[str, str], command: tuple[str, ...]
) -> tuple[subprocess.Popen[bytes], int, int]:
    """wrap as the foreground group of a new terminal: (process, job's pid, terminal's master)."""
    master, slave = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        # Opening a terminal without O_NOCTTY makes it the controlling one of a session leader.
        os.close(os.open(os.ttyname(slave), os.O_RDWR))

    process, job = start_ready(
        children, env, command, stdin=slave, stderr=slave, preexec_fn=take_terminal
    )
    os.close(slave)
    return process, job, master


def test_ctrl_c_reaches_the_job_once_and_its_status_is_reported(
    alone: dict[str, str], children: Start
) -> None:
    process, job, master = _on_a_terminal(children, alone, trap("SIGINT,SIGALRM", 2))
    os.write(master, b"\x03")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"SIGINT"
    os.kill(job, signal.SIGALRM)
    assert process.stdout.readline().strip() == b"SIGALRM"
    assert process.wait(HANG_SECONDS) == 42
    os.close(master)


@pytest.mark.parametrize(("key", "number"), [(b"\x03", signal.SIGINT), (b"\x1c", signal.SIGQUIT)])
def test_a_job_that_dies_of_the_keyboard_takes_wrap_with_it(
    alone: dict[str, str], children: Start, key: bytes, number: int
) -> None:
    code = (
        "import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
        "signal.signal(signal.SIGINT, signal.SIG_DFL);"
        "print('ready', os.getpid(), flush=True); signal.pause()"
    )
    process, _, master = _on_a_terminal(children, alone, (sys.executable, "-I", "-c", code))
    os.write(master, key)
    assert process.wait(HANG_SECONDS) == -number
    os.close(master)


def test_ctrl_z_stops_both_and_continuing_continues_both(
    alone: dict[str, str], children: Start
) -> None:
    # A stop of an orphaned group is ignored by the kernel: a shell must be there, as a parent in
    # the same session. This interpreter plays it.
    shell = (
        "import os, subprocess, sys\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setpgid(0, 0)\n"
        "    os.execv(sys.argv[1], sys.argv[1:])\n"
        "try: os.setpgid(pid, pid)\n"
        "except PermissionError: pass\n"
        "import signal; signal.signal(signal.SIGTTOU, signal.SIG_IGN)\n"
        "os.tcsetpgrp(0, pid)\n"
        "print('wrap', pid, flush=True)\n"
        "_, status = os.waitpid(pid, 0)\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    master, slave = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(slave), os.O_RDWR))

    process = children(
        [sys.executable, "-I", "-c", shell, *uffdprefetch("wrap", "--", *trap("SIGUSR1", 1))],
        env=alone, stdin=slave, stdout=subprocess.PIPE, stderr=slave, preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(slave)
    assert process.stdout is not None
    said = dict(process.stdout.readline().split() for _ in range(2))
    wrapper, job = int(said[b"wrap"]), int(said[b"ready"])
    os.write(master, b"\x1a")
    wait_until(lambda: process_state(wrapper) == "T", "wrap to stop")
    wait_until(lambda: process_state(job) == "T", "the job to stop")
    os.kill(wrapper, signal.SIGCONT)  # to wrap alone: it passes this on
    wait_until(lambda: process_state(job) == "S", "the job to go on")
    os.kill(wrapper, signal.SIGUSR1)
    assert process.wait(HANG_SECONDS) == 41
    os.close(master)
