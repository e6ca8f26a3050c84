"""A request's steps: what each adds to its text, and how long a request waits for them."""
