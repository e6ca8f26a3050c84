"""How deep to draft: step times, acceptance rates, the policy over both, and the health of the draft
model."""
