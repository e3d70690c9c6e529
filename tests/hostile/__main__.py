"""Print how many cases of each kind ended how: `python -m tests.hostile [--all] [PART OF A NAME …]`.

Without `--all`, the slow cases are left out, as `make test` does.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.hostile.cases import ENDS, KINDS, outcome
from tests.hostile.corpus import corpus


def main() -> int:
    wanted = [part for part in sys.argv[1:] if part != "--all"] or [""]
    cases = [case for case in corpus() if any(part in f"{case.kind}: {case.name}" for part in wanted)]
    cases = [case for case in cases if "--all" in sys.argv or not case.slow]
    counts: Counter[tuple[str, str]] = Counter()
    started = time.monotonic()
    for case in cases:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            began = time.monotonic()
            found = outcome(case, Path(place))
        counts[case.kind, found.end] += 1
        if not found.good:
            print(f"{found.end}: {case.kind}: {case.name}: {found.said}"[:600], flush=True)
        if time.monotonic() - began > 5 and not case.slow:
            print(f"slow: {case.kind}: {case.name}: {time.monotonic() - began:.1f} s", flush=True)
    print(table(counts))
    print(f"{len(cases)} cases in {time.monotonic() - started:.0f} s")
    return int(any(end not in ("refused", "right") for _, end in counts))


def table(counts: Counter[tuple[str, str]]) -> str:
    """Return the counts by kind and end as lines of a table."""
    lines = [f"{'':<14}" + "".join(f"{end:>11}" for end in (*ENDS, "cases"))]
    for kind in (*KINDS, "all"):
        row = [sum(n for (k, e), n in counts.items() if kind in (k, "all") and e == end) for end in ENDS]
        lines.append(f"{kind:<14}" + "".join(f"{number:>11}" for number in (*row, sum(row))))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
