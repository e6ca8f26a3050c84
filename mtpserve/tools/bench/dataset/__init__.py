"""The requests of a load: datasets, generated texts, and the times at which they are sent."""
