"""The engine's statistics: one table of what is counted, and of the names under which servers export it."""
