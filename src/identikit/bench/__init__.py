"""Performance claims, as ratios measured side by side in one run: `identikit bench NAME`."""
