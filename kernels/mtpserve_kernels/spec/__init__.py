"""The verdict over drafts, two launches for a whole step: one program per node, then one per request."""
