"""The page at `/` and the page of the API at `/docs`: their files, and the numbers that they read."""
