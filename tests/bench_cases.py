"""The cases of a benchmark suite under chosen options, and what every row of results has."""

import re

ROW = {
    "suite": str,
    "case": str,
    "backend": str,
    "dtype": str,
    "head_dim": int,
    "seqlen": int,
    "causal": bool,
    "direction": str,
    "unit": str,
    "flashbpt": float,
}


def options_of(bench, only=(), **kwargs):
    return bench("options").Options(only=[re.compile(text) for text in only], **kwargs)


def cases_of(bench, suite, **kwargs):
    return list(bench(f"suites.{suite}").cases(options_of(bench, **kwargs)))
