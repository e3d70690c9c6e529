"""Speed and memory, as ratios measured side by side in one run: `python -m benchmarks NAME`.

Each module has one function `run` that returns rows, see `bench.measure`.
"""
