"""What the compiled simplex method works on: rows and what to bound in them, and the state of one row."""

from typing import NamedTuple

import numpy as np


class RowTask(NamedTuple):
    """`Rows` and a `Question` as arrays, with each row's strongest keys.

    - `keys`: whether each key's weight is bounded; empty: none is
    - `objectives`: of all rows, or of each; `both`: whether they are also made least
    - `strongest`: each row's keys by weight; `key_count` (row): how many of them may be compared
    """

    attention: np.ndarray
    visible: np.ndarray
    group: np.ndarray
    basis: np.ndarray
    keys: np.ndarray
    objectives: np.ndarray
    strongest: np.ndarray
    key_count: np.ndarray
    both: bool


class Row(NamedTuple):
    """The state of one row's simplex: n keys that it sees, and r constraints.

    Columns 0 to n - 1 are keys; n + k is the artificial column of constraint k, with the sign of its right side.

    - `keys` (n): which of all keys these are; `column_of_key`: the column of each of all keys, or -1
    - `columns` (n + r, r): U at these keys, and the artificial columns; `right` (r): b
    - `tableau` (r + 1, n): $B^{-1} N$, and the profits of N; `inside` (r), `outside` (n): the columns of B and N
    - `values` (r): the weights of B; `weights` (n): those of keys at the last vertex that was settled
    - `can_be_zero` (n + r): which columns some vertex has at 0; `objective` (n + r): c
    - `column` (r + 1): the entering column; `pivot` (n): the row of the leaving one
    - `room` (2, r): see `simplex._choose_leaving`; `steps` (1): how many were made
    """

    keys: np.ndarray
    column_of_key: np.ndarray
    columns: np.ndarray
    right: np.ndarray
    tableau: np.ndarray
    inside: np.ndarray
    outside: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    can_be_zero: np.ndarray
    objective: np.ndarray
    column: np.ndarray
    pivot: np.ndarray
    room: np.ndarray
    steps: np.ndarray
