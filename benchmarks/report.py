"""Rows of results: their ratio to the best peer, the JSON file, the printed table."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PEER_NAMES = (
    "sdpa fa3 fa4 cudnn fa2 efficient math flex flashinfer flashinfer_tc flashinfer_fa2 "
    "flashinfer_fa3 cascade flat plain plain_flashbpt compile checkpoint checkpoint_chunked "
    "selective torch_cp"
).split()
HIGHER_IS_BETTER = {"TFLOP/s": True, "TB/s": True, "tokens/s": True, "us": False, "ms": False}
HIGHER_IS_BETTER["GB"] = False


def peers_of(row: Row) -> dict[str, float]:
    return {name: row[name] for name in PEER_NAMES if row.get(name) is not None}


def best_peer(row: Row) -> str | None:
    peers = peers_of(row)
    if not peers:
        return None
    return (max if HIGHER_IS_BETTER[row["unit"]] else min)(peers, key=peers.get)


def ratio(row: Row) -> float | None:
    """flashbpt's speed over that of the best peer, 1 and more is as good or better."""
    best = best_peer(row)
    if best is None:
        return None
    if HIGHER_IS_BETTER[row["unit"]]:
        return row["flashbpt"] / row[best]
    return row[best] / row["flashbpt"]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def write(path: Path, header: dict[str, Any], rows: list[Row]) -> None:
    """One JSON object a suite, a row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{"header": {json.dumps(header)},\n "rows": [\n{lines}\n]}}\n')


def table(rows: list[Row]) -> str:
    """The rows as text, with the ratio to the best peer, and the bar of a row that has one."""
    peers = [name for name in PEER_NAMES if any(name in row for row in rows)]
    head = ["case", "dtype", "d", "S", "mask", "direction", "unit", "flashbpt", *peers, "ratio"]
    bars = any(row.get("bar") is not None for row in rows)
    if bars:
        head += ["times", "bar"]
    lines = [head]
    for row in rows:
        cells = [row["case"], row["dtype"], row["head_dim"], row["seqlen"]]
        cells += ["causal" if row["causal"] else "full", row["direction"], row["unit"]]
        cells += [_number(row.get(name)) for name in ("flashbpt", *peers)] + [_number(ratio(row))]
        if bars:
            value = ratio(row)
            cells += [_number(value and 1 / value), _number(row["bar"])]
        lines.append([str(cell) for cell in cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, 1, 4, 5, 6) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def describe(row: Row) -> str:
    mask = "causal" if row["causal"] else "full"
    return (
        f"{row['case']} {row['dtype']} d {row['head_dim']} S {row['seqlen']} {mask} "
        f"{row['direction']}"
    )
