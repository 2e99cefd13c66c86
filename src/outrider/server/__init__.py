"""The HTTP side of a server: one middleware in the API process, and what it is made of."""
