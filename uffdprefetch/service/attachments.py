# SPDX-License-Identifier: Apache-2.0
"""Mappings as they are offered: their file is opened, it is decided how each is served, and what
the job says of it is heard."""

from __future__ import annotations

import fcntl
import os

from uffdprefetch.base.config import Config
from uffdprefetch.base.limits import is_of_a_limit, words_of
from uffdprefetch.base.procfs import may_write
from uffdprefetch.native import uffd
from uffdprefetch.protocol import wire
from uffdprefetch.readers.advice import Advice
from uffdprefetch.readers.arbiter import Arbiter
from uffdprefetch.service.mappings import ManagedMappings
from uffdprefetch.service.offers import Offers
from uffdprefetch.service.pooled import PooledMappings
from uffdprefetch.service.serving import Serving, by_page_tables, serving_of
from uffdprefetch.state.admission import REUSED, FileTable
from uffdprefetch.state.client import Client
from uffdprefetch.state.files import FileState
from uffdprefetch.state.ledger import Ledger
from uffdprefetch.state.opening import Opened, Opener
from uffdprefetch.state.publisher import EventPublisher
from uffdprefetch.state.reader import FIRST_OBSERVED, Region, reader_of
from uffdprefetch.state.unserved import FOR_GOOD, Coarse, Reason, Refusal

#: Why a file is given up of which somebody wants the lease.
OPENED_FOR_WRITING = "opened for writing"
#: Of kinds of files that are followed in vain (service/brief.py).
LEFT_TO_THE_KERNEL = (
    "some files: mapped for moments, and nothing was gained for those like them: most are left to "
    "the kernel"
)


def _not_opened(error: OSError) -> Refusal:
    if is_of_a_limit(error):
        return Refusal(Reason.NOT_FOLLOWED, f"it cannot be opened: {words_of(error)}")
    return Refusal(Reason.NOT_OPENED, f"it cannot be opened ({error.strerror})")


class Attachments:
    """Of all processes of the job on this node."""

    def __init__(
        self, config: Config, mappings: ManagedMappings, table: FileTable, opener: Opener,
        arbiter: Arbiter, advice: Advice, ledger: Ledger, publisher: EventPublisher,
        pooled: PooledMappings | None, offers: Offers | None,
    ) -> None:  # fmt: skip
        """``offers``: where checkpoints are laid."""
        self._config, self._mappings, self._table, self._opener = config, mappings, table, opener
        self._arbiter, self._advice, self._ledger, self._publisher = (
            arbiter,
            advice,
            ledger,
            publisher,
        )
        self._pooled = pooled
        self.offers = offers

    def attach(self, client: Client, a: wire.Attach, fd: int | None) -> None:
        """An agent offers a mapping: decide how it is served and tell it. ``fd``: what is mapped,
        None where an earlier one of the same file must do."""
        for region in [
            r for r in client.regions.values() if r.address == a.address and r.id >= FIRST_OBSERVED
        ]:  # found in /proc before its agent told of it
            self._mappings.detached(client, region.id)
        file = self._table.known(a, fd)
        if file is not None:
            if fd is not None:
                uffd.close_file(fd)
            self._decide(client, a, file, file.path, None)
            return
        if fd is None:  # inherited, and not open here (yet): it is found in /proc (observe.py)
            client.agent.tell(a.region, wire.ServingMode.REFUSE, [])
            return
        # of O_PATH, which an agent sends where it can, the agent has looked
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            # who may open it again could read it all the same: it was not meant to be
            uffd.close_file(fd)
            self._decide(client, a, None, f"inode {a.inode}", REUSED)
            return
        client.pending.add(a.region)
        self._opener.open(
            fd, lambda opened: self._opened(client, a, opened),
            is_wanted=lambda: a.region in client.pending,
        )  # fmt: skip

    def look_for_writer(self, a: wire.Attach) -> None:
        """Before attach(): somebody may have opened the file for writing while this process stood
        still."""
        file = self._table.files.get((a.device, a.inode, a.size_bytes, a.mtime_ns))
        if (
            file is not None
            and file.guard.changed is None
            and file.guard.lease_breaking(file.opened.fd)
        ):
            self._mappings.give_up(file, OPENED_FOR_WRITING)

    def observed(self, client: Client, a: wire.Attach, opened: Opened) -> None:
        """A mapping was found in /proc of which no agent tells."""
        client.pending.add(a.region)
        self._opened(client, a, opened)

    def _opened(self, client: Client, a: wire.Attach, opened: Opened | OSError) -> None:
        if not client.pending.is_open(a.region):  # gone meanwhile
            # whose server is told of it may take its time
            if not isinstance(opened, OSError) and not self._opener.run(
                opened.close, lambda _: None
            ):
                opened.close()
            return
        file, path, why = None, f"inode {a.inode}", None
        if isinstance(opened, OSError):
            path, why = opened.filename or path, _not_opened(opened)
        else:
            try:
                file, path, why = self._table.admit(a, opened)
            except OSError as error:
                why = _not_opened(error)
            except (MemoryError, OverflowError):
                why = Refusal(Reason.TOO_LARGE, "too large for the service's memory")
        self._decide(client, a, file, path, why)

    def _decide(
        self, client: Client, a: wire.Attach, file: FileState | None, path: str,
        why: Refusal | None,
    ) -> None:  # fmt: skip
        if file is None:
            assert why is not None
            self._refuse(client, a, path, why, [])
            return
        if self._config.keeps_copies and not file.guard.changed:
            self._look_for_writer_in(client, a, file)
        serving, fds = self._serving_of(client, a, file)
        wanted: list[int] = []
        # a mapping that can be written says nothing of the others, nor does one of many at once
        apart = wire.ATTACH_WRITABLE | wire.ATTACH_COPIES | wire.ATTACH_INHERITED | wire.ATTACH_MANY
        settled = self._pooled is None and not a.flags & apart
        if serving.mode == wire.ServingMode.CHECKPOINTS and self.offers is not None:
            wanted, fds, unsettled = self.offers.wanted(
                a, reader_of(client, file), self._config.spacing_bytes
            )
            settled = settled and not unsettled
        if a.flags & wire.ATTACH_INHERITED and self._config.keeps_copies:
            fds = [*fds, file.opened.map_fd] if fds else [file.opened.map_fd, file.opened.map_fd]
        if serving.refusal is not None:
            self._refuse(client, a, path, serving.refusal, fds)
            return
        region = self._mappings.adopt(client, a, file, serving.mode)  # before its first fault
        if serving.mode != wire.ServingMode.POOL:
            self._arbiter.begin(file, a.offset_bytes)
        if wanted and self.offers is not None:
            self.offers.make(client, region, wanted, fds[0])
        else:
            client.agent.tell(
                a.region, serving.mode, fds, settled, lease_fd=region.lease_fd,
                brief=self._brief_of(region),
            )  # fmt: skip
        self._advice.attached(region, a.advice)
        if a.flags & wire.ATTACH_STATED:
            self._advice.populated(region)
        for said in client.pending.said_of(a.region):
            self._said(region, said)
        self._publisher.region(client, region)
        self._ledger.attached(file, serving.mode, serving.reason, serving.coarse)

    def _serving_of(
        self, client: Client, a: wire.Attach, file: FileState
    ) -> tuple[Serving, list[int]]:
        """How the mapping is served, and what the job maps in its place: the pool's memory."""
        serving = serving_of(client, a, file, self._config)
        if self._pooled is None or serving.mode != wire.ServingMode.CHECKPOINTS:
            return serving, []
        if self._mappings.brief.of(file.path) and not self._pooled.may_have(file):
            return by_page_tables(client, Coarse.BRIEF), []
        if self._pooled.has_no_use_for(file):
            return serving if self._config.lays_checkpoints else by_page_tables(client, None), []
        fds, told = self._pooled.accept(client, file)
        if fds:
            return Serving(wire.ServingMode.POOL, told), fds
        if file.pooled is not None or not self._config.lays_checkpoints:
            # (of what the pool has pages and checkpoints are not compared at once)
            serving = by_page_tables(client, Coarse.NOT_POOLED, f": {told}")
        return serving, []

    def _brief_of(self, region: Region) -> wire.Brief:
        """How mappings like it live, for its agent; where something of ours may lie over them, or
        somebody else wants to know of them, it need not know."""
        file, order = region.file, region.reader.order
        if self._config.lays_checkpoints or (
            self._pooled is not None and self._pooled.may_have(file)
        ):
            return wire.Brief.NO
        is_awaited = order.followed or order.pending_since_ns or self._config.orders.plan
        if is_awaited or self._publisher.active or self._config.learn.name is not None:
            return wire.Brief.NO
        brief = self._mappings.brief.of(file.path)
        if brief is wire.Brief.UNTOLD:
            self._ledger.degrade(LEFT_TO_THE_KERNEL, is_mendable=False)
        return brief

    def _look_for_writer_in(self, client: Client, a: wire.Attach, file: FileState) -> None:
        """Whether the process has the file open for writing, where no lease would tell."""
        if a.flags & wire.ATTACH_WRITABLE or (
            not (file.guard.leased or file.guard.writer) and may_write(client.pid, file.path)
        ):
            self._mappings.writer_came(file)

    def _refuse(
        self, client: Client, a: wire.Attach, path: str, why: Refusal, fds: list[int]
    ) -> None:
        client.pending.drop(a.region)
        client.sightings.refused.add(a.address)
        client.agent.tell(a.region, wire.ServingMode.REFUSE, fds, settled=why.reason in FOR_GOOD)
        self._ledger.refuse(path, why, a.length_bytes)

    # -------------------------------------------------------------- what is said of them

    def heard(self, client: Client, said: wire.Statement) -> None:
        """A job has said something of a mapping."""
        region = client.regions.get(said.region)
        if region is not None:
            self._said(region, said)
        else:
            client.pending.hear(said)

    def _said(self, region: Region, said: wire.Statement) -> None:
        span = region.span
        start, end = max(said.start_bytes, span.start_bytes), min(said.end_bytes, span.end_bytes)
        if start < end:
            self._advice.said(region, said.what, start, end)

    def laid(self, client: Client, ack: wire.Ack) -> None:
        """The agent says how many of a mapping's checkpoints it has laid; of a command, what
        failed, which changes nothing: page tables tell as well."""
        region = client.regions.get(ack.region)
        if region is None or ack.sequence:
            return
        if ack.error and region.mode == wire.ServingMode.POOL:
            self._mappings.not_pooled(client, region, ack.error)
        if self.offers is not None:
            self.offers.laid(client, region, ack.done, ack.error)
