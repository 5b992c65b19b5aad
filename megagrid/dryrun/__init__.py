"""One rank's step without its peers and without memory, and what it would take of both."""
