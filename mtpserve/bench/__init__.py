"""A load generator for servers with OpenAI's API: what is asked, when it is sent, what comes back and how long it took. No server here."""
