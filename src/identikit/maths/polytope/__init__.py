"""All attention with the same output, many rows at once, and how far quantities can vary over it.

`rows` describes the sets; `bounds` holds the question, the answer and its proof. `exact` and `certified` answer it: the
first with the simplex method (`cpu` and `simplex`, or `cuda`), the second with the interior-point method (`interior`).
`least_norm` finds one point of each set, `alternative` steps to another, `duals` prepares proofs for files, and `ahead`
compiles the simplex method in another process while this one loads a model.
"""
