# SPDX-License-Identifier: Apache-2.0
"""What the tests on a Lustre client share. Elsewhere they are skipped, whatever else is asked for:
the image is no part of a machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lustre import client, job

MIB = 1 << 20
SIZE_BYTES = 64 * MIB + 1234


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "long_form: left out of the short form (make lustre has them)"
    )


@pytest.fixture(scope="session", autouse=True)
def on_lustre() -> None:
    if client.MOUNT_VARIABLE not in os.environ:
        pytest.skip("runs on a Lustre client, in a guest: UFFDPREFETCH_LUSTRE=DIR make lustre")
    client.warm_up()


@dataclass(frozen=True)
class Data:
    """A file on the client, and what the job must find in it."""

    path: Path
    digest: str
    size_bytes: int

    @property
    def least_rpcs(self) -> int:
        return -(-self.size_bytes // client.RPC_BYTES)


def made(name: str, size_bytes: int) -> Data:
    path = client.mount() / name
    client.write_file(path, size_bytes)
    return Data(path, client.digest_of(path, job.RECORD_BYTES), size_bytes)


@pytest.fixture(scope="session")
def data() -> Iterator[Data]:
    """64 MiB and a bit; nobody writes it."""
    file = made("records.bin", SIZE_BYTES)
    yield file
    file.path.unlink()


@pytest.fixture(scope="session")
def large() -> Iterator[Data]:
    """256 MiB and a bit."""
    file = made("large.bin", 256 * MIB + 1234)
    yield file
    file.path.unlink()
