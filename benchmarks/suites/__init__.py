"""The suites, by the name that --suite takes.

A suite is a module with `rows(options)`, a generator of result rows without the keys "suite" and
"ratio", and `verdict(rows)`, lines that hold the rows against the suite's targets.
"""

from types import ModuleType

from suites import cpu, dense, masks, overhead, varlen

SUITES: dict[str, ModuleType] = {
    "dense": dense,
    "varlen": varlen,
    "masks": masks,
    "overhead": overhead,
    "cpu": cpu,
}
