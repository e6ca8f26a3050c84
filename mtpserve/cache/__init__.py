"""Keys and values: the accounting of pages (`pages`), their storage (`pool`), and which layer uses which pool
(`stores`)."""
