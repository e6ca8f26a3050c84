"""The way from options to a running engine: what is loaded, how memory is divided, and how the parts are put
together."""
