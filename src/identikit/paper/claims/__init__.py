"""The paper's claims: what each says, how it is judged, and how the verdicts are shown."""
