"""One file per command: a thin call into the library, which is imported only when the command runs."""
