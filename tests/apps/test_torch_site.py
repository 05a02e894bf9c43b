# SPDX-License-Identifier: Apache-2.0
"""How the hook gets into the job's Python: only with torch, and nothing else is different."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch_service import (
    HAVE_TORCH,
    SITE,
    Listener,
    job_environment,
    output_of,
    run_python,
)

pytestmark = pytest.mark.torch

HAVE_DATASETS = importlib.util.find_spec("datasets") is not None
needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed")

MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"
LOADED = "import sys, json; print(json.dumps([m for m in sys.modules if m.startswith('_uffdpre')]))"
TORCH_LOADED = "import torch.utils.data; " + LOADED
TRAIN = """
import torch
from torch.utils.data import DataLoader, Dataset
class Four(Dataset):
    __len__ = lambda self: 4
    __getitem__ = lambda self, index: index
print([batch.tolist() for batch in DataLoader(Four(), batch_size=2)])
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    service = Listener(tmp_path)
    yield service
    service.close()


def test_without_torch_nothing_of_ours_is_loaded_but_the_sitecustomize(listener: Listener) -> None:
    plain = set(output_of("-c", MODULES, environment=job_environment()))
    ours = set(output_of("-c", MODULES, environment=listener.environment()))
    assert ours - plain <= {"sitecustomize"}
    assert plain <= ours


def test_sys_path_is_as_without_us_and_children_inherit_the_variable(listener: Listener) -> None:
    show = "import os, sys, json; print(json.dumps([sys.path, os.environ['PYTHONPATH']]))"
    path, variable = output_of("-c", show, environment=listener.environment())
    plain = output_of(
        "-c", "import sys, json; print(json.dumps(sys.path))", environment=job_environment()
    )
    assert path == plain
    assert variable == str(SITE)


def test_once_all_that_it_waits_for_is_there_no_finder_is_left(listener: Listener) -> None:
    count = "import sys, json; %sprint(json.dumps([type(f).__name__ for f in sys.meta_path]))"
    waiting = output_of("-c", count % "", environment=listener.environment())
    assert waiting[0] == "_Finder"
    if HAVE_TORCH and HAVE_DATASETS:
        both = count % "import torch, datasets.iterable_dataset; "
        assert "_Finder" not in output_of("-c", both, environment=listener.environment())


@needs_torch
def test_with_torch_the_hook_is_loaded_and_nothing_that_torch_has_not(listener: Listener) -> None:
    show = "import torch.utils.data, sys, json; print(json.dumps(sorted(sys.modules)))"
    plain = set(output_of("-c", show, environment=job_environment()))
    ours = set(output_of("-c", show, environment=listener.environment()))
    more = ours - plain
    assert "_uffdprefetch_job.hook" in more
    assert {name.partition(".")[0] for name in more} <= {"_uffdprefetch_job", "sitecustomize"}


@needs_torch
def test_torchs_module_is_seen_to_come_from_its_own_loader(listener: Listener) -> None:
    show = (
        "import torch.utils.data.dataloader as m, json, inspect;"
        "print(json.dumps([type(m.__loader__).__name__, type(m.__spec__.loader).__name__,"
        " sorted(vars(m.__loader__)), len(inspect.getsource(m.DataLoader)) > 1000]))"
    )
    plain = output_of("-c", show, environment=job_environment())
    assert output_of("-c", show, environment=listener.environment()) == plain


@needs_torch
@pytest.mark.parametrize("why", ["off", "no service", "another's directory"])
def test_the_hook_stays_away(listener: Listener, why: str) -> None:
    environment = listener.environment()
    if why == "off":
        environment["UFFDPREFETCH_TORCH"] = "off"
    elif why == "no service":
        environment["UFFDPREFETCH_SOCKET"] += ".not"
    else:
        listener.plans.chmod(0o755)
        assert run_python("-c", TRAIN, environment=environment).stdout == "[[0, 1], [2, 3]]\n"
        assert list(listener.plans.iterdir()) == []
        return
    assert output_of("-c", TORCH_LOADED, environment=environment) == []


@needs_torch
def test_a_job_goes_on_when_nobody_listens_any_more(listener: Listener) -> None:
    environment = listener.environment()
    listener.socket.rename(listener.socket.with_name("elsewhere"))
    done = run_python("-c", TRAIN, environment=environment)
    listener.socket.with_name("elsewhere").rename(listener.socket)
    assert (done.stdout, done.stderr, done.returncode) == ("[[0, 1], [2, 3]]\n", "", 0)
    assert listener.announced() == []


@needs_torch
def test_a_job_that_ends_amid_an_epoch_ends_silently(listener: Listener) -> None:
    script = (
        TRAIN
        + "loader = DataLoader(Four(), batch_size=2, num_workers=1, persistent_workers=True)\n"
        + "iterator = iter(loader); next(iterator); loader.itself = loader\n"
        + "plain = iter(DataLoader(Four(), batch_size=2)); next(plain)\n"
        + "Four.cycle = [plain, Four]\n"
    )
    done = run_python("-c", script, environment=listener.environment())
    assert (done.stderr, done.returncode) == ("", 0)
    assert len(listener.announced()) == 3


@needs_torch
def test_debug_says_what_is_left_alone_and_why(listener: Listener) -> None:
    script = TRAIN.replace("batch_size=2", "batch_size=2, sampler=Own()")
    script = f"class Own:\n    def __iter__(self): return iter([1, 0])\n{script}"
    quiet = run_python("-c", script, environment=listener.environment())
    assert (quiet.stdout, quiet.stderr) == ("[[1, 0]]\n", "")
    told = run_python("-c", script, environment=listener.environment(UFFDPREFETCH_TORCH="debug"))
    assert told.stdout == quiet.stdout
    assert told.stderr == "uffdprefetch: torch: left alone: Own is not a sampler of torch's\n"


def test_the_users_sitecustomize_runs_and_is_the_one_that_is_imported(
    listener: Listener, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.mine = __file__\n")
    environment = listener.environment(PYTHONPATH=f"{SITE}{os.pathsep}{own}")
    show = "import sys, json, sitecustomize; print(json.dumps([sys.mine, sitecustomize.__file__]))"
    expected = str(own / "sitecustomize.py")
    assert output_of("-c", show, environment=environment) == [expected, expected]


@pytest.mark.parametrize(
    "text", ["raise KeyError('mine')", "import not_there", "raise ImportError('x')", "1 +"]
)
def test_an_error_in_the_users_sitecustomize_is_shown_as_without_us(
    listener: Listener, tmp_path: Path, text: str
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(text)
    both = [
        run_python("-c", "print('runs')", environment=environment)
        for environment in (
            job_environment(PYTHONPATH=str(own)),
            listener.environment(PYTHONPATH=f"{SITE}{os.pathsep}{own}"),
        )
    ]
    assert both[1].stdout == both[0].stdout == "runs\n"
    assert both[1].stderr == both[0].stderr
    assert "Error in sitecustomize" in both[1].stderr


@pytest.mark.parametrize("option", ["-I", "-S", "-E"])
def test_a_python_that_does_not_look_at_the_variable_or_site_runs_without_the_hook(
    listener: Listener, option: str
) -> None:
    code = TORCH_LOADED if HAVE_TORCH and option != "-S" else LOADED
    assert output_of(option, "-c", code, environment=listener.environment()) == []


@needs_torch
def test_modules_beside_the_script_that_are_called_as_ours_are_the_users(
    listener: Listener, tmp_path: Path
) -> None:
    names = [
        "hook",
        "channel",
        "datasets",
        "samplers",
        "lists",
        "keys",
        "late",
        "epochs",
        "tables",
        "arrow_tables",
        "iterables",
        "token_files",
    ]
    for name in names:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    script = tmp_path / "train.py"
    lines = [f"import {name}; assert {name}.MINE" for name in names]
    script.write_text("\n".join([TRAIN, *lines]))
    done = run_python(script, environment=listener.environment(), cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[[0, 1], [2, 3]]\n", "")
    (said,) = listener.announced()
    assert said.order() == [(0, i) for i in range(4)]


@needs_torch
def test_a_child_process_of_any_kind_has_the_hook(listener: Listener) -> None:
    script = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TRAIN!r}], check=True)"
    )
    assert run_python("-c", script, environment=listener.environment()).returncode == 0
    assert len(listener.announced()) == 1


@needs_torch
def test_a_torch_that_is_made_otherwise_is_left_as_it_is(
    listener: Listener, tmp_path: Path
) -> None:
    home = tmp_path / "torch" / "utils" / "data"
    home.mkdir(parents=True)
    for directory in (tmp_path / "torch", tmp_path / "torch" / "utils", home):
        (directory / "__init__.py").touch()
    (home / "dataloader.py").write_text(
        "class _BaseDataLoaderIter:\n    def __next__(self): return 1\n"
    )
    show = (
        "import torch.utils.data.dataloader as m, json;"
        "print(json.dumps(sorted(n for n in vars(m._BaseDataLoaderIter) if n[1] != '_')"
        " + [m._BaseDataLoaderIter().__next__()]))"
    )
    environment = listener.environment(UFFDPREFETCH_TORCH="debug")
    done = run_python("-c", show, environment=environment, cwd=tmp_path)
    assert json.loads(done.stdout) == [1]
    assert "made otherwise" in done.stderr
