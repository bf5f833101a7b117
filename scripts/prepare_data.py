"""Turns text, JSONL or parquet files into packed rows for training.

    python scripts/prepare_data.py --input a.jsonl b.parquet --out data/mine --length 1024
    python train.py --config configs/lm.py --workdir runs/mine \
        --config.data.text.path=data/mine --config.data.length=1024

The folder holds `train` and `held_out` rows and a `meta.json`; it appears only when it is complete.
"""

import argparse
import time
from collections.abc import Sequence

from fastweights import cli
from fastweights.data.prepare import prepare_corpus
from fastweights.data.source import read_documents
from fastweights.data.tokenizer import BYTES


def main(argv: Sequence[str] | None = None) -> int:
    """Prepares the data that the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help=".jsonl, .parquet or text files")
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument("--length", type=int, required=True, help="tokens of a row")
    parser.add_argument(
        "--tokenizer", default=BYTES, help="'bytes' or the path of a tokenizer.json"
    )
    parser.add_argument("--text_field", default="text", help="JSONL field or parquet column")
    parser.add_argument(
        "--separator", default="", help=r"cuts text files into documents; \n is a line's end"
    )
    parser.add_argument("--held_out", type=float, default=0.01, help="share of documents held out")
    args = parser.parse_args(argv)

    start = time.perf_counter()
    separator = args.separator.replace(r"\n", "\n")
    meta = prepare_corpus(
        lambda: read_documents(args.input, text_field=args.text_field, separator=separator),
        args.out,
        length=args.length,
        tokenizer=args.tokenizer,
        held_out=args.held_out,
    )
    for name, split in meta["splits"].items():
        print(
            f"{name:9}{split['documents']:>12,} documents{split['bytes']:>16,} bytes"
            f"{split['targets']:>16,} tokens{split['rows']:>12,} rows"
        )
    print(
        f"{args.out}: rows of {meta['length']} tokens, vocabulary {meta['vocab_size']}, "
        f"{time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    cli.run(main)
