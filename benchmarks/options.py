"""What the command line of run.py asks of the suites."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from report import Row, describe

Function = TypeVar("Function", bound=Callable | None)


@dataclass
class Options:
    quick: bool = False  # a check in seconds, no measurement
    fp16: bool = False  # rows in fp16 beside those in bf16
    big: bool = False  # rows that take a minute each
    only: list[re.Pattern] = field(default_factory=list)  # all of them match a row that runs
    peers: list[str] | None = None  # those to measure, None for all

    def wants(self, row: Row) -> bool:
        return all(pattern.search(describe(row)) for pattern in self.only)

    def wanted_peers(self, peers: dict[str, Function]) -> dict[str, Function]:
        return {name: f for name, f in peers.items() if self.peers is None or name in self.peers}
