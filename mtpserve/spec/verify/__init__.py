"""Verification: which drafts the target accepts, and the token after them."""
