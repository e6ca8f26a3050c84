"""Where keys and values live: the accounting of pages (`pages`) and their storage (`pool`)."""
