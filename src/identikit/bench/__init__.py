"""Speed and memory, as ratios measured side by side in one run: `identikit bench NAME`.

Each module has one function `run` that returns rows, see `bench.measure`.
"""
