# SPDX-License-Identifier: Apache-2.0
"""The files that the programs of bench/apps.py read: `python bench/apps_files.py KIND DIR BYTES`.

Random bytes from fixed seeds, in about BYTES. Each kind is made by the library that reads it, in a
process of its own.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import harm_files
import harm_stores
import numpy as np
import reads_files
from apps_sequences import make_blast, make_kraken2, make_mmseqs

LAYERS, SHARDS = 16, 4
#: One layer has 4 matrices of HIDDEN x HIDDEN and 3 of INTERMEDIATE x HIDDEN, and that is 11/4 of
#: HIDDEN, as in Llama 2 (4096 and 11008).
LAYER_SQUARES = 4 + 3 * 11 / 4
HALF_BYTES = 2
VOCABULARY = 4096


# ---- model weights ---------------------------------------------------------------------------


def llama_sizes(size_bytes: int) -> tuple[int, int]:
    """(hidden, intermediate) size of a model of 16 bits an element; both can be cut into 8."""
    hidden = math.sqrt(size_bytes / HALF_BYTES / LAYERS / LAYER_SQUARES)
    hidden = max(64, round(hidden / 64) * 64)
    return hidden, hidden * 11 // 4


def llama_tensors(size_bytes: int) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of a Llama model, in the order in which transformers saves them."""
    hidden, intermediate = llama_sizes(size_bytes)
    generator = np.random.Generator(np.random.SFC64(1))

    def values(*shape: int) -> np.ndarray:
        # Without the exponent's highest bit: all are numbers, below 2.
        bits = generator.integers(0, 1 << 16, shape, dtype=np.uint16) & 0xBFFF
        return bits.view(np.float16)

    yield "model.embed_tokens.weight", values(VOCABULARY, hidden)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", values(hidden)
        yield f"{prefix}.mlp.down_proj.weight", values(hidden, intermediate)
        yield f"{prefix}.mlp.gate_proj.weight", values(intermediate, hidden)
        yield f"{prefix}.mlp.up_proj.weight", values(intermediate, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", values(hidden)
        for name in "koqv":
            yield f"{prefix}.self_attn.{name}_proj.weight", values(hidden, hidden)
    yield "model.norm.weight", values(hidden)
    yield "lm_head.weight", values(VOCABULARY, hidden)


def make_weights(directory: Path, size_bytes: int) -> None:
    """One safetensors file."""
    from safetensors.numpy import save_file

    save_file(
        dict(llama_tensors(size_bytes)), directory / "model.safetensors", metadata={"format": "pt"}
    )


def make_checkpoint(directory: Path, size_bytes: int) -> None:
    """SHARDS safetensors files with their index, and the model's configuration."""
    from safetensors.numpy import save_file

    tensors = dict(llama_tensors(size_bytes))
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        full = sum(one.nbytes for one in shards[-1].values()) >= total_bytes / SHARDS
        if full and len(shards) < SHARDS:
            shards.append({})
        shards[-1][name] = tensor
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    hidden, intermediate = llama_sizes(size_bytes)
    configuration = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "float16",
    }
    (directory / "config.json").write_text(json.dumps(configuration))


def make_pickled(directory: Path, size_bytes: int) -> None:
    """What torch.save writes."""
    import torch

    state = {name: torch.from_numpy(tensor) for name, tensor in llama_tensors(size_bytes)}
    torch.save(state, directory / "model.pt")


def make_gguf(directory: Path, size_bytes: int) -> None:
    """A GGUF file of version 3 without metadata (docs/gguf.md of ggml)."""
    alignment_bytes, f16 = 32, 1
    tensors = dict(llama_tensors(size_bytes))
    head, offset = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0), 0
    for name, tensor in tensors.items():
        sizes = tensor.shape[::-1]
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, f16, offset)
        offset += -(-tensor.nbytes // alignment_bytes) * alignment_bytes
    with open(directory / "model.gguf", "wb") as file:
        file.write(head)
        for tensor in tensors.values():
            file.write(bytes(-file.tell() % alignment_bytes))
            file.write(tensor.tobytes())


# ---- arrays, tables, data sets, vectors -------------------------------------------------------


def make_tokens(directory: Path, size_bytes: int) -> None:
    """Tokens of 16 bits, as nanoGPT's prepare.py writes them."""
    generator = np.random.Generator(np.random.SFC64(2))
    generator.integers(0, 50257, size_bytes // 2, dtype=np.uint16).tofile(directory / "train.bin")


def make_table(directory: Path, size_bytes: int) -> None:
    """An Arrow IPC file: eight columns of 64-bit integers in record batches of 4 MiB."""
    import pyarrow as pa

    columns, batch_rows = 8, 1 << 16
    generator = np.random.Generator(np.random.SFC64(3))
    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(columns)])
    with (
        pa.OSFile(str(directory / "table.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for _ in range(max(1, size_bytes // (8 * columns * batch_rows))):
            values = generator.integers(-1 << 40, 1 << 40, (columns, batch_rows))
            writer.write_batch(pa.record_batch([pa.array(v) for v in values], schema=schema))


def make_dataset(directory: Path, size_bytes: int) -> None:
    """A data set of images of 16 to 112 KB, saved in two Arrow shards."""
    import datasets

    datasets.disable_progress_bars()
    generator = np.random.Generator(np.random.SFC64(4))
    parts, made_bytes, number = [], 0, 0
    while made_bytes < size_bytes:
        images = [generator.bytes(generator.integers(16_000, 112_000)) for _ in range(100)]
        made_bytes += sum(map(len, images))
        labels = list(range(number, number + len(images)))
        number += len(images)
        parts.append(datasets.Dataset.from_dict({"image": images, "label": labels}))
    datasets.concatenate_datasets(parts).save_to_disk(str(directory / "dataset"), num_shards=2)


def make_megatron(directory: Path, size_bytes: int) -> None:
    """Two data sets of tokens of 32 bits in documents of 1 to 64 KB, as Megatron-LM's
    preprocess_data.py writes them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.Generator(np.random.SFC64(6))
    for name in ("books", "web"):
        builder = IndexedDatasetBuilder(str(directory / f"{name}.bin"), dtype=np.int32)
        made_bytes = 0
        while made_bytes < size_bytes // 2:
            tokens = generator.integers(0, 128_256, generator.integers(256, 16_384), dtype=np.int32)
            builder.add_document(tokens, [len(tokens)])
            made_bytes += tokens.nbytes
        builder.finalize(str(directory / f"{name}.idx"))


def make_records(directory: Path, size_bytes: int) -> None:
    """An LMDB of records of 12 to 192 KiB."""
    import lmdb

    generator = np.random.Generator(np.random.SFC64(6))
    with lmdb.open(str(directory), map_size=2 * size_bytes + (64 << 20)) as environment:
        made_bytes = number = 0
        while made_bytes < size_bytes:
            with environment.begin(write=True) as transaction:
                for _ in range(100):
                    value = generator.bytes(generator.integers(12 << 10, 192 << 10))
                    transaction.put(b"%08d" % number, value, append=True)
                    made_bytes, number = made_bytes + len(value), number + 1
    (directory / "lock.mdb").unlink()


def make_vectors(directory: Path, size_bytes: int) -> None:
    """A faiss IVF index of 768 dimensions, as of embeddings of text."""
    import faiss

    dimensions, lists = 768, 256
    count = size_bytes // (4 * dimensions)
    generator = np.random.Generator(np.random.SFC64(5))
    index = faiss.index_factory(dimensions, f"IVF{lists},Flat")
    index.cp.niter = 4
    index.train(generator.standard_normal((40 * lists, dimensions), dtype=np.float32))
    index.add(generator.standard_normal((count, dimensions), dtype=np.float32))
    faiss.write_index(index, str(directory / "vectors.faiss"))


KINDS = {
    "weights": make_weights,
    "checkpoint": make_checkpoint,
    "pickled": make_pickled,
    "gguf": make_gguf,
    "tokens": make_tokens,
    "table": make_table,
    "dataset": make_dataset,
    "megatron": make_megatron,
    "records": make_records,
    "vectors": make_vectors,
    "kraken2": make_kraken2,
    "mmseqs": make_mmseqs,
    "blast": make_blast,
    **harm_files.KINDS,
    **harm_stores.KINDS,
    **reads_files.KINDS,
}


if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
