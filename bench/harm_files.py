# SPDX-License-Identifier: Apache-2.0
"""The files that the jobs of bench/harm.py read, beside those of bench/apps_files.py.

Each maker puts files of about as many bytes as it is told into a directory, from fixed seeds, by
the library that reads them. Here are bytes and arrays; bench/harm_stores.py has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PAGE_BYTES = 4096
KIB, MIB = 1 << 10, 1 << 20


def generator(seed: int) -> np.random.Generator:
    """A quick one."""
    return np.random.Generator(np.random.SFC64(seed))


def write_noise(path: Path, size_bytes: int, seed: int) -> None:
    """A file of random bytes."""
    source = generator(seed)
    with open(path, "wb") as file:
        for first in range(0, size_bytes, 16 * MIB):
            file.write(source.bytes(min(16 * MIB, size_bytes - first)))


def pages_of(size_bytes: int) -> int:
    """Bytes of whole pages."""
    return max(1, size_bytes // PAGE_BYTES) * PAGE_BYTES


# ---- bytes -----------------------------------------------------------------------------------


def make_noise(directory: Path, size_bytes: int) -> None:
    """One file of random bytes."""
    write_noise(directory / "data.bin", pages_of(size_bytes), 31)


def make_pair(directory: Path, size_bytes: int) -> None:
    """An index of a third of the bytes, and what it leads to."""
    write_noise(directory / "index.idx", pages_of(size_bytes // 3), 32)
    write_noise(directory / "values.dat", pages_of(size_bytes * 2 // 3), 33)


def make_holes(directory: Path, size_bytes: int) -> None:
    """A file of which one page in each 512 KiB was written."""
    step_bytes = 512 * KIB
    source = generator(34)
    with open(directory / "data.bin", "wb") as file:
        file.truncate(size_bytes)
        for first in range(0, size_bytes, step_bytes):
            file.seek(first)
            file.write(source.bytes(PAGE_BYTES))


def make_small(directory: Path, size_bytes: int) -> None:
    """Files of 20 KB to 2 MB, their sizes' logarithms spread evenly."""
    source = generator(35)
    made_bytes = number = 0
    while made_bytes < size_bytes:
        count = int(20_000 * 100 ** source.random())
        (directory / f"{number:05d}.bin").write_bytes(source.bytes(count))
        made_bytes, number = made_bytes + count, number + 1


def make_sparse(directory: Path, size_bytes: int) -> None:
    """Files of 20 MB, each with one place that was written: 4 or 40 KiB, told by its name."""
    each_bytes = 20_000_000
    source = generator(36)
    for number in range(max(1, size_bytes // each_bytes)):
        count = int(source.choice([1, 10])) * PAGE_BYTES
        first = int(source.integers(each_bytes // PAGE_BYTES - 10)) * PAGE_BYTES
        with open(directory / f"{number:05d}-{first}-{first + count}.bin", "wb") as file:
            file.truncate(each_bytes)
            file.seek(first)
            file.write(source.bytes(count))


# ---- arrays ----------------------------------------------------------------------------------


def numbers(seed: int, shape: tuple[int, ...], dtype: str = "u2") -> Any:
    """An array that does not compress."""
    count = int(np.prod(shape))
    return np.frombuffer(generator(seed).bytes(count * np.dtype(dtype).itemsize), dtype).reshape(
        shape
    )


def planes(size_bytes: int, plane_bytes: int, least: int) -> int:
    """How many planes make so many bytes."""
    return max(least, size_bytes // plane_bytes)


def make_mrc(directory: Path, size_bytes: int) -> None:
    """16 stacks of images of 518 KB, as of particles in a microscope."""
    import mrcfile

    images = planes(size_bytes // 16, 360 * 360 * 4, 4)
    for number in range(16):
        values = generator(40 + number).random((images, 360, 360), dtype=np.float32)
        with mrcfile.new(directory / f"stack-{number:02d}.mrcs") as file:
            file.set_data(values)


def make_blosc2(directory: Path, size_bytes: int) -> None:
    """24 volumes of 16 bits in chunks of 64 x 128 x 128, of blocks of 32 KiB."""
    import blosc2

    depth = planes(size_bytes // 24, 256 * 256 * 2, 64)
    for number in range(24):
        blosc2.asarray(
            numbers(60 + number, (depth, 256, 256)),
            chunks=(64, 128, 128), blocks=(16, 32, 32), cparams={"clevel": 1},
            urlpath=str(directory / f"volume-{number:02d}.b2nd"), mode="w",
        )  # fmt: skip


def make_zarr(directory: Path, size_bytes: int) -> None:
    """A volume of 16 bits in uncompressed chunks of 192 x 256 x 256, each a file of 25 MB."""
    import zarr

    depth = planes(size_bytes, 256 * 256 * 2, 192)
    zarr.save_array(
        zarr.DirectoryStore(str(directory / "volume.zarr")), numbers(85, (depth, 256, 256)),
        chunks=(192, 256, 256), compressor=None,
    )  # fmt: skip


def make_hdf5(directory: Path, size_bytes: int) -> None:
    """A contiguous volume of 32 bits, 512 x 512 in each plane."""
    import h5py

    with h5py.File(directory / "volume.h5", "w") as file:
        file["volume"] = numbers(86, (planes(size_bytes, 512 * 512 * 4, 16), 512, 512), "u4")


def make_npy(directory: Path, size_bytes: int) -> None:
    """A volume of 16 bits, 512 x 512 in each plane."""
    shape = (planes(size_bytes, 512 * 512 * 2, 64), 512, 512)
    np.save(directory / "volume.npy", numbers(87, shape))


def make_fits(directory: Path, size_bytes: int) -> None:
    """An image of 16384 pixels a row, of 32 bits."""
    from astropy.io import fits

    values = numbers(88, (planes(size_bytes, 16384 * 4, 128), 16384), ">i4")
    fits.PrimaryHDU(values).writeto(directory / "image.fits")


def make_netcdf(directory: Path, size_bytes: int) -> None:
    """Records of 20 variables of 100 KB each, by SciPy."""
    from scipy.io import netcdf_file

    steps = planes(size_bytes, 20 * 100_000, 4)
    with netcdf_file(directory / "steps.nc", "w", version=2) as file:
        file.createDimension("time", None)
        file.createDimension("place", 25_000)
        for number in range(20):
            variable = file.createVariable(f"v{number}", "i4", ("time", "place"))
            variable[:] = numbers(100 + number, (steps, 25_000), ">i4")


KINDS: dict[str, Callable[[Path, int], None]] = {
    "noise": make_noise,
    "pair": make_pair,
    "holes": make_holes,
    "small": make_small,
    "sparse": make_sparse,
    "mrc": make_mrc,
    "blosc2": make_blosc2,
    "zarr": make_zarr,
    "hdf5": make_hdf5,
    "npy": make_npy,
    "fits": make_fits,
    "netcdf": make_netcdf,
}
