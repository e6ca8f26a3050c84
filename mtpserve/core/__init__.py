"""Plain dataclasses and protocols that all layers share. Imports no other part of mtpserve, and no torch at
run time."""
