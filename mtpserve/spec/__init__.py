"""Proposing tokens and judging proposals. A drafter is one function; acceptance without drafts is ordinary sampling."""
