"""Run the experiments behind the pages of results, and write these pages.

    python -m recipes.lab run                      # every job of jobs.yaml that has no row yet
    python -m recipes.lab run --only inflection --workers 2 --threads 1
    python -m recipes.lab list                     # what is done, what is open
    python -m recipes.lab curves                   # dev scores of the runs into dev_curves.csv, alphas beside their row
    python -m recipes.lab views                    # a word and a sentence as trained models see them
    python -m recipes.lab heads translation        # analyse the heads of the trained models
    python -m recipes.lab page                     # all pages of results, from the rows
    python -m recipes.lab figures                  # all their figures

A job is done when the CSV file of its group has a row with its command; an unfinished one is resumed from its checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import heads, jobs, rows, views
from .pages import figures, page


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    does = parser.add_subparsers(dest="what", required=True)
    found, queue = (argparse.ArgumentParser(add_help=False) for _ in range(2))
    found.add_argument("--results", type=Path, default=rows.RESULTS, help="folder of the CSV files")
    queue.add_argument("--jobs", type=Path, default=jobs.JOBS, help="YAML list of jobs")
    queue.add_argument("--only", action="append", help="group of jobs; repeatable")
    queue.add_argument("--folder", type=Path, default=rows.ROOT / "runs", help="folder of the runs")
    run = does.add_parser("run", parents=[found, queue], help="run the jobs that have no row yet")
    run.add_argument("--workers", type=int, default=1, help="jobs at a time")
    run.add_argument("--threads", type=int, default=1, help="threads of each")
    does.add_parser("list", parents=[found, queue], help="say what is done and what is open")
    does.add_parser("curves", parents=[found, queue], help="collect the dev scores and alphas of the runs")
    does.add_parser("views", parents=[found, queue], help="write down what models make of a word and of a sentence")
    look = does.add_parser("heads", parents=[found, queue], help="analyse the heads of the trained models")
    look.add_argument("study", choices=sorted(heads.STUDIES))
    does.add_parser("page", parents=[found], help="fill the tables of the pages from the rows")
    draw = does.add_parser("figures", parents=[found], help="draw the figures of the pages from the rows")
    draw.add_argument("--out", type=Path, default=rows.FIGURES, help="folder of the figures")
    args = parser.parse_args(arguments)
    if args.what == "page":
        return page.write_all(rows.Rows(args.results))
    if args.what == "figures":
        return figures.draw_all(rows.Rows(args.results), args.out)
    chosen = [job for job in jobs.read_jobs(args.jobs) if not args.only or job.group in args.only]
    if args.what == "heads":
        heads.study(args.study, chosen, args.results, args.folder)
    elif args.what == "list":
        for job in chosen:
            print(f"{'done' if job.done(args.results) else 'open'}  {job.command}")
    elif args.what == "curves":
        read = jobs.curves(chosen, args.results, args.folder)
        print(f"dev scores of {read} runs in {args.results / 'dev_curves.csv'}")
        for group, steps in jobs.alphas(chosen, args.results, args.folder).items():
            print(f"alphas at {steps} steps in {args.results / group}.jsonl")
    elif args.what == "views":
        if not (groups := [group for group in views.VIEWS if any(job.group == group for job in chosen)]):
            sys.exit(f"there is no view of {', '.join(args.only)}; there is one of {' and of '.join(views.VIEWS)}.")
        for collect, file in map(views.VIEWS.__getitem__, groups):
            print(f"{collect(chosen, args.results, args.folder)} in {args.results / file}")
    elif failed := jobs.run_all(chosen, args.results, args.folder, args.workers, args.threads):
        sys.exit(f"{len(failed)} of {len(chosen)} jobs failed:\n" + "\n".join(job.command for job in failed))


if __name__ == "__main__":
    main()
