# SPDX-License-Identifier: Apache-2.0
"""A model of DIR by transformers' from_pretrained: `pretrained.py DIR [--prefetch]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from prefetcher import prefetch_beside
from reading import Reading
from transformers import LlamaForCausalLM


def main() -> None:
    """Load it, and take in every parameter by name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prefetch", action="store_true", help="the peer of prefetcher.py")
    args = parser.parse_args()
    with Reading() as reading:
        if args.prefetch:
            prefetch_beside(sorted(args.directory.glob("*.safetensors")))
        model = LlamaForCausalLM.from_pretrained(args.directory, dtype="auto")
        for _, parameter in sorted(model.named_parameters()):
            reading.add_tensor(parameter)


if __name__ == "__main__":
    main()
