# SPDX-License-Identifier: Apache-2.0
"""Parts of images and volumes by the library that maps them: `arrays.py DIR --reader NAME`.

A read is an image of a stack, a crop of 64 x 64 x 64, a plane, a cut-out of 64 x 64 pixels, or a
variable; there are --reads of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from reading import Reading, read_as_told, together

CROP = 64
WORKERS = 4


def crops(generator: Any, shape: tuple[int, ...], count: int) -> Iterator[tuple[slice, ...]]:
    """``count`` cubes of CROP elements at random places."""
    for _ in range(count):
        yield tuple(
            slice(at, at + CROP) for at in (generator.integers(0, s - CROP + 1) for s in shape)
        )


def read_mrcfile(directory: Path, reads: int, reading: Reading) -> None:
    """So many images of each stack."""
    import mrcfile

    generator = np.random.default_rng(20)
    for path in sorted(directory.iterdir()):
        with mrcfile.mmap(path, mode="r") as file:
            for number in generator.integers(len(file.data), size=reads).tolist():
                reading.add(np.ascontiguousarray(file.data[number]))


def crops_of_blosc2(directory: Path, reads: int, number: int) -> int:
    """A worker's: each of a volume that it opens for it."""
    import blosc2

    blosc2.set_nthreads(1)
    paths = sorted(directory.iterdir())
    generator, crc = np.random.default_rng(21 + number), 0
    for _ in range(reads):
        path = paths[generator.integers(len(paths))]
        volume: Any = blosc2.open(str(path), mode="r", mmap_mode="r")
        (crop,) = crops(generator, volume.shape, 1)
        crc = zlib.crc32(volume[crop].tobytes(), crc)
    return crc


def read_blosc2(directory: Path, reads: int, reading: Reading) -> None:
    """WORKERS processes, so many crops each."""
    workers = range(WORKERS)
    together([lambda n=n: crops_of_blosc2(directory, reads, n) for n in workers], reading)


def read_zarr(directory: Path, reads: int, reading: Reading) -> None:
    """By a store that maps a chunk's file, as zarr's tutorial has it."""
    import mmap

    import zarr

    class Mapped(zarr.DirectoryStore):  # type: ignore[misc]
        def _fromfile(self, fn: str) -> memoryview:
            with open(fn, "rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    volume = zarr.open(Mapped(str(directory / "volume.zarr")), mode="r")
    for crop in crops(np.random.default_rng(22), volume.shape, reads):
        reading.add(np.ascontiguousarray(volume[crop]))


def read_npy(directory: Path, reads: int, reading: Reading) -> None:
    """By np.load(mmap_mode="r")."""
    volume = np.load(directory / "volume.npy", mmap_mode="r")
    for crop in crops(np.random.default_rng(23), volume.shape, reads):
        reading.add(np.ascontiguousarray(volume[crop]))


def read_h5py(directory: Path, reads: int, reading: Reading) -> None:
    """Planes across: of each row of the file's planes a line. h5py tells where the values lie."""
    import h5py

    with h5py.File(directory / "volume.h5", "r") as file:
        volume = file["volume"]
        where = (volume.dtype, "r", volume.id.get_offset(), volume.shape)
    data = np.memmap(directory / "volume.h5", *where)
    for row in np.linspace(0, data.shape[1] - 1, reads + 2, dtype=int)[1:-1].tolist():
        reading.add(np.ascontiguousarray(data[:, row]))


def read_astropy(directory: Path, reads: int, reading: Reading) -> None:
    """Cut-outs of a mapped image."""
    from astropy.io import fits

    generator = np.random.default_rng(24)
    with fits.open(directory / "image.fits", memmap=True) as file:
        image = file[0].data
        for _ in range(reads):
            y, x = (generator.integers(0, size - CROP + 1) for size in image.shape)
            reading.add(np.ascontiguousarray(image[y : y + CROP, x : x + CROP]))


def read_scipy(directory: Path, reads: int, reading: Reading) -> None:
    """Some of the variables of each record."""
    from scipy.io import netcdf_file

    with netcdf_file(directory / "steps.nc", "r", mmap=True) as file:
        for number in range(reads):
            variable = file.variables[f"v{number * 6 + 1}"]
            reading.add(np.ascontiguousarray(variable[:]))
            del variable


READERS: dict[str, tuple[str, Callable[[Path, int, Reading], None]]] = {
    "mrcfile": ("mrcfile", read_mrcfile),
    "blosc2": ("blosc2", read_blosc2),
    "zarr": ("zarr", read_zarr),
    "npy": ("numpy", read_npy),
    "h5py": ("h5py", read_h5py),
    "astropy": ("astropy.io.fits", read_astropy),
    "scipy": ("scipy.io", read_scipy),
}


if __name__ == "__main__":
    read_as_told(READERS)
