"""Drafting and acceptance. A drafter is one function; acceptance without drafts is ordinary sampling."""
