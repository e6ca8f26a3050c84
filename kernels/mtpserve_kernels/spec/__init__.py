"""The verdict over drafts, two launches for a step of greedy requests, three or four for others; and the argmax of each row of logits."""
