"""CUDA graphs: steps that are captured once and replayed, and the parts of a step that are not."""
