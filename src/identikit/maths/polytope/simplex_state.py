"""What the compiled simplex method works on: the state of one row, and what is asked of rows."""

from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """The state of one row's simplex: n keys that it sees, and r constraints.

    Columns 0 to n - 1 are keys; n + k is the artificial column of constraint k, with the sign of its right side.

    - `keys` (n): which of all keys these are; `seat`: where each of all keys stands among them, or -1
    - `columns` (n + r, r): U at these keys, and the artificial columns; `right` (r): b
    - `tableau` (r + 1, n): $B^{-1} N$, and the profits of N; `inside` (r), `outside` (n): the columns of B and N
    - `values` (r): the weights of B; `weights` (n): those of keys at the last vertex that was settled
    - `left` (n + r): which columns some vertex has at 0; `objective` (n + r): c
    - `column` (r + 1): the entering column; `pivot` (n): the row of the leaving one; `room` (2, r): see `_leaving`
    - `steps` (1): how many were made
    """

    keys: np.ndarray
    seat: np.ndarray
    columns: np.ndarray
    right: np.ndarray
    tableau: np.ndarray
    inside: np.ndarray
    outside: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    left: np.ndarray
    objective: np.ndarray
    column: np.ndarray
    pivot: np.ndarray
    room: np.ndarray
    steps: np.ndarray


class RowTask(NamedTuple):
    """What is asked of rows, as arrays: `Rows`, and `Question` with every row's strongest asked keys.

    - `known` (row): how many keys of `strongest` a row sees
    - `objectives`: of all rows, or of each; `both`: whether they are also made least
    """

    attention: np.ndarray
    visible: np.ndarray
    group: np.ndarray
    basis: np.ndarray
    asked: np.ndarray
    objectives: np.ndarray
    strongest: np.ndarray
    known: np.ndarray
    both: bool
