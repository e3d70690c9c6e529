"""Check a proof in rational arithmetic. One file, Python's standard library only: `python proof.py FILE`.

Data. A row is a list of visible keys, each with a weight a_m >= 0 and a value v_m (a vector of d numbers). All numbers
are floats, that is, exact rationals. A learned sink is a key whose value is 0. The row's set is
    P = { a' : a'_m >= 0 for each m, sum a'_m = sum a_m, sum a'_m v_m = sum a_m v_m }.

Theorem. For any numbers c_m and any vector z, every a' in P has
    c.a' <= z.(sum a_m v_m) + (sum a_m) max_m (c_m - z.v_m), and c.a' >= the same with min in place of max.
Proof. c.a' = sum a'_m z.v_m + sum a'_m (c_m - z.v_m). The first sum is z.(sum a_m v_m), as a' is in P. In the second,
a'_m >= 0, so replacing each bracket by the largest (smallest) does not lower (raise) it, and sum a'_m = sum a_m. QED.
It does not matter where z comes from: a good z only makes the bound sharp.

Steps. A file is a list of steps; each defines a quantity Q of the rows' weights a' and two ends, and is checked:
- a row step: Q = sum c_m a'_m of one row. c_m is a number, or f Q_s with a number f >= 0 and an earlier step s; then
  the ends of step s stand for Q_s: a' >= 0 and f >= 0, so they bound f Q_s a'_m from either side.
- a sum step: Q = sum w Q_s over earlier steps (none: Q_s = 1), with rational numbers w >= 0: ends add up.
So by induction: for every choice of a' from the sets of all rows, lower <= Q <= upper in every step. What is proven is
about the numbers in the file; a proof cannot show that they came from a model.
"""

import hashlib
import json
import sys
from fractions import Fraction
from pathlib import Path

VERSION = "identikit-proof-1"
ROW = {"row", "objective", "lower_dual", "upper_dual", "lower", "upper"}
SUM = {"terms", "lower", "upper"}


class Refused(Exception):  # noqa: N818 - says what a file is, not what went wrong
    """The file is not a proof in this format."""


def need(condition, why):
    """Refuse the file unless a condition holds."""
    if not condition:
        raise Refused(why)


def number(value):
    """Return a finite float or whole number of the file as the rational number that it is."""
    need(type(value) in (int, float) and abs(value) <= sys.float_info.max, f"{value!r:.40} is not a finite number")
    return Fraction(value)


def vector(values, length, what):
    """Return a list of numbers of the expected length."""
    need(isinstance(values, list) and len(values) == length, f"{what} must be a list of {length} numbers")
    return [number(value) for value in values]


def place(index, count, what):
    """Return a whole number from 0 to count - 1."""
    need(type(index) is int and 0 <= index < count, f"{what} {index!r:.40} is not one of the {count} that are there")
    return index


def dot(first, second):
    """Return the product of two vectors."""
    return sum((x * y for x, y in zip(first, second, strict=True) if x and y), Fraction(0))


def read_row(row, matrices):
    """Return a row as (keys, weights, values, sum of weights, sum of weighted values)."""
    need(isinstance(row, dict) and set(row) == {"values", "keys", "attention"}, "a row has values, keys and attention")
    values = matrices[place(row["values"], len(matrices), "values")]
    need(isinstance(row["keys"], list) and row["keys"], "a row needs keys")
    keys = [place(key, len(values), "key") for key in row["keys"]]
    need(len(set(keys)) == len(keys), "a key of a row is repeated")
    weights = vector(row["attention"], len(keys), "attention")
    need(min(weights) >= 0, "a weight is negative")
    values = [values[key] for key in keys]
    return keys, weights, values, sum(weights), [dot(weights, column) for column in zip(*values, strict=True)]


def row_ends(row, low, high, duals):
    """Bound the sum of c_m a'_m from below and above, c_m being from low to high; this is the theorem."""
    _, _, values, total, output = row
    least = min(c - dot(duals[0], value) for c, value in zip(low, values, strict=True))
    greatest = max(c - dot(duals[1], value) for c, value in zip(high, values, strict=True))
    return dot(duals[0], output) + total * least, dot(duals[1], output) + total * greatest


def step_ends(step, rows, ends):
    """Return the ends of a step that are proven, from those of the steps before it."""
    if "terms" in step:
        low = high = Fraction(0)
        need(set(step) - {"name"} == SUM and isinstance(step["terms"], list), "a sum step is malformed")
        for term in step["terms"]:
            need(isinstance(term, list) and len(term) == 3, "a term has a numerator, a denominator and a step")
            need(type(term[0]) is type(term[1]) is int and term[0] >= 0 < term[1], "a term's weight is negative")
            earlier = (1, 1) if term[2] is None else ends[place(term[2], len(ends), "step")]
            low += Fraction(term[0], term[1]) * earlier[0]
            high += Fraction(term[0], term[1]) * earlier[1]
        return low, high
    need(set(step) - {"name"} == ROW and isinstance(step["objective"], list), "a row step is malformed")
    row = rows[place(step["row"], len(rows), "row")]
    low = dict.fromkeys(row[0], Fraction(0))
    high = dict(low)
    for entry in step["objective"]:
        need(isinstance(entry, list) and len(entry) in (2, 3), "an objective has a key, a number and perhaps a step")
        need(type(entry[0]) is int and entry[0] in low, f"{entry[0]!r:.40} is not a key of the row")
        factor = number(entry[1])
        if len(entry) == 2:
            least = greatest = factor
        else:
            need(factor >= 0, "the factor of a step is negative")
            least, greatest = (factor * end for end in ends[place(entry[2], len(ends), "step")])
        low[entry[0]] += least
        high[entry[0]] += greatest
    duals = [vector(step[name], len(row[4]), name) for name in ("lower_dual", "upper_dual")]
    return row_ends(row, low.values(), high.values(), duals)


def digest(content):
    """Return the SHA-256 of a file's content without its digest."""
    covered = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(covered, sort_keys=True, allow_nan=False).encode()).hexdigest()


def read(text):
    """Return a file's steps and rows; refuse what is malformed."""

    def unique(pairs):
        need(len(dict(pairs)) == len(pairs), "a name is repeated")
        return dict(pairs)

    try:
        content: dict = json.loads(text, object_pairs_hook=unique)
        need(isinstance(content, dict) and content.get("format") == VERSION, f"its format is not {VERSION}")
        names = {"format": str, "about": dict, "values": list, "rows": list, "steps": list, "digest": str}
        need(set(content) == set(names), "it needs format, about, values, rows, steps and digest, and nothing else")
        need(all(type(content[name]) is kind for name, kind in names.items()), "its parts are of the wrong kinds")
        need(digest(content) == content["digest"], "its digest does not match: it was changed after it was written")
    except (ValueError, RecursionError) as error:
        raise Refused(f"it is not JSON with finite numbers ({error})") from None
    matrices = []
    for matrix in content["values"]:
        need(isinstance(matrix, list) and matrix and isinstance(matrix[0], list), "values must be a matrix")
        matrices.append([vector(value, len(matrix[0]), "a value") for value in matrix])
    return content, [read_row(row, matrices) for row in content["rows"]]


def check(text):
    """Yield (name, lower, upper, slack) of each step: not proven where the slack, how far its ends are beyond those
    that are proven, is negative. Later steps rest on the ends of earlier ones."""
    content, rows = read(text)
    ends: list[tuple[Fraction, Fraction]] = []
    for step in content["steps"]:
        need(isinstance(step, dict) and {"lower", "upper"} <= set(step), "a step needs lower and upper")
        need(type(step.get("name", "")) is str, "a name is not a string")
        proven = step_ends(step, rows, ends)
        ends.append((number(step["lower"]), number(step["upper"])))
        yield step.get("name"), *ends[-1], min(proven[0] - ends[-1][0], ends[-1][1] - proven[1])


def printable(words):
    """Return words of a file on one line, with escapes for what no terminal should be sent."""
    escaped = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(words))
    encoding = sys.stdout.encoding or "utf-8"
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def main(file):
    """Check a file, print its claims (the steps with a name), and return 0 if all steps are proven."""
    try:
        steps = list(check(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, Refused) as why:
        print(f"Not proven: {printable(file)}: {printable(why)}.")
        return 1
    wrong = [step for step in steps if step[3] < 0]
    claims = [step for step in steps if step[0] is not None]
    for name, lower, upper, slack in wrong or claims:
        verdict = f"Not proven, by {float(min(-slack, Fraction(sys.float_info.max))):.3g}" if slack < 0 else "Proven"
        print(f"{verdict}: {printable(name or 'a step')} is between {float(lower)!r} and {float(upper)!r}.")
    print(f"{'Not proven' if wrong or not claims else 'Proven'}: {len(claims)} claims, {len(steps)} steps.")
    return 1 if wrong or not claims else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else "Usage: python proof.py FILE")
