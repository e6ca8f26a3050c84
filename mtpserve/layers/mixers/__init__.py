"""Token mixers: the layers in which a row depends on its request's earlier rows."""
