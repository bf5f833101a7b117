"""Writes one HTML page on a sweep: tables, figures, failures; nothing in it needs a network.

    python scripts/report.py runs/ratio [--eval recall,length,ppl]
    python scripts/report.py runs/ratio monday.csv --out report

With several folders, or CSVs of scripts/collect.py, it is on the runs of all.
Beside the page (runs/ratio/report/index.html) lie the same figures as PNG and all rows as one CSV.
A model is all runs that differ in learning rate and seed alone. It is shown at the rate of the best
mean over slices and seeds, with the 95 % bootstrap interval over seeds and examples; robustness is
the area under its recall over the logarithm of the rate. Failed runs count as a recall of 0.
"""

import argparse
import base64
import html
import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib import pyplot as plt

import collect
import figures
from fastweights import analysis, cli, evals, files
from fastweights.analysis import Loss, Summary
from fastweights.errors import UserError, check
from fastweights.files import write_atomic

TOLD = ("attention_share", "state_bytes", "parameters")
# Eval -> what the page takes from its rows.
SHOWN = collect.needs((*TOLD, "task", "length", "pairs", "chance"), TOLD)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; } img { max-width: 100%; } .note { color: #666; }
.best { font-weight: 600; }
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "sources", type=pathlib.Path, nargs="+", help="folders of a sweep's runs, or CSVs of them"
    )
    parser.add_argument("--eval", default="recall", help=f"some of {', '.join(SHOWN)}, by comma")
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder (default: report/ in the first of the sources)"
    )
    args, rest = cli.parse(parser, argv)
    check(not rest, f"report reads what is on disk and takes no overrides, got {rest}.")
    others = [name for name in evals.split_names(args.eval) if name not in SHOWN]
    check(
        not others,
        f"the report shows the evals {', '.join(SHOWN)}, not {', '.join(others)}, whose rows "
        "have other columns; gather those with scripts/collect.py.",
    )
    first = args.sources[0]
    check(
        args.out is not None or not first.is_file(),
        f"'{first}' is no folder, so say where the report goes with --out.",
    )
    rows = collect.gather(args.sources, args.eval, SHOWN)
    summaries = analysis.summarise(rows)
    check(
        bool(summaries),
        f"'{first}' has no finished run with recall in the eval {args.eval} "
        f"({rows[0]['status']}); let the sweep finish one.",
    )
    out = args.out or first / "report"
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.csv").open("w", newline="") as file:
        collect.write_rows(rows, file)
    losses = analysis.losses(rows)
    pictures = draw(summaries, losses, rows, out)
    text = page(first.resolve().name, summaries, losses, rows, pictures)
    write_atomic(out / "index.html", text)
    print(f"{out / 'index.html'}: {len(summaries)} scores of {len(pictures)} figures")
    return 0


def tasks_of(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Task -> its summaries; figures compare models on one task alone."""
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        if "/" not in summary.slice:
            found.setdefault(summary.row["task"], []).append(summary)
    return found


def mean_table(summaries: Sequence[Summary], rows: Sequence[dict[str, Any]]) -> str:
    """A task's models by their mean over its slices, at the rates of `summaries`."""
    models = {s.model: s.lr for s in summaries}
    mine = [
        row
        for row in rows
        if row["eval"] != analysis.LOSS_EVAL and analysis.model_name(row["run"]) in models
    ]
    try:
        return headline(analysis.summarise(analysis.mean_over_slices(mine), models))
    except UserError as error:
        return f'<p class="note">No means over slices: {html.escape(str(error))}</p>'


def hardest(summaries: Sequence[Summary]) -> list[Summary]:
    """Those on the slice with most pairs, and of these the longest, that most models have."""
    slices = {(s.row["pairs"], s.row["length"], s.slice, s.eval) for s in summaries}
    counts = {key: sum((s.slice, s.eval) == key[2:] for s in summaries) for key in slices}
    most = max(counts.values())
    *_, name, eval_name = max(key for key, count in counts.items() if count == most)
    return [s for s in summaries if (s.slice, s.eval) == (name, eval_name)]


def draw(
    summaries: Sequence[Summary],
    losses: Sequence[Loss],
    rows: list[dict[str, Any]],
    out: pathlib.Path,
) -> dict[str, pathlib.Path]:
    """Caption -> PNG."""
    drawn = {}
    for task, found in tasks_of(summaries).items():
        top = hardest(found)
        drawn[f"{task}: recall against state"] = figures.accuracy_against_state(top)
        if len({s.row["attention_share"] for s in top}) > 1:
            caption = f"{task}: recall and loss against attention"
            drawn[caption] = figures.accuracy_against_attention(top)
        if len({s.slice for s in found}) > 1:
            drawn[f"{task}: recall by pairs and length"] = figures.heat_maps(found)
        if any(len(s.scores) > 1 for s in top):
            drawn[f"{task}: recall against learning rate"] = figures.rate_robustness(top)
    if losses:
        drawn["loss on text against attention"] = figures.text_loss(losses)
    if any(row.get("steps_to_90") for row in rows):
        drawn["steps to 90 % recall"] = figures.steps_to_threshold(rows, analysis.model_name)
    saved = {}
    for number, (caption, figure) in enumerate(drawn.items()):
        saved[caption] = out / f"figure_{number}.png"
        files.save_figure(figure, saved[caption])
        plt.close(figure)
    return saved


def page(
    name: str,
    summaries: Sequence[Summary],
    losses: Sequence[Loss],
    rows: list[dict[str, Any]],
    pictures: dict[str, pathlib.Path],
) -> str:
    parts = [f"<h1>{html.escape(name)}</h1>", f'<p class="note">{scale(summaries, rows)}</p>']
    for task, found in tasks_of(summaries).items():
        parts.append(f"<h2>{html.escape(task)}</h2>")
        if len({s.slice for s in found}) > 1:
            parts.append(mean_table(found, rows))
        parts.append(headline(found))
    if losses:
        parts += ["<h2>loss on text</h2>", loss_table(losses)]
    for caption, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(
            f"<h3>{html.escape(caption)}</h3>"
            f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        )
    ended = {r["run"]: r["status"] for r in rows if not r["status"].startswith("done")}
    if ended:
        told = [[run, status] for run, status in ended.items()]
        parts += ["<h2>failures</h2>", table(["run", "what happened"], told)]
    kinds = [s for s in summaries if "/" in s.slice]
    if kinds:
        parts += ["<h2>kinds of answers</h2>", headline(kinds)]
    head = f'<meta charset="utf-8"><title>{html.escape(name)}</title><style>{STYLE}</style>'
    return (
        f"<!doctype html>\n<html><head>{head}</head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def scale(summaries: Sequence[Summary], rows: list[dict[str, Any]]) -> str:
    """What was compared, and in what the models were made equal."""
    runs = {row["run"] for row in rows}
    matched = sorted({s.row.get("matched") or "" for s in summaries})
    # Two sweeps side by side may have been made equal in different things, or one of them alone.
    equal = (
        f"made equal in {matched[0]}"
        if len(matched) == 1 and matched[0]
        else "not made equal in parameters or state"
    )
    rates = sorted({len(s.scores) for s in summaries})
    seeds = sorted({s.seeds for s in summaries})
    few = (
        " Fewer than four rates or three seeds: read differences with care."
        if (rates[0] < 4 or seeds[0] < 3)
        else ""
    )
    failed = {row["run"] for row in analysis.failed_runs(rows)}
    shown = {s.model for s in summaries}
    counted = [run for run in failed if analysis.model_name(run) in shown]
    zero = f" {len(counted)} of them failed and count as a recall of 0." if counted else ""
    lost = sorted({analysis.model_name(run) for run in failed} - shown)
    if lost:
        zero += f" All runs of {', '.join(lost)} failed, so the tables leave these models out."
    return (
        f"{len(runs)} runs; models {equal}; {'/'.join(map(str, rates))} learning rates, "
        f"{'/'.join(map(str, seeds))} seeds a model.{zero}{few}"
    )


def headline(summaries: Sequence[Summary]) -> str:
    best = {}
    for s in summaries:
        key = (s.eval, s.slice)
        best[key] = max(best.get(key, 0.0), s.score)
    cells = []
    for s in summaries:
        score = f"{s.score:.3f}"
        if s.score == best[s.eval, s.slice]:
            score = f'<span class="best">{score}</span>'
        cheater = s.row.get("cheater")
        cells.append(
            [
                s.model, s.slice, score, f"{s.low:.3f} to {s.high:.3f}", f"{s.row['chance']:.3f}",
                "-" if cheater is None else f"{cheater:.3f}", f"{s.lr:g}", f"{s.robustness:.3f}",
                str(s.seeds), f"{s.row['parameters']:,}", f"{s.row['state_bytes']:,}",
            ]
        )  # fmt: skip
    columns = ["model", "slice", "recall", "95 % interval", "chance", "best cheater", "best lr",
               "robustness", "seeds", "parameters", "state bytes"]  # fmt: skip
    return table(columns, cells)


def loss_table(losses: Sequence[Loss]) -> str:
    cells = [
        [
            s.model, s.slice, f"{s.nll:.4f}", f"{s.low:.4f} to {s.high:.4f}", f"{s.lr:g}",
            f"{s.row['parameters']:,}", f"{s.row['state_bytes']:,}",
        ]
        for s in losses
    ]  # fmt: skip
    columns = ["model", "tokens", "loss (nats)", "seeds", "best lr", "parameters", "state bytes"]
    return table(columns, cells)


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Cells may hold a span of ours; all other text is escaped."""

    def cell(text: str) -> str:
        return f"<td>{text if text.startswith('<span') else html.escape(text)}</td>"

    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


if __name__ == "__main__":
    cli.run(main)
