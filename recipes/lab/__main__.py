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

from . import heads, jobs, mapping_views, rows, views
from .pages import figures, head_alphas, page


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    does = parser.add_subparsers(dest="what", required=True)
    found, pages, queue = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    found.add_argument("--results", type=Path, default=rows.RESULTS, help="folder of the CSV files")
    pages.add_argument("--cards", type=Path, default=rows.CARDS, help="folder of the pages, and of their figures/")
    queue.add_argument("--jobs", type=Path, default=jobs.JOBS, help="YAML list of jobs")
    queue.add_argument("--only", action="append", help="group of jobs; repeatable")
    queue.add_argument("--folder", type=Path, default=rows.ROOT / "runs", help="folder of the runs")
    run = does.add_parser("run", parents=[found, queue], help="run the jobs that have no row yet")
    run.add_argument("--workers", type=int, default=1, help="jobs at a time")
    run.add_argument("--threads", type=int, default=1, help="threads of each")
    does.add_parser("list", parents=[found, queue], help="say what is done and what is open")
    does.add_parser("curves", parents=[found, queue], help="collect the dev scores and alphas of the runs")
    does.add_parser(
        "views", parents=[found, queue], help="write down what trained models make of a word and of a sentence"
    )
    look = does.add_parser("heads", parents=[found, queue, pages], help="analyse the heads of the trained models")
    look.add_argument("study", choices=sorted(heads.STUDIES))
    does.add_parser("page", parents=[found, pages], help="write the pages from the rows")
    does.add_parser("figures", parents=[found, pages], help="draw the figures of the pages from the rows")
    args = parser.parse_args(arguments)
    if args.what == "page":
        page.write_all(args.results, args.cards)
    elif args.what == "figures":
        figures.draw_all(args.results, args.cards / "figures")
    elif args.what == "heads":
        heads.study(args.study, jobs.read_jobs(args.jobs), args.results, args.folder, args.cards / "figures")
    else:
        chosen = [job for job in jobs.read_jobs(args.jobs) if not args.only or job.group in args.only]
        if args.what == "list":
            for job in chosen:
                print(f"{'done' if job.done(args.results) else 'open'}  {job.command}")
        elif args.what == "curves":
            read = jobs.curves(chosen, args.results, args.folder)
            print(f"dev scores of {read} runs in {args.results / 'dev_curves.csv'}")
            for group, steps in head_alphas.collect(chosen, args.results, args.folder).items():
                print(f"alphas at {steps} steps in {args.results / group}.jsonl")
        elif args.what == "views":
            known = {view.GROUP: view for view in (views, mapping_views)}
            if not (groups := [group for group in known if any(job.group == group for job in chosen)]):
                sys.exit(f"there is no view of {', '.join(args.only)}; there is one of {' and of '.join(known)}.")
            for view in map(known.__getitem__, groups):
                print(f"{view.collect(chosen, args.results, args.folder)} in {args.results / view.FILE}")
        elif failed := jobs.run_all(chosen, args.results, args.folder, args.workers, args.threads):
            sys.exit(f"{len(failed)} of {len(chosen)} jobs failed:\n" + "\n".join(job.command for job in failed))


if __name__ == "__main__":
    main()
