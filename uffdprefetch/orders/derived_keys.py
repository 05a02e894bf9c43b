# SPDX-License-Identifier: Apache-2.0
"""Keys derived from a list's element: a path or name, a part of it, or its hash. Pure."""

from __future__ import annotations

import hashlib
import os.path
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uffdprefetch.orders.key_forms import protocols, shown
from uffdprefetch.orders.key_table import KeyTable

Make = Callable[[bytes], bytes]

#: Elements that a derivation is first tried with, and most key endings tried: bounds the time.
FEW = 4
_ENDINGS_MAX = 8
_HEAD = re.compile(rb"[^-_/:.]+[-_/:.]")


@dataclass(frozen=True)
class KeyDerivation:
    """A derivation. ``make``: element -> key. ``name``: "sha1 of", empty for the element itself."""

    name: str
    make: Make


def _last_components(components: int) -> Make:
    return lambda path: b"/".join(path.split(b"/")[-components:])


def _stem(path: bytes) -> bytes:
    return os.path.splitext(path)[0]


def _pickled(protocol: int, text: bool) -> Make:
    def make(element: bytes) -> bytes:
        return pickle.dumps(element.decode("utf-8", "replace") if text else element, protocol)

    return make


def _digest(name: str, as_text: bool) -> Make:
    def make(element: bytes) -> bytes:
        found = hashlib.new(name, element, usedforsecurity=False)
        return found.hexdigest().encode() if as_text else found.digest()

    return make


#: Derivations, the simplest first: the first one that explains the evidence is taken.
ITSELF = KeyDerivation("", lambda element: element)
PATHS = (
    ITSELF,
    KeyDerivation("file name of", _last_components(1)),
    KeyDerivation("last 2 components of", _last_components(2)),
    KeyDerivation("last 3 components of", _last_components(3)),
    KeyDerivation("path without extension of", _stem),
    KeyDerivation("file name without extension of", lambda path: _stem(_last_components(1)(path))),
    KeyDerivation(
        "last 2 components without extension of", lambda path: _stem(_last_components(2)(path))
    ),
)
DIGESTS = tuple(
    KeyDerivation(f"{name}{'' if as_text else ' (bytes)'} of", _digest(name, as_text))
    for as_text in (True, False)
    for name in ("md5", "sha1", "sha256")
)


def composed(way: KeyDerivation, digest: KeyDerivation) -> KeyDerivation:
    """``digest`` of ``way``'s key."""
    if way is ITSELF:
        return digest
    return KeyDerivation(
        f"{digest.name} {way.name}", lambda element: digest.make(way.make(element))
    )


def ways(
    elements: Sequence[bytes], kind: str, sample_keys: Sequence[bytes], longest: int
) -> list[KeyDerivation]:
    """Ways from elements of this kind ("bytes", "text") to keys, the simplest first, without those
    that repeat another's keys or make keys longer than ``longest`` bytes. ``sample_keys``: some of
    the file's keys."""
    candidates = list(PATHS)
    candidates += [composed(way, digest) for digest in DIGESTS for way in PATHS]
    for protocol in protocols(sample_keys):
        candidates.append(KeyDerivation("pickle of", _pickled(protocol, kind == "text")))
    found: list[KeyDerivation] = []
    known: set[tuple[bytes, ...]] = set()
    for way in candidates:
        made = tuple(way.make(element) for element in elements)
        fit = sum(0 < len(key) <= longest for key in made)
        if made not in known and fit >= 0.9 * len(made):
            known.add(made)
            found.append(way)
    return found


def prefixes(sample_keys: Sequence[bytes]) -> list[bytes]:
    """Frequent prefixes of these keys: the empty one, their common one, heads such as "image-"."""
    heads: Counter[bytes] = Counter()
    for key in sample_keys:
        found = _HEAD.match(key)
        if found:
            heads[found[0]] += 1
    often = [head for head, count in heads.most_common(4) if 8 * count >= len(sample_keys)]
    low, high = min(sample_keys, default=b""), max(sample_keys, default=b"")
    same = next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return list(dict.fromkeys([b"", low[:same], *often]))


def affixed_ways(
    table: KeyTable, stems: Sequence[bytes], befores: Sequence[bytes]
) -> list[KeyDerivation]:
    """Ways from a stem to its key by a prefix (one of ``befores``) and an ending such as ".jpg" or
    "-label" that the file's keys have around each of these stems."""
    found = []
    for prefix in befores:
        endings: list[bytes] = []
        for number, stem in enumerate(stems):
            whole = prefix + stem
            here = [key[len(whole) :] for key in table.starting_with(whole, _ENDINGS_MAX)]
            endings = here if not number else [each for each in endings if each in here]
            if not endings:
                break
        # where keys do not ascend starting_with() finds nothing
        some = dict.fromkeys([b"", *endings])
        found += [_affixed(prefix, ending) for ending in some]
    return found


def _affixed(prefix: bytes, ending: bytes) -> KeyDerivation:
    if not prefix and not ending:
        return ITSELF
    name = f"{shown(prefix)!r} + " if prefix else ""
    return KeyDerivation(
        f"{name}...{f' + {shown(ending)!r}' if ending else ''}",
        lambda stem: prefix + stem + ending,
    )
