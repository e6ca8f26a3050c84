"""Where other projects place engines and send requests to them. What they need is installed by the extra of
the same name."""
