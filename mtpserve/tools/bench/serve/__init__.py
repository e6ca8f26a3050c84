"""`mtpserve bench serve`: a load generator for servers with OpenAI's API, its figures, tables and pictures.
It starts no server."""
