"""Runs benchmark suites: flashbpt beside its peers, in one process.

    python benchmarks/run.py --suite dense --suite varlen [--out DIR] [--backend sm80]
    python benchmarks/run.py --suite dense --only 'd 128 S (2048|8192) ' --only ' bwd$' --peer fa2
    python benchmarks/run.py --quick

Each suite prints a table, with the ratio to the best peer on every row (1 and more: as fast or
faster), and writes one JSON object, {"header": {...}, "rows": [...]}, to
DIR/<GPU or CPU>/<suite>.json; DIR is benchmarks/results if not given. What is not the whole suite
writes only where --out says: --quick, which takes seconds, checks that everything runs and measures
nothing worth keeping; --only, for the rows that match, as in
"B8 H16 bfloat16 d 128 S 2048 causal fwd+bwd"; and --peer, for some of the peers.
"""

import argparse
import datetime
import gc
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
from options import Options  # noqa: E402
from report import (  # noqa: E402
    PEER_NAMES,
    SELF_NAMES,
    against_others,
    best_peer,
    describe,
    geometric_mean,
    ratio,
    summary,
    table,
    write,
)
from suites import SUITES  # noqa: E402

import flashbpt  # noqa: E402


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


def run_suite(name: str, options: Options) -> list[dict]:
    rows = []
    for row in SUITES[name].rows(options):
        rows.append({"suite": name, **row, "ratio": ratio(row)})
        if sys.stderr.isatty():
            line = f"{name}: {len(rows)} rows, {describe(row)}"
            print(f"\r{line[:79]:79}", end="\r", file=sys.stderr, flush=True)
    return rows


def print_results(name: str, rows: list[dict]) -> None:
    print(f"{name}: ratio = flashbpt's speed over the best peer's")
    print(table(rows))
    compared = against_others(rows)
    if compared:
        print(summary(rows))
    for line in SUITES[name].verdict(rows):
        print(line)
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
    parser.add_argument("--backend", default="auto", help="as flashbpt.use_backend takes it")
    parser.add_argument("--fp16", action="store_true", help="rows in fp16 too, on CUDA")
    parser.add_argument("--big", action="store_true", help="block: 524288 tokens too, a minute")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        type=re.compile,
        metavar="REGEX",
        help="rows that match; several times: that match all",
    )
    parser.add_argument(
        "--peer", action="append", choices=PEER_NAMES + SELF_NAMES, help="default: all of them"
    )
    args = parser.parse_args(arguments)
    options = Options(
        quick=args.quick, fp16=args.fp16, big=args.big, only=args.only, peers=args.peer
    )
    whole = not (args.quick or args.only or args.peer)
    out = args.out or (HERE / "results" if whole else None)
    with flashbpt.use_backend(args.backend):
        for name in args.suite or SUITES:
            torch.manual_seed(0)
            rows = run_suite(name, options)
            if not rows:
                print(f"{name}: no rows; it needs a GPU, or --only matches none\n")
                continue
            path = None
            if out is not None:
                head = header()
                path = out / slug(head["gpu"]) / f"{name}.json"
                write(path, head, rows)
            print_results(name, rows)
            if path is not None:
                print(f"written to {path}\n")


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: collections between the rows need not look at it
    main()
