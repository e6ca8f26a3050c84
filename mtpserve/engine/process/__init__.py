"""The engine in a process of its own: the messages, both ends, several engines as one, and how a hang is
noticed."""
