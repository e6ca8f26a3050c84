"""The command line: wires everything; defaults and checks of options are in the config dataclasses."""
