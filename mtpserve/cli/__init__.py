"""The command line: wires everything, decides nothing that a config dataclass could."""
