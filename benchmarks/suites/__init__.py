"""The suites, by the name that --suite takes.

A suite is a module with `rows(options)`, a generator of result rows without the keys "suite" and
"ratio", and `verdict(rows)`, lines that hold the rows against the suite's targets.
"""

from types import ModuleType

from suites import block, cpu, decode, dense, masks, overhead, prefill, shared_prefix, varlen

SUITES: dict[str, ModuleType] = {
    "dense": dense,
    "varlen": varlen,
    "masks": masks,
    "decode": decode,
    "prefill": prefill,
    "shared_prefix": shared_prefix,
    "block": block,
    "overhead": overhead,
    "cpu": cpu,
}
