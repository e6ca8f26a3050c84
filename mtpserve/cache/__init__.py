"""Where keys and values live: the accounting of pages (`pages`), their storage (`pool`), and which layer uses
which (`stores`)."""
