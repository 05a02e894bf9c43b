# SPDX-License-Identifier: Apache-2.0
"""The C under AddressSanitizer, UndefinedBehaviorSanitizer, LeakSanitizer and ThreadSanitizer.

`make asan tsan` builds the preload object (its agent as a pthread: the run-times must know every
thread), a job that does everything to its mappings (tests/programs/preload_stress.c), and the
service's part with programs around it (tests/programs/helper_stress.c, compare_stress.c and
paths_stress.c; for the node's page pool pool_stress.c and pool_trouble.c, for what lies between
nodes net_stress.c, for how threads wait cond_stress.c). Any report fails. The last tests break the
C on purpose, in a copy, to see that a report comes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from components import why_no_checkpoints
from conftest import HANG_SECONDS, require
from harness import AGENT_STATES, Start, hammered, programs
from paths import ROOT
from start_profiles import Replays, directory_entry, file_entry, name_entry

from uffdprefetch.launch.environment import TEST_PRELOAD_VARIABLE
from uffdprefetch.native.preload import preload_object
from uffdprefetch.native.start_log import StartLog
from uffdprefetch.protocol import start_log

pytest_plugins = ("harness_fixtures",)
pytestmark = pytest.mark.slow

#: The job's stderr may be closed or a pipe that a test reads: reports go to files.
VARIABLES = {
    "asan": {
        "ASAN_OPTIONS": "log_path={0}/report:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "log_path={0}/report:print_stacktrace=1",
    },
    # die_after_fork: our forked children start an agent, which is a thread.
    "tsan": {
        "TSAN_OPTIONS": "log_path={0}/report:halt_on_error=1:die_after_fork=0:atexit_sleep_ms=50"
    },
}
#: No complaint: LeakSanitizer misses an agent that ended as a crash would, without pthread_exit.
LOST_THREAD = re.compile(r"^==\d+==Running thread \d+ was not suspended\..*\n", re.MULTILINE)
THREADS = "4"
GOOD = "all as it should be\n"
#: ThreadSanitizer's symbolizer maps the program's files through our mmap while it holds the lock of
#: its thread registry: where that meets a second race it waits for itself, in one of three runs.
RUNS_OF_THE_BROKEN = 8
STEPS = {"asan": "400", "tsan": "300", "plain": "1500"}


@dataclass(frozen=True)
class Build:
    """A build of the C, and where its reports go. ``plain`` is the preload object as it ships."""

    kind: str
    directory: Path
    reports: Path
    preload: str

    @property
    def program(self) -> str:
        return str(self.directory / "preload_stress")

    @property
    def storm(self) -> list[str]:
        """How much a job of this build does in a few seconds: threads, and steps of each."""
        return ["storm", THREADS, STEPS[self.kind]]

    @property
    def variables(self) -> dict[str, str]:
        """What a job of this build needs in its environment."""
        values = VARIABLES.get(self.kind, {})
        variables = {name: value.format(self.reports) for name, value in values.items()}
        if self.preload:
            variables[TEST_PRELOAD_VARIABLE] = self.preload
        return variables

    def report(self) -> str:
        """What the sanitizers complain of."""
        text = "".join(p.read_text(errors="replace") for p in sorted(self.reports.iterdir()))
        return LOST_THREAD.sub("", text)

    def run(
        self, words: list[str], env: dict[str, str], seconds: float = 2 * HANG_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of this build by itself, without wrap; one that hangs is killed."""
        env = {**env, **self.variables}
        if self.preload and "LD_PRELOAD" in env:
            env["LD_PRELOAD"] = self.preload
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # forked children that hang
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def clean(self, done: subprocess.CompletedProcess[str]) -> str:
        """stdout of a run that nobody complains of."""
        assert (done.returncode, self.report()) == (0, ""), done.stderr
        return done.stdout


def runtime(kind: str) -> str:
    """The path of the compiler's run-time; skips where it does not come with the compiler."""
    require(shutil.which("cc") and shutil.which("make"), "no C compiler or no make")
    name = f"lib{kind}.so"
    found = subprocess.run(
        ["cc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    require(os.path.isabs(found), f"the compiler has no {name}: install libgcc's, or CC=gcc")
    return os.path.realpath(found)


def make(directory: Path, *targets: str) -> None:
    done = subprocess.run(["make", "-s", "-C", str(directory), *targets], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def sanitized(kind: str, root: Path, reports: Path, *targets: str) -> Build:
    """Build ``targets`` (or all) of a tree; the job's program is always this checkout's."""
    library = runtime(kind)
    make(ROOT, kind)
    if targets:
        make(root, *targets)
    reports.mkdir()
    preload = f"{library}:{root}/build/{kind}/preload.so"
    build = Build(kind, ROOT / "build" / kind, reports, preload)
    works = build.run([build.program, str(reports.parent / "tiny"), "make", "1"], dict(os.environ))
    runs = "unexpected memory mapping" not in build.report()
    require(runs, f"{kind} does not run on this kernel: lower vm.mmap_rnd_bits")
    build.clean(works)
    return build


@pytest.fixture(params=("asan", "tsan"))
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    """Each sanitizer's build."""
    return sanitized(request.param, ROOT, tmp_path / "reports")


@pytest.fixture(params=("asan", "tsan", "plain"))
def any_build(
    request: pytest.FixtureRequest, tmp_path: Path, compiled: Callable[..., str]
) -> Build:
    """The same and the preload object as it ships."""
    if request.param != "plain":
        return sanitized(request.param, ROOT, tmp_path / "reports")
    (tmp_path / "reports").mkdir()
    program = compiled("preload_stress")
    return Build("plain", Path(program).parent, tmp_path / "reports", "")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, compiled: Callable[..., str]) -> Path:
    """24 MiB of which preload_stress knows every word."""
    require(why_no_checkpoints() is None, f"no userfaultfd: {why_no_checkpoints()}")
    path = tmp_path_factory.mktemp("stress") / "data"
    subprocess.run([compiled("preload_stress"), str(path), "make", "24"], check=True)
    return path


# ---- the service's part -------------------------------------------------------------------------


def test_the_service_s_c_is_clean(build: Build, tmp_path: Path) -> None:
    require(why_no_checkpoints() is None, f"no userfaultfd: {why_no_checkpoints()}")
    words = [str(build.directory / "helper_stress"), str(tmp_path)]
    assert build.clean(build.run(words, dict(os.environ))) == "all as it should be\n"


def test_what_compares_copies_with_their_file_is_clean(build: Build, tmp_path: Path) -> None:
    words = [str(build.directory / "compare_stress"), str(tmp_path)]
    assert build.clean(build.run(words, dict(os.environ))) == "all as it should be\n"


def test_what_reads_files_by_name_is_clean(build: Build, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    words = [str(build.directory / "paths_stress"), str(directory)]
    assert build.clean(build.run(words, dict(os.environ))) == "all as it should be\n"


def test_no_start_profile_is_believed(build: Build) -> None:
    words = [str(build.directory / "profile_fuzz")]
    assert build.clean(build.run(words, dict(os.environ))) == "all as it should be\n"


def test_a_replay_of_a_start_is_clean(build: Build, tmp_path: Path) -> None:
    """Of files that are there, that were changed, and that are none."""
    replays, entries = Replays(tmp_path), []
    for number in range(300):
        path = tmp_path / f"file{number}"
        path.write_bytes(b"x" * (1 + 1000 * number))
        entries.append(file_entry(path, ((0, 1), (4, 1)) if number == 299 else ()))
    (tmp_path / "file7").write_bytes(b"yy")
    (tmp_path / "file8").unlink()
    os.mkfifo(tmp_path / "file8")
    entries += [directory_entry(tmp_path), name_entry(tmp_path / "missing")]
    words = [str(build.directory / "replay"), *replays.of(*entries).words()[1:]]
    shell = ["sh", "-c", 'exec "$@" <>"$0"', str(replays.result), *words]
    build.clean(build.run(shell, dict(os.environ)))
    told = replays.told()
    assert (told["state"], told["skipped"]) == ("done", {"changed": 1, "no_file": 1})
    assert (told["files"], told["directories"], told["names"]) == (298, 1, 1)


def test_what_looks_who_reads_is_clean(build: Build, tmp_path: Path) -> None:
    words = [str(build.directory / "reads_stress"), str(tmp_path)]
    assert build.clean(build.run(words, dict(os.environ))) == "all as it should be\n"


def test_no_signal_to_a_thread_that_waits_is_lost(build: Build) -> None:
    words = [str(build.directory / "cond_stress")]
    assert build.clean(build.run(words, dict(os.environ))).endswith(" taken\n")


@pytest.mark.parametrize("program", ["pool_stress", "pool_trouble"])
def test_the_pool_s_c_is_clean(program: str, build: Build, tmp_path: Path) -> None:
    require(why_no_checkpoints() is None, f"no userfaultfd: {why_no_checkpoints()}")
    words = [str(build.directory / program), str(tmp_path)]
    assert build.clean(build.run(words, dict(os.environ))) == "all as it should be\n"


def test_the_c_between_nodes_is_clean(build: Build, tmp_path: Path) -> None:
    require(why_no_checkpoints() is None, f"no userfaultfd: {why_no_checkpoints()}")
    words = [str(build.directory / "net_stress"), str(tmp_path)]
    assert build.clean(build.run(words, dict(os.environ))).endswith(" KiB read instead\n")


# ---- the job's part -----------------------------------------------------------------------------


def test_the_preload_is_clean_while_checkpoints_come_and_go_without_end(
    any_build: Build, data: Path, tmp_path: Path, hammer: Any
) -> None:
    stop = hammer(1, file=data)
    words = [any_build.program, str(data), *any_build.storm]
    said = any_build.clean(any_build.run(words, hammered(tmp_path)))
    counts = stop()
    assert said.count("at") == 2
    assert counts.pop("bypassed") == []
    del counts["failed"]  # of a page that went meanwhile: none need have
    assert all(counts.values()), counts  # also in forked children, and given back by the service
    assert counts["faults"] > 100


def test_the_preload_is_clean_under_the_real_service(
    any_build: Build, data: Path, job: Start
) -> None:
    words = [any_build.program, str(data), *any_build.storm]
    storm = job(words, **any_build.variables).finish()
    assert any_build.report() == ""
    storm.good()
    assert storm.summary is not None
    assert storm.summary["rung"] == 1 and storm.summary["totals"]["checkpoints"]["laid"] > 20


def test_the_preload_is_clean_when_the_service_dies_under_it(
    any_build: Build, data: Path, job: Start
) -> None:
    words = [any_build.program, str(data), *any_build.storm]
    storm = job(words, **any_build.variables)
    assert storm.line() == {"at": "half"}
    storm.kill_service()
    done = storm.finish()
    assert any_build.report() == ""
    assert done.good().lines == [{"at": "end"}]


@pytest.mark.parametrize(
    ("step", "state"),
    [(1, ""), (40, ""), (500, ""), (1, "detaching"), (5, "detaching"), (20, "laying")],
)
def test_the_preload_is_clean_when_its_agent_dies(
    any_build: Build, data: Path, tmp_path: Path, hammer: Any, step: int, state: str
) -> None:
    """At a step of any state; or of one, in which it may have been asked to end."""
    stop = hammer(2, file=data)
    log = tmp_path / "exit"
    env = hammered(tmp_path)
    env["UFFDPREFETCH_TEST_AGENT_EXIT"] = str(step)
    env["UFFDPREFETCH_TEST_AGENT_EXIT_LOG"] = str(log)
    if state:
        env["UFFDPREFETCH_TEST_AGENT_EXIT_STATE"] = str(AGENT_STATES.index(state))
    words = [any_build.program, str(data), "storm", THREADS, "100", "unwatched"]
    any_build.clean(any_build.run(words, env))
    stop()
    assert log.read_text()


def test_thousands_of_mappings_and_more_at_once_than_are_managed(
    any_build: Build, data: Path, tmp_path: Path, hammer: Any
) -> None:
    stop = hammer(3, file=data)
    words = [any_build.program, str(data), "many", THREADS, "300"]
    any_build.clean(any_build.run(words, hammered(tmp_path)))
    # the program waits until 100 of its 1100 at once have checkpoints; at the most each mapping is
    # told of as it comes, and once more where a part was given back
    assert 100 <= stop()["attached"] <= 2 * (4 * 300 + 1100)


def test_however_the_job_ends(any_build: Build, data: Path, tmp_path: Path, hammer: Any) -> None:
    stop = hammer(4, file=data)
    any_build.clean(any_build.run([any_build.program, str(data), "ends"], hammered(tmp_path)))
    assert stop()["peers"] > 6


def test_what_notes_what_is_opened_is_clean(any_build: Build, tmp_path: Path) -> None:
    """Many processes and threads at once, in a log that has room for them all and then in one that
    has not."""
    program = any_build.program.replace("preload_stress", "opens_stress")
    if any_build.kind == "plain":
        program = programs(tmp_path, "opens_stress")
    fd = start_log.make()
    log = StartLog(fd)
    start_log.publish(str(tmp_path / "s"), os.getpid(), fd)
    env = dict(os.environ, LD_PRELOAD=preload_object())
    env[start_log.VARIABLE] = str(tmp_path / "s") + start_log.SUFFIX
    for _ in range(2):
        assert any_build.clean(any_build.run([program, str(tmp_path)], env)) == GOOD
        assert log.lost == 0
    own = [one.path for one in log.take(1 << 20) if one.path.startswith(f"{tmp_path}/")]
    # 3 processes with 4 threads, of 400 names of their own each, twice; and 400 that are the same
    assert len(own) == len(set(own)) == 2 * 3 * 4 * 400 + 400
    os.pwrite(fd, (1 << 40).to_bytes(8, "little"), 0)  # as if so much of it were taken
    assert any_build.clean(any_build.run([program, str(tmp_path)], env)) == GOOD
    log.close()
    os.close(fd)


# ---- would they say anything? -------------------------------------------------------------------

PRELOAD, HELPER, POOL = "preload.so", "helper_stress", "pool_stress"
COMPARE, NET, COND = "compare_stress", "net_stress", "cond_stress"
PATHS, READS, PROFILE = "paths_stress", "reads_stress", "profile_fuzz"
#: (sanitizer, what is built, file, text, its replacement, what the report says)
BREAKAGES = {
    "the agent writes past an array": (
        "asan", PRELOAD, "job/link.c",
        "i < sizeof(sun.sun_path)", "i <= sizeof(sun.sun_path)",
        "runtime error: index 108 out of bounds|stack-buffer-overflow",
    ),
    "the agent reads past its stack": (
        "asan", PRELOAD, "job/agent.c",
        "if (events[UP_SERVICE_SAYS] & EPOLLOUT)", "if (events[UP_SOURCES] & EPOLLOUT)",
        "out of bounds|stack-buffer-overflow",
    ),
    "the constructor loses memory": (
        "asan", PRELOAD, "job/preload.c",
        "\tread_rank();\n",
        "\tread_rank();\n\t*(void *volatile *)&up_job.agent_stack = malloc(77);\n"
        "\tup_job.agent_stack = NULL;\n",
        "LeakSanitizer: detected memory leaks",
    ),
    "a thread of the job looks at what is the agent's alone": (
        "tsan", PRELOAD, "job/request.c",
        "return address < r->address", "return r->queued < 9 && address < r->address",
        "data race.*(.|\n)*up_overlaps",
    ),
    "the service writes past an array": (
        "asan", HELPER, "service/residency.c",
        "max_runs < SCAN_REGIONS ? (uint64_t)max_runs", "max_runs < 40 ? (uint64_t)max_runs + 1",
        "heap-buffer-overflow",
    ),
    "a worker forgets a lock": (
        "tsan", HELPER, "service/warm.c",
        "pthread_mutex_lock(&p->lock);\n\t\tfor (uint64_t i = 0; i < n; i++)\n"
        "\t\t\tp->result[p->done_head++ % QUEUE] = r[i];",
        "for (uint64_t i = 0; i < n; i++)\n\t\t\tp->result[p->done_head++ % QUEUE] = r[i];\n"
        "\t\tpthread_mutex_lock(&p->lock);",
        "data race",
    ),
    "a record of the kernel's is taken without a look at what was written before": (
        "tsan", HELPER, "service/bpf_ring.c",
        "(const uint32_t *)record, __ATOMIC_ACQUIRE", "(const uint32_t *)record, __ATOMIC_RELAXED",
        "data race.*(.|\n)*up_bpf_ring_drain",
    ),
    "more records are taken than there is room for": (
        "asan", HELPER, "service/bpf_ring.c",
        "n < max", "n <= max",
        "heap-buffer-overflow",
    ),
    "a round goes on with what it was told to compare after giving it back": (
        "asan", COMPARE, "service/checker.c",
        "compare_round(&t);\n\t\tfree(job.page);", "free(job.page);\n\t\tcompare_round(&t);",
        "heap-use-after-free",
    ),
    "the list of processes is walked after one was given back": (
        "asan", READS, "service/reads.c",
        "*at = p->next;\n\t\tp->next = gone;", "*at = p->next;\n\t\tfree(p);\n\t\tp->next = gone;",
        "heap-use-after-free",
    ),
    "a thread goes to sleep whatever was signalled since it had the lock": (
        "asan", COND, "service/cond.h",
        "FUTEX_WAIT_BITSET_PRIVATE, sequence,", "FUTEX_WAIT_BITSET_PRIVATE, c->sequence,",
        "a signal was lost",
    ),
    "a result is taken from a request that was given back": (
        "asan", PATHS, "service/paths.c",
        "out[n++] = i->result;\n\t\tfree(i);", "free(i);\n\t\tout[n++] = i->result;",
        "heap-use-after-free",
    ),
    "what is queued changes while it is released": (
        "tsan", PATHS, "service/paths.c",
        "pthread_mutex_lock(&p->lock);\n\tfor (struct item *i = p->queue.first; i; i = i->next)\n"
        "\t\tdo_not_hold(i, by, number);",
        "for (struct item *i = p->queue.first; i; i = i->next)\n"
        "\t\tdo_not_hold(i, by, number);\n\tpthread_mutex_lock(&p->lock);",
        "data race",
    ),
    "a start profile's word is taken for how much of the last path is this one's": (
        "asan", PROFILE, "service/profile.c",
        "shared > p->path_bytes ||\n\t    more > PATH_BYTES_MAX - shared",
        "more > PATH_BYTES_MAX - shared",
        "overflow|SEGV",
    ),
    "blocks are evicted that lie behind the file's end": (
        "asan", POOL, "service/pool/pool_room.c",
        "end = f->chunks;", "end += 0;",
        "heap-buffer-overflow",
    ),
    "a transport's number of a slot is believed": (
        "asan", NET, "service/net/net_main.c",
        "\tif (m->slot >= n->layout.ask_slots)\n\t\treturn;\n", "",
        "buffer-overflow|SEGV",
    ),
    "what is known of blocks changes while it is read": (
        "tsan", NET, "service/net/net_main.c",
        "\tpthread_mutex_lock(&n->lock);\n\tgone = n->file[file];", "\tgone = n->file[file];",
        "data race|unlock of an unlocked mutex",
    ),
    "the pool's books are read while they change": (
        "tsan", POOL, "service/pool/pool_main.c",
        "pthread_mutex_lock(&p->lock);\n\tused = p->used_bytes;\n\tpool_unlock(p);",
        "used = p->used_bytes;",
        "data race",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKAGES)
def test_a_mistake_in_the_c_is_reported(what: str, data: Path, tmp_path: Path, hammer: Any) -> None:
    kind, target, name, text, replacement, report = BREAKAGES[what]
    tree = tmp_path / "tree"
    for part in ("csrc", "tests/programs"):
        shutil.copytree(ROOT / part, tree / part)
    shutil.copy(ROOT / "Makefile", tree)
    source = (tree / "csrc" / name).read_text()
    assert source.count(text) == 1, f"csrc/{name} has changed: break it in another place"
    (tree / "csrc" / name).write_text(source.replace(text, replacement))
    broken = sanitized(kind, tree, tmp_path / "reports", f"build/{kind}/{target}")
    if target != PRELOAD:
        words = [str(tree / "build" / kind / target), str(tmp_path)]
        done = broken.run(words, dict(os.environ))
    else:
        stop = hammer(5, file=data)
        mode = broken.storm if kind == "tsan" else ["end", "unmap"]
        for _ in range(RUNS_OF_THE_BROKEN):
            words = [broken.program, str(data), *mode]
            done = broken.run(words, hammered(tmp_path), HANG_SECONDS / 10)
            if re.search(report, broken.report() + done.stderr):
                break
        stop()
    assert done.returncode != 0
    told = broken.report() + done.stderr  # UBSan tells stderr, wherever ASan's report goes
    assert re.search(report, told), told
