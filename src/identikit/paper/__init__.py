"""The paper, figure by figure and claim by claim: what each needs, how it is drawn, and how it is judged."""
