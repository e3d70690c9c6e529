"""The paper's figures: each is one function in the module of its question; `catalogue` has them all."""
