# SPDX-License-Identifier: Apache-2.0
"""The names in a directory, and where each of the four orders has them."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from conftest import require
from listed_names import GivenNames

from uffdprefetch.native.listing import ListedNames, read
from uffdprefetch.predict.name_orders import NameOrder


def listed(path: Path, most: int = 1 << 20, flags: int = os.O_PATH) -> list[ListedNames]:
    fd = os.open(path, flags | os.O_DIRECTORY)
    try:
        return list(read(fd, most))
    finally:
        os.close(fd)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    names = [b"%04d.jpg" % n for n in range(300)] + [b"a\xff", b"a", b"A", b"a.", "\u00e9".encode()]
    random.Random(1).shuffle(names)
    made = tmp_path / "made"
    made.mkdir()
    for number, name in enumerate(names):
        path = os.path.join(os.fsencode(made), name)
        if number % 50 == 7:
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    (made / "link").symlink_to("a")
    os.mkfifo(made / "fifo")
    return made


@pytest.mark.parametrize("flags", [os.O_PATH, os.O_RDONLY])
def test_files_and_subdirectories_are_in_four_orders(directory: Path, flags: int) -> None:
    with os.scandir(directory) as entries:
        seen = [entry for entry in entries if not entry.is_symlink()]
    files, directories = listed(directory, flags=flags)
    for names, mine in (
        (files, [entry for entry in seen if entry.is_file()]),
        (directories, [entry for entry in seen if entry.is_dir()]),
    ):
        expected = GivenNames([entry.name for entry in mine], [entry.inode() for entry in mine])
        assert len(names) == len(mine) > 0
        for order in NameOrder:
            there = [names.index(order, place) for place in range(len(names))]
            assert [names.name(index) for index in there] == expected.ordered(order)
            assert [names.place(order, index) for index in there] == list(range(len(names)))
        for index, entry in enumerate(mine):
            assert names.find(entry.name) == index
            assert names.inode(index) == entry.inode()
    assert directories.find("link") == files.find("link") == files.find("fifo") == -1
    assert files.find("") == files.find("zzz") == -1


def test_names_of_one_file_are_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    for name in ("a", "c"):
        os.link(tmp_path / "b", tmp_path / name)
    files, _ = listed(tmp_path)
    assert [files.index(NameOrder.INODE, place) for place in range(3)] == [0, 1, 2]


def test_an_empty_directory_has_no_names(tmp_path: Path) -> None:
    for names in listed(tmp_path):
        assert len(names) == 0 and names.find("a") == -1
        with pytest.raises(IndexError):
            names.index(NameOrder.REVERSED, 0)
        with pytest.raises(IndexError):
            names.name(0)


def test_of_too_many_names_nothing_is_known(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / str(number)).touch()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError) as refused:
        listed(tmp_path, most=4)
    assert refused.value.errno == errno.E2BIG
    assert len(listed(tmp_path, most=5)[0]) == 5
    assert os.listdir("/proc/self/fd") == before


def test_names_outlive_the_others_of_their_listing(directory: Path) -> None:
    files = listed(directory)[0]
    first = files.name(0)
    assert files.find(first) == 0


def test_it_is_not_read_where_that_is_forbidden(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "only root can become another user")
    (tmp_path / "closed").mkdir(mode=0o711)
    fd = os.open(tmp_path / "closed", os.O_PATH)
    child = os.fork()
    if not child:
        try:
            os.setresuid(65534, 65534, 65534)
            read(fd, 10)
        except OSError as error:
            os._exit(error.errno or 0)
        os._exit(0)
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EACCES
