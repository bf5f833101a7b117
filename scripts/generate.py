"""Text from a run's checkpoint: one prompt, streamed, or a file of prompts in batches.

    python scripts/generate.py --workdir runs/lm --prompt "The list method " [--temperature 0.8]
    python scripts/generate.py --workdir runs/lm --input prompts.jsonl --output texts.jsonl

Without a temperature each next token is the most likely one. A line of the input is an object with
a "prompt"; the output has the same lines, in the same order, with "text", "tokens" and "finish"
("stop", "end" or "length") added. An imported model's own end tokens end a text too. The tokenizer
is that of the run's own data, or a tokenizer.json in the run's folder where there is one. Speeds
and the bytes of the caches go to stderr.
"""

import argparse
import contextlib
import json
import pathlib
import re
import sys
from typing import Any, TextIO

import jax

from fastweights import cli, interop, sharding
from fastweights.data import run_tokenizer
from fastweights.errors import UserError, check
from fastweights.generation import Engine, SamplingConfig, complete
from fastweights.training import run_folder
from fastweights.training.loading import load_params


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="the run's folder")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the last)")
    parser.add_argument("--prompt", help="text to go on from")
    parser.add_argument("--input", type=pathlib.Path, help="JSON lines, each with a prompt")
    parser.add_argument("--output", type=pathlib.Path, help="JSON lines (default: stdout)")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        help=r"ends a text; may be repeated; \n and \n\n are ends of lines",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--min_p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16, help="prompts of the input at a time")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens at a time")
    parser.add_argument("--burst", type=int, default=16, help="new tokens between two outputs")
    args, rest = cli.parse(parser, argv)

    check(not rest, "this command takes no --config overrides; the run's own config counts.")
    check(
        (args.prompt is None) != (args.input is None),
        "give either --prompt or --input (a file of JSON lines), not both or none.",
    )
    # Only what is nothing else, for \nabla is a word.
    stop = [x.replace(r"\n", "\n") if re.fullmatch(r"(\\n)+", x) else x for x in args.stop]
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    config = run_folder.load_config(args.workdir)
    tokenizer = run_tokenizer(config.data, args.workdir)
    records = [{"prompt": args.prompt}] if args.input is None else read_prompts(args.input)
    for number, record in enumerate(records):
        check(
            _is_text(record["prompt"]),
            f"prompt {number} holds half a letter (a lone surrogate); write it as UTF-8.",
        )
    prompts = tokenizer.encode_many([record["prompt"] for record in records])

    ends: dict[str, Any] = dict(stop=stop, end_ids=interop.end_ids(args.workdir))
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        engine = Engine(
            config.model,
            # Kept by nobody else, for the engine lays them out anew.
            load_params(args.workdir, config, mesh, args.step).params,
            rows=min(args.rows, len(prompts)),
            prompt_length=max(1, *map(len, prompts)),
            new_tokens=args.max_new_tokens,
            vocab_size=tokenizer.vocab_size,
            sampling=sampling,
            chunk=args.chunk,
            burst=args.burst,
        )
        engine.check_prompts(prompts)  # before anything is written
        if args.input is None:

            def show(_: int, piece: str) -> None:
                print(piece, end="", flush=True)

            list(complete(engine, tokenizer, prompts, **ends, on_text=show))
            print()
        else:
            texts = complete(engine, tokenizer, prompts, **ends)
            with open_output(args.output) as out:
                for record, done in zip(records, texts, strict=True):
                    extra = {"text": done.text, "tokens": done.tokens, "finish": done.finish}
                    print(json.dumps(record | extra, ensure_ascii=False), file=out, flush=True)
    print(describe(engine), file=sys.stderr)
    return 0


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_prompts(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, empty lines passed over."""
    try:
        # Not by `splitlines`: a JSON string may hold what that takes for an end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--input '{path}' can't be read ({error}); check the path.") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"line {number} of '{path}' is not JSON ({error}); write one object a line."
            ) from error
        check(
            isinstance(record, dict) and isinstance(record.get("prompt"), str),
            f'line {number} of \'{path}\' is {line.strip()[:60]}; write {{"prompt": "..."}}.',
        )
        records.append(record)
    check(bool(records), f"--input '{path}' holds no prompt; write one object a line.")
    return records


def open_output(path: pathlib.Path | None) -> contextlib.AbstractContextManager[TextIO]:
    """The file to write, or stdout."""
    if path is None:
        return contextlib.nullcontext(sys.stdout)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output '{path}' can't be written ({error.strerror}).") from error


def describe(engine: Engine) -> str:
    """One line: speeds of both parts and what the caches take."""
    t = engine.timing
    return (
        f"prefill {t.prefill_tokens:,} tokens at {t.prefill_tokens / t.prefill_seconds:,.0f} a "
        f"second, decode {t.decode_tokens:,} at {t.decode_tokens / t.decode_seconds:,.0f}, caches "
        f"{engine.cache_bytes:,} bytes ({engine.rows} rows)"
    )


if __name__ == "__main__":
    cli.run(main)
