"""`mtpserve prove`: the same requests with and without speculation, compared."""
