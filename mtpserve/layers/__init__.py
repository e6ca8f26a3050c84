"""Building blocks of model families. Rows of all requests are one dimension; only attention, through
`attend`, knows whose they are."""
