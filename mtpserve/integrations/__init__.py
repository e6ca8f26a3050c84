"""Engines and requests of other projects. What they need is installed by the extra of the same name."""
