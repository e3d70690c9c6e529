"""The paper's figures: what each needs, where its data come from, and how it is drawn."""
