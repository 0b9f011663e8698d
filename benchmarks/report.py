"""Rows of results: their ratio to the best peer, the JSON file, the printed tables and verdicts."""

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
# flashbpt itself without what the row measures.
SELF_NAMES = (
    "flag unmasked no_dropout no_bias_grad no_bias no_softcap no_sinks no_alibi bf16_cache page64 "
    "contiguous own_flat"
).split()
HIGHER_IS_BETTER = {"TFLOP/s": True, "TB/s": True, "tokens/s": True, "us": False, "ms": False}
HIGHER_IS_BETTER["GB"] = False


def peers_of(row: Row) -> dict[str, float]:
    return {name: row[name] for name in PEER_NAMES + SELF_NAMES if row.get(name) is not None}


def best_peer(row: Row) -> str | None:
    peers = peers_of(row)
    if not peers:
        return None
    return (max if HIGHER_IS_BETTER[row["unit"]] else min)(peers, key=peers.get)


def ratio(row: Row, peer: str | None = None) -> float | None:
    """flashbpt's speed over that of a peer, the best if not named; 1 and more is as good."""
    peer = peer or best_peer(row)
    if row.get(peer) is None:
        return None
    if HIGHER_IS_BETTER[row["unit"]]:
        return row["flashbpt"] / row[peer]
    return row[peer] / row["flashbpt"]


def against_others(rows: list[Row]) -> list[Row]:
    """The rows with a peer that is not flashbpt itself."""
    return [row for row in rows if best_peer(row) in PEER_NAMES]


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
    peers = [name for name in PEER_NAMES + SELF_NAMES if any(name in row for row in rows)]
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
            value = ratio(row) if "bar" in row else None
            cells += [_number(value and 1 / value), _number(row.get("bar"))]
        lines.append(cells)
    return _columns(lines, left=(0, 1, 4, 5, 6))


def summary(rows: list[Row]) -> str:
    """A line a dtype, head dim and direction: means of the ratios to each peer, and to the best."""
    rows = against_others(rows)
    peers = [name for name in PEER_NAMES if any(row.get(name) is not None for row in rows)]
    lines = [["geometric means", "d", "direction", "rows", *peers, "best peer", "worst row"]]
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        dtype = row["dtype"] + (" TF32" if row.get("tf32") else "")
        groups.setdefault((dtype, row["head_dim"], row["direction"]), []).append(row)
    for group, held in groups.items():
        cells = [*group, len(held)]
        for peer in (*peers, None):
            ratios = [r for row in held if (r := ratio(row, peer)) is not None]
            cells.append(_number(geometric_mean(ratios) if ratios else None))
        lines.append([*cells, _number(min(ratio(row) for row in held))])
    return _columns(lines, left=(0, 2))


def target(what: str, ratios: list[float], mean: float = 0, worst: float = 0) -> list[str]:
    """Whether the ratios hold their least mean and the least of each; no line without ratios."""
    if not ratios:
        return []
    found = geometric_mean(ratios), min(ratios)
    under = sum(r < worst for r in ratios)
    parts = [
        f"mean {found[0]:.3f}" + (f" (at least {mean})" if mean else ""),
        f"worst {found[1]:.3f}" + (f" (at least {worst}, {under} under it)" if worst else ""),
        "met" if found[0] >= mean and found[1] >= worst else "MISSED",
    ]
    return [f"target: {what}, {len(ratios)} rows: {', '.join(parts)}"]


def bar_line(what: str, times: list[float], bar: float | None) -> list[str]:
    """Whether no row takes more than `bar` times the time of another; no line without rows."""
    if not times:
        return []
    line = f"bar: {what}, {len(times)} rows: mean {geometric_mean(times):.2f}"
    line += f", worst {max(times):.2f}"
    if bar is not None:
        line += f" (at most {bar:.4g}), {'met' if max(times) <= bar else 'MISSED'}"
    return [line]


def _columns(lines: list[list], left: tuple[int, ...]) -> str:
    """Cells under each other, the columns `left` to the left."""
    cells = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in cells
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def describe(row: Row) -> str:
    mask = "causal" if row["causal"] else "full"
    return (
        f"{row['case']} {row['dtype']} d {row['head_dim']} S {row['seqlen']} {mask} "
        f"{row['direction']}"
    )
