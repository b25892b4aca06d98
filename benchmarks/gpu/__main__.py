"""The parts, each of which takes up where it stopped.

python -m benchmarks.gpu equality|grid|fleet|summary.. --out FOLDER [--device cpu|cuda] [--tiny]
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.gpu.cells import Deadline

PARTS = ("equality", "grid", "fleet", "summary")


def main(arguments: list[str] | None = None) -> None:
    """Run parts one after another; exit with 1 where a part has to be run again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few cells of models of no size")
    parser.add_argument(
        "--minutes", type=float, default=6.5, help="after which a part begins nothing"
    )
    args = parser.parse_args(arguments)
    if args.device == "cpu":
        # A rank takes the GPU that it sees.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif args.parts != ["summary"] and not _has_gpu():
        sys.exit("torch sees no GPU: take --device cpu, with --tiny")
    for name in args.parts:
        part = importlib.import_module(f"benchmarks.gpu.{name}")
        if not part.run(args.out, args.device, args.tiny, Deadline(args.minutes)):
            sys.exit(f"{name} is not complete: run the same command again")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
