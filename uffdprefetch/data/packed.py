# SPDX-License-Identifier: Apache-2.0
"""``Packed``: a data set of files that `uffdprefetch pack` has packed, as torchvision has those of
a directory (``ImageFolder``, ``DatasetFolder``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from uffdprefetch.base.errors import UffdPrefetchError, usage_error

from . import layout
from .codec import Codec
from .environment import environment, library, look_again


def image(value: bytes) -> Any:
    """A loader: the picture as ImageFolder gives it, by PIL, in RGB."""
    import io

    from PIL import Image

    return Image.open(io.BytesIO(value)).convert("RGB")


class Packed:
    """Sample i is (what ``loader`` makes of the file's bytes, its class's number).

    As torchvision's DatasetFolder: a class is a directory directly below the source; ``classes``
    are sorted; ``samples`` are (path below the source, number of the class), by class, directory
    and name; ``targets`` are these numbers. A file that is in no directory is no sample, unless
    there are no directories at all: then each is, of class -1.

    ``loader``: bytes -> sample (default: the bytes; ``image`` is ImageFolder's). ``transform``,
    ``target_transform``: of sample and number. ``extensions``: files with other endings are no
    samples (default: all are). ``stored``: samples in the order in which they lie in the database,
    which `--shuffle` makes.

    It may be pickled, and used after a fork and in threads: each process opens the database itself.
    Raises UffdPrefetchError when the database cannot be read, or is not complete.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        loader: Callable[[bytes], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        extensions: Sequence[str] | None = None,
        stored: bool = False,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.loader, self.transform, self.target_transform = loader, transform, target_transform
        look_again(self.path)
        described = layout.PackDescription.decoded(self._meta(layout.SOURCE), self.path)
        if not described.complete:
            raise usage_error(
                f"{self.path}: packing has not come to its end: `uffdprefetch pack --resume`"
            )
        self._codec = None
        if described.level is not None:
            self._codec = Codec(described.level, self._meta(layout.DICTIONARY))
        paths = layout.split(self._meta(layout.PATHS), self.path)
        found = [path.decode("utf-8", "surrogateescape") for path in paths]
        self.classes = sorted({path.partition("/")[0] for path in found if "/" in path})
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        if extensions is not None:
            endings = tuple(extension.lower() for extension in extensions)
            found = [path for path in found if path.lower().endswith(endings)]
        if not self.classes:
            self.samples = [(path, -1) for path in found]
        else:
            self.samples = [
                (path, self.class_to_idx[path.partition("/")[0]]) for path in found if "/" in path
            ]
        if not stored:
            self.samples.sort(key=_place)
        self.imgs = self.samples  # its other name in ImageFolder
        self.targets = [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, target = self.samples[index]
        sample: Any = self.read(path)
        if self.loader is not None:
            sample = self.loader(sample)
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target

    def read(self, path: str | bytes) -> bytes:
        """The bytes of the file at ``path`` below the source, whether it is a sample or not.

        Raises KeyError when there is none, UffdPrefetchError when the database is damaged.
        """
        key = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
        value = self._get(key, None)
        if value is None or key == layout.META:
            raise KeyError(path)
        if self._codec is None:
            return value
        try:
            return self._codec.decode(value)
        except layout.DamagedError as error:
            what = f"{self.path}: {layout.shown(key)}: {error.message}"
            raise layout.DamagedError(what) from None

    def __getstate__(self) -> dict[str, Any]:
        codec = self._codec
        kept = None if codec is None else (codec.level, codec.dictionary)
        return {**self.__dict__, "_codec": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        codec = state["_codec"]
        self.__dict__.update(state, _codec=None if codec is None else Codec(*codec))

    def __repr__(self) -> str:
        return f"Packed({self.path!r}): {len(self.samples)} samples, {len(self.classes)} classes"

    def _meta(self, key: bytes) -> bytes:
        value = self._get(key, layout.META)
        if value is None:
            raise layout.DamagedError(f"{self.path}: damaged: it has no {key.decode()}")
        return layout.payload(key, value, self.path)

    def _get(self, key: bytes, database: bytes | None) -> bytes | None:
        env, meta = environment(self.path)
        lmdb = library()
        try:
            with env.begin(db=None if database is None else meta) as transaction:
                value: bytes | None = transaction.get(key)
        except lmdb.BadValsizeError:
            return None  # longer than any key
        except lmdb.Error as error:
            raise UffdPrefetchError(f"{self.path}: {error}") from None
        return value


def _place(sample: tuple[str, int]) -> tuple[int, str, str]:
    """torchvision's order: os.walk() sorted, then the names of each directory."""
    path, target = sample
    directory, _, name = path.rpartition("/")
    return target, directory, name
