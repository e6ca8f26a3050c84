"""The verdict over drafts, two launches for greedy requests, three or four for others; drafts from logits, the largest or drawn."""
