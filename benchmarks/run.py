"""Runs benchmark suites: flashbpt beside its peers, in one process.

    python benchmarks/run.py --suite cpu --suite overhead [--out DIR] [--quick]

Each suite prints a table, with the ratio to the best peer on every row (1 and more: as fast or
faster), and writes one JSON object, {"header": {...}, "rows": [...]}, to
DIR/<GPU or CPU>/<suite>.json; DIR is benchmarks/results if not given. --quick takes seconds, checks
that everything runs and measures nothing worth keeping, so it writes only where --out says.
"""

import argparse
import datetime
import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
if importlib.util.find_spec("flashbpt") is None:  # not installed: the package of this checkout
    sys.path.insert(0, str(ROOT))

from git_tree import git_tree  # noqa: E402
from report import best_peer, describe, geometric_mean, ratio, table, write  # noqa: E402
from suites import SUITES  # noqa: E402


def header() -> dict:
    gpu, driver = device_name(), None
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
        driver = output(query)
    return {
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "csrc": git_tree(ROOT / "csrc"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def device_name() -> str:
    """The GPU, or the CPU's model where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        model = None
    name = model.group(1) if model else platform.processor() or platform.machine()
    return f"CPU {name.strip()}, {torch.get_num_threads()} threads"


def output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run_suite(name: str, quick: bool) -> list[dict]:
    rows = []
    for row in SUITES[name].rows(quick):
        rows.append({"suite": name, **row, "ratio": ratio(row)})
        if sys.stderr.isatty():
            line = f"{name}: {len(rows)} rows, {describe(row)}"
            print(f"\r{line[:79]:79}", end="\r", file=sys.stderr, flush=True)
    return rows


def print_results(name: str, rows: list[dict]) -> None:
    print(f"{name}: ratio = flashbpt's speed over the best peer's")
    print(table(rows))
    for line in SUITES[name].verdict(rows):
        print(line)
    compared = [row for row in rows if row["ratio"] is not None]
    if not compared:
        return
    mean = geometric_mean(row["ratio"] for row in compared)
    print(f"geometric mean of {len(compared)} ratios: {mean:.3f}")
    worst = min(compared, key=lambda row: row["ratio"])
    print(f"worst row: {worst['ratio']:.3f} of {best_peer(worst)}: {describe(worst)}\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all of them")
    parser.add_argument("--out", type=Path, help="where to write results")
    parser.add_argument("--quick", action="store_true", help="seconds; a check, no measurement")
    args = parser.parse_args(arguments)
    out = args.out or (None if args.quick else HERE / "results")
    for name in args.suite or SUITES:
        torch.manual_seed(0)
        rows = run_suite(name, args.quick)
        if out is not None:
            head = header()
            path = out / slug(head["gpu"]) / f"{name}.json"
            write(path, head, rows)
        print_results(name, rows)
        if out is not None:
            print(f"written to {path}\n")


if __name__ == "__main__":
    main()
