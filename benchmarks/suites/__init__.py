"""The suites, by the name that --suite takes.

A suite is a module with `rows(quick)`, a generator of result rows without the key "suite", and
`verdict(rows)`, lines that hold the rows against the suite's targets.
"""

from types import ModuleType

from suites import cpu, overhead

SUITES: dict[str, ModuleType] = {"cpu": cpu, "overhead": overhead}
